"""`decode_attention`: attention of the newest queries over a cache, read as it is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from halfbyte.arguments import Kind, as_int32, check_tensor, integer, number
from halfbyte.cpu import decode_attention as cpu
from halfbyte.errors import InvalidArgument, check, warn_once
from halfbyte.kv_buffer import AttentionOptions, Cache, DecodeCall, KVBuffer
from halfbyte.ops import _decode_on_gpu as gpu
from halfbyte.ops._library import can_bypass_dispatcher, define, level, refuse_capture
from halfbyte.ops._per_sequence import attend_chunks, attend_per_sequence
from halfbyte.ops.append import Stored
from halfbyte.ops.launch_cache import Signature, replay, signature
from halfbyte.plans.decode_attention import format_of
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import block_size

#: out [B, Hq, L, Dv], lse fp32 [B, Hq, L].
Results = tuple[torch.Tensor, torch.Tensor]

#: Queries of one pass in torch code; more are processed in blocks of so many, which bounds the memory of the scores.
QUERY_BLOCK = 128

_SCHEMA = (
    "decode_attention(Tensor q, Tensor k_codes, Tensor? k_scales, Tensor? k_offsets, Tensor? k_tail, "
    "Tensor v_codes, Tensor? v_scales, Tensor? v_offsets, Tensor? v_tail, Tensor lengths, Tensor? query_start, Tensor? page_table, "
    "Tensor? starts, Tensor? ends, Tensor? alibi_slopes, Tensor? sinks, float sm_scale, float? softcap, int? window, "
    "bool rotate_keys, str key_format, str value_format, str level, bool deterministic_batch=False, "
    "Tensor? cu_seqlens_q=None, int max_query_len=0, int sink_tokens=0) -> (Tensor, Tensor)"
)
#: Defaults of the last arguments, which torch may leave out.
_DEFAULTS = (False, None, 0, 0)


#: How many of a call's flat arguments are tensors.
_TENSORS = 16

#: The levels in torch code.
_LEVELS: dict[str, Any] = {"cpu": cpu, "reference": reference}


def _flat(call: DecodeCall) -> tuple[Any, ...]:
    """The arguments of the op."""
    o = call.options
    numbers = (o.sm_scale, o.softcap, o.window, o.rotate_keys)
    names = (call.keys.format.name, call.values.format.name)
    ragged = (call.deterministic_batch, call.cu_seqlens_q, call.max_query_len)
    return (*call.tensors(), *numbers, *names, call.impl, *ragged, call.keys.sink_tokens)


def _call(*flat: Any) -> DecodeCall:
    """The call from the op's arguments. Torch leaves out last ones that have their defaults."""
    q, (k, v) = flat[0], (flat[1:5], flat[5:9])
    lengths, query_start, page_table, starts, ends, slopes, sinks = flat[9:_TENSORS]
    sm_scale, softcap, window, rotate_keys, keys, values, level, *rest = flat[_TENSORS:]
    last: tuple[Any, ...] = (*rest, *_DEFAULTS[len(rest) :])
    *ragged, sink_tokens = last
    return DecodeCall(
        q,
        KVBuffer(format_of(keys), *k, sink_tokens=sink_tokens),
        KVBuffer(format_of(values), *v, sink_tokens=sink_tokens),
        *(lengths, query_start, page_table),
        AttentionOptions(sm_scale, softcap, slopes, window, starts, ends, sinks, rotate_keys),
        *(level, *ragged),
    )


def _run(*flat: Any) -> Results:
    call = _call(*flat)
    _check_lengths(call)
    if call.q.numel() == 0:
        return call.new_results()
    if call.impl in ("cpu", "reference"):
        refuse_capture("decode_attention", call.q.device)
        if call.cu_seqlens_q is not None:
            return attend_chunks(_LEVELS[call.impl].chunk_attention, call, QUERY_BLOCK)
        return attend_per_sequence(_in_torch, call) if call.deterministic_batch else _in_torch(call)
    return gpu.run(call, compiled=True)


def _fake(*flat: Any) -> Results:
    call = _call(*flat)
    check_tensor("q", call.q, ("B", "Hq", "L", call.keys.dim), device=call.keys.codes.device)
    return call.new_results()


def _in_torch(c: DecodeCall) -> Results:
    attend: Callable[[DecodeCall], Results] = _LEVELS[c.impl].decode_attention
    parts = enumerate(c.q.split(QUERY_BLOCK, dim=2))
    pieces = [attend(c._replace(q=q, query_start=c.first_query + i * QUERY_BLOCK)) for i, q in parts]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)


