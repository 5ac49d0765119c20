"""`decode_attention`: attention of the newest queries over a cache, read as it is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from halfbyte.arguments import Kind, as_int32, check_tensor, integer, number
from halfbyte.cpu import decode_attention as cpu
from halfbyte.errors import InvalidArgument, check
from halfbyte.kv_buffer import AttentionOptions, Cache, DecodeCall, KVBuffer
from halfbyte.ops import _decode_on_gpu as gpu
from halfbyte.ops._decode_on_gpu import DECODE
from halfbyte.ops._library import can_bypass_dispatcher, kernel_level, refuse_capture
from halfbyte.ops.launch_cache import replay
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import block_size

#: out [B, Hq, L, Dv], lse fp32 [B, Hq, L].
Results = tuple[torch.Tensor, torch.Tensor]

#: Queries of one pass in torch code; more are processed in blocks of so many, which bounds the memory of the scores.
QUERY_BLOCK = 128
#: The levels in torch code.
_LEVELS: dict[str, Any] = {"cpu": cpu, "reference": reference}


def _run(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    _check_lengths(call)
    if call.q.numel() == 0:
        return call.new_results()
    if call.impl not in _LEVELS:
        return gpu.run(call, compiled=True)
    refuse_capture("decode_attention", call.q.device)
    if call.cu_seqlens_q is not None:
        return _attend_chunks(_LEVELS[call.impl].chunk_attention, call, QUERY_BLOCK)
    return _attend_per_sequence(_in_torch, call) if call.deterministic_batch else _in_torch(call)


def _fake(call: DecodeCall) -> Results:
    check_tensor("q", call.q, ("B", "Hq", "L", call.query_dim), device=call.keys.codes.device)
    return call.new_results()


DECODE.register(_run, _fake)


def _in_torch(c: DecodeCall) -> Results:
    attend: Callable[[DecodeCall], Results] = _LEVELS[c.impl].decode_attention
    if c.q.shape[2] <= QUERY_BLOCK:
        return attend(c)
    parts = enumerate(c.q.split(QUERY_BLOCK, dim=2))
    pieces = [attend(c._replace(q=q, query_start=c.first_query + i * QUERY_BLOCK)) for i, q in parts]
    return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)


def _check_lengths(call: DecodeCall) -> None:
    """Lengths outside of 0..capacity would read out of bounds. Checked on a CPU only: on a GPU it would synchronize."""
    lengths, ends = call.lengths, call.options.ends
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    numbers = lengths.tolist()  # far faster than torch's operators, of which this would take two
    low, high, limit = min(numbers), max(numbers), call.capacity
    check(ends is None or int(ends.min()) >= 0, "lengths: a sequence is shorter than the chunk; append the chunk first")
    check(low >= 0 and high <= limit, f"lengths run from {low} to {high}; this cache holds 0 to {limit} tokens a sequence")


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
    latent: bool = False,
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
    latent        MLA in its absorbed form: values are latents, of which keys are made, too. A token's key is its latent followed
                  by its cached key, the rotary part; q is [B, Hq, L, Dv + D], and sm_scale must be given. See `LatentHeads`
    impl          "auto"; the GPU's kernels "gluon" (tuned) and "triton" (portable); "cpu"; "reference" (float64, the specification)
    deterministic_batch   a sequence's result has the same bits alone and in every batch. On a GPU this takes splits of fixed
                  size; the `cpu` and `reference` levels compute one sequence after the other

    Types: 16-bit queries have fp32 scores and sums. Queries of 32 and 64 bits are computed in float64 and have no kernel: on a GPU
    they run blocked torch code, many times slower, which a CUDA graph cannot capture.

    The error of lse is at most (D + 8) * 2^-24 * S, where S is 1 plus the largest sm_scale * sum |q_i * k_i| of a visible key (both
    rotated, if they are) plus the ALiBi term: scores are fp32 sums, so a common offset of -5e5 costs tenths of a nat. Kernels round
    a rotated query to 16 bits, which adds 2^-11 * S, over bf16 keys 2^-9 * S, to the error of scores and lse; over latents Hopper's
    rounds to 2^-14 of a query's largest number, which adds 2^-14 * sm_scale * max |q_i| * sum |k_i|. `reference` and wider queries
    only round lse to float32.

    Raises `InvalidArgument` naming the argument at fault. The algorithm is FlashDecoding's online softmax over blocks of tokens.
    """
    options = options_of(cache, sm_scale, alibi_slopes, window, softcap, sinks, starts)
    call = DecodeCall(q, cache.keys, cache.values, cache.lengths, query_start, cache.page_table, options, impl, deterministic_batch)
    if latent:
        check(sm_scale is not None, "sm_scale is None; with latent=True pass that of the model's own heads")
        call = call._replace(latent=True)
    if out is None:
        result, lse = attend(call, True)
    else:
        check_out(out, q, (*q.shape[:-1], cache.values.dim))
        result, lse = attend(call, True, out)
        result = put_into(out, result)
    return (result, lse) if return_lse else result


def check_out(out: torch.Tensor, q: torch.Tensor, shape: Sequence[int]) -> None:
    """A tensor for results of this shape, in q's dtype."""
    check_tensor("out", out, shape, device=q.device)
    check(out.dtype is q.dtype, f"out is {out.dtype}; expected the dtype of q, {q.dtype}")


