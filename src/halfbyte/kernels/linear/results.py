"""The epilogue of the linear kernels: what the sums of a tile become. y, or in a decoder block what surrounds the projection:

    factors      y[m, n] / sqrt(mean(h[m]^2) + eps), where x is h * weight of an RMSNorm: its scale of a row is a factor of sums
    activation   act(gate) * up; rows of gate and up alternate in a tile
    residual     h = residual + multiplier * y; and for a norm that follows h * weight, and the tile's sum of h^2 of each row m

So a norm costs no launch and no instruction in the loop. What modules round to 16 bits is rounded here, but for what a norm
multiplies by its weight: that is rounded once, after the product. Sums of squares of tiles are added in their order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.scales import to_float
from halfbyte.kernels.linear.experts_table import entry
from halfbyte.kernels.linear.operands import plain
from halfbyte.kernels.linear.ring import place


class Around(NamedTuple):
    """Tensors of an `Epilogue`, contiguous; None where there is none of it.

    ids           with routing: [M * top_k], the experts of each token
    squares       fp32 [parts, M], sums of squares of parts of the rows that x was made from
    residual      [M, N]
    weight        [N], of the norm behind the sum
    weighted      [M, N]: the sum times weight
    own_squares   fp32 [tiles, M]: sums of squares of the sum
    """

    squares: Any = None
    residual: Any = None
    weight: Any = None
    weighted: Any = None
    own_squares: Any = None
    ids: Any = None


@gluon.constexpr_function
def output_layout(C):
    """[W, tile, columns]: every thread holds the W sums of its own numbers, and of both halves of an activation."""
    across = min(C.sums, 32)
    return gl.BlockedLayout([C.k_slices, C.epilogue.halves, 1], [1, 32 // across, across], [1, C.warps, 1], [2, 1, 0])


@gluon.constexpr_function
def row_layout(C):
    """[tile, M]: a thread writes 8 neighbours of a row of y."""
    lanes = min(32, C.tile // 8)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, C.warps], [0, 1])


@gluon.constexpr_function
def _square_layout(C):
    """[warps, parts of each, M]: lanes read neighbours, as all programs read the same few lines at the same time."""
    across = min(C.x_rows, 32)
    return gl.BlockedLayout([1, 1, 1], [1, 32 // across, across], [C.warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _factor_layout(C):
    """[warps, M]: a thread holds what all warps have of a column."""
    across = min(C.sums, 32)
    return gl.SliceLayout(1, gl.BlockedLayout([C.warps, 1, 1], [1, 32 // across, across], [1, C.warps, 1], [2, 1, 0]))


@gluon.jit
def write_tile(v, tile, first_row, M, weights, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a tile to y, from `first_row` on, with what is left of the scales, and the bias."""
    _, scales, _, bias, factor, out, N, n0 = place(tile, weights, C)
    n = n0 + gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    v = _scaled(v, n, N, scales, bias, factor, weights.biases[0] is not None, S, C).to(out.dtype.element_ty)
    if C.sums > 16:
        # Warp-group MMAs leave neighbours of a row of y in different lanes: turned through shared memory, 16 bytes go at once.
        v = gl.convert_layout(v, row_layout(C))
    n = n0 + gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    m = first_row + gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    gl.store(out + (m.to(gl.int64) * N + n), v, mask=(m < M) & (n < N))


