"""The portable decode kernel (`portable.py`): which rows a program takes and which tokens they see, and its query in parts."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl

from halfbyte.kernels.common.codes import exponent, power_of_two
from halfbyte.kernels.decode.kv_args import TOP, KVArgs
from halfbyte.kernels.decode.portable_softmax import LOG2E, operand
from halfbyte.plans.compiled_for import CompiledFor

#: [B, Hq, L, D] and its strides.
Queries = namedtuple("Queries", "rows batch head token dim")
#: [B, Hq, L, Dv], fp32 [B, Hq, L], and fp32 for splits (`workspace_floats`).
Results = namedtuple("Results", "out lse partial")
#: A launch's arguments, keys and values separately, as device code passes them on; table0 and table1 are strides of the page table.
#: Ragged queries have `bounds`, int32 [count + 1], of so many sequences, and so many `tokens`.
Call = namedtuple(
    "Call",
    "q sequences per_head results bounds count tokens table0 table1 pages heads queries group capacity splits chunk "
    "sm_scale softcap window",
)
#: Rows of a KV head of a sequence. Of ragged queries, from_token is the sequence's first, and `queries` how many it has.
#: [M] each: query and query_head; `valid`, whether there is such a row; its position; low and high: it sees tokens [low, high).
Rows = namedtuple("Rows", "sequence head from_token queries query query_head valid position low high")


@dataclass(frozen=True)
class Constants(CompiledFor):
    """What the kernel is compiled for, next to its formats. rows, tokens: of a block."""

    page: int
    rotate: int
    rotate_steps: int
    latent: bool
    single: bool
    split: bool
    rows: int
    tokens: int
    stages: int
    pdl: bool
    interpreted: bool


@triton.jit
def _rotated(x, M: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Hadamard-rotate rows x, fp32 [M, D], in blocks of SIZE = 2^STEPS. Each step also turns the bits of the index by one."""
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(x, (M, D // SIZE, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (M, D))
    return x * (SIZE**-0.5)


@triton.jit
def _in_parts(x, M: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """Rows [M, WORDS * PARTS] as PARTS tensors [M, WORDS]."""
    parts = (x,)
    for bit in tl.static_range(3):
        if 2**bit < PARTS:  # by one more bit of the dim, the lowest first
            even = ()
            odd = ()
            for j in tl.static_range(len(parts)):
                a, b = tl.split(tl.reshape(parts[j], (M, parts[j].shape[1] // 2, 2)))
                even += (a,)
                odd += (b,)
            parts = even + odd
    return parts


@triton.jit
def block_of_rows(block, bounds, sequences, tokens, group, M: tl.constexpr):
    """Of a block of M rows its sequence (`sequences`: the padding behind them all), that one's first token and how many it has, and
    the block's first row.

    The last sequence whose first block is not behind this one. Bounds out of order lead to some sequence and to no token outside.
    """
    count = 0
    for first in tl.range(0, sequences + 1, 128):
        number = first + tl.arange(0, 128)
        begin = tl.minimum(tl.maximum(tl.load(bounds + number, mask=number <= sequences, other=0).to(tl.int64), 0), tokens)
        count += tl.sum(((number <= sequences) & (begin * group // M + number <= block)).to(tl.int32), 0)
    sequence = tl.maximum(count - 1, 0)
    begin = tl.minimum(tl.maximum(tl.load(bounds + sequence).to(tl.int64), 0), tokens)
    end = tl.load(bounds + sequence + 1, mask=sequence < sequences, other=tokens).to(tl.int64)
    end = tl.maximum(tl.minimum(end, tokens), begin)
    first = tl.maximum(block - begin * group // M - sequence, 0) * M
    return sequence.to(tl.int64), begin, (end - begin).to(tl.int32), first.to(tl.int32)


@triton.jit
def rows_of(sequence, head, call: Call, C: tl.constexpr):
    """The rows of this program, and the tokens [lo, hi) that any of them sees."""
    M: tl.constexpr = C.rows
    first = tl.program_id(1) * M
    padding = False
    from_token = 0
    queries = call.queries
    if call.bounds is not None:
        sequence, from_token, queries, first = block_of_rows(sequence, call.bounds, call.count, call.tokens, call.group, M)
        padding = sequence == call.count
        sequence = tl.minimum(sequence, call.count - 1)
    index = first + tl.arange(0, M)
    query, query_head = index // call.group, head * call.group + index % call.group
    valid = index < queries * call.group
    of = call.sequences
    if of.query_start is not None:
        start = tl.load(of.query_start + sequence).to(tl.int64)
    else:
        start = tl.load(of.lengths + sequence).to(tl.int64) - queries
    limit = tl.minimum(tl.load(of.lengths + sequence), call.capacity)
    if call.bounds is not None:
        limit = tl.where(padding, 0, limit)
    oldest = 0
    if of.ends is not None:
        limit = tl.minimum(limit, tl.load(of.ends + sequence))
    if of.starts is not None:
        oldest = tl.maximum(oldest, tl.load(of.starts + sequence))
    position = start + query
    low = tl.zeros([M], tl.int32) + oldest
    if call.window is not None:
        low = tl.minimum(tl.maximum(low, position - call.window + 1), call.capacity).to(tl.int32)
    high = tl.maximum(tl.minimum(position + 1, limit), 0).to(tl.int32)
    lo = tl.min(tl.where(valid, low, call.capacity), 0)
    hi = tl.max(tl.where(valid, high, 0), 0)
    rows = Rows(sequence, head, from_token, queries, query, query_head, valid, position, low, high)
    return rows, lo, hi


@triton.jit
def share_of(split, lo, hi, keys: KVArgs, call: Call, C: tl.constexpr):
    """This program's share of tokens [lo, hi), from a multiple of 16 on (of whole blocks that share scales)."""
    N: tl.constexpr = C.tokens
    BLOCK: tl.constexpr = keys.F.block
    ALIGN: tl.constexpr = N if call.bounds is not None else BLOCK if BLOCK > 0 else 16
    begin = lo // ALIGN * ALIGN
    stop = hi
    if C.split:
        if call.chunk > 0:
            begin, stop = tl.maximum(begin, split * call.chunk), tl.minimum(hi, (split + 1) * call.chunk)
        else:
            share = tl.cdiv(tl.cdiv(tl.maximum(hi - begin, 0), call.splits), N) * N
            begin, stop = begin + split * share, tl.minimum(hi, begin + (split + 1) * share)
    return begin, stop


@triton.jit
def query_of(rows: Rows, x: KVArgs, BEFORE: tl.constexpr, ROTATE: tl.constexpr, call: Call, C: tl.constexpr):
    """The query of keys (or latents) x, behind so many dims: in parts; their sums over UNIT; and what products with codes, and with
    rows of a tail, are multiplied by.

    Where products take fp16, rows are brought to a power of two below its limit: bf16 may be of any size.
    """
    M: tl.constexpr = C.rows
    q = call.q
    WIDTH: tl.constexpr = x.WORDS * x.PARTS
    dim = tl.arange(0, WIDTH)
    if call.bounds is None:
        first = q.rows + rows.sequence * q.batch
        pointers = first + (rows.query_head * q.head + rows.query.to(tl.int64) * q.token)[:, None]
    else:
        pointers = q.rows + (rows.query_head * q.head + (rows.from_token + rows.query) * q.token)[:, None]
    if BEFORE > 0:
        pointers += BEFORE * q.dim
    pointers += dim.to(tl.int64)[None, :] * q.dim
    query = tl.load(pointers, mask=rows.valid[:, None] & (dim < x.DIM)[None, :], other=0).to(tl.float32)
    if ROTATE:
        query = _rotated(query, M, WIDTH, C.rotate, C.rotate_steps)
    scale = tl.full([M], 1.0, tl.float32) * call.sm_scale
    if x.DOT == tl.float16:  # noqa: SIM300 (an operand, not a constant)
        e = tl.minimum(tl.maximum(exponent(tl.max(tl.abs(query), 1)), -100), 100)
        query *= power_of_two(-e + TOP)[:, None]
        scale *= power_of_two(e - TOP)
    query = operand(query, x)
    sums = tl.sum(query.to(tl.float32), 1) / x.UNIT
    tail_scale = scale
    scale *= x.UNIT  # here once, and not on every product
    parts = _in_parts(query, M, x.WORDS, x.PARTS)
    if x.F.spread == "tensor":
        scale *= tl.load(x.scales).to(tl.float32)
    if call.softcap is None:
        scale *= LOG2E
        tail_scale *= LOG2E
    return parts, sums, scale, tail_scale