def put_into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy a result to out, unless a kernel has written it there."""
    there = not torch.compiler.is_compiling() and out.data_ptr() == result.data_ptr()
    return out if there else out.copy_(result)


def attend(call: DecodeCall, unchecked: bool = False, into: torch.Tensor | None = None) -> Results:
    """(out, lse) of a call, from the launch cache if it has one. unchecked: only scalars have been checked.

    into: memory for out, which a kernel uses if it can.
    """
    signature = DECODE.signature(call)
    if signature is not None:
        results: Results | None = replay(signature, call.numbers(), into)
        if results is not None:
            return results
    call = checked(call) if unchecked else call
    call = call._replace(impl=kernel_level("decode_attention", call.impl, call.q, "q"))
    kernel = call.impl not in _LEVELS and call.q.numel() > 0
    tensors = call.q, call.keys.codes, call.values.codes, call.options.sinks, call.options.alibi_slopes
    if kernel and can_bypass_dispatcher(*tensors):
        return gpu.run(call, signature=signature, into=into)  # the dispatcher would take longer than the kernel
    out: Results = DECODE(call)
    return out


def decode_of_parts(q: torch.Tensor, parts: Mapping[str, Any], options: Mapping[str, Any]) -> torch.Tensor:
    """`decode_attention` as compiled code calls it: with the `Op.parts` of a contiguous cache, and options by their names."""
    rest = {f"options_{name}": option for name, option in options.items()}
    rest |= {"options_rotate_keys": parts["rotate_keys"], "impl": kernel_level("decode_attention", "auto", q, "q")}
    out: torch.Tensor = DECODE.of_parts({**parts, **rest, "q": q})[0]
    return out


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
        window = integer("window", window, 1, 2**31 - 1, "1 (the query's own key) to 2^31 - 1, or None for no window")
    if softcap is not None:
        softcap = number("softcap", softcap, 1e-30, 1e30, "a positive finite number, or None for no softcap")
    scale = cache.keys.dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale, -1e30, 1e30, "a finite number")
    return AttentionOptions(scale, softcap, alibi_slopes, window, starts, None, sinks, cache.rotate_keys)


def checked(call: DecodeCall) -> DecodeCall:
    """The call with every tensor checked, and index tensors as int32."""
    q, keys, lengths, o = call.q, call.keys, call.lengths, call.options
    batch = lengths.shape[0]
    check_tensor("q", q, (batch if call.cu_seqlens_q is None else 1, "Hq", "L", call.query_dim), device=keys.codes.device)
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


# ------------------------------------------------------------------------------------------------- torch code, by sequence

# For results that do not depend on the rest of the batch: torch's GEMMs sum in another order for another batch, and levels split
# tokens according to the whole batch.


def _attend_per_sequence(attend: Callable[[DecodeCall], Results], call: DecodeCall) -> Results:
    """`attend` of each sequence alone, on a contiguous copy of its queries and no more of the cache than it fills."""
    outs, lses = [], []
    for b, length in enumerate(call.lengths.tolist()):
        q = call.q[b : b + 1].clone(memory_format=torch.contiguous_format)
        out, lse = attend(_alone(call, b, length)._replace(q=q, query_start=_cut(call.query_start, slice(b, b + 1))))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _attend_chunks(attend: Callable[[DecodeCall, int], Results], call: DecodeCall, most: int) -> Results:
    """Ragged queries: `attend` of at most `most` consecutive ones of a sequence (`reference.chunk_attention`) at a time."""
    assert call.cu_seqlens_q is not None
    results = out, lse = call.new_results()
    out.zero_()
    lse.fill_(-torch.inf)
    bounds = call.cu_seqlens_q.clamp(0, call.q.shape[2]).tolist()
    for b, (first, last, length) in enumerate(zip(bounds, bounds[1:], call.lengths.tolist(), strict=False)):
        own = _alone(call, b, length)
        for begin in range(first, last, most):
            chunk = slice(begin, min(begin + most, last))
            parts = attend(own._replace(q=call.q[:, :, chunk]), length - last + begin)
            for whole, part in zip(results, parts, strict=True):
                whole[:, :, chunk] = part
    return results


def _alone(call: DecodeCall, b: int, length: int) -> DecodeCall:
    """The call with the memory and the options of sequence b, and no more of the cache than it fills."""
    keys, table, options, own = call.keys, call.page_table, call.options, slice(b, b + 1)
    unit = keys.codes.shape[2] if table is not None else keys.format.token_block or 1
    units = -(-max(length, 0) // max(unit, 1))  # the host does not know lengths in a GPU's memory
    tokens = None if table is not None else units * unit
    return call._replace(
        keys=_of_sequence(keys, own, tokens),
        values=_of_sequence(call.values, own, tokens),
        lengths=call.lengths[own],
        page_table=None if table is None else table[own, :units],
        options=options._replace(starts=_cut(options.starts, own), ends=_cut(options.ends, own)),
    )


def _of_sequence(buffer: KVBuffer, own: slice, tokens: int | None) -> KVBuffer:
    """The part of a buffer that belongs to one sequence: its tail, and its first tokens (None: they are in a pool of pages)."""
    codes, scales, offsets, tail = buffer.tensors()
    if tokens is not None:
        count = tokens // (buffer.format.token_block or 1)
        codes = codes[own, :, :tokens]
        scales, offsets = (t if t is None or t.ndim == 1 else _rows(t, own, count) for t in (scales, offsets))
    return KVBuffer(buffer.format, codes, scales, offsets, _cut(tail, own), sink_tokens=buffer.sink_tokens)


def _rows(t: torch.Tensor, own: slice, count: int) -> torch.Tensor:
    """The first scales or offsets of a sequence: of whole tokens [B, T], else [B, H, T, ...]."""
    return t[own, :count] if t.ndim == 2 else t[own, :, :count]


def _cut(t: torch.Tensor | None, own: slice) -> torch.Tensor | None:
    return None if t is None else t[own]