@gluon.jit
def _scaled(v, n, N, scales, bias, factor, has_bias: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Sums of rows n with what is left of the scales, and the bias."""
    if S.groups == 0:
        v = v * to_float(gl.load(scales + n, mask=n < N, other=0.0), S)
    v = v * (1.0 / S.unit(C.dtype))
    if S.factor:
        v = v * gl.load(factor)
    if has_bias:
        v = v + gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    return v


@gluon.jit
def row_squares(around, M, C: gl.constexpr):
    """Sums of squares of the rows, those of each warp's parts, [warps, M] in shared memory; () without them.

    The warps add up while they wait for x, which takes as long, and not for each other: they meet before a tile's sums are there.
    """
    squares = ()
    if C.epilogue.parts > 0:
        layout: gl.constexpr = _square_layout(C)
        each: gl.constexpr = max(1, C.epilogue.padded_parts // C.warps)
        warp = gl.arange(0, C.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
        i = gl.arange(0, each, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
        m = gl.arange(0, C.x_rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        part = warp * each + i
        there = (part < C.epilogue.parts) & (m < M)
        parts = gl.load(around.squares + (part * M + m), mask=there, other=0.0, cache_modifier=".cg")
        sums = gl.sum(parts, axis=1, keep_dims=True).broadcast_to([C.warps, C.sums // C.x_rows, C.x_rows])  # of other rows: any
        squares = gl.allocate_shared_memory(gl.float32, [C.warps, C.sums], plain(2), gl.reshape(sums, [C.warps, C.sums]))
    return squares


@gluon.jit
def _row_factors(squares, K, C: gl.constexpr):
    """1 / sqrt(mean(h^2) + eps) of each row, as columns of a tile's sums."""
    columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, output_layout(C)))
    total = gl.sum(squares.load(gl.constexpr(_factor_layout(C))), axis=0)
    return gl.convert_layout(gl.rsqrt(total / K + C.epilogue.eps), columns)


