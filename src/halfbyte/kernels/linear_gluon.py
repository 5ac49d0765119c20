"""Tuned products with quantised weights in Gluon, for few rows of x: the weight is read once, as it is stored.

    y[m, n] = sum_k x[m, k] W[n, k],     W[n, k] = scale[n, g] (code[n, k] - zero[n, g]),  g the group that k lies in

Rows of the weight are the M axis of the tensor cores and rows of x the N axis, so that up to 8 rows of x cost one product. A
*tile* is `tile` rows of the weight; a *step* of it is a chunk of K for each of `streams` warps (or groups of `across` warps, which
divide the rows of the tile). Codes, scales, zero points and x of a step come into a ring in shared memory by cp.async. Codes enter
the product exactly: a nibble masked in place is a number already (linear_operands.py); what it has too much (128 + 8, say) is a
multiple of the sum of x, which a product with ones gives; the group's scale multiplies fp32 sums of the group. The streams' sums of
a tile are added at its end, in the order of the streams.

Work is the steps of all tiles of all weights that are computed together, one after the other; the programs take equal shares. With
as many programs as tiles a share is a tile (data-parallel), with n times as many a tile is cut into n (split-K), with as many as
the GPU runs at once a share may begin and end inside a tile (stream-K). A tile that one program computes alone is written at once;
else its partial results go to the workspace and the program that arrives last adds them up, in the order of the programs.
"""

