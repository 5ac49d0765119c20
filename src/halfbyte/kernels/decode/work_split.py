"""The tuned decode kernels: how work is partitioned, which work items a program works on, and which of their tiles.

A work item is a KV head of a sequence, or two of them. All items lie one behind the other on a line, each as long as its tiles
cost and a little more; every program takes an equal piece of the line. Where sink and recent tokens are stored in 16 bits, an item
begins with the chunks of its tail (decode/tail.py), and its tiles are those of the tokens between.

Where bits must not depend on the batch, pieces begin and end where splits of `C.split` tokens do, counted from a sequence's first
token on: each at the one that is nearest. The tail belongs to an item's first split.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.layouts import lengths_layout
from halfbyte.kernels.common.shares import quotient, share

#: What a work item costs besides its tiles, in eighths of a tile: its queries, its reduction, its output.
TILE_COST = gl.constexpr(8)
ITEM_COST = gl.constexpr(8)


@gluon.jit
def visible_keys(b, ok, call, C: gl.constexpr):
    """(first query's position, end of the keys, [lo, hi): the keys that any query sees, first recent token), of sequence(s) b."""
    sequences = call.sequences
    length = gl.load(sequences.lengths + b, mask=ok, other=0)
    limit = gl.minimum(gl.maximum(length, 0), call.capacity)
    recent = limit
    if C.tail_rows:
        recent = gl.maximum(limit - C.recent_tokens, C.sink_tokens)
    first = length - C.queries
    if sequences.query_start is not None:
        first = gl.load(sequences.query_start + b, mask=ok, other=0)
    if sequences.ends is not None:
        limit = gl.minimum(limit, gl.load(sequences.ends + b, mask=ok, other=0))
    hi = gl.maximum(gl.minimum(limit, first + C.queries), 0)
    lo = first * 0
    if sequences.starts is not None:
        lo = gl.maximum(lo, gl.load(sequences.starts + b, mask=ok, other=0))
    if C.window:
        lo = gl.maximum(lo, first - call.window + 1)
    return first, limit, gl.minimum(lo, hi), hi, recent


@gluon.jit
def coded_keys(keys, C: gl.constexpr):
    """Which of them are codes: keys [lo, hi) without those in the tail. keys: what `visible_keys` returns."""
    lo = keys[2]
    hi = keys[3]
    if C.tail_rows:
        lo = gl.maximum(lo, C.sink_tokens)
        hi = gl.minimum(hi, keys[4])
    return lo, hi


@gluon.jit
def _tail_cost(keys, C: gl.constexpr):
    return gl.where(keys[3] > keys[2], C.chunks * C.chunk_cost, 0)


@gluon.jit
def _tiles_and_cost(keys, C: gl.constexpr):
    """(first tile, tiles, cost) of a work item of these keys."""
    lo, hi = coded_keys(keys, C)
    first = lo // C.tile
    tiles = gl.where(hi > lo, (hi + C.tile - 1) // C.tile - first, 0)
    cost = tiles * TILE_COST + ITEM_COST
    if C.tail_rows:
        cost += _tail_cost(keys, C)
    return first, tiles, cost


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def partition(keys, call, C: gl.constexpr):
    """(all work, the programs that share it, my share [x, x_end), the sequence that x lies in, where that begins).

    keys: what `visible_keys` returns for all sequences.
    """
    program = gl.program_id(0)
    costs = _tiles_and_cost(keys, C)[2] * (call.heads // C.heads)
    if C.batch == 1:
        total = costs
    else:
        every = gl.arange(0, C.batch, layout=lengths_layout(C))
        costs = gl.where(every < call.batch, costs, 0)
        total = gl.sum(costs, axis=0)  # not the last of `ends`: what follows from it need not wait for the scan
        ends = gl.associative_scan(costs, 0, _add)
    programs = gl.minimum(gl.num_programs(0), gl.maximum(total // TILE_COST, 1))
    x = share(program, programs, total)
    x_end = gl.minimum(share(program + 1, programs, total), total)
    b = program * 0
    start = program * 0
    if C.batch > 1:
        if C.split > 0:
            x = _to_split(x, *_sequence_at(x, ends, every, call), call, C)
            x_end = _to_split(x_end, *_sequence_at(x_end, ends, every, call), call, C)
        b, start = _sequence_at(x, ends, every, call)
    elif C.split > 0:
        x = _to_split(x, b, start, call, C)
        x_end = _to_split(x_end, b, start, call, C)
    return total, programs, x, x_end, b, start


@gluon.jit
def _sequence_at(x, ends, every, call):
    """The sequence that position x lies in, and where that begins."""
    before = (ends <= x) & (every < call.batch)
    return gl.sum(before.to(gl.int32), axis=0), gl.max(gl.where(before, ends, 0), axis=0)


@gluon.jit
def _to_split(x, b, start, call, C: gl.constexpr):
    """Position x, of sequence b, which begins at `start`, moved to where the nearest split begins; the end of all work stays."""
    keys = visible_keys(gl.minimum(b, call.batch - 1), True, call, C)
    first, tiles, cost = _tiles_and_cost(keys, C)
    item = start + quotient(x - start, cost) * cost
    tile = first + _tile_at(x - item, tiles, keys, C)
    nearest = (tile + C.split_tiles // 2) // C.split_tiles
    position = position_of_split(nearest, keys, C)
    return item + gl.where(x == item, 0, gl.where(nearest * C.split_tiles >= first + gl.maximum(tiles, 1), cost, position))


@gluon.jit
def position_of_split(split, keys, C: gl.constexpr):
    """Where a split begins within its work item."""
    before = split * C.split_tiles - coded_keys(keys, C)[0] // C.tile
    position = before * TILE_COST
    if C.tail_rows:
        position += _tail_cost(keys, C)
    return gl.where(before > 0, position, 0)


@gluon.jit
def splits_of(keys, begin, end, cost, t_begin, t_end, C: gl.constexpr):
    """Splits of a work item, [first, last), and those of its part [begin, end), whose tiles are [t_begin, t_end)."""
    lo, hi = coded_keys(keys, C)
    first = lo // C.split
    last = gl.where(hi > lo, (hi - 1) // C.split, first) + 1
    return first, last, gl.where(begin == 0, first, t_begin // C.split_tiles), gl.where(end == cost, last, t_end // C.split_tiles)


@gluon.jit
def _tile_at(position, tiles, keys, C: gl.constexpr):
    """The tile that a position within a work item stands for: behind its tail. An item's own cost lies behind its tiles."""
    if C.tail_rows:
        position = gl.maximum(position - _tail_cost(keys, C), 0)
    return gl.minimum(position // TILE_COST, tiles)


@gluon.jit
def chunk_at(position, keys, C: gl.constexpr):
    """The chunk of its tail that a position within a work item stands for."""
    return gl.minimum(position, _tail_cost(keys, C)) // C.chunk_cost


@gluon.jit
def work_item_at(x, x_end, b, h, start, call, C: gl.constexpr):
    """The work item that position x lies in, in sequence b, and what of it is this program's, whose share ends at x_end.

    h < 0: not known yet, and `start` is where the sequence begins. Returns what `visible_keys` does; the item's number in its
    sequence, where it begins and what it costs; this program's part of that, [begin, end), and its tiles, [t_begin, t_end).
    """
    keys = visible_keys(b, True, call, C)
    tile0, tiles, cost = _tiles_and_cost(keys, C)
    if h < 0:
        h = quotient(x - start, cost)
        start += h * cost
    begin = x - start
    end = gl.minimum(x_end - start, cost)
    return keys, h, start, cost, begin, end, tile0 + _tile_at(begin, tiles, keys, C), tile0 + _tile_at(end, tiles, keys, C)


@gluon.jit
def next_work_item(b, h, start, cost, end, items):
    """Where a program goes on behind [.., end) of a work item: position, sequence, number of the item, where that begins."""
    x = start + end
    if end == cost:
        start += cost
        h += 1
        if h == items:
            h = 0
            b += 1
    return x, b, h, start