@gluon.jit
def finish(v, tile, M, K, weights, around, squares, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a tile to wherever they go."""
    if C.epilogue.parts > 0:
        v = v * gl.expand_dims(_row_factors(squares, K, C), 0)
    if C.epilogue.activation is not None:
        _write_gated(v, tile, M, weights, S, C)
    elif C.epilogue.adds:
        _write_sum(v, tile, M, weights, around, S, C)
    else:
        write_tile(v, tile, 0, M, weights, S, C)


@gluon.jit
def _write_gated(v, tile, M, weights, S: gl.constexpr, C: gl.constexpr):
    """act(gate) * up."""
    gate, up = gl.split(gl.permute(gl.reshape(v, [C.tile // 2, 2, C.sums]), [0, 2, 1]))
    out = weights.outs[0]
    half: gl.constexpr = out.dtype.element_ty
    N = weights.features[0]
    n = tile * (C.tile // 2) + gl.arange(0, C.tile // 2, layout=gl.SliceLayout(1, gate.type.layout))[:, None]
    m = gl.arange(0, C.sums, layout=gl.SliceLayout(0, gate.type.layout))[None, :]
    has_bias: gl.constexpr = weights.biases[0] is not None
    gate = _scaled(gate, n, N, weights.scales[0], weights.biases[0], weights.factors[0], has_bias, S, C).to(half).to(gl.float32)
    up = _scaled(up, n, N, weights.scales[1], weights.biases[1], weights.factors[1], has_bias, S, C).to(half).to(gl.float32)
    A: gl.constexpr = C.epilogue.activation  # by a name: Triton 3.6 does not pass it on otherwise
    gate = _activation(gate, A).to(half).to(gl.float32)
    gl.store(out + (m.to(gl.int64) * N + n), (gate * up).to(half), mask=(m < M) & (n < N))


@gluon.jit
def _activation(x, A: gl.constexpr):
    """f(x) of an `Activation`."""
    if A.kind == "silu":
        x = x / (1.0 + gl.exp(-A.alpha * x))
    elif A.kind == "gelu_tanh":
        x = x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = x * 0.5 * (1.0 + gl.erf(x * 0.7071067811865476))
    return x


@gluon.jit
def _write_sum(v, tile, M, weights, around, S: gl.constexpr, C: gl.constexpr):
    """h = residual + multiplier * y, and what the norm behind it needs."""
    out = weights.outs[0]
    half: gl.constexpr = out.dtype.element_ty
    N = weights.features[0]
    n = tile * C.tile + gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    m = gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    at = m.to(gl.int64) * N + n
    inside = (m < M) & (n < N)
    residual = gl.load(around.residual + at, mask=inside, other=0.0).to(gl.float32)
    weight = ()
    if C.epilogue.norm != "":  # ahead of a store, behind which the compiler would leave it
        weight = gl.load(around.weight + n, mask=n < N, other=0.0).to(gl.float32)
    has_bias: gl.constexpr = weights.biases[0] is not None
    v = _scaled(v, n, N, weights.scales[0], weights.biases[0], weights.factors[0], has_bias, S, C).to(half).to(gl.float32)
    if C.epilogue.multiplier != 1.0:
        v = (v * C.epilogue.multiplier).to(half).to(gl.float32)
    total = (residual + v).to(half)
    gl.store(out + at, total, mask=inside)
    if C.epilogue.norm != "":
        if C.epilogue.norm == "offset":
            weight += 1.0
        total = total.to(gl.float32)
        gl.store(around.weighted + at, (total * weight).to(half), mask=inside)
        row = gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))
        squares = gl.sum(gl.where(inside, total * total, 0.0), axis=0)
        gl.store(around.own_squares + (tile * M + row), squares, mask=row < M)


# ---------------------------------------------------------------------------------------------------------- experts


@gluon.jit
def activated(y, C: gl.constexpr):
    """[n, M] -> [n / 2, M], see `Activation`; as it is without one."""
    if C.epilogue.activation is not None:
        A: gl.constexpr = C.epilogue.activation
        gate, up = gl.split(gl.permute(gl.reshape(y, [y.shape[0] // 2, 2, y.shape[1]]), [0, 2, 1]))
        if A.limit < float("inf"):
            # Comparisons, which let NaN through.
            gate = gl.where(gate > A.limit, A.limit, gate)
            up = gl.where(up > A.limit, A.limit, gl.where(up < -A.limit, -A.limit, up))
        y = _activation(gate, A) * (up + A.shift)
    return y


@gluon.jit
def routed_results(v, expert, n0, weights, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a tile with what is left of the scales, and the bias."""
    N = weights.features[0]
    n = n0 + gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    row = expert.to(gl.int64) * N + n
    if S.groups == 0:
        v = v * to_float(gl.load(weights.scales[0] + row, mask=n < N, other=0.0), S)
    v = v * (1.0 / S.unit(C.dtype))
    if S.factor:
        v = v * gl.load(weights.factors[0] + row, mask=n < N, other=0.0)
    if weights.biases[0] is not None:
        v = v + gl.load(weights.biases[0] + row, mask=n < N, other=0.0).to(gl.float32)
    return v


@gluon.jit
def write_pairs(v, block, weights, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a block of an expert's pairs to the rows of out that belong to them."""
    expert, n0, first, count = block
    v = routed_results(v, expert, n0, weights, S, C)
    width = weights.features[0] // C.epilogue.halves
    v = activated(v, C)
    m = gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    pair = entry(C.order_at, first + gl.minimum(m, count - 1)) & 1023
    n = n0 // C.epilogue.halves + gl.arange(0, C.tile // C.epilogue.halves, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    out = weights.outs[0] + (pair.to(gl.int64) * width + n)
    gl.store(out, v.to(weights.outs[0].dtype.element_ty), mask=(m < count) & (n < width))


@gluon.jit
def write_zeros(row, weights, C: gl.constexpr):
    """Zeros to a row of out."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [C.warps], [0])
    width = weights.features[0] // C.epilogue.halves
    for begin in range(0, width, 256 * C.warps):
        n = begin + gl.arange(0, 256 * C.warps, layout=layout)
        zero = gl.full([256 * C.warps], 0.0, weights.outs[0].dtype.element_ty, layout)
        gl.store(weights.outs[0] + (row.to(gl.int64) * width + n), zero, mask=n < width)
