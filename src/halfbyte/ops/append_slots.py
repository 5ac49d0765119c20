"""`append_slots`: quantize new keys and values and write each token to its slot in an engine's pages, in place."""

from __future__ import annotations

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.kv_buffer import AppendCall, KVBuffer, Rope, RopeLike
from halfbyte.ops.append import APPEND, check_query, check_rope, check_transform, rope_of, store
from halfbyte.ops.launch_cache import replay
from halfbyte.tensors import KeyTransform
from halfbyte.transforms import refuse_transforms


def append_slots(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    slot_mapping: torch.Tensor,
    *,
    rotate_keys: bool = False,
    rope: RopeLike | None = None,
    q: torch.Tensor | None = None,
    transform: KeyTransform | tuple[()] = (),
    impl: str = "auto",
) -> torch.Tensor | None:
    """Quantize k [T, H, D] and v [T, H, Dv] (any floating dtype and strides) and write token t to slot_mapping[t], in place.

    slot_mapping  int64 or int32 [T]: page * N + row in pages of N tokens. Negative: the token is skipped, whatever it holds. Slots
                  must be distinct
    rotate_keys   keys are stored Hadamard-rotated
    rope          (cos, sin), float32 [T, R/2], or a `halfbyte.kv_buffer.Rope`: apply rotary embedding to the first R elements of
                  each key
    q             [T, Hq, D]: rotated by position and transformed too, on a GPU in the same launch; returned as a new tensor
    transform     of calibrated keys (`KeyTransform`): keys are multiplied by a matrix and shifted, after rope

    Lengths and page tables stay with the engine. On a CPU NaN, infinity and slots beyond the pages raise `InvalidArgument`, and
    nothing changes. On a GPU a block with NaN or infinity becomes NaN, and tokens with slots beyond the pages are not written.
    """
    if not isinstance(keys, KVBuffer):
        raise _no_buffer("keys", keys)
    if not isinstance(values, KVBuffer):
        raise _no_buffer("values", values)
    measure = "tensor" in (keys.format.granularity, values.format.granularity)
    rotation = None if rope is None else rope_of(rope)
    c = AppendCall(k, v, keys, values, slot_mapping, None, None, rotate_keys, rotation, q, measure, True, None, transform, impl)
    signature = APPEND.signature(c)
    results: tuple[torch.Tensor, ...] | None = None if signature is None else replay(signature)
    if results is None:
        _check(c)
        rotated = store(_as_sequences(c), signature)
    else:
        rotated = results[0] if results else None
    return None if rotated is None else rotated.squeeze(2)


def _no_buffer(name: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{name} is a {type(value).__name__}; expected a KVBuffer (PageLayout.buffers)")


def _check(c: AppendCall) -> None:
    """Check dtypes, shapes and devices; contents are checked when they are read."""
    (k, v, keys, values, slots), rope, q = c[:5], c.rope, c.q
    if not torch.compiler.is_compiling():
        refuse_transforms("append_slots", (k, v, q, rope))
    if keys.format.token_block:
        raise Unsupported(f"{keys.format} keys keep a tail for each sequence, and slots know no sequences; use KVCache.append")
    if keys.tail is not None or values.tail is not None:
        raise Unsupported("sink and recent tokens are in the tail of a sequence, and slots know no sequences; use KVCache.append")
    device = keys.codes.device
    check_tensor("k", k, ("T", keys.heads, keys.dim), device=device)
    check_tensor("v", v, (len(k), values.heads, values.dim), device=device)
    check_tensor("slot_mapping", slots, (len(k),), "integer", device)
    if rope is not None:
        check_rope(rope, k, (len(k),))
    if q is not None:
        check_query(c, (len(k), "Hq", keys.dim))
    if c.transform:
        check_transform(c)


def _as_sequences(c: AppendCall) -> AppendCall:
    """Each token as a sequence of its own, [T, H, 1, D]."""
    rope = None if c.rope is None else Rope(c.rope[0].unsqueeze(1), c.rope[1].unsqueeze(1), *c.rope[2:])
    q = None if c.q is None else c.q.unsqueeze(2)
    return c._replace(k=c.k.unsqueeze(2), v=c.v.unsqueeze(2), rope=rope, q=q)
