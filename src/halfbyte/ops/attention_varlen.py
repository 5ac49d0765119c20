"""`attention_varlen`: attention of a mixed batch of prompt chunks and decodes over pages that already hold their tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from halfbyte.arguments import as_int32, check_tensor, integer
from halfbyte.errors import check
from halfbyte.formats import plain_format
from halfbyte.kv_buffer import Cache, DecodeCall, KVBuffer
from halfbyte.ops import _fused
from halfbyte.ops._decode_in_torch import Results
from halfbyte.ops._library import can_bypass_dispatcher, kernel_level
from halfbyte.ops.decode_attention import attend, check_out, options_of, put_into
from halfbyte.ops.merge_states import merged
from halfbyte.reference import attention as reference


class ExactTokens(NamedTuple):
    """The first and the last tokens of each sequence in 16 bits, in pages of their own. Attention reads them in place of codes.

    keys, values   in a 16-bit format; keys are not rotated
    page_table     int32 [B, pages]. Only pages of the first and the last tokens, and of those of this call, are read
    sink_tokens    int32 [B]: how many of the first tokens; None: none
    recent_tokens  how many tokens a query reads in 16 bits, from its own one back
    code_lengths   int32 [B]: lengths - recent_tokens, at least 0
    """

    keys: KVBuffer
    values: KVBuffer
    page_table: torch.Tensor
    sink_tokens: torch.Tensor | None
    recent_tokens: int
    code_lengths: torch.Tensor


def attention_varlen(
    q: torch.Tensor,
    cache: Cache,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    *,
    sm_scale: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    prefill: str = "cache",
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    exact_tokens: ExactTokens | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest tokens of each sequence, as many as each has, over a cache that already holds them.

    q [T, Hq, D], fp16, bf16, fp32 or float64, any strides. Returns out [T, Hq, Dv] in q's dtype; with `return_lse` also lse,
    float32 [T, Hq]. Options as in `decode_attention`. Nothing synchronizes with the device; CUDA graphs read cu_seqlens_q, lengths
    and page table at every replay.

    cache          a `PagedView` or any other cache; its lengths, int32 [B], include the tokens of this call
    cu_seqlens_q   int32 [B + 1], starting with 0: tokens cu_seqlens_q[b] .. cu_seqlens_q[b + 1] of q belong to sequence b. Tokens
                   after the last one are padding: out = 0, lse = -inf
    max_query_len  at least the largest number of queries of a sequence. T = B * max_query_len promises that all sequences have so
                   many, except empty ones at the end: on a GPU the kernels of `decode_attention` then run, and cu_seqlens_q is
                   not read
    prefill        "cache": all keys and values are read as stored. "exact": those of this call are taken from k and v
    k, v           [T, H, D] and [T, H, Dv], only for "exact": the tokens of this call, unquantized
    exact_tokens   sink and recent tokens in 16 bits, stored in addition to codes: a query at position i reads tokens from
                   i - recent_tokens + 1 on in 16 bits; with prefill="exact" those that the first query of this call does
    out            [T, Hq, Dv] in q's dtype, written and returned; if contiguous, without a copy
    deterministic_batch   on a GPU a token's result has the same bits for any split into calls and batches: splits and blocks have
                   fixed sizes, so prompts take longer

    With "cache" a token attends to the same codes for any chunking, page size and batch. `cpu` and `reference` then give fp32
    queries the same bits, too; other levels keep the accuracy promise. With sink or recent tokens, chunking changes which keys are
    in 16 bits: the cache is read as it is after this call.

    Raises `InvalidArgument` naming the argument at fault; the contents of cu_seqlens_q are checked on a CPU only.
    """
    options = options_of(cache, sm_scale, alibi_slopes, window, softcap, sinks, None)
    most = integer("max_query_len", max_query_len, 1, 2**31 - 1, "the largest number of queries of a sequence, at least 1")
    memory = (cache.keys, cache.values, cache.lengths, None, cache.page_table)
    call = _checked(DecodeCall(q, *memory, options, impl, deterministic_batch, cu_seqlens_q, most))
    if out is not None:
        check_out(out, q, (*q.shape[:2], cache.values.dim))
    if prefill == "exact":
        result, lse = _exact(call, k, v, exact_tokens)
    else:
        check(prefill == "cache", f"prefill={prefill!r}; expected 'cache' or 'exact'")
        check(k is None and v is None, "k and v were given with prefill='cache', which reads what is stored; leave them out")
        result, lse = _attend(call, out) if exact_tokens is None else _merged(call, _stored(call, exact_tokens))
    result = result if out is None else put_into(out, result)
    return (result, lse) if return_lse else result


