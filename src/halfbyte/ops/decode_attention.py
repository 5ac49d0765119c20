"""`decode_attention`: attention of the newest queries over a cache, read as it is stored."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, cast

import torch

from halfbyte.arguments import Kind, as_int32, check_tensor, integer, number
from halfbyte.cpu import decode_attention as cpu
from halfbyte.errors import InvalidArgument, check, warn_once
from halfbyte.kv_buffer import AttentionOptions, Cache, KVBuffer
from halfbyte.ops import _decode_on_gpu as gpu
from halfbyte.ops import _relaunch
from halfbyte.ops._library import can_bypass_dispatcher, define, level, refuse_capture
from halfbyte.ops._per_sequence import attend_per_sequence
from halfbyte.ops.append import Stored
from halfbyte.plans.decode_attention import format_of
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import block_size

#: Queries that torch code attends in one pass; longer ones are walked in pieces, so that scores never take more rows a head.
QUERY_BLOCK = 128

_SCHEMA = (
    "decode_attention(Tensor q, Tensor k_codes, Tensor? k_scales, Tensor? k_offsets, Tensor? k_tail, "
    "Tensor v_codes, Tensor? v_scales, Tensor? v_offsets, Tensor lengths, Tensor? query_start, Tensor? page_table, "
    "Tensor? starts, Tensor? ends, Tensor? alibi_slopes, Tensor? sinks, float sm_scale, float? softcap, int? window, "
    "bool rotate_keys, str key_format, str value_format, str level, bool deterministic_batch=False) -> (Tensor, Tensor)"
)


def _run(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scales: torch.Tensor | None,
    k_offsets: torch.Tensor | None,
    k_tail: torch.Tensor | None,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor | None,
    v_offsets: torch.Tensor | None,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    page_table: torch.Tensor | None,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    sm_scale: float,
    softcap: float | None,
    window: int | None,
    rotate_keys: bool,
    keys: str,
    values: str,
    level: str,
    deterministic_batch: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    key_buffer = KVBuffer(format_of(keys), k_codes, k_scales, k_offsets, k_tail)
    value_buffer = KVBuffer(format_of(values), v_codes, v_scales, v_offsets)
    _check_lengths(lengths, ends, key_buffer, page_table)
    options = AttentionOptions(sm_scale, softcap, alibi_slopes, window, starts, ends, sinks, rotate_keys)
    if q.numel() == 0:
        return q.new_empty(*q.shape[:3], value_buffer.dim), q.new_empty(q.shape[:3], dtype=torch.float32)
    if level in ("cpu", "reference"):
        refuse_capture("decode_attention", q.device)
        query_start = lengths - q.shape[2] if query_start is None else query_start
        where = (key_buffer, value_buffer, lengths, page_table, query_start, options)
        attend = functools.partial(_in_torch, level)
        return attend_per_sequence(attend, q, *where) if deterministic_batch else attend(q, *where)
    return gpu.run(
        q, key_buffer, value_buffer, lengths, query_start, page_table, options, level, deterministic_batch, compiled=True
    )


def _in_torch(
    level: str,
    q: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    query_start: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    attend = {"cpu": cpu.decode_attention, "reference": reference.decode_attention}[level]
    pieces = [
        attend(piece, keys, values, lengths, page_table, query_start + i * QUERY_BLOCK, options)
        for i, piece in enumerate(q.split(QUERY_BLOCK, dim=2))
    ]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)


def _fake(q: torch.Tensor, k_codes: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    v_codes, (keys, values) = args[3], args[17:19]
    key_buffer, value_buffer = KVBuffer(format_of(keys), k_codes), KVBuffer(format_of(values), v_codes)
    check_tensor("q", q, ("B", "Hq", "L", key_buffer.dim), device=k_codes.device)
    return q.new_empty(*q.shape[:3], value_buffer.dim), q.new_empty(q.shape[:3], dtype=torch.float32)


def _check_lengths(lengths: torch.Tensor, ends: torch.Tensor | None, keys: KVBuffer, page_table: torch.Tensor | None) -> None:
    """Lengths outside 0..capacity would read what is not there. Checked where looking at them costs nothing."""
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    limit = keys.codes.shape[2] * (1 if page_table is None else page_table.shape[1])
    low, high = int(lengths.min()), int(lengths.max())
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
    starts        int [B]; keys before it are left padding and are never seen
    query_start   int [B]; position of the first query; None: lengths - L, the newest tokens
    impl          "auto"; the GPU's kernels "gluon" (tuned) and "triton" (portable); "cpu"; "reference" (float64, the specification)
    deterministic_batch   a sequence's result has the same bits alone and in every batch. On a GPU this takes the portable kernel
                  and splits of fixed size; the `cpu` and `reference` levels compute one sequence after the other

    Raises `InvalidArgument` naming the argument at fault. FlashDecoding's online softmax over blocks of tokens.
    """
    options = options_of(cache, sm_scale, alibi_slopes, window, softcap, sinks, starts)
    request = _request(q, cache, cache.lengths, query_start, options, impl, deterministic_batch)
    done = None if request is None else _relaunch.again(request, options)
    if done is None:
        options = checked(q, cache, options, query_start)
        query_start = None if query_start is None else as_int32(query_start)
        done = _attend(q, cache, cache.lengths, query_start, options, level_of(impl, q), deterministic_batch, request)
    return done if return_lse else done[0]


