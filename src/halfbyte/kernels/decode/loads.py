"""The tuned decode kernels: how keys and values reach shared memory, and queries the registers."""

# ruff: noqa: RET505, RUF005
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from halfbyte.kernels.common.compat import copy_to_shared
from halfbyte.kernels.common.layouts import (
    PLAIN,
    code_copy_layout,
    code_ring_layout,
    first_dim,
    mma_layout,
    multiple_of,
    operand_of,
    planes_of,
    scale_copy_layout,
    with_planes,
)
from halfbyte.kernels.decode.blocks import memory_of, real_rows, rows_of_head
from halfbyte.kernels.decode.per_channel import copy_rows


@gluon.jit
def _entry_of(token, hi, C: gl.constexpr):
    """The entry of the page table that says where tokens lie; for those beyond hi, that of the last one before."""
    return gl.minimum(token, gl.maximum(hi - 1, 0)) // C.page


@gluon.jit
def page_of_tile(at, tile, hi, C: gl.constexpr):
    """The page that each run of tokens of a tile lies in, [runs], if that is one. at: as `place_of` says."""
    if not C.one_page:
        return 0
    else:
        layout: gl.constexpr = code_copy_layout(C, C.heads * C.keys.padded)
        w = gl.arange(0, C.runs, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        # A table of no pages has no entry to read, and keys that end at 0.
        return gl.load(at[3] + _entry_of(tile * C.tile + w * C.tokens, hi, C), mask=(w >= 0) & (hi > 0), other=0)


@gluon.jit
def place_of(call, kv, scale_token, b, h, S: gl.constexpr, C: gl.constexpr):
    """Where keys (or values) of a work item, whose first head is h, lie: addresses, page table, strides of pages and tokens."""
    Pages = call.sequences.page_table
    Scales = kv.scales
    Offsets = kv.offsets
    scale_batch = kv.scale_batch
    b = memory_of(b, call).to(gl.int64)
    h = h.to(gl.int64)
    codes = h * kv.head
    scales = h * kv.scale_head
    if C.page == 0:
        codes += b * kv.batch
        scales += b * scale_batch
    if S.paired:  # in words of two, also where the one that is wanted is the second
        Scales = Scales.to(gl.pointer_type(gl.int32), bitcast=True)
        if S.offset:
            Offsets = Offsets.to(gl.pointer_type(gl.int32), bitcast=True)
        scales = scales >> 1
        scale_batch = scale_batch >> 1
    return (
        kv.codes + codes,
        kv.codes if Scales is None else Scales + scales,
        kv.codes if Offsets is None else Offsets + scales,
        kv.codes if Pages is None else Pages + b * call.page_table_stride,
        call.pages,
        kv.batch,
        kv.token8 * 8,
        scale_batch,
        scale_token,
    )


@gluon.jit
def first_head(b, head, call):
    """A work item's first head in contiguous memory of keys or values, counted over all sequences."""
    return memory_of(b, call).to(gl.int64) * call.heads + head


@gluon.jit
def _pointers(Base, step, c, tile, hi, page, Pages, pages, s_page, layout: gl.constexpr, C: gl.constexpr):
    """Where columns c, [1, 1, n], of a tile's tokens lie, `step` being the distance of tokens: [runs, T, n].

    The addresses of one thread differ by a few distances, the same for all threads: where the distance is known when compiling, one
    address is enough for all of it. Warps that copy a run for two heads divide its tokens: their distance is no constant.
    """
    w = gl.arange(0, C.runs, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    t = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    apart: gl.constexpr = C.tokens - min(C.tokens, layout.size_per_thread[1] * layout.threads_per_warp[1] * C.heads)
    first = tile * C.tile
    if C.page == 0:
        row = w * C.tokens + t
        return Base + first.to(gl.int64) * step + ((row & ~apart) * step + c) + (row & apart) * step
    elif C.one_page:
        page = gl.convert_layout(page, gl.SliceLayout(1, gl.SliceLayout(2, layout)), assert_trivial=True)[:, None, None]
        page = gl.minimum(gl.maximum(page, 0), pages - 1)  # a number out of range reads some page
        inside = (tile * C.runs + w) % (C.page // C.tokens) * C.tokens
        return Base + page.to(gl.int64) * s_page + ((inside + (t & ~apart)) * step + c) + (t & apart) * step
    else:
        token = first + w * C.tokens + t
        page = gl.load(Pages + _entry_of(token, hi, C))
        page = gl.max_constancy(page, [1, 2, 1])  # true of whatever is read: neighbours share a page
        page = gl.minimum(gl.maximum(page, 0), pages - 1)
        return Base + (page.to(gl.int64) * s_page + token % C.page * step) + c


@gluon.jit
def _rows_of(layout: gl.constexpr, C: gl.constexpr):
    """Token of a tile, [runs, T, 1], in the layout of a copy."""
    w = gl.arange(0, C.runs, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    t = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    return w * C.tokens + t


@gluon.jit
def _copy_codes(ring, Base, step, tile, lo, hi, page, Pages, pages, s_page, whole: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Codes of one tile into the ring. `whole`: all its tokens lie in [lo, hi); else those outside become zeros."""
    layout: gl.constexpr = code_copy_layout(C, C.heads * S.padded)
    row = _rows_of(layout, C)
    c = gl.arange(0, C.heads * S.padded, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    first = tile * C.tile
    if S.token_stride > 0:
        step = S.token_stride * S.words
    pointers = _pointers(Base, step, c, tile, hi, page, Pages, pages, s_page, layout, C)
    if whole and S.padded == S.words:
        copy_to_shared(ring, pointers)
    elif whole:
        copy_to_shared(ring, pointers, mask=(c < S.words) & (row >= 0))
    else:
        ok = (row < hi - first) & (row >= lo - first)
        if S.padded != S.words:
            ok = ok & (c < S.words)
        copy_to_shared(ring, pointers, mask=ok)


@gluon.jit
def _copy_scales(ring, Base, step, tile, lo, hi, page, Pages, pages, s_page, whole: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or offsets) of one tile into the ring, 0 outside [lo, hi)."""
    columns: gl.constexpr = S.scale_columns
    layout: gl.constexpr = scale_copy_layout(C, S)
    row = _rows_of(layout, C)
    g = gl.arange(0, columns, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    first = tile * C.tile
    if S.groups > 1 or S.staged or S.paired:
        ok = (row < hi - first) & (row >= lo - first)
    else:  # copied in pairs of tokens, and a pair lies in one page; the mask of the scores takes care of an odd end
        ok = (row < (hi - first + 1) // 2 * 2) & (row >= (lo - first) // 2 * 2)
    if S.paired:
        step = S.scale_stride * S.groups // 2
    elif not S.staged:
        step = S.groups  # known when compiling, which proves that neighbours can be copied together
    pointers = _pointers(Base, step, g, tile, hi, page, Pages, pages, s_page, layout, C)
    if S.staged:
        ring.store(gl.load(pointers, mask=ok & (g >= 0), other=0.0))
    elif whole:
        copy_to_shared(ring, pointers)
    else:
        copy_to_shared(ring, pointers, mask=ok & (g >= 0))


@gluon.jit
def head_of(w, r, C: gl.constexpr):
    """Which query head of a work item row r of stream w is of."""
    return w % C.heads * (C.rows // C.queries) + r // C.queries


@gluon.jit
def first_slope(call, head, C: gl.constexpr):
    """The ALiBi slope of the first query head of a work item."""
    return call.per_head.alibi_slopes + head * (C.rows // C.queries)


@gluon.jit
def load_query(call, b, head, S: gl.constexpr, C: gl.constexpr):
    """Query rows of a work item in the layout of mma operands, in the order of `key_operands`, as they are stored."""
    q = call.q
    first = rows_of_head(call, b, head, C)
    lb: gl.constexpr = gl.DotOperandLayout(1, mma_layout(C), 2)
    loaded = ()
    if S.halved or S.codes_per_word == 1:
        words: gl.constexpr = 8 if S.halved else S.rows
        i = gl.arange(0, S.rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, lb)))[None, :, None]
        r = gl.arange(0, C.padded_rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, lb)))[None, None, :]
        w = gl.arange(0, C.kv_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, lb)))[:, None, None]
        rows = first + (head_of(w, r, C) * q.head + r % C.queries * q.token)
        for g in gl.static_range(gl.constexpr(S.sections)):
            for j in gl.static_range(gl.constexpr(S.operands)):
                d = first_dim(S, g, j) + S.codes_per_word * (i % words) + i // words
                loaded = loaded + (gl.load(rows + d, mask=real_rows(r, b, call, C) & (d < S.words * S.codes_per_word), other=0.0),)
    else:
        # The codes of a word lie side by side in memory: one load of all, in the layout that splits into operands.
        la: gl.constexpr = with_planes(gl.full([C.kv_warps, S.rows, C.padded_rows], 0, gl.int32, lb), S).type.layout
        j = gl.arange(0, S.codes_per_word, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, la))))[None, None, None, :]
        r = gl.arange(0, C.padded_rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, la))))[None, None, :, None]
        i = gl.arange(0, S.rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, la))))[None, :, None, None]
        w = gl.arange(0, C.kv_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, la))))[:, None, None, None]
        rows = first + (head_of(w, r, C) * q.head + r % C.queries * q.token)
        for g in gl.static_range(gl.constexpr(S.sections)):
            d = (g * S.rows + i) * S.codes_per_word + j
            x = gl.load(rows + d, mask=real_rows(r, b, call, C) & (i < S.words - g * S.rows), other=0.0)
            planes = planes_of(x, S)
            for k in gl.static_range(gl.constexpr(S.codes_per_word)):
                loaded = loaded + (gl.convert_layout(planes[k], lb, assert_trivial=True),)
    return loaded


