"""Attention over keys and values as they are stored, by compiled loops."""

from __future__ import annotations

import numpy as np
import torch

from halfbyte.cpu.sides import is_readable, sides_of
from halfbyte.cpu.threads import compiler_works, over_rows
from halfbyte.kv_buffer import DecodeCall
from halfbyte.reference.hadamard import block_size

#: Columns of decoded rows are a multiple of it.
LANES = 16


def reads_codes(c: DecodeCall) -> bool:
    """Whether the loops take this call: on a CPU, over codes and scales whose rows lie in one piece, and not over latents."""
    fits = c.q.is_cpu and c.q.numel() > 0 and not c.latent
    return fits and all(map(is_readable, (c.keys, c.values))) and compiler_works()


def decode_attention(c: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, L, Dv] in q's dtype, lse float32 [B, Hq, L]; a query's bits depend on what it sees and on its position alone."""
    from halfbyte.cpu.compiled.attention import SPLIT, Options, loops

    q, o, lengths = c.q.detach(), c.options, c.lengths.numpy()
    number = number_of(q.dtype)
    numbers = q.to(getattr(torch, number)).numpy()
    (batch, q_heads, count, dim), heads = q.shape, c.keys.heads
    limit = lengths if o.ends is None else o.limit(c.lengths).numpy()
    places = np.empty((batch, 4), np.int64)
    places[:, 0] = lengths - count if c.query_start is None else c.query_start.numpy()
    places[:, 1] = 0 if o.starts is None else o.starts.numpy()
    places[:, 2], places[:, 3] = limit, lengths
    splits = max(1, -(-max(limit.tolist()) // SPLIT))
    shape = batch, heads, q_heads // heads * count
    new = np.empty
    rows = new((*shape, width_of(dim)), number)
    out = new((batch, heads, splits, shape[2], width_of(c.values.dim)), number)
    state = new((*out.shape[:-1], 2), number)
    result, lse = new((batch, q_heads, count, c.values.dim), number), new((batch, q_heads, count), np.float32)
    prepare, attend, finish = loops(number)

    keys, values = sides_of(c.keys), sides_of(c.values)
    prepare(numbers, o.sm_scale, block_size(dim) if o.rotate_keys else 0, keys[0][3].parts, rows)
    table = new((0, 0), np.int32) if c.page_table is None else c.page_table.numpy()
    options = Options(count, 2**40 if o.window is None else o.window, o.softcap or 0.0)
    steps = rows.size * min(c.capacity, splits * SPLIT) * 2
    units = batch * heads * splits
    over_rows(attend, units, steps, rows, keys, values, table, places, _heads(o.alibi_slopes), options, state, out)
    finish(state, out, _heads(o.sinks), values[0][3].parts, result, lse)
    return torch.from_numpy(result).to(q.dtype), torch.from_numpy(lse)


def number_of(dtype: torch.dtype) -> str:
    """The type that attention computes in for queries of a type."""
    return "float32" if dtype.itemsize == 2 else "float64"


def width_of(dim: int) -> int:
    """Columns of a decoded row."""
    return -(-dim // LANES) * LANES


def _heads(t: torch.Tensor | None) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A number for each head, or none."""
    return np.empty(0, np.float32) if t is None else t.detach().float().contiguous().numpy()
