"""The linear kernel for small M: how codes, scales, zero points and x of a step come into shared memory.

A K slice's warps copy the codes and x that the K slice reads, and a part of the scales of all K slices (linear/sync.py). They do
not wait for the block: K slices run independently, and one waits for memory while another computes. A step of a K slice:

    wait until its own copies for this step are there; meet the K slice's other warps; ask for the step `stages` - 1 further on,
    whose slot all of them have read by now; wait for the others' copies of this step's scales; compute

The compiler would put a barrier of the whole block between copies and reads that share memory. So copies are PTX with addresses
in `global_smem`, which its analysis does not see. All that is copied lies in one allocation, at its beginning (`Spec.x_at` ..).
What a slot holds is read as a part, by number, of the whole allocation (`compat.view`): no other view compiles with Triton 3.8.

A thread copies pieces i = 0, 1, .. of 16 bytes or less: t + i T of the K slice's pieces in the order of shared memory, t its number
among the T threads of the K slice. T is a power of two, as all sizes are: rows and columns of t and of i T add up.
"""

# ruff: noqa: RET505
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import view
from halfbyte.kernels.common.layouts import code_ring_layout
from halfbyte.kernels.linear.operands import dtype_of, plain
from halfbyte.kernels.linear.ring import place
from halfbyte.kernels.linear.sync import filled, k_slice_of, slot_of, thread_of