def decode_parts(
    q: torch.Tensor,
    parts: Stored,
    formats: tuple[str, str],
    rotate_keys: bool,
    *,
    sm_scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """`decode_attention` as compiled code calls it, on the `stored` tensors of a contiguous cache and the names of its formats.

    Every object and property that is traced is looked at again before every call of the compiled code, so there are none.
    """
    k_codes, k_scales, k_offsets, k_tail, _, v_codes, v_scales, v_offsets, _, lengths = parts
    planes = (k_codes, k_scales, k_offsets, k_tail, v_codes, v_scales, v_offsets)
    options = (starts, None, None, sinks, sm_scale, softcap, window, rotate_keys)
    out: torch.Tensor = _op(q, *planes, lengths, None, None, *options, *formats, level_of("auto", q))[0]
    return out


def level_of(impl: str, q: torch.Tensor) -> str:
    """The level that runs; on a GPU, torch code for queries of 32 and 64 bits, which have no kernel."""
    if q.device.type != "cpu" and impl == "auto" and q.element_size() > 2:
        warn_once(f"decode_attention has kernels for float16 and bfloat16; blocked torch code runs for {q.dtype} queries")
        impl = "cpu"
    chosen = level("decode_attention", impl, q.device)
    return "auto" if impl == "auto" and chosen == "gluon" else chosen


def attend_again(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, query_start: torch.Tensor, options: AttentionOptions, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One of the calls of `prefill_attention`, whose arguments were checked; launched like an earlier one where there was one."""
    request = _request(q, cache, lengths, query_start, options, impl)
    done = None if request is None else _relaunch.again(request, options)
    return _attend(q, cache, lengths, query_start, options, level_of(impl, q), request=request) if done is None else done


def _request(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    options: AttentionOptions,
    impl: str,
    deterministic_batch: bool = False,
) -> _relaunch.Request | None:
    """What to remember a call as; None where it is not to be remembered. Tensors may be unchecked."""
    keys, values = cache.keys, cache.values
    if not can_bypass_dispatcher(q, keys.codes, values.codes) or not q.numel() or q.element_size() > 2:
        return None
    tensors = _relaunch.tensors_of(q, keys, values, lengths, query_start, cache.page_table, options)
    return _relaunch.request(tensors, (keys.format, values.format), options, impl, deterministic_batch)


def _attend(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    options: AttentionOptions,
    chosen: str,
    deterministic_batch: bool = False,
    request: _relaunch.Request | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten everything for the op; on a GPU in eager mode go past the dispatcher, which would take longer than the kernel."""
    o, keys, values = options, cache.keys, cache.values
    if chosen not in ("cpu", "reference") and can_bypass_dispatcher(q, keys.codes, values.codes) and q.numel():
        where = (lengths, query_start, cache.page_table)
        return gpu.run(q, keys, values, *where, options, chosen, deterministic_batch, request=request)
    out: tuple[torch.Tensor, torch.Tensor] = _op(
        *(q, *keys.tensors(), *values.tensors()[:3], lengths, query_start, cache.page_table),
        *(o.starts, o.ends, o.alibi_slopes, o.sinks, o.sm_scale, o.softcap, o.window, o.rotate_keys),
        *(keys.format.name, values.format.name, chosen, deterministic_batch),
    )
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
    """The options of a call. Their numbers have been looked at, their tensors not yet."""
    if not isinstance(getattr(cache, "keys", None), KVBuffer):
        raise InvalidArgument(f"cache is a {type(cache).__name__}; expected a KVCache or PagedKVCache")
    if window is not None:
        window = integer("window", window, 1, 2**31 - 1, "at least 1 (the query's own key), or None for no window")
    if softcap is not None:
        softcap = number("softcap", softcap, 1e-30, 1e30, "a positive finite number, or None for no softcap")
    scale = cache.keys.dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale, -1e30, 1e30, "a finite number")
    return AttentionOptions(scale, softcap, alibi_slopes, window, starts, None, sinks, cache.rotate_keys)


def checked(q: torch.Tensor, cache: Cache, o: AttentionOptions, query_start: torch.Tensor | None) -> AttentionOptions:
    """The options as kernels take them, after every tensor has been looked at."""
    keys, batch = cache.keys, cache.lengths.shape[0]
    check_tensor("q", q, (batch, "Hq", "L", keys.dim), device=keys.codes.device)
    check(
        q.shape[1] > 0 and q.shape[1] % keys.heads == 0,
        f"q has {q.shape[1]} heads and the cache {keys.heads} KV heads; query heads must be a multiple of KV heads",
    )
    if cache.lengths.device != q.device and not cache.lengths.is_pinned():
        # Triton raises, but not where the driver lets a GPU read all memory of the host: there it would be taken.
        raise InvalidArgument(
            f"lengths are on {cache.lengths.device} and cannot be accessed from {q.device}: move them, or pin their memory"
        )
    for name, t, size, kind in (
        ("alibi_slopes", o.alibi_slopes, q.shape[1], "floating"),
        ("sinks", o.sinks, q.shape[1], "floating"),
        ("starts", o.starts, batch, "integer"),
        ("query_start", query_start, batch, "integer"),
    ):
        if t is not None:
            check_tensor(name, t, (size,), cast(Kind, kind), q.device)
    if o.rotate_keys:
        block_size(keys.dim)
    return o if o.starts is None else replace(o, starts=as_int32(o.starts))
