"""`unpack_pages`: stored tokens dequantized into dense rows, as attention kernels that know no codes read them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import torch

from halfbyte.arguments import Mark, check_tensor
from halfbyte.errors import Unsupported, check
from halfbyte.kv_buffer import Cache, KVBuffer, PagedView
from halfbyte.ops import launch_cache
from halfbyte.ops._library import level, refuse_capture
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Signature, replay
from halfbyte.ops.self_check import refusal, untested
from halfbyte.ops.small_calls import unpack_error
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import rotate


class NewTokens(NamedTuple):
    """k [T, H, D], v [T, H, Dv] and cu_seqlens_q [B + 1]."""

    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor


class UnpackCall(NamedTuple):
    """One call of `unpack_pages`, for its signature."""

    keys: Annotated[torch.Tensor, Mark.WRITTEN]
    values: Annotated[torch.Tensor, Mark.WRITTEN]
    cu_seqlens_k: torch.Tensor
    cache: PagedView
    new: NewTokens | None
    impl: str = "auto"

    @property
    def replayable(self) -> bool:
        return True

    def new_results(self) -> list[torch.Tensor]:
        """None: rows are written in place."""
        return []


class _Plan(NamedTuple):
    """No workspace."""

    floats: int = 0
    counters: int = 0


#: Of rows.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

UNPACK = Op("unpack_pages", UnpackCall)


def unpack_pages(
    cache: Cache,
    cu_seqlens_k: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    impl: str = "auto",
) -> None:
    """Write the newest tokens of each sequence, dequantized, as rows cu_seqlens_k[b] .. cu_seqlens_k[b + 1] of keys and values.

    cache          pages of formats whose scales lie in the page (`halfbyte.engine.PageLayout`)
    cu_seqlens_k   int32 [B + 1], from 0 to at most S: how many tokens of each sequence, no more than it has
    keys, values   [S, H, D] and [S, H, Dv], fp16, bf16 or fp32, dims contiguous. Rows behind the last sequence stay as they are
    new            (k [T, H, D], v [T, H, Dv], cu_seqlens_q int32 [B + 1]): tokens cu_seqlens_q[b] .. cu_seqlens_q[b + 1],
                   unquantized, in place of the newest stored ones of sequence b
    impl           "auto", "triton" (a GPU) or "reference"

    A number is scale * code + offset in fp32, rounded once; keys that are stored rotated come out as they were before. Nothing
    synchronizes with the device. On a GPU no contents of the index tensors lead outside of the tensors, and a token that does not
    exist is written as 0. Raises `InvalidArgument` naming the argument at fault.
    """
    cache = PagedView(cache.keys, cache.values, cache.lengths, cache.page_table, cache.rotate_keys)
    call = UnpackCall(keys, values, cu_seqlens_k, cache, None if new is None else NewTokens(*new), impl)
    signature = UNPACK.signature(call)
    if signature is not None and replay(signature) is not None:
        return
    _check(call)
    if not keys.numel() or not len(cache.lengths):
        return
    with torch.cuda.device_of(keys):
        runs = level("unpack_pages", impl, keys.device) == "triton" and not (impl == "auto" and _refused(call))
        (_launch if runs else _reference)(call, signature)


def _refused(call: UnpackCall) -> bool:
    """Whether the kernel was found to be wrong on this GPU."""
    keys, cache = call.keys, call.cache
    if not untested(keys.device):
        return False
    dims, sides = (cache.keys.dim, cache.values.dim), (cache.keys.format.name, cache.values.format.name)
    spec = sides, dims, cache.keys.codes.shape[2], keys.dtype, call.new is None, cache.rotate_keys
    return bool(refusal("unpack_pages", spec, keys.device, partial(unpack_error, call, _launch, _reference)))


def _launch(call: UnpackCall, signature: Signature | None = None) -> None:
    launch_cache.launch(UNPACK, call, _Plan(), _launches, (), signature=signature)


def _launches(call: UnpackCall, *_: Any) -> list[Any]:
    from halfbyte.kernels.decode.unpack import launches

    return list(launches(call.cache, call.cu_seqlens_k, call.keys, call.values, call.new))


def _reference(call: UnpackCall, signature: Signature | None = None) -> None:
    keys, values, cu_seqlens_k, cache, new, _ = call
    refuse_capture("unpack_pages", keys.device)
    lengths, table = cache.lengths, cache.page_table
    tokens = [reference.read(side, lengths, table).float() for side in (cache.keys, cache.values)]
    tokens[0] = rotate(tokens[0]) if cache.rotate_keys else tokens[0]  # its own inverse
    for b, length in enumerate(lengths.tolist()):
        first, last = cu_seqlens_k[b : b + 2].tolist()
        for side, (out, x) in enumerate(zip((keys, values), tokens, strict=True)):
            out[first:last] = x[b, :, length - (last - first) : length].transpose(0, 1)
            if new is not None:
                begin, end = new[2][b : b + 2].tolist()
                count = min(end - begin, last - first)
                out[last - count : last] = new[side][end - count : end]


def _check(call: UnpackCall) -> None:
    """Check all but contents."""
    keys, values, cu_seqlens_k, cache, new, _ = call
    device, batch = cache.keys.codes.device, len(cache.lengths)
    for name, side in (("keys", cache.keys), ("values", cache.values)):
        _check_pages(name, side, cache.page_table)
    check_tensor("cu_seqlens_k", cu_seqlens_k, (batch + 1,), "integer", device)
    check(cu_seqlens_k.dtype is torch.int32, f"cu_seqlens_k is {cu_seqlens_k.dtype}; expected int32")
    outputs = [("keys", keys, cache.keys), ("values", values, cache.values)]
    for name, out, side in outputs:
        check_tensor(name, out, (len(keys), side.heads, side.dim), device=device)
        good = out.dtype is keys.dtype and out.dtype in _DTYPES and out.stride(2) == 1
        check(good, f"{name} is {out.dtype} with strides {list(out.stride())}; expected fp16, bf16 or fp32, alike, dims contiguous")
    if new is not None:
        for name, x, side in (("k", new[0], cache.keys), ("v", new[1], cache.values)):
            check_tensor(name, x, (len(new[0]), side.heads, side.dim), device=device)
            check(x.stride(2) == 1, f"{name} has strides {list(x.stride())}; expected contiguous dims")
        check_tensor("cu_seqlens_q", new[2], (batch + 1,), "integer", device)
        check(new[2].dtype is torch.int32, f"cu_seqlens_q is {new[2].dtype}; expected int32")


def _check_pages(name: str, side: KVBuffer, table: torch.Tensor | None) -> None:
    if side.tail is not None or side.format.granularity in ("tensor", "token", "channel") or table is None:
        raise Unsupported(f"{name} of {side.format} are not in pages of their own; read them by decode_attention")