@gluon.jit
def make_pool(C: gl.constexpr):
    """Shared memory of codes, scales, zero points and x of each stage."""
    return gl.allocate_shared_memory(gl.int32, [C.ring_bytes // 128, 32], plain(1))


@gluon.jit
def codes_of(pool, slot, block: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """A block of 16 words of each row of a slot, [k_slices, tile, 16]."""
    words: gl.constexpr = gl.constexpr(S.words(C) // C.code_parts)
    shape: gl.constexpr = [C.k_slices, C.tile, words]
    part = view(pool, slot * C.code_parts + 16 * block // words, gl.int16, shape, code_ring_layout(words))
    return part.slice(16 * block % words, 16, dim=2)


@gluon.jit
def scales_of(pool, slot, zeros: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or zero points) of a slot, [tile, columns]."""
    shape: gl.constexpr = [C.tile, C.columns(S)]
    size: gl.constexpr = 1 if zeros else S.scale_bytes
    dtype: gl.constexpr = gl.uint8 if size == 1 else gl.float16 if size == 2 else gl.float32
    first: gl.constexpr = (C.zeros_at if zeros else C.scales_at) // (C.tile * C.columns(S) * size)
    return view(pool, first + slot, dtype, shape, plain(2))


@gluon.jit
def x_of(pool, slot, C: gl.constexpr):
    """x of a slot, [k_slices, x_high, chunk / 32, x_low, 32]."""
    shape: gl.constexpr = [C.k_slices, C.x_high, C.chunk // 32, C.x_low, 32]
    return view(pool, gl.constexpr(C.x_at // C.x_bytes) + slot, dtype_of(C), shape, plain(5))


@gluon.constexpr_function
def _code_pieces(S, C):
    """(row, bytes in the row, what the place in shared memory is xored with, bytes from there) of piece i relative to piece 0."""
    pieces = S.words(C) // 8
    rows = 32 * C.warps_m // pieces  # at once
    pieces //= C.code_parts
    per_phase, phases = max(1, 8 // pieces), min(8, pieces)  # as code_ring_layout
    return [(row, 0, row // per_phase % phases * 16, row * pieces * 16) for row in range(0, C.tile, rows)]


@gluon.constexpr_function
def _scale_lanes(S, C, piece):
    """Lanes of each warp that copy scales (or zero points): all K slices' of a row are few pieces."""
    return min(32, C.tile * C.columns(S) // piece // C.warps)


@gluon.constexpr_function
def _scale_pieces(S, C, piece, zeros):
    """The same for scales (or zero points), of which all warps of the block copy a part."""
    rows = _scale_lanes(S, C, piece) * C.warps * piece // C.columns(S)
    return [(row, 0, 0, row * C.scale_stride(zeros)) for row in range(0, C.tile, rows)]


@gluon.constexpr_function
def _x_pieces(C):
    """The same for x, whose row is one of x."""
    found = []
    for j in range(0, C.x_rows * C.chunk // 8, 32 * C.warps_m):
        part, high = j // (4 * C.x_low) % (C.chunk // 32), j // (4 * C.x_low) // (C.chunk // 32)
        found.append((high * C.x_low + j // 4 % C.x_low, part * 64 + j % 4 * 16, 0, 16 * j))
    return found


@gluon.constexpr_function
def _copy_asm(pieces, base, size, fill, cached, sources=1, whole=False):
    """Copies of one thread's `pieces` of `size` bytes. $1 where piece 0 goes, in bytes from `base`; $2 its address; $3 bytes from
    row to row; $4 rows that are left from that of piece 0 on: others are not copied, as their results are not stored;
    with `fill` $5 bytes (or any measure, where a thread has one piece of a row) that are left of a row: beyond them come zeros.
    sources: rows alternate between so many weights. A thread's are of one of them. whole: if the row of piece 0 is left, all are.
    """
    distance = next((row for row, _, _, _ in pieces if row), 0)  # rows from one piece to the next that is in another
    if distance % sources:
        raise ValueError(f"a thread's pieces lie {distance} rows from each other, and rows alternate between {sources} weights")
    distance //= sources
    how = "cg" if size == 16 and not cached else "ca"
    lines = ["{ .reg .pred q; .reg .b32 n, s, g; .reg .b64 p, d; mov.u32 g, global_smem; mov.b64 p, $2;"]
    lines.append(f"mul.wide.s32 d, $3, {distance};")
    if whole:
        lines.append(".reg .pred h; setp.gt.s32 h, $4, 0;")
    last_row, last_byte, last_xor = 0, None, None
    for row, byte, xor, at in pieces:
        if row != last_row:
            lines.append("add.s64 p, p, d;")
        if xor != last_xor:
            lines.append(f"xor.b32 s, $1, {xor}; add.u32 s, s, g;")
        if fill and byte != last_byte:
            lines.append(f"setp.gt.s32 q, $5, {byte}; selp.b32 n, {size}, 0, q;")
        last_row, last_byte, last_xor = row, byte, xor
        there = "@h" if whole else f"setp.gt.s32 q, $4, {row}; @q"
        lines.append(f"{there} cp.async.{how}.shared.global [s+{base + at}], [p+{byte}], {size}")
        lines[-1] += ", n;" if fill else ";"
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _odd_asm(pieces, base):
    """As `_copy_asm` for scales whose odd rows begin 2 bytes off a multiple of 4. $5 bytes of a row are left from piece 0 on; $6 is
    as $4 for the piece behind it, which only the last thread of an odd row copies too.
    """
    distance = next((row for row, _, _, _ in pieces if row), 0)
    lines = ["{ .reg .pred q; .reg .b32 n, m, s; .reg .b64 p, d; mov.u32 s, global_smem; add.u32 s, s, $1; mov.b64 p, $2;"]
    lines.append(f"mul.wide.s32 d, $3, {distance}; max.s32 n, $5, 0; min.s32 n, n, 4;")
    lines.append("sub.s32 m, $5, 4; max.s32 m, m, 0; min.s32 m, m, 4;")
    for row, _, _, at in pieces:
        if row:
            lines.append("add.s64 p, p, d;")
        lines.append(f"setp.gt.s32 q, $4, {row}; @q cp.async.ca.shared.global [s+{base + at}], [p], 4, n;")
        lines.append(f"setp.gt.s32 q, $6, {row}; @q cp.async.ca.shared.global [s+{base + at + 4}], [p+4], 4, m;")
    return " ".join(lines) + " }"


@gluon.jit
def _scale_thread(piece: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The number of a thread among those of the block that copy scales (or zero points), and whether it is one of them."""
    lanes: gl.constexpr = _scale_lanes(S, C, piece)
    t = thread_of(C)
    return (k_slice_of(C) * C.warps_m + t // 32) * lanes + t % 32 % lanes, t % 32 < lanes


@gluon.jit
def _scales_from(Base, n0, step, K, zeros: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The address of a thread's first scales (or zero points) of a step of a tile."""
    size: gl.constexpr = 1 if zeros else S.scale_bytes
    piece: gl.constexpr = C.zeros_per_copy if zeros else C.scales_per_copy
    pieces: gl.constexpr = gl.constexpr(C.columns(S) // piece)
    t, _ = _scale_thread(piece, S, C)
    row = K // S.group
    at = n0.to(gl.int64) * row + step * C.columns(S) + (t // pieces // C.sources * row + t % pieces * piece)
    if C.odd_zeros if zeros else C.odd_scales:
        Base = Base.to(gl.int64) - t // pieces % 2 * 2
    return Base.to(gl.int64) + at * size


@gluon.jit
def weight_at(tile, step, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Where a thread's pieces of a step lie: codes, scales and zero points, and the rows of the weight from there on."""
    if C.sources == 2:
        return _alternating_at(tile, step, weights, K, S, C)
    else:
        codes, scales, zeros, _, _, _, N, n0 = place(tile, weights, C)
        codes, scales, zeros = rows_at(codes, scales, zeros, n0, step, K, S, C)
        return codes, scales, zeros, N - n0


@gluon.jit
def _alternating_at(tile, step, weights, K, S: gl.constexpr, C: gl.constexpr):
    """The same where even rows of a tile are of the first weight, odd rows of the second, of as many rows."""
    n0 = tile * (C.tile // 2)
    zeros = weights.codes if weights.zeros[0] is None else weights.zeros
    codes, scales, zero = rows_at(weights.codes[0], weights.scales[0], zeros[0], n0, step, K, S, C)
    odd_codes, odd_scales, odd_zero = rows_at(weights.codes[1], weights.scales[1], zeros[1], n0, step, K, S, C)
    codes = gl.where(thread_of(C) // gl.constexpr(S.words(C) // 8) % 2 == 0, codes, odd_codes)
    if S.groups > 0:
        scales = gl.where(_of_even_scales(C.scales_per_copy, S, C), scales, odd_scales)
        if S.zero:
            zero = gl.where(_of_even_scales(C.zeros_per_copy, S, C), zero, odd_zero)
    return codes, scales, zero, 2 * (weights.features[0] - n0)


@gluon.jit
def _of_even_scales(piece: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Whether a thread copies scales (or zero points) of even rows of a tile."""
    t, _ = _scale_thread(piece, S, C)
    return t // gl.constexpr(C.columns(S) // piece) % 2 == 0


@gluon.jit
def codes_at(codes, row, step, K, S: gl.constexpr, C: gl.constexpr):
    """The address of a thread's first piece of codes of a step of the tile that begins with this row."""
    pieces: gl.constexpr = gl.constexpr(S.words(C) // 8)
    t = thread_of(C)
    width = K // S.codes_per_word
    at = row.to(gl.int64) * width + step * (C.k_slices * S.words(C))
    return codes.to(gl.int64) + 2 * (at + (t // pieces // C.sources * width + (k_slice_of(C) * S.words(C) + t % pieces * 8)))


@gluon.jit
def rows_at(codes, scales, zeros, row, step, K, S: gl.constexpr, C: gl.constexpr):
    """Addresses of a thread's pieces of a step of the tile that begins with this row: codes, scales and zero points."""
    codes = codes_at(codes, row, step, K, S, C)
    if S.groups > 0:
        scales = _scales_from(scales, row, step, K, False, S, C)
        if S.zero:
            zeros = _scales_from(zeros, row, step, K, True, S, C)
    return codes, scales, zeros


@gluon.jit
def _fetch_scales(at, slot, rows, left, K, zeros: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    base: gl.constexpr = C.zeros_at if zeros else C.scales_at
    size: gl.constexpr = 1 if zeros else S.scale_bytes
    piece: gl.constexpr = C.zeros_per_copy if zeros else C.scales_per_copy
    pieces: gl.constexpr = gl.constexpr(C.columns(S) // piece)
    t, takes_part = _scale_thread(piece, S, C)
    first_row = gl.where(takes_part, t // pieces, 1 << 30)
    if C.odd_zeros if zeros else C.odd_scales:
        odd = t // pieces % 2
        last = (odd == 1) & (t % pieces == pieces - 1)
        gl.inline_asm_elementwise(
            _odd_asm(_scale_pieces(S, C, piece, zeros), base),
            "=r,r,l,r,r,r,r,~{memory}",
            [
                (slot * C.tile + t // pieces) * C.scale_stride(zeros) + t % pieces * 4,
                at,
                K // S.group * size,
                rows - first_row,
                gl.where(left > 0, left // S.group * size + odd * 2, 0) - t % pieces * 4,
                gl.where(last, rows - first_row, 0),
            ],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        gl.inline_asm_elementwise(
            _copy_asm(_scale_pieces(S, C, piece, zeros), base, piece * size, True, False, C.sources, C.whole_tiles),
            "=r,r,l,r,r,r,~{memory}",
            [
                slot * (C.tile * C.columns(S) * size) + t * (piece * size),
                at,
                K // S.group * size,
                rows - first_row,
                left - t % pieces * (piece * S.group),
            ],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def fetch_scales(turn, at, step, wanted, K, S: gl.constexpr, C: gl.constexpr):
    """Ask for scales and zero points of the step that `at` points to, if `wanted`; returns where the next step is.

    turn: which says their slot.
    """
    codes, scales, zeros, rows = at
    left = gl.where(wanted, K - step * C.step, 0)
    slot = slot_of(turn, C)
    _fetch_scales(scales, slot, rows, left, K, False, S, C)
    scales += C.columns(S) * S.scale_bytes
    if S.zero:
        _fetch_scales(zeros, slot, rows, left, K, True, S, C)
        zeros += C.columns(S)
    filled(slot, C)
    return codes, scales, zeros, rows


@gluon.jit
def copy_codes(slot, codes, rows, left, K, S: gl.constexpr, C: gl.constexpr):
    """Ask for codes of the step that `codes` points to, of so many rows, of which so many k are left."""
    pieces: gl.constexpr = gl.constexpr(S.words(C) // 8)
    t = thread_of(C)
    w = k_slice_of(C)
    in_part: gl.constexpr = gl.constexpr(pieces // C.code_parts)
    # The eight rows of an ldmatrix lie in different banks: see code_ring_layout.
    row = t // pieces
    column = (t % in_part) ^ (row // gl.constexpr(max(1, 8 // in_part)) % gl.constexpr(min(8, in_part)))
    part = slot * C.code_parts + t % pieces // in_part
    into = (part * C.k_slices + w) * gl.constexpr(C.tile * in_part * 16) + (row * in_part + column) * 16
    there = gl.where((w * S.words(C) + t % pieces * 8) * S.codes_per_word < left, rows - row, 0)
    gl.inline_asm_elementwise(
        _copy_asm(_code_pieces(S, C), 0, 16, False, False, C.sources, C.whole_tiles),
        "=r,r,l,r,r,~{memory}",
        [into, codes, K // S.codes_per_word * 2, there],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fetch_codes(slot, at, step, wanted, K, S: gl.constexpr, C: gl.constexpr):
    """Ask for codes of the step that `at` points to, if `wanted`; returns where the next step is."""
    codes, scales, zeros, rows = at
    copy_codes(slot, codes, rows, gl.where(wanted, K - step * C.step, 0), K, S, C)
    codes += C.k_slices * S.words(C) * 2
    return codes, scales, zeros, rows


@gluon.jit
def _x_piece(K, step, wanted, C: gl.constexpr):
    """A thread's first piece of x in a step: its number, the thread's K slice, the piece's row and column; K that is left there."""
    inside: gl.constexpr = gl.constexpr(
        C.x_rows * C.chunk // 8
    )  # pieces of a K slice; where rows are few, two threads copy the same
    t = thread_of(C) % inside
    w = k_slice_of(C)
    left = gl.where(wanted, K - step * C.step, 0)
    part = t // gl.constexpr(4 * C.x_low) % gl.constexpr(C.chunk // 32)
    m = t // gl.constexpr(4 * C.x_low * (C.chunk // 32)) * C.x_low + t // 4 % C.x_low
    k = w * C.chunk + part * 32 + t % 4 * 8
    return t, w, m, k, left


@gluon.jit
def fetch_x(slot, step, wanted, X, M, K, x_stride, C: gl.constexpr):
    """Ask for x of one step, if `wanted`."""
    t, w, m, k, left = _x_piece(K, step, wanted, C)
    at = X.to(gl.int64) + 2 * (step.to(gl.int64) * C.step + (m * x_stride + k))
    into = (slot * C.k_slices + w) * gl.constexpr(2 * C.x_rows * C.chunk) + t * 16
    gl.inline_asm_elementwise(
        _copy_asm(_x_pieces(C), C.x_at, 16, True, C.x_cached),
        "=r,r,l,r,r,r,~{memory}",
        [into, at, x_stride * 2, M - m, (left - k) * 2],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _gather_asm(pieces, base, rows_at, cached):
    """As `_copy_asm` with `fill`, of 16 bytes each. The table at `rows_at` says where a row begins, in bytes from $2; its entry for
    the row of piece 0 is $3 bytes further."""
    how = "ca" if cached else "cg"
    lines = ["{ .reg .pred q; .reg .b32 n, s, e; .reg .b64 p, d; mov.u32 s, global_smem; add.u32 e, s, $3; add.u32 s, s, $1;"]
    last_row, last_byte = None, None
    for row, byte, _, at in pieces:
        if row != last_row:
            lines.append(f"setp.gt.s32 q, $4, {row}; @q ld.shared.b32 n, [e+{rows_at + 4 * row}];")
            lines.append("@q cvt.s64.s32 d, n; @q add.s64 p, $2, d;")
            last_byte = None
        if byte != last_byte:
            lines.append(f"setp.gt.s32 q, $5, {byte}; selp.b32 n, 16, 0, q;")
        last_row, last_byte = row, byte
        lines.append(f"setp.gt.s32 q, $4, {row}; @q cp.async.{how}.shared.global [s+{base + at}], [p+{byte}], 16, n;")
    return " ".join(lines) + " }"


@gluon.jit
def fetch_rows(slot, step, wanted, X, block, K, C: gl.constexpr):
    """Ask for x of one step, if `wanted`: the rows of a block of pairs, given by its first one and how many it has."""
    first, count = block
    t, w, m, k, left = _x_piece(K, step, wanted, C)
    at = X.to(gl.int64) + 2 * (step.to(gl.int64) * C.step + k)
    into = (slot * C.k_slices + w) * gl.constexpr(2 * C.x_rows * C.chunk) + t * 16
    gl.inline_asm_elementwise(
        _gather_asm(_x_pieces(C), C.x_at, C.rows_at, C.x_cached),
        "=r,r,l,r,r,r,~{memory}",
        [into, at, (first + m) * 4, count - m, (left - k) * 2],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
