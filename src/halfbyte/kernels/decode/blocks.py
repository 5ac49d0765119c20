"""Blocks of queries: how the tuned decode kernels read ragged queries, and prompts of more queries than a program holds.

Each block has up to L consecutive queries of one sequence, and is a sequence of its own to the kernel. A table says which queries,
whose keys and values, and which rows of the results are its own. It is made on the device, so the host knows of a batch only how
many tokens and sequences it has, and CUDA graphs read bounds and lengths at every replay.

Even queries, L of each of B sequences, make B ceil(L / queries) blocks. Ragged ones have bounds: sequence b begins with block
bounds[b] / queries + b, padding behind the last one is sequence B, and blocks without queries in between cost next to nothing.
"""

# ruff: noqa: RET505
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.decode.portable_rows import block_of_rows
from halfbyte.kv_buffer import DecodeCall
from halfbyte.plans.decode_spec import DecodePlan

#: Vectors of a table, int32 [blocks]: lengths, query_start, starts, ends. Behind them lies a record of each block, int32 [FIELDS].
VECTORS = 4
#: A record: its sequence, its first token in that sequence's queries (of ragged ones, in all), and how many it has; the row of the
#: results that belongs to this token and head 0; and rows from one head, and from one token, to the next.
FIELDS = gl.constexpr(8)
SEQUENCE, TOKEN, COUNT, ROW, HEAD_STEP, TOKEN_STEP = (gl.constexpr(i) for i in range(6))


# ------------------------------------------------------------------------------------------------------------- the table


_UNSPECIALIZED = ["sequences", "tokens", "each", "heads", "first", "blocks"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _make_table(
    table, bounds, lengths, query_start, starts, ends, sequences, tokens, each, heads, first, blocks,
    EVEN: tl.constexpr, QUERIES: tl.constexpr, VECTORS: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block: number `first` + program of the call's. each: queries of a sequence, if they are EVEN; blocks: of the table."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if EVEN:
        of_sequence = (each + QUERIES - 1) // QUERIES
        sequence = (first + program) // of_sequence
        begin, count, skipped = sequence * each, each, (first + program) % of_sequence * QUERIES
    else:
        sequence, begin, count, skipped = block_of_rows(first + program, bounds, sequences, tokens, 1, QUERIES)
    real = tl.minimum(tl.maximum(count - skipped, 0), QUERIES)
    empty = (sequence >= sequences) | (real == 0)
    sequence = tl.minimum(sequence, sequences - 1)
    length = tl.load(lengths + sequence)
    position = length - count
    if query_start is not None:
        position = tl.load(query_start + sequence)
    tl.store(table + program, tl.where(empty, 0, length))
    tl.store(table + blocks + program, position + skipped)
    if starts is not None:
        tl.store(table + 2 * blocks + program, tl.load(starts + sequence))
    if ends is not None:
        tl.store(table + 3 * blocks + program, tl.load(ends + sequence))
    if bounds is None:
        token, row, head_step, token_step = skipped, begin * heads + skipped, each, 1
    else:
        token, row, head_step, token_step = begin + skipped, (begin + skipped) * heads, 1, heads
    record = table + VECTORS * blocks + program * FIELDS
    tl.store(record, sequence)
    tl.store(record + 1, token)
    tl.store(record + 2, real)
    tl.store(record + 3, row)
    tl.store(record + 4, head_step)
    tl.store(record + 5, token_step)


class Blocks(NamedTuple):
    """The blocks of a plan as sequences: the call of them, their records, and the launch that makes the table."""

    call: DecodeCall
    records: torch.Tensor
    launch: Launch


def blocks_of(call: DecodeCall, plan: DecodePlan) -> Blocks:
    """Of a call with ragged queries, or with more of them than the kernel of the plan takes."""
    q, o, batch = call.q, call.options, len(call.lengths)
    room = -(-plan.blocks // 16) * 16  # vectors are aligned
    table = torch.empty((VECTORS + FIELDS.value) * room, dtype=torch.int32, device=q.device)
    vectors = table[: VECTORS * room].view(VECTORS, room)[:, : plan.blocks]
    even = call.cu_seqlens_q is None or q.shape[2] == batch * call.max_query_len
    each = q.shape[2] if call.cu_seqlens_q is None else call.max_query_len
    arguments = (
        table, call.cu_seqlens_q, call.lengths, call.query_start, o.starts, o.ends, batch, q.shape[2], each, q.shape[1],
        plan.first_block, room, even, plan.spec.queries, VECTORS, FIELDS.value, plan.spec.use_pdl,
    )  # fmt: skip
    options = o._replace(
        starts=None if o.starts is None else vectors[2],
        ends=None if o.ends is None else vectors[3],
    )
    return Blocks(
        call._replace(lengths=vectors[0], query_start=vectors[1], options=options),
        table[VECTORS * room :],
        Launch(_make_table, (plan.blocks,), arguments, {"num_warps": 1, "launch_pdl": plan.spec.use_pdl}),
    )


# ------------------------------------------------------------------------------------------------- in the tuned kernels


@gluon.jit
def of_block(b, field: gl.constexpr, call):
    """A field of the record of block b."""
    return gl.load(call.sequences.blocks + (b * FIELDS + field))


@gluon.jit
def memory_of(b, call):
    """The sequence whose keys and values sequence b of the kernel reads."""
    if call.sequences.blocks is None:
        return b
    else:
        return of_block(b, SEQUENCE, call)


@gluon.jit
def rows_of_head(call, b, head, C: gl.constexpr):
    """Where the query rows of a work item begin, whose first KV head is `head`."""
    q = call.q
    if call.sequences.blocks is None:
        first = b.to(gl.int64) * q.batch
    else:
        first = of_block(b, SEQUENCE, call).to(gl.int64) * q.batch + of_block(b, TOKEN, call).to(gl.int64) * q.token
    return q.rows + first + head * (C.rows // C.queries * q.head)


@gluon.jit
def real_rows(r, b, call, C: gl.constexpr):
    """Which query rows r of a KV head there are."""
    if call.sequences.blocks is None:
        return r < C.rows
    else:
        return (r < C.rows) & (r % C.queries < of_block(b, COUNT, call))


@gluon.jit
def result_at(Base, r, d, b, item, head, size: gl.constexpr, call, C: gl.constexpr):
    """Where element d of rows r of a KV head lies in a result, of `size` elements a row. item: the head's number among all."""
    if call.sequences.blocks is None:
        return Base + item.to(gl.int64) * (C.rows * size) + (r * size + d)
    else:
        head = head * (C.rows // C.queries) + r // C.queries
        row = of_block(b, ROW, call) + head * of_block(b, HEAD_STEP, call) + r % C.queries * of_block(b, TOKEN_STEP, call)
        return Base + row.to(gl.int64) * size + d