def _attend(call: DecodeCall, into: torch.Tensor | None = None) -> Results:
    """(out [T, Hq, Dv], lse [T, Hq]) of a call with q [T, Hq, D]."""
    q, batch, most = call.q, len(call.lengths), call.max_query_len
    kernel = q.is_cuda or call.impl in ("gluon", "triton")
    if not kernel or call.deterministic_batch or len(q) != batch * most:
        into = None if into is None else into.transpose(0, 1)[None]
        out, lse = attend(call._replace(q=q.transpose(0, 1)[None]), True, into)
        return out[0].transpose(0, 1), lse[0].t()
    call = call._replace(cu_seqlens_q=None)
    if most == 1:
        out, lse = attend(call._replace(q=q.unsqueeze(2)), True, None if into is None else into.unsqueeze(2))
        return out.squeeze(2), lse.squeeze(2)
    out, lse = attend(call._replace(q=q.unflatten(0, (batch, most)).transpose(1, 2)), True)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _exact(call: DecodeCall, k: torch.Tensor | None, v: torch.Tensor | None, exact: ExactTokens | None) -> Results:
    """Attention over the stored past and over this call's unquantized tokens, merged."""
    q, bounds = call.q, call.cu_seqlens_q
    check(k is not None and v is not None, "prefill='exact' needs k and v, the keys and values of this call's tokens")
    assert k is not None and v is not None and bounds is not None
    for name, x, buffer in (("k", k, call.keys), ("v", v, call.values)):
        check_tensor(name, x, (len(q), buffer.heads, buffer.dim), device=q.device)
    counts = bounds.diff()
    before = call.lengths - counts
    past = [_over(call, ends=before)] if exact is None else _stored_before(call, exact, before)
    return _merged(call, [*past, _own(call, k, v, counts)])


def _own(call: DecodeCall, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor) -> Results:
    """Attention over this call's unquantized tokens."""
    q, bounds, most = call.q, call.cu_seqlens_q, call.max_query_len
    assert bounds is not None
    plain = call.options._replace(sinks=None, rotate_keys=False)
    if can_bypass_dispatcher(q, k, v) and call.impl == "auto" and not call.deterministic_batch:
        own = _fused.ragged(q, k, v, bounds, most, plain)
        if own is not None:
            return own
    table = bounds[:-1, None] + torch.arange(most, dtype=torch.int32, device=q.device)  # pages of one token each
    keys, values = (KVBuffer(plain_format(x.dtype), x.unsqueeze(2)) for x in (k, v))
    return _attend(call._replace(keys=keys, values=values, lengths=counts, page_table=table, options=plain))


def _over(call: DecodeCall, **options: Any) -> Results:
    """Attention with these options, without the sinks, which `_merged` adds."""
    return _attend(call._replace(options=call.options._replace(sinks=None, **options)))


def _merged(call: DecodeCall, parts: list[Results]) -> Results:
    """Attention over disjoint tokens, and over the sinks of the call."""
    level = kernel_level("decode_attention", call.impl, call.q, "q")
    merge = reference.merge_states if level in ("cpu", "reference") else merged
    out, lse = merge([out.unsqueeze(2) for out, _ in parts], [lse.unsqueeze(2) for _, lse in parts], call.options.sinks)
    return out.squeeze(2), lse.squeeze(2)


