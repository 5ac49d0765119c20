"""Attention over keys and values as they are stored, by compiled loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from halfbyte.cpu.threads import compiler_works, over_rows
from halfbyte.formats import Code, Format, plain_format
from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.reference.hadamard import block_size

if TYPE_CHECKING:
    from halfbyte.cpu.compiled.attention import Side

#: Columns of decoded rows are a multiple of it.
LANES = 16
#: A scale and an offset of what has none.
_ONE, _ZERO = torch.ones(1, 1, 1, 1, dtype=torch.float16), torch.zeros(1, 1, 1, 1, dtype=torch.float16)


def reads_codes(c: DecodeCall) -> bool:
    """Whether the loops take this call: on a CPU, over codes and scales whose rows lie in one piece."""
    return c.q.is_cpu and c.q.numel() > 0 and all(map(_is_readable, (c.keys, c.values))) and compiler_works()


def _is_readable(buffer: KVBuffer) -> bool:
    code = buffer.format.code
    rows = (t for t in buffer.tensors() if t is not None and t.ndim > 3 and t.shape[3] > 1)
    return code.values is None and not code.bias and buffer.codes.numel() > 0 and all(t.stride(3) == 1 for t in rows)


def decode_attention(c: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, L, Dv] in q's dtype, lse float32 [B, Hq, L]; a query's bits depend on what it sees and on its position alone."""
    from halfbyte.cpu.compiled.attention import SPLIT, Options, loops

    q, o, lengths = c.q.detach(), c.options, c.lengths.numpy()
    wide = q.float() if q.dtype.itemsize == 2 else q.double()
    (batch, q_heads, count, dim), heads = q.shape, c.keys.heads
    numbers = wide.numpy()
    places = np.empty((batch, 4), np.int64)
    places[:, 0], places[:, 1] = c.first_query.numpy(), 0 if o.starts is None else o.starts.numpy()
    places[:, 2], places[:, 3] = o.limit(c.lengths).numpy(), lengths
    splits = max(1, -(-int(places[:, 2].max()) // SPLIT))
    shape = batch, heads, q_heads // heads * count
    new = np.empty
    rows = new((*shape, _width(dim)), numbers.dtype)
    out = new((batch, heads, splits, shape[2], _width(c.values.dim)), numbers.dtype)
    state = new((*out.shape[:-1], 2), numbers.dtype)
    result, lse = new((batch, q_heads, count, c.values.dim), numbers.dtype), new((batch, q_heads, count), np.float32)
    prepare, attend, finish = loops(numbers.dtype.name)

    keys, values = (_sides(buffer) for buffer in (c.keys, c.values))
    prepare(numbers, o.sm_scale, block_size(dim) if o.rotate_keys else 0, keys[0][3].parts, rows)
    table = new((0, 0), np.int32) if c.page_table is None else c.page_table.numpy()
    options = Options(count, 2**40 if o.window is None else o.window, o.softcap or 0.0)
    steps = rows.size * min(c.capacity, splits * SPLIT) * 2
    units = batch * heads * splits
    over_rows(attend, units, steps, rows, keys, values, table, places, _heads(o.alibi_slopes), options, state, out)
    finish(state, out, _heads(o.sinks), values[0][3].parts, result, lse)
    return torch.from_numpy(result).to(q.dtype), torch.from_numpy(lse)


def _width(dim: int) -> int:
    """Columns of a decoded row."""
    return -(-dim // LANES) * LANES


def _heads(t: torch.Tensor | None) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A number for each head, or none."""
    return np.empty(0, np.float32) if t is None else t.detach().float().contiguous().numpy()


def _sides(buffer: KVBuffer) -> tuple[Side, Side]:
    """A buffer as the loops take it: what is quantized, and the tail."""
    fmt, tail = buffer.format, buffer.tail
    scales, offsets = (None if t is None else broadcast_scales(t, fmt) for t in (buffer.scales, buffer.offsets))
    rows = _side(buffer.codes, fmt.code, scales, offsets, fmt.token_block or 0, buffer.sink_tokens, buffer.ring)
    if tail is None:
        return rows, _side(buffer.codes[:0], fmt.code)
    return rows, _side(tail, plain_format(tail.dtype).code)


def _side(
    codes: torch.Tensor,
    code: Code,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    every: int = 0,
    sinks: int = 0,
    ring: int = 0,
) -> Side:
    """Rows of codes [.., n]. Scales that there are not are 1, and offsets 0."""
    from halfbyte.cpu.compiled.attention import Facts
    from halfbyte.cpu.compiled.blocks import READERS

    groups = 1 if scales is None else scales.shape[3]
    facts = Facts(list(READERS).index(code.name), codes.shape[3], code.per_byte, groups, every, sinks, ring)
    shape = scales.shape if every and scales is not None else (*codes.shape[:3], groups)
    halves = ((one if t is None else t).expand(shape) for t, one in ((scales, _ONE), (offsets, _ZERO)))
    scale, offset = (t.view(torch.uint16).numpy() for t in halves)
    return codes.view(torch.uint8).numpy(), scale, offset, facts


def broadcast_scales(t: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Scales or offsets as [B|1, H|1, n|1, groups]; per channel: [B, H, n / every, D]."""
    match fmt.granularity:
        case "tensor":
            return t.view(1, 1, 1, 1)
        case "token":
            return t[:, None, :, None]
        case "head":
            return t.unsqueeze(-1)
    return t
