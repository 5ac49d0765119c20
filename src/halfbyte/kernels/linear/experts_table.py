"""The tuned kernel for mixtures of experts: which pairs of a token and an expert belong together.

A table in shared memory behind the rings, int32, which every program makes for itself from all ids:

    order    the pairs sorted by expert, expert << 10 | pair; those whose id is no expert come last
    rows     the bytes from X to the row of each
    blocks   where in `order` each block begins: at most `x_rows` pairs of one expert. Behind the last one, twice, the number of
             pairs that have an expert

The place of a pair is the number of smaller keys: each thread compares its pairs with all others. Few pairs that are a block
each (`unsorted`) need no order: those that have an expert come first, and of `blocks` there is only their number. Entries are read
and written by PTX with addresses in `global_smem`, as copies into the rings are (linear/async_copy.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import barrier
from halfbyte.kernels.common.shares import quotient


@gluon.constexpr_function
def _key_layout(C):
    """[pairs, keys that each is compared with]: a thread has pairs of its own; few pairs every warp sorts for itself."""
    return gl.BlockedLayout([max(1, C.table.size // (32 * C.warps)), 32], [32, 1], [C.warps, 1], [1, 0])


@gluon.constexpr_function
def _pair_layout(C):
    """Pairs, each of one thread; of few there are threads without."""
    return gl.BlockedLayout([max(1, C.table.size // (32 * C.warps))], [32], [C.warps], [0])


@gluon.constexpr_function
def _put_asm(at):
    start = "{ .reg .b32 a; .reg .pred q; mov.u32 a, global_smem; add.u32 a, a, $1; setp.ne.u32 q, $3, 0;"
    return f"{start} @q st.shared.b32 [a+{at}], $2; }} // $0"


@gluon.jit
def _put(at: gl.constexpr, index, value, there):
    """table[index] = value where `there`, of the table that begins `at` so many bytes."""
    gl.inline_asm_elementwise(
        _put_asm(at),
        "=r,r,r,r,~{memory}",
        [index * 4, value, there.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _entry_asm(at):
    return f"{{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $1; ld.shared.b32 $0, [a+{at}]; }}"


@gluon.jit
def entry(at: gl.constexpr, index):
    """table[index] of the table that begins `at` so many bytes."""
    return gl.inline_asm_elementwise(_entry_asm(at), "=r,r,~{memory}", [index * 4], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _which(there):
    """The threads of a warp where `there`, as bits; each holds one of 32."""
    bits = there.to(gl.int32) << gl.arange(0, 32, layout=there.type.layout)
    return gl.inline_asm_elementwise("redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [bits], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _count(bits):
    """How many are set."""
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _largest(a, b):
    return gl.maximum(a, b)


@gluon.jit
def sort_pairs(ids, S, E, x_stride, pool, C: gl.constexpr):
    """Write the table; returns how many blocks there are, and how many pairs have an expert."""
    # All programs read the same lines at the same time, and each request waits for those before it: one warp loads an id, unless
    # every warp needs all.
    p = gl.arange(0, gl.constexpr(32 if C.unsorted else max(C.table.size, 32 * C.warps)), layout=_pair_layout(C))
    expert = gl.load(ids + p, mask=p < S, other=-1)
    good = (expert >= 0) & (expert < E)
    key = gl.where(good, expert, E).to(gl.int32) << 10 | p
    if C.unsorted:
        pairs = _as_they_come(p, key, good, S, x_stride, C)
        blocks = pairs
    else:
        _put(C.blocks_at, p, gl.where(p < S, key, 0x7FFFFFFF), p < C.table.size)
        barrier()  # keys lie where blocks lie later
        _sort(S, x_stride, pool, C)
        blocks, pairs = _blocks(S, E, C)
    return blocks, pairs


@gluon.jit
def _as_they_come(p, key, good, S, x_stride, C: gl.constexpr):
    """The table of pairs in any order, those that have an expert first; returns how many these are."""
    found = _which(good)
    pairs = _count(found)
    before = _count(found & ((1 << p) - 1))
    _put_pair(gl.where(good, before, pairs + p - before), key, p, S, x_stride, C)
    _put(C.blocks_at, p, pairs, p < 1)
    barrier()
    return entry(C.blocks_at, 0)


@gluon.jit
def _sort(S, x_stride, pool, C: gl.constexpr):
    """Put the pairs whose keys lie at the blocks into their places."""
    layout: gl.constexpr = _key_layout(C)
    s = gl.arange(0, C.table.size, layout=gl.SliceLayout(1, layout))
    key = entry(C.blocks_at, s)
    place = s * 0
    for i in range((S + 31) // 32):
        other = pool.index(gl.constexpr(C.blocks_at // 128) + i).load(gl.SliceLayout(0, layout))[None, :]
        place += gl.sum((other < key[:, None]).to(gl.int32), axis=1)
    _put_pair(place, key, s, S, x_stride, C)
    barrier()  # all pairs are in their places, and all keys have been read


@gluon.jit
def _put_pair(place, key, pair, S, x_stride, C: gl.constexpr):
    """A pair into the table, and where what it multiplies lies in X."""
    row = pair // C.table.top_k if C.table.shared else pair
    _put(C.order_at, place, key, pair < S)
    _put(C.rows_at, place, row * (2 * x_stride), pair < S)


@gluon.jit
def _blocks(S, E, C: gl.constexpr):
    """Cut the sorted pairs into blocks; returns how many there are, and how many pairs have an expert."""
    p = gl.arange(0, C.table.size, layout=_pair_layout(C))
    there = gl.where(p < S, p, 0)
    expert = entry(C.order_at, there) >> 10
    good = (p < S) & (expert < E)
    first = (p == 0) | (entry(C.order_at, gl.maximum(there - 1, 0)) >> 10 != expert)
    start = gl.associative_scan(gl.where(first & (p < S), p, 0), 0, _largest)  # of the expert's pairs
    begins = (good & ((p - start) % C.x_rows == 0)).to(gl.int32)
    number = gl.associative_scan(begins, 0, _sum)
    both = gl.sum(begins << 16 | good.to(gl.int32))
    count, pairs = both >> 16, both & 0xFFFF
    _put(C.blocks_at, number - 1, p, begins > 0)
    _put(C.blocks_at, count + p, p * 0 + pairs, p < 2)
    barrier()
    return count, pairs


@gluon.jit
def block_at(tile, tiles, weights, C: gl.constexpr):
    """What a tile is: (its expert, its first row there, the first of its sorted pairs, how many it has)."""
    each = (weights.features[0] + C.tile - 1) // C.tile
    tile = gl.maximum(gl.minimum(tile, tiles - 1), 0)
    block = quotient(tile, each)
    if C.unsorted:
        first, count = block, 1
    else:
        first = entry(C.blocks_at, block)
        count = entry(C.blocks_at, block + 1) - first
    return entry(C.order_at, first) >> 10, (tile - block * each) * C.tile, first, count
