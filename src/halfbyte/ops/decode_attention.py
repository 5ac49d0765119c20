"""`decode_attention`: attention of the newest queries over a cache, read as it is stored. Checks, level, plan and launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from halfbyte.arguments import Kind, as_int32, check_tensor, integer, number
from halfbyte.device import gpu
from halfbyte.errors import InvalidArgument, check
from halfbyte.kv_buffer import AttentionOptions, Cache, DecodeCall, KVBuffer
from halfbyte.ops import _decode_in_torch as in_torch
from halfbyte.ops import launch_cache
from halfbyte.ops._decode_in_torch import Results
from halfbyte.ops._library import can_bypass_dispatcher, kernel_level, refuse_capture
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Signature, layout, replay
from halfbyte.ops.self_check import refusal
from halfbyte.ops.small_calls import attention_error
from halfbyte.ops.workspace import floats
from halfbyte.plans.decode_attention import plans_of
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.plans.decode_problem import DecodeProblem, problem_of
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.reference.hadamard import block_size
from halfbyte.settings import pair_launches

Plan = DecodePlan | TritonTiles

#: The op; compiled code calls it by `Op.of_parts`.
DECODE = Op("decode_attention", DecodeCall)
#: Blocks of query rows in one launch of the portable kernel: CUDA's limit on the second axis of a grid. 131,072 queries of 16 heads
#: a KV head are one block more.
MOST_BLOCKS = 65_535
#: fp32 numbers of workspace for ragged queries, 256 MiB: splits of fixed size take some of every token for all of the capacity.
MOST_FLOATS = 1 << 26


def _run(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    _check_lengths(call)
    if call.q.numel() == 0:
        return call.new_results()
    if call.impl not in in_torch.LEVELS:
        return run_on_gpu(call, compiled=True)
    refuse_capture("decode_attention", call.q.device)
    return in_torch.run(call)


def _fake(call: DecodeCall) -> Results:
    check_tensor("q", call.q, ("B", "Hq", "L", call.query_dim), device=call.keys.codes.device)
    return call.new_results()


DECODE.register(_run, _fake)


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
    kernel = call.impl not in in_torch.LEVELS and call.q.numel() > 0
    tensors = call.q, call.keys.codes, call.values.codes, call.options.sinks, call.options.alibi_slopes
    if kernel and can_bypass_dispatcher(*tensors):
        return run_on_gpu(call, signature=signature, into=into)  # the dispatcher would take longer than the kernel
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


# -------------------------------------------------------------------------------------------------------------- the GPU levels

# From a call to a plan, to a workspace, to a launch. Nothing here waits for the device. In decoding the same call comes once a
# layer and token, with other addresses only. So what the first such call computed (the plan, the compiled kernel, all sizes and
# strides) is stored in the launch cache; later ones only fill in addresses and do not pass here.


def run_on_gpu(
    call: DecodeCall, *, compiled: bool = False, signature: Signature | None = None, into: torch.Tensor | None = None
) -> Results:
    """out [B, Hq, L, Dv] in q's dtype and lse float32 [B, Hq, L], by the level of the call ("auto": by the best that can).

    `compiled`: called from compiled code, behind whose back nothing may be kept. `signature`: what to store this call by.
    `into`: memory for out, taken if it is laid out like that.
    """
    out, lse = call.new_results()
    if into is not None and layout(into) == layout(out) and into.data_ptr() % 16 == 0:
        out = into
    if not len(call.lengths):  # ragged queries that are all padding
        return out.zero_(), lse.fill_(-math.inf)
    with torch.cuda.device_of(call.q):
        call = _dense(call)
        plans = _checked_plans(call)
        for plan in plans:
            launch(call, plan, out, lse, compiled, signature if len(plans) == 1 else None)
    return out, lse


def _dense(call: DecodeCall) -> DecodeCall:
    """The call as kernels read it: contiguous vectors, slopes and sinks in fp32."""
    o, table = call.options, call.page_table
    lengths, query_start, starts, ends = (
        None if t is None else t.contiguous() for t in (call.lengths, call.query_start, o.starts, o.ends)
    )
    slopes, sinks = (None if t is None else t.to(torch.float32).contiguous() for t in (o.alibi_slopes, o.sinks))
    assert lengths is not None
    return call._replace(
        lengths=lengths,
        query_start=query_start,
        cu_seqlens_q=None if call.cu_seqlens_q is None else call.cu_seqlens_q.contiguous(),
        page_table=table if table is None or table.stride(1) == 1 else table.contiguous(),
        options=o._replace(alibi_slopes=slopes, sinks=sinks, starts=starts, ends=ends),
    )


@functools.lru_cache(maxsize=1024)
def _plans(problem: DecodeProblem, level: str, most: int, device: int, use_pdl: bool) -> tuple[Plan, ...]:
    """The launches of a call on GPU `device` (-1: the interpreter)."""
    return plans_of(problem, level, most, gpu(device), use_pdl)


def _checked_plans(call: DecodeCall) -> tuple[Plan, ...]:
    """The same for a call, by the portable kernel where the tuned one was found to be wrong on this GPU."""
    facts = problem_of(call), call.impl, call.max_query_len, _index(call.q), pair_launches()
    plans = _plans(*facts)
    plan = plans[0]
    if call.impl != "auto" or isinstance(plan, TritonTiles):
        return plans
    spec = (plan.spec, "blocks") if plan.blocks else plan.spec
    wrong = refusal("decode_attention", spec, call.q.device, lambda: attention_error(call, plan, partial(launch, own=False)))
    return _plans(facts[0], "triton", *facts[2:]) if wrong else plans


def _index(q: torch.Tensor) -> int:
    """Of its GPU; -1: the interpreter."""
    return -1 if q.device.type == "cpu" else q.device.index


def launch(
    call: DecodeCall, plan: Plan, out: torch.Tensor, lse: torch.Tensor, own: bool, signature: Signature | None = None
) -> None:
    """Launch as planned on the current stream, and store that under `signature`. `own`: see `workspace.floats`."""
    if isinstance(plan, TritonTiles):
        _launch_portable(call, plan, out, lse, own)
        return
    from halfbyte.kernels.decode.launch import launches

    launch_cache.launch(DECODE, call, plan, launches, (out, lse), signature=signature, own=own)


def _launch_portable(call: DecodeCall, tiles: TritonTiles, out: torch.Tensor, lse: torch.Tensor, own: bool) -> None:
    """The portable kernel, over and over with as many queries as the grid, or the workspace of ragged ones, holds."""
    from halfbyte.kernels.decode import portable

    (_, heads, queries, _), ragged = call.q.shape, call.cu_seqlens_q is not None
    room, per_query = MOST_BLOCKS * tiles.block_rows, heads // call.keys.heads
    if ragged:
        room, per_query = MOST_FLOATS, portable.workspace_floats(heads, call.values.dim, tiles.splits)
    most = max(1, room // max(1, per_query))
    call = call if ragged else call._replace(query_start=call.first_query)
    for first in range(0, queries, most):
        piece, results = call, [out, lse]
        if queries > most:
            piece, results = _of_queries(call, slice(first, first + most)), [t[:, :, first : first + most] for t in (out, lse)]
        parts = [t if ragged or t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in results]
        count = portable.workspace_floats(parts[1].numel(), call.values.dim, tiles.splits)
        portable.launch(piece, tiles, parts[0], parts[1], floats(call.q.device, count, own))
        for result, part in zip(results, parts, strict=True):
            if part is not result:
                result.copy_(part)


def _of_queries(call: DecodeCall, some: slice) -> DecodeCall:
    """The call of some of the queries, which of ragged ones may be no sequence's."""
    q, bounds, first = call.q[:, :, some], call.cu_seqlens_q, some.start
    if bounds is None:
        return call._replace(q=q, query_start=call.first_query + first)
    start = call.lengths - bounds.diff() + (first - bounds[:-1]).clamp_min(0)
    return call._replace(q=q, query_start=start, cu_seqlens_q=(bounds - first).clamp(0, q.shape[2]))