# ruff: noqa: RUF005, RET505
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if`.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.compat import barrier, reinterpret
from halfbyte.kernels.compiling import Configuration
from halfbyte.kernels.gluon_tiles import program_at, quotient, share
from halfbyte.kernels.linear_operands import (
    code_operands,
    halves,
    make_table,
    mma_layout,
    plain,
    scale_layout,
    sixteenth_layout,
    x_layout,
    x_operands,
)
from halfbyte.kernels.linear_ring import fetch_weight, fetch_x, make_rings, place, weight_at
from halfbyte.kernels.linear_sample import FEW_ROWS, sample_configurations
from halfbyte.plans.linear import Spec, gluon_linear
from halfbyte.tensors import QuantTensor


@gluon.constexpr_function
def _bits(n):
    return n.bit_length() - 1


@gluon.jit
def _scales_of(ring, S: gl.constexpr, C: gl.constexpr):
    """Scales (or zero points) of a step: for each group of a chunk, those of every chunk, [streams, tile, 1]."""
    mma: gl.constexpr = mma_layout(C)
    G: gl.constexpr = C.columns(S) // C.streams
    twos: gl.constexpr = [2] * _bits(G)
    s = gl.permute(gl.reshape(ring.load(scale_layout(C, G)), [C.tile, C.streams, G]), [1, 0, 2])
    parts = halves(gl.reshape(s, [C.streams, C.tile] + twos), _bits(G))
    made = ()
    for g in gl.static_range(G):
        made = made + (gl.expand_dims(gl.convert_layout(parts[g], gl.SliceLayout(2, mma), assert_trivial=True), 2),)
    return made


@gluon.jit
def to_float(s, S: gl.constexpr):
    """A stored scale as a number; E8M0's 255 and E4M3's 127 and 255 are NaN."""
    if S.scale == "e8m0":
        # 0 is 2^-127, a subnormal of fp32; 255 is infinity's exponent, and with one more bit NaN.
        bits = gl.maximum(s.to(gl.int32) << 23, 0x00400000) | (s.to(gl.int32) + 1 >> 8 << 22)
        return bits.to(gl.float32, bitcast=True)
    elif S.scale == "e4m3":
        bits = ((s.to(gl.int32) & 128) << 24) | ((s.to(gl.int32) & 127) << 20)
        number = bits.to(gl.float32, bitcast=True) * 1.329227995784916e36
        return gl.where((s.to(gl.int32) & 127) == 127, float("nan"), number)
    else:
        return s.to(gl.float32)


@gluon.jit
def _rows_alike(c, C: gl.constexpr):
    """[streams, 16 across, rows of x] with all its rows the same -> [streams, tile, rows of x]; registers only."""
    for i in gl.static_range(_bits(C.tile // (16 * C.across))):
        c = gl.permute(gl.join(c, c), [0, 3, 1, 2])
        c = gl.reshape(c, [C.streams, (32 * C.across) << i, C.rows])
    return gl.convert_layout(c, mma_layout(C), assert_trivial=True)


@gluon.jit
def _sixteenths(ring, S: gl.constexpr, C: gl.constexpr):
    """Scales of groups of 16 codes, for each block of a chunk: 16-bit operands [W, tile, 16] to multiply codes by."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    half: gl.constexpr = gl.bfloat16 if C.half == "bf16" else gl.float16
    like = gl.full([C.streams, C.tile, 16], 0.0, half, la)
    grouped: gl.constexpr = gl.reshape(like, [C.streams, C.tile, 4, 4]).type.layout
    G: gl.constexpr = C.columns(S) // C.streams
    twos: gl.constexpr = [2] * _bits(G // 4)
    s = to_float(ring.load(sixteenth_layout(C, G)), S).to(half)
    s = gl.permute(gl.reshape(s, [C.tile, C.streams, G // 4, 4]), [1, 0, 3, 2])
    parts = halves(gl.reshape(s, [C.streams, C.tile, 4] + twos), _bits(G // 4))
    made = ()
    for block in gl.static_range(G // 4):
        one = gl.expand_dims(gl.convert_layout(parts[block], gl.SliceLayout(3, grouped), assert_trivial=True), 3)
        one = one + gl.full([C.streams, C.tile, 4, 4], 0.0, half, grouped)
        made = made + (gl.convert_layout(gl.reshape(one, [C.streams, C.tile, 16]), la, assert_trivial=True),)
    return made


@gluon.jit
def _sums_of(x, first: gl.constexpr, last: gl.constexpr, C: gl.constexpr):
    """sum of x over operands first..last-1, every row of [streams, 16 across, rows of x] the same: a product with ones."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    ones = gl.full([C.streams, 16 * C.across, 16], 1.0, x[0].dtype, la)
    total = gl.full([C.streams, 16 * C.across, C.rows], 0.0, gl.float32, mma_layout(C))
    for i in gl.static_range(first, last):
        total = mma_v2(ones, x[i], total)
    return total


@gluon.jit
def _multiply(acc, rings, slot, S: gl.constexpr, C: gl.constexpr):
    """acc + one step's products, [streams, tile, rows of x]."""
    scales = ()
    zeros = ()
    if S.group == 16:
        scales = _sixteenths(rings[1].index(slot), S, C)
    elif S.groups > 0:
        scales = _scales_of(rings[1].index(slot), S, C)
    if S.zero:
        zeros = _scales_of(rings[2].index(slot), S, C)
    for part in gl.static_range(gl.constexpr(C.chunk // 128)):
        acc = _multiply_part(acc, rings, slot, part, scales, zeros, S, C)
    return acc


@gluon.jit
def _multiply_part(acc, rings, slot, part: gl.constexpr, scales, zeros, S: gl.constexpr, C: gl.constexpr):
    """acc + the products of 128 k of each chunk."""
    mma: gl.constexpr = mma_layout(C)
    x = x_operands(rings[3].index(slot).slice(4 * part, 4, dim=2).load(x_layout(C, S.planes)), S, C)
    codes = rings[0].index(slot)
    planes: gl.constexpr = S.planes
    first: gl.constexpr = part * (8 // planes)  # block of words
    shift: gl.constexpr = S.shift(C.half)
    # Sums of whole rows, and of codes that are scaled before the product, go straight into `acc`.
    direct: gl.constexpr = S.groups == 0 or S.group == 16
    groups: gl.constexpr = 1 if direct else S.groups
    each: gl.constexpr = 8 // groups
    a = ()
    for g in gl.static_range(groups):
        dot = gl.full([C.streams, C.tile, C.rows], 0.0, gl.float32, mma)
        if direct:
            dot = acc
        for i in gl.static_range(g * each, g * each + each):
            if i % planes == 0:
                a = code_operands(codes, first + i // planes, S, C)
            if S.group == 16:
                dot = mma_v2(a[i % planes] * scales[first + i // planes], x[i], dot)
            else:
                dot = mma_v2(a[i % planes], x[i], dot)
        # What codes have too much, beside the products and not ahead of them: neither chain waits for the other.
        if S.zero:
            sums = _rows_alike(_sums_of(x, g * each, g * each + each, C), C)
            dot = dot - (zeros[part * groups + g].to(gl.float32) * S.unit(C.half) + shift) * sums
        elif shift != 0.0:
            dot = dot - shift * _rows_alike(_sums_of(x, g * each, g * each + each, C), C)
        if direct:
            acc = dot
        else:
            acc += dot * to_float(scales[part * groups + g], S)
    return acc


@gluon.constexpr_function
def _output_layout(C):
    """[W, tile, rows of x]: every thread holds the W sums of its own numbers."""
    across = min(C.rows, 32)
    return gl.BlockedLayout([C.streams, 1, 1], [1, 32 // across, across], [1, C.warps, 1], [2, 1, 0])


@gluon.jit
def write_tile(v, tile, rows, Codes, Scales, Zeros, Biases, Factors, Outs, Ns, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a tile to y, with what is left of the scales, and the bias."""
    _, scales, _, bias, factor, out, N, n0 = place(tile, Codes, Scales, Zeros, Biases, Factors, Outs, Ns, C)
    n = n0 + gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    m = gl.arange(0, C.rows, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    if S.groups == 0:
        v = v * to_float(gl.load(scales + n, mask=n < N, other=0.0), S)
    v = v * (1.0 / S.unit(C.half))
    if S.factor:
        v = v * gl.load(factor)
    if Biases[0] is not None:
        v = v + gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    gl.store(out + (m.to(gl.int64) * N + n), v.to(out.dtype.element_ty), mask=(m < rows) & (n < N))


@gluon.constexpr_function
def _loads_in_flight(C):
    """Of partial results, as far as registers go."""
    return max(1, min(4, 64 * 32 * C.warps // C.part_floats))


@gluon.jit
def sum_parts(Part, at, first, last, C: gl.constexpr):
    """The partial results of programs first..last added in that order, several loads in flight."""
    together: gl.constexpr = _loads_in_flight(C)
    total = gl.load(Part + (2 * first + 1).to(gl.int64) * C.part_floats + at, cache_modifier=".cg")
    for begin in range(first + 1, last + 1, together):
        parts = ()
        for y in gl.static_range(together):
            there = (at >= 0) & (begin + y <= last)
            base = Part + (2 * (begin + y)).to(gl.int64) * C.part_floats
            parts = parts + (gl.load(base + at, mask=there, other=0.0, cache_modifier=".cg"),)
        for y in gl.static_range(together):
            total += parts[y]
    return total


@gluon.jit(do_not_specialize=["rows"])
def linear(
    X,  # [rows, K], strides x_row and 1
    Codes,  # of each weight: 16-bit words [N, K / planes]
    Scales,  # [N, K / group], or [N, 1]
    Zeros,  # uint8, as Scales
    Biases,  # [N]
    Factors,  # fp32 [1]
    Outs,  # [rows, N]
    Part,  # fp32 workspace: two partial results a program
    Count,  # int32, one a tile, zero before and after
    rows,
    K,
    x_row,
    Ns,
    C: gl.constexpr,
):
    """One program's share of the steps of all tiles."""
    S: gl.constexpr = C.weights[0]
    mma: gl.constexpr = mma_layout(C)
    rings = make_rings(S, C)
    red = rings[0]
    if C.sums_apart:
        red = gl.allocate_shared_memory(gl.float32, [C.streams, C.tile, C.rows], plain(3))
    steps = (K + C.step - 1) // C.step
    tiles = 0
    for i in gl.static_range(gl.constexpr(len(C.weights))):
        tiles += (Ns[i] + C.tile - 1) // C.tile
    total = tiles * steps
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    x = share(program, programs, total)
    x_end = share(program + 1, programs, total)
    tile = quotient(x, steps)
    step = x - tile * steps
    begin = step
    # The weights first, ahead of the wait for the kernel before: that may write x, but not a weight.
    at = weight_at(tile, step, Codes, Scales, Zeros, Biases, Factors, Outs, Ns, K, S, C)
    ahead_tile = tile
    ahead_step = step
    for i in gl.static_range(gl.constexpr(C.stages - 1)):
        if x + i < x_end:
            at = fetch_weight(rings, i, at, ahead_step, K, S, C)
        async_copy.commit_group()
        ahead_step += 1
        if ahead_step == steps:
            ahead_step = 0
            ahead_tile += 1
            at = weight_at(ahead_tile, 0, Codes, Scales, Zeros, Biases, Factors, Outs, Ns, K, S, C)
    if S.kind == "pairs":
        make_table(rings[0], S, C)
    if C.pair:
        gdc_wait()
        gdc_launch_dependents()
    x_step = step
    for i in gl.static_range(gl.constexpr(C.stages - 1)):
        if x + i < x_end:
            fetch_x(rings, i, x_step, X, rows, K, x_row, C)
        async_copy.commit_group()
        x_step = gl.where(x_step + 1 == steps, 0, x_step + 1)
    acc = gl.full([C.streams, C.tile, C.rows], 0.0, gl.float32, mma)
    slot = 0
    for now in range(x, x_end):
        async_copy.wait_group(C.stages - 2)
        if now + (C.stages - 1) < x_end:
            free = gl.where(slot == 0, C.stages - 1, slot - 1)
            fetch_x(rings, free, ahead_step, X, rows, K, x_row, C)
            at = fetch_weight(rings, free, at, ahead_step, K, S, C)
        async_copy.commit_group()
        ahead_step += 1
        if ahead_step == steps:
            ahead_step = 0
            ahead_tile += 1
            at = weight_at(ahead_tile, 0, Codes, Scales, Zeros, Biases, Factors, Outs, Ns, K, S, C)
        acc = _multiply(acc, rings, slot, S, C)
        step += 1
        if (step == steps) | (now + 1 == x_end):
            if C.sums_apart:
                sums = red
            else:
                barrier()  # nobody reads this slot's codes any more
                sums = reinterpret(rings[0].index(slot), gl.float32, [C.streams, C.tile, C.rows], plain(3))
            sums.store(acc)
            barrier()
            v = gl.sum(sums.load(_output_layout(C)), axis=0)
            if (begin == 0) & (step == steps):
                write_tile(v, tile, rows, Codes, Scales, Zeros, Biases, Factors, Outs, Ns, S, C)
            else:
                n = gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
                offsets = n * C.rows + gl.arange(0, C.rows, layout=gl.SliceLayout(0, v.type.layout))[None, :]
                own = 2 * program + (begin == 0).to(gl.int32)
                gl.store(Part + own.to(gl.int64) * C.part_floats + offsets, v, cache_modifier=".cg")
                first = program_at(tile * steps, programs, total)
                last = program_at(tile * steps + (steps - 1), programs, total)
                barrier()
                arrived = gl.atomic_add(Count + tile, 1, sem="acq_rel", scope="gpu")
                if arrived == last - first:
                    gl.store(Count + tile, 0)
                    v = sum_parts(Part, offsets, first, last, C)
                    write_tile(v, tile, rows, Codes, Scales, Zeros, Biases, Factors, Outs, Ns, S, C)
            acc = gl.full([C.streams, C.tile, C.rows], 0.0, gl.float32, mma)
            begin = 0
            step = 0
            tile += 1
        slot = gl.where(slot == C.stages - 1, 0, slot + 1)
    async_copy.wait_group(0)


def launch(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    spec: Spec,
    programs: int,
    part: torch.Tensor,
    count: torch.Tensor,
    compiled: Any = None,
) -> Any:
    """Launch on the current stream, compiling if need be; returns what was compiled.

    x [M, K], rows 16 numbers or a multiple apart; weights of one format, biases all or none and of one type. With spec.pair weights
    are read before what ran last is known to have ended (programmatic dependent launch): docs/linear.md, paired launches.
    part: fp32, two partial results a program; count: int32, one a tile, zero before and after.
    compiled: what an earlier launch of the same types, alignments and sizes (but for M) returned; the JIT is not asked then.
    """
    arguments = (
        x,
        tuple(w.codes.view(torch.int16) for w in weights),
        tuple(w.scales for w in weights),
        tuple(w.offsets for w in weights),
        tuple(biases),
        tuple(w.tensor_scale for w in weights),
        tuple(outs),
        *(part, count, x.shape[0], x.shape[1], x.shape[1] if x.shape[0] == 1 else x.stride(0)),
        tuple(w.shape[0] for w in weights),
    )
    if compiled is not None:
        compiled[programs, 1, 1](*arguments, spec)
        return compiled
    return linear[(programs,)](*arguments, C=spec, num_warps=spec.warps, launch_pdl=spec.pair, maxnreg=255)


def configurations() -> Iterator[Configuration]:
    """The sample's products, as an A100, an H100 and a B200 would be given them."""
    for product in FEW_ROWS:
        for capability in ((8, 0), (9, 0), (10, 0)):
            yield from sample_configurations(*product, plan=gluon_linear, launch=launch, capability=capability)