def _check_lengths(call: DecodeCall) -> None:
    """Lengths outside of 0..capacity would read out of bounds. Checked on a CPU only: on a GPU it would synchronize."""
    lengths, ends = call.lengths, call.options.ends
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    low, high, limit = int(lengths.min()), int(lengths.max()), call.capacity
    check(ends is None or int(ends.min()) >= 0, "lengths: a sequence is shorter than the chunk; append the chunk first")
    check(low >= 0 and high <= limit, f"lengths run from {low} to {high}; this cache holds 0 to {limit} tokens a sequence")


_op = define(_SCHEMA, _run, _fake)


def decode_attention(
    q: torch.Tensor,
    cache: Cache,
    *,
    sm_scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    query_start: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last L tokens of each sequence over a cache that already holds them.

    q [B, Hq, L, D], fp16, bf16, fp32 or float64, any strides; Hq a multiple of the cache's KV heads. Returns out [B, Hq, L, Dv] in
    q's dtype; with `return_lse` also lse, float32 [B, Hq, L], the natural logarithm of the softmax's denominator without sinks.
    A query that sees no key gives out = 0 and lse = -inf.

    sm_scale      multiplies q . k; None: 1/sqrt(D)
    softcap       score -> softcap * tanh(score / softcap)
    alibi_slopes  float [Hq]; adds slope * (key position - query position)
    window        keys j with i - window < j <= i are kept; None: all j <= i
    sinks         float [Hq]; a logit in the denominator without a value (GPT-OSS)
    starts        int [B]; keys before it are left padding and are masked
    query_start   int [B]; position of the first query; None: lengths - L, the newest tokens
    out           [B, Hq, L, Dv] in q's dtype, written and returned; if contiguous, without a copy on a GPU
    impl          "auto"; the GPU's kernels "gluon" (tuned) and "triton" (portable); "cpu"; "reference" (float64, the specification)
    deterministic_batch   a sequence's result has the same bits alone and in every batch. On a GPU this takes splits of fixed
                  size; the `cpu` and `reference` levels compute one sequence after the other

    Types: 16-bit queries have fp32 scores and sums. Queries of 32 and 64 bits are computed in float64 and have no kernel: on a GPU
    they run blocked torch code, many times slower, which a CUDA graph cannot capture.

    The error of lse is at most (D + 8) * 2^-24 * S, where S is 1 plus the largest sm_scale * sum |q_i * k_i| of a visible key (both
    rotated, if they are) plus the ALiBi term: scores are fp32 sums, so a common offset of -5e5 costs tenths of a nat. Kernels round
    a rotated query to 16 bits, which adds 2^-11 * S, over bf16 keys 2^-9 * S, to the error of scores and lse. `reference` and wider
    queries only round lse to float32.

    Raises `InvalidArgument` naming the argument at fault. The algorithm is FlashDecoding's online softmax over blocks of tokens.
    """
    options = options_of(cache, sm_scale, alibi_slopes, window, softcap, sinks, starts)
    call = DecodeCall(q, cache.keys, cache.values, cache.lengths, query_start, cache.page_table, options, impl, deterministic_batch)
    if out is not None:
        check_out(out, q, (*q.shape[:-1], cache.values.dim))
    found, lse = attend(call, True, out)
    found = found if out is None else put_into(out, found)
    return (found, lse) if return_lse else found


def check_out(out: torch.Tensor, q: torch.Tensor, shape: Sequence[int]) -> None:
    """A tensor for results of this shape, in q's dtype."""
    check_tensor("out", out, shape, device=q.device)
    check(out.dtype is q.dtype, f"out is {out.dtype}; expected the dtype of q, {q.dtype}")


def put_into(out: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Copy `found` to out, unless a kernel has written it there."""
    there = not torch.compiler.is_compiling() and out.data_ptr() == found.data_ptr()
    return out if there else out.copy_(found)


def attend(call: DecodeCall, unchecked: bool = False, into: torch.Tensor | None = None) -> Results:
    """(out, lse) of a call, from the launch cache if it has one. unchecked: only scalars have been checked.

    into: memory for out, which a kernel uses if it can.
    """
    known = _signature(call)
    if known is not None:
        found: Results | None = replay(known, call.options, into)
        if found is not None:
            return found
    call = checked(call) if unchecked else call
    call = call._replace(impl=level_of(call.impl, call.q))
    kernel = call.impl not in ("cpu", "reference") and call.q.numel() > 0
    if kernel and can_bypass_dispatcher(call.q, call.keys.codes, call.values.codes):
        return gpu.run(call, signature=known, into=into)  # the dispatcher would take longer than the kernel
    out: Results = _op(*_flat(call))
    return out


def _signature(call: DecodeCall) -> Signature | None:
    """The launch cache's key of an unchecked call; None if it needs more than one launch of the tuned kernel."""
    q, keys, values, _, _, _, o, impl, deterministic_batch, ragged, _ = call
    if deterministic_batch or ragged is not None or impl not in ("auto", "gluon"):
        return None
    if not can_bypass_dispatcher(q, keys.codes, values.codes):
        return None
    options = (impl, o.window is None, o.softcap is None, o.rotate_keys, keys.sink_tokens)
    return signature("decode_attention", options, (keys.format, values.format), call.tensors())


def decode_parts(
    q: torch.Tensor,
    parts: Stored,
    formats: tuple[str, str],
    rotate_keys: bool,
    sink_tokens: int,
    *,
    sm_scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """`decode_attention` as compiled code calls it, on the `stored` tensors of a contiguous cache and the names of its formats.

    Every traced object or property becomes a guard that is re-evaluated on each call, so there are none.
    """
    buffers = (*parts[:4], *parts[5:9])  # without the counters
    options = (starts, None, None, sinks, sm_scale, softcap, window, rotate_keys)
    last = (level_of("auto", q), *_DEFAULTS[:-1], sink_tokens)
    out: torch.Tensor = _op(q, *buffers, parts[-1], None, None, *options, *formats, *last)[0]
    return out


def level_of(impl: str, q: torch.Tensor) -> str:
    """The level that runs; on a GPU, torch code for queries of 32 and 64 bits, which have no kernel."""
    if q.device.type != "cpu" and impl == "auto" and q.element_size() > 2:
        warn_once(f"decode_attention has kernels for float16 and bfloat16; blocked torch code runs for {q.dtype} queries")
        impl = "cpu"
    chosen = level("decode_attention", impl, q.device)
    return "auto" if impl == "auto" and chosen == "gluon" else chosen


def options_of(
    cache: Cache,
    sm_scale: float | None,
    alibi_slopes: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> AttentionOptions:
    """The options of a call: scalars checked, tensors not yet."""
    if not isinstance(getattr(cache, "keys", None), KVBuffer):
        raise InvalidArgument(f"cache is a {type(cache).__name__}; expected a KVCache, PagedKVCache or PagedView")
    if window is not None:
        window = integer("window", window, 1, 2**31 - 1, "at least 1 (the query's own key), or None for no window")
    if softcap is not None:
        softcap = number("softcap", softcap, 1e-30, 1e30, "a positive finite number, or None for no softcap")
    scale = cache.keys.dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale, -1e30, 1e30, "a finite number")
    return AttentionOptions(scale, softcap, alibi_slopes, window, starts, None, sinks, cache.rotate_keys)


def checked(call: DecodeCall) -> DecodeCall:
    """The call with every tensor checked, and index tensors as int32."""
    q, keys, lengths, o = call.q, call.keys, call.lengths, call.options
    batch = lengths.shape[0]
    check_tensor("q", q, (batch if call.cu_seqlens_q is None else 1, "Hq", "L", keys.dim), device=keys.codes.device)
    check(
        q.shape[1] > 0 and q.shape[1] % keys.heads == 0,
        f"q has {q.shape[1]} heads and the cache {keys.heads} KV heads; query heads must be a multiple of KV heads",
    )
    if lengths.device != q.device and not lengths.is_pinned():
        # Triton raises too, except where the driver lets a GPU read all host memory.
        raise InvalidArgument(
            f"lengths are on {lengths.device} and cannot be accessed from {q.device}: move them, or pin their memory"
        )
    for name, t, size, kind in (
        ("alibi_slopes", o.alibi_slopes, q.shape[1], "floating"),
        ("sinks", o.sinks, q.shape[1], "floating"),
        ("starts", o.starts, batch, "integer"),
        ("query_start", call.query_start, batch, "integer"),
    ):
        if t is not None:
            check_tensor(name, t, (size,), cast(Kind, kind), q.device)
    if o.rotate_keys:
        block_size(keys.dim)
    starts, query_start = (None if t is None else as_int32(t) for t in (o.starts, call.query_start))
    return call._replace(query_start=query_start, options=o if o.starts is None else o._replace(starts=starts))
