"""The GPU levels of `decode_attention`: from tensors to a plan, to a workspace, to a launch. Nothing here waits for the device.

In decoding the same call comes once a layer and token, with other addresses only. So what the first such call found out - the plan,
the compiled kernel, all sizes and strides - is kept (`_relaunch`), and later ones only fill in addresses and do not pass here.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from halfbyte.device import describe
from halfbyte.errors import Unsupported
from halfbyte.kv_buffer import AttentionOptions, KVBuffer
from halfbyte.ops import _relaunch
from halfbyte.ops._workspace import counters, floats
from halfbyte.plans.decode_attention import MOST_SEQUENCES, MOST_TOKENS, DecodePlan, Problem, format_of, queries_of_a_block
from halfbyte.plans.decode_portable import TritonTiles, triton_tiles
from halfbyte.plans.tuning_cache import NO_TABLE, decode_plan, table_of
from halfbyte.reference.hadamard import rotate
from halfbyte.settings import pair_launches

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}

#: Tokens of one split where the split must not depend on the batch: a function of a sequence's own length only.
_FIXED_CHUNK = 1024

#: Blocks of query rows in one launch of the portable kernel: CUDA's limit on the second axis of a grid. 131,072 queries of 16 heads
#: a KV head are one block more.
MOST_BLOCKS = 65_535


@dataclass(frozen=True)
class Call:
    """One call: its tensors as kernels read them (vectors dense, slopes and sinks in fp32)."""

    q: torch.Tensor
    keys: KVBuffer
    values: KVBuffer
    lengths: torch.Tensor
    query_start: torch.Tensor | None
    page_table: torch.Tensor | None
    options: AttentionOptions
    out: torch.Tensor
    lse: torch.Tensor


def run(
    q: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    page_table: torch.Tensor | None,
    options: AttentionOptions,
    level: str,
    deterministic_batch: bool,
    compiled: bool = False,
    request: _relaunch.Request | None = None,
    blocks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, L, Dv] in q's dtype and lse float32 [B, Hq, L], by the level asked for ("auto": by the best that can).

    `compiled`: called from compiled code, behind whose back nothing may be kept. `request`: what to remember this call as.
    `blocks`: q holds blocks of a prompt's tokens, one sequence each.
    """
    out = q.new_empty(*q.shape[:3], values.dim)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        call = Call(*(q, keys, values, _dense(lengths), _dense(query_start), _table(page_table), _plain(options), out, lse))
        problem = problem_of(call, deterministic_batch)
        device = _number(q)
        if level != "triton" and (queries := _queries_of_a_block(problem, device)):
            _launch_blocks(call, queries, level, compiled)
            return out, lse
        plan = _plan(problem, level, device, pair_launches())
        plan = _for_many(plan) if blocks else plan
        kernel = launch(call, plan, compiled)
    if request is not None and isinstance(plan, DecodePlan):
        from halfbyte.kernels.decode.launch import sizes

        used = _relaunch.tensors_of(q, keys, values, call.lengths, call.query_start, call.page_table, call.options)
        numbers, formats = sizes(q, keys, values, page_table), (keys.format, values.format)
        _relaunch.remember(request, used, formats, plan, kernel, (out, lse), numbers)
    return out, lse


def _dense(t: Any, dtype: torch.dtype | None = None) -> Any:
    """A vector as kernels read it, one number after the other; None stays None."""
    return None if t is None else t.to(dtype or t.dtype).contiguous()