@gluon.jit
def _divided(x, code: gl.constexpr, S: gl.constexpr):
    """Query elements x, fp16, over what masking in place multiplies a code of the keys' words by."""
    if code % S.per_byte == 0:
        return x
    else:
        return (x.to(gl.float32) * (1.0 / multiple_of(S, code))).to(gl.float16)


@gluon.jit
def powers_of(top):
    """Two powers of two, fp32: what brings `top` to [2^8, 2^9), or below that, and its inverse."""
    exponent = gl.minimum(gl.maximum(top.to(gl.int32, bitcast=True) >> 23, 32), 246)
    up = ((262 - exponent) << 23).to(gl.float32, bitcast=True)  # 2^8 / 2^(exponent - 127)
    down = ((exponent - 8) << 23).to(gl.float32, bitcast=True)
    return up, down


@gluon.jit
def query_operands(loaded, S: gl.constexpr, C: gl.constexpr):
    """Queries as mma operands, their sums per group, and the factor that scores are to be multiplied by.

    For fp16 operands the rows are multiplied by a power of two that puts the largest number of all at 2^8; in splits of fixed size
    that of each row, whose bits know of no other.
    """
    mma: gl.constexpr = mma_layout(C)
    lb: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    if S.codes_per_word == 1:
        unscaled = gl.full([C.kv_warps, 1, 1], 1.0, gl.float32, mma)
        if S.kind == "fp16":
            return (loaded[0].to(gl.float16),), (), unscaled
        else:
            return (loaded[0].to(gl.bfloat16),), (), unscaled
    else:
        largest = gl.abs(loaded[0].to(gl.float32))
        for j in gl.static_range(1, gl.constexpr(S.sections * S.operands)):
            largest = gl.maximum(largest, gl.abs(loaded[j].to(gl.float32)))
        largest = gl.where(largest < float("inf"), largest, 0.0)  # else one infinity would make all other rows 0
        if C.split > 0:
            up, down = powers_of(gl.max(largest, axis=1))
            up = up[:, None, :]
        else:
            top = gl.max(gl.max(largest, axis=1), axis=1)
            up, down = powers_of(top)
            up = gl.convert_layout(up, gl.SliceLayout(1, gl.SliceLayout(2, lb)))[:, None, None]
        i = gl.arange(0, S.rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, lb)))[None, :, None]
        made = ()
        sums = ()
        for g in gl.static_range(gl.constexpr(S.groups)):
            total = gl.full([C.kv_warps, S.rows, C.padded_rows], 0.0, gl.float32, lb)
            for j in gl.static_range(gl.constexpr(S.operands)):
                x = loaded[operand_of(S, g, j)].to(gl.float32) * up
                if S.sharing > 1:  # 0 for the words of the section's other group
                    x = gl.where(i % 8 // 4 == g % S.sharing, x, 0.0)
                x = x.to(gl.float16)
                total += x.to(gl.float32)
                if S.per_byte > 1 and S.halved:
                    x = gl.where(i // 8 == 1, _divided(x, 2 * j + 1, S), _divided(x, 2 * j, S))
                elif S.per_byte > 1:
                    x = _divided(x, j, S)
                made = made + (x,)
            sums = sums + (gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, mma))[:, None, :],)
        if C.split > 0:
            factor = gl.convert_layout(down, gl.SliceLayout(1, mma))[:, None, :]
        else:
            factor = gl.convert_layout(down, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
        return made, sums, factor


@gluon.jit
def make_rings(S: gl.constexpr, C: gl.constexpr):
    """Shared memory of one side: codes, scales, offsets, each [slots, runs, T, n]; unused ones are as small as can be."""
    shape: gl.constexpr = [C.stages + C.pad_slots, C.runs, C.tokens]
    codes = gl.allocate_shared_memory(gl.int16, shape + [C.heads * S.padded], code_ring_layout(C.heads * S.padded))
    scales = codes
    offsets = codes
    dtype: gl.constexpr = gl.int32 if S.paired else gl.float16
    of_scales: gl.constexpr = shape[:2] + [1, S.codes_per_word * S.padded] if S.scale == "channel" else shape + [S.scale_columns]
    if S.scale == "token" or S.scale == "channel":
        scales = gl.allocate_shared_memory(dtype, of_scales, PLAIN)
    if S.offset:
        offsets = gl.allocate_shared_memory(dtype, of_scales, PLAIN)
    return codes, scales, offsets


@gluon.jit
def _fetch_side(rings, slot, at, tile, page, lo, hi, whole: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Ask for one tile of one side. at: where its codes, scales, offsets and pages lie, and their strides."""
    Codes, Scales, Offsets, Pages, pages, c_page, c_token, s_page, s_token = at
    _copy_codes(rings[0].index(slot), Codes, c_token, tile, lo, hi, page, Pages, pages, c_page, whole, S, C)
    if S.scale == "channel":
        copy_rows(rings[1].index(slot), Scales, tile, lo, hi, page, pages, s_page, S, C)
        if S.offset:
            copy_rows(rings[2].index(slot), Offsets, tile, lo, hi, page, pages, s_page, S, C)
    if S.scale == "token":
        _copy_scales(rings[1].index(slot), Scales, s_token, tile, lo, hi, page, Pages, pages, s_page, whole, S, C)
    if S.offset and S.scale == "token":
        _copy_scales(rings[2].index(slot), Offsets, s_token, tile, lo, hi, page, Pages, pages, s_page, whole, S, C)


@gluon.jit
def fetch(k_rings, v_rings, slot, k_at, v_at, tile, page, end, lo, coded, hi, C: gl.constexpr):
    """Ask for one tile of keys (up to `coded`) and values, if it lies before tile `end`. Returns `page_of_tile` of the next one.

    That is known by the time it is needed: here, its requests would wait for the page table.
    """
    KS: gl.constexpr = C.keys
    VS: gl.constexpr = C.values
    if (tile * C.tile >= lo) & (tile * C.tile + C.tile <= coded) & (tile < end):
        _fetch_side(k_rings, slot, k_at, tile, page, lo, coded, True, KS, C)
        _fetch_side(v_rings, slot, v_at, tile, page, lo, hi, True, VS, C)
    elif tile < end:
        _fetch_side(k_rings, slot, k_at, tile, page, lo, coded, False, KS, C)
        _fetch_side(v_rings, slot, v_at, tile, page, lo, hi, False, VS, C)
    async_copy.commit_group()
    return page_of_tile(k_at, tile + 1, hi, C)