# ------------------------------------------------------------------------------------------------ tokens in 16 bits


def _stored(call: DecodeCall, exact: ExactTokens) -> list[Results]:
    """Attention over codes, recent tokens and sink tokens, as each query reads them.

    A query at position i reads codes up to i - recent_tokens: those of a query at that position.
    """
    recent, first, window, slopes = exact.recent_tokens, exact.sink_tokens, call.options.window, call.options.alibi_slopes
    plain, parts = _in_16_bits(call, exact), []
    if window is None or window > recent:
        older = None if window is None else window - recent
        out, lse = _over(call._replace(lengths=exact.code_lengths), starts=first, window=older)
        parts.append((out, lse if slopes is None else lse - slopes * recent))
    if recent:
        parts.append(_over(plain, starts=first, window=recent if window is None else min(recent, window)))
    if first is not None:
        parts.append(_over(plain, ends=first))
    return parts


def _stored_before(call: DecodeCall, exact: ExactTokens, before: torch.Tensor) -> list[Results]:
    """The same of the tokens before this call, [B]: all queries read them as the first one does."""
    first = exact.sink_tokens
    end = (before - max(exact.recent_tokens - 1, 0)).clamp_min(0)
    plain, parts = _in_16_bits(call, exact), [_over(call, starts=first, ends=end)]
    if exact.recent_tokens > 1:
        parts.append(_over(plain, starts=end if first is None else torch.maximum(end, first), ends=before))
    if first is not None:
        parts.append(_over(plain, ends=torch.minimum(first, before)))
    return parts


def _in_16_bits(call: DecodeCall, exact: ExactTokens) -> DecodeCall:
    """The call over the tokens in 16 bits."""
    options = call.options._replace(rotate_keys=False)
    return call._replace(keys=exact.keys, values=exact.values, page_table=exact.page_table, options=options)


def _checked(call: DecodeCall) -> DecodeCall:
    """The call with its tensors checked, except those of the options."""
    q, keys, lengths, table, bounds = call.q, call.keys, call.lengths, call.page_table, call.cu_seqlens_q
    check_tensor("q", q, ("T", "Hq", keys.dim), device=keys.codes.device)
    for name, t, axes in (("lengths", lengths, ("B",)), ("page_table", table, (len(lengths), "pages"))):
        if t is not None:
            check_tensor(f"cache.{name}", t, axes, "integer", q.device)
            check(t.dtype is torch.int32, f"cache.{name} is {t.dtype}; expected int32")
    check_tensor("cu_seqlens_q", bounds, (len(lengths) + 1,), "integer", q.device)
    assert bounds is not None
    if bounds.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_bounds(bounds.tolist(), lengths.tolist(), len(q), call.max_query_len)
    return call._replace(cu_seqlens_q=as_int32(bounds))


def _check_bounds(bounds: list[int], lengths: list[int], tokens: int, most: int) -> None:
    counts = [end - begin for begin, end in pairwise(bounds)]
    right = bounds[0] == 0 and all(n >= 0 for n in counts) and bounds[-1] <= tokens
    check(right, f"cu_seqlens_q is {bounds}; expected it to rise from 0 to at most T = {tokens}")
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        check(count <= most, f"cu_seqlens_q gives sequence {b} {count} queries; max_query_len={most} promises no more than that")
        check(count <= length, f"sequence {b} has {count} queries and a length of {length}; lengths count the tokens of this call")
        if tokens == len(lengths) * most and count:
            check(
                (bounds[b], count) == (b * most, most),
                f"T = {tokens} is B * max_query_len, so each sequence has {most} queries, and sequence {b} has {count} from token "
                f"{bounds[b]} on; pass a larger max_query_len",
            )