def _table(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.stride(1) == 1 else t.contiguous()


def _plain(o: AttentionOptions) -> AttentionOptions:
    slopes, sinks = _dense(o.alibi_slopes, torch.float32), _dense(o.sinks, torch.float32)
    return replace(o, alibi_slopes=slopes, sinks=sinks, starts=_dense(o.starts), ends=_dense(o.ends))


def problem_of(call: Call, deterministic_batch: bool) -> Problem:
    """What a plan needs to know of a call."""
    q, keys, values, table, options = call.q, call.keys, call.values, call.page_table, call.options
    rows = keys.codes.shape[2]
    return Problem(
        _NAMES.get(q.dtype, str(q.dtype)),
        q.shape[0],
        keys.heads,
        q.shape[1] // keys.heads,
        q.shape[2],
        keys.dim,
        values.dim,
        rows if table is None else rows * table.shape[1],
        keys.format.name,
        values.format.name,
        0 if table is None else rows,
        _aligned(q, keys.codes) and _aligned(q, values.codes) and _dense_tail(keys.tail),
        options.window is not None,
        options.alibi_slopes is not None,
        options.softcap is not None,
        deterministic_batch,
        _apart(keys),
        _apart(values),
        _scales_apart(keys),
        _scales_apart(values),
    )


def _aligned(q: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether codes can be copied in 16-byte pieces, by addresses that the compiler can see are multiples of 32 bytes."""
    b, h, t, d = codes.stride()
    size = codes.element_size()
    pieces = (b * size | h * size) % 32 == 0 and t * size % 16 == 0
    near = q.shape[1] * q.stride(1) < 2**31  # where a head's queries lie is a product in 32 bits
    return d == 1 and pieces and codes.data_ptr() % 16 == 0 and q.stride(3) == 1 and near and codes.shape[0] > 0


def _dense_tail(tail: torch.Tensor | None) -> bool:
    """Whether the tail of keys, if there is one, is [B, H, block, D] without gaps: a head's part is found by that."""
    return tail is None or (tail.is_contiguous() and tail.data_ptr() % 16 == 0)


def _apart(buffer: KVBuffer) -> int:
    """How many rows apart codes of neighbouring tokens lie, if that is what a kernel is compiled for; else 0."""
    row, (_, head, token, _) = buffer.codes.shape[3], buffer.codes.stride()
    if token == row:
        return 1
    return buffer.heads if token == buffer.heads * row and head == row else 0


def _scales_apart(buffer: KVBuffer) -> int:
    """The same of scales, where cp.async can copy them: those of several tokens at once, or two of one token in 4 bytes."""
    s, o = buffer.scales, buffer.offsets
    if s is None or s.ndim == 1:
        return 1
    stride, groups = s.stride(), s.shape[3] if s.ndim == 4 else 1
    token = stride[1] if s.ndim == 2 else stride[2]
    head = 0 if s.ndim == 2 else stride[1]
    addresses = s.data_ptr() | (0 if o is None else o.data_ptr())
    if (groups > 1 and stride[3] != 1) or (o is not None and o.stride() != stride):
        return 0
    even = (stride[0] | head) % 16 == 0 and addresses % 16 == 0
    if token == groups and even:
        return 1
    tokens_first = buffer.heads > 1 and head == groups and token == buffer.heads * groups
    if buffer.format.token_block:  # copied 16 bytes at a time
        return buffer.heads if tokens_first and even else 0
    return buffer.heads if tokens_first and (token | stride[0]) % 2 == 0 and addresses % 4 == 0 else 0


@functools.lru_cache(maxsize=1024)
def _queries_of_a_block(problem: Problem, device: int) -> int:
    """New tokens that a tuned kernel takes at a time, of a call with more than it can hold; 0: as the call is."""
    if device < 0 or problem.dtype not in _NAMES.values():
        return 0
    return queries_of_a_block(problem, describe(f"cuda:{device}").capability or (8, 0))


def plan_of(call: Call, level: str, deterministic_batch: bool, pair: bool) -> DecodePlan | TritonTiles:
    """What runs a call. Raises `Unsupported` when the level asked for cannot."""
    return _plan(problem_of(call, deterministic_batch), level, _number(call.q), pair)


def _number(q: torch.Tensor) -> int:
    """Of its GPU; -1: the interpreter."""
    return -1 if q.device.type == "cpu" else q.device.index


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, level: str, device: int, pair: bool) -> DecodePlan | TritonTiles:
    """What runs a problem on GPU number `device` (-1: the interpreter). Raises `Unsupported` when the level asked for cannot."""
    if problem.dtype not in _NAMES.values():
        raise Unsupported(f"q is {problem.dtype}; the {level} kernel takes float16 and bfloat16 queries; use impl='auto'")
    facts = None if device < 0 else describe(f"cuda:{device}")
    capability, sm_count = (facts.capability or (8, 0), facts.sm_count or 1) if facts else ((8, 0), 8)
    table = table_of(facts.name, sm_count) if facts else NO_TABLE
    tuned = decode_plan(problem, sm_count, capability, pair, table)[0] if level != "triton" else "asked for"
    if isinstance(tuned, DecodePlan):
        return tuned
    if level == "gluon":
        raise Unsupported(f"impl='gluon' cannot run this call: {tuned}; use impl='auto', which takes the portable kernel here")
    return triton_tiles(
        format_of(problem.keys),
        format_of(problem.values),
        batch=problem.batch,
        heads=problem.heads,
        rows=problem.rows,
        capacity=problem.capacity,
        dim=max(problem.dim, problem.value_dim),
        num_sms=sm_count,
        capability=capability if pair else (8, 0),
        chunk=_FIXED_CHUNK if problem.deterministic_batch else 0,
    )


def launch(call: Call, plan: DecodePlan | TritonTiles, own: bool) -> Any:
    """Launch as planned on the current stream; the tuned kernel, compiled. `own`: see `_workspace.floats`."""
    if isinstance(plan, DecodePlan):
        return _launch_gluon(call, plan, own)
    _launch_triton(call, plan, own)
    return None


def _launch_blocks(c: Call, queries: int, level: str, compiled: bool) -> None:
    """More new tokens than a tuned kernel holds: `queries` of them at a time are sequences of their own, over the same memory.

    A launch has the blocks of several sequences, or some of those of one, as many as the kernel looks through.
    """
    (batch, _, length, _), o, table = c.q.shape, c.options, c.page_table
    count = -(-length // queries)
    missing = count * queries - length
    q = torch.nn.functional.pad(c.q, (0, 0, 0, missing)) if missing else c.q
    q = q.unflatten(2, (count, queries)).transpose(1, 2)  # [B, blocks, Hq, queries, D]
    held = c.lengths.to(q.device, non_blocking=True)  # which may be in pinned memory of the host
    first = held - length if c.query_start is None else c.query_start
    query_start = first[:, None] + torch.arange(0, count * queries, queries, dtype=torch.int32, device=q.device)
    tokens = c.keys.heads * c.keys.codes.shape[2] * (1 if table is None else table.shape[1])
    most = max(1, min(MOST_SEQUENCES, MOST_TOKENS // max(1, tokens)))
    some = max(1, most // count)
    for b, begin in itertools.product(range(0, batch, some), range(0, count, most)):
        here, those = slice(b, b + some), slice(begin, begin + most)
        blocks = q[here, those].flatten(0, 1)
        if blocks.shape[1] * blocks.stride(1) >= 2**31:
            blocks = blocks.contiguous()
        n = len(query_start[b, those])
        lengths, starts, ends = (None if t is None else t[here].repeat_interleave(n) for t in (held, o.starts, o.ends))
        keys, values = (_of_sequences(p, here, table is not None) for p in (c.keys, c.values))
        assert lengths is not None
        piece = replace(
            c,
            q=blocks,
            keys=keys,
            values=values,
            lengths=lengths,
            query_start=query_start[here, those].flatten(),
            page_table=None if table is None else table[here].repeat_interleave(n, 0),
            options=replace(o, starts=starts, ends=ends),
        )
        out, lse = _run_again(piece, level, compiled)
        for into, part in ((c.out, out), (c.lse, lse)):
            _put(into[here, :, begin * queries :], part.unflatten(0, (-1, n)))


def _run_again(c: Call, level: str, compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`run` of blocks, launched like earlier ones where there were any; the results are new ones, not those of `c`."""
    given = (c.q, c.keys, c.values, c.lengths, c.query_start, c.page_table, c.options)
    request = None
    if not compiled:
        request = _relaunch.request(_relaunch.tensors_of(*given), (c.keys.format, c.values.format), c.options, level, False)
    done = None if request is None else _relaunch.again(request, c.options)
    return run(*given, level, False, compiled, request, blocks=True) if done is None else done


def _of_sequences(buffer: KVBuffer, some: slice, paged: bool) -> KVBuffer:
    """What a buffer holds of some sequences. All of them share its pages, and their tables say which are whose."""
    tensors = [t if t is None or t.ndim == 1 or (paged and t is not buffer.tail) else t[some] for t in buffer.tensors()]
    return KVBuffer(buffer.format, *cast(Any, tensors))


def _for_many(plan: DecodePlan | TritonTiles) -> DecodePlan | TritonTiles:
    """The plan with a kernel for up to 64 sequences, or for as many as there can be: prompts of all lengths share those two."""
    if not isinstance(plan, DecodePlan):
        return plan
    return replace(plan, spec=replace(plan.spec, batch=64 if plan.spec.batch <= 64 else MOST_SEQUENCES))


def _put(into: torch.Tensor, blocks: torch.Tensor) -> None:
    """blocks [B, n, Hq, tokens of a block, ...] into [B, Hq, L, ...]; what the last one has too much is left out."""
    size, length = blocks.shape[3], min(into.shape[2], blocks.shape[1] * blocks.shape[3])
    whole = length // size
    into[:, :, : whole * size].unflatten(2, (whole, size)).copy_(blocks[:, :whole].transpose(1, 2))
    if whole * size < length:
        into[:, :, whole * size : length].copy_(blocks[:, whole, :, : length - whole * size])


def _launch_gluon(c: Call, plan: DecodePlan, own: bool) -> Any:
    from halfbyte.kernels.decode import launch

    q = c.q
    if c.options.rotate_keys:
        # To fp32, where keys are codes: the kernel rounds once. In float64, which neither autocast nor TF32 touches.
        keep = not own and not (q.is_cuda and torch.cuda.is_current_stream_capturing())  # else it would lie in memory of a graph
        matrix = (_hadamard if keep else _hadamard.__wrapped__)(q.shape[3], q.device)
        with torch.autocast(q.device.type, enabled=False):
            q = (q.double() @ matrix).to(torch.float32 if c.keys.format.is_quantized else q.dtype)
    part = floats(q.device, plan.floats, own)
    count = counters(q.device, plan.counters, own)
    tensors = (q, c.keys, c.values, c.lengths, c.query_start, c.page_table, c.options)
    return launch.launch(*tensors, plan.spec, plan.programs, c.out, c.lse, part, count)


def _launch_triton(c: Call, tiles: TritonTiles, own: bool) -> None:
    from halfbyte.kernels.decode import portable

    start = c.lengths - c.q.shape[2] if c.query_start is None else c.query_start
    most = max(1, MOST_BLOCKS * tiles.block_rows // (c.q.shape[1] // c.keys.heads))
    if c.q.shape[2] > most:
        for first in range(0, c.q.shape[2], most):
            _launch_piece(c, slice(first, first + most), start + first, tiles, own)
        return
    part = floats(c.q.device, portable.workspace_floats(math.prod(c.q.shape[:3]), c.values.dim, tiles.splits), own)
    portable.launch(c.q, c.keys, c.values, c.lengths, start, c.page_table, c.options, tiles, c.out, c.lse, part)


def _launch_piece(c: Call, queries: slice, start: torch.Tensor, tiles: TritonTiles, own: bool) -> None:
    """Some of the queries of a call, the first of them at position `start`."""
    out, lse = c.out[:, :, queries], c.lse[:, :, queries]
    made = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (out, lse)]
    piece = replace(c, q=c.q[:, :, queries], query_start=start, out=made[0], lse=made[1])
    _launch_triton(piece, tiles, own)
    out.copy_(piece.out)
    lse.copy_(piece.lse)


@functools.cache
def _hadamard(dim: int, device: torch.device) -> torch.Tensor:
    """The matrix of `reference.hadamard.rotate`."""
    return rotate(torch.eye(dim, dtype=torch.float64, device=device))
