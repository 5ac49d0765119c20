"""What a GEMM of integers multiplies (x in INT8, weights of 4 bits), in one launch ahead of it: x, and scales of the weights.

    x[m, k] ~ token[m] c[m, k],     token[m] = max_k |x[m, k]| / 127,     c the nearest integers
    W[n, k] ~ row[n] d[n, k],       row[n] = max_g |scale[n, g]| reach[n, g] / 127,     d = round((code - zero) ratio[n, g])

reach is the largest |code - zero| that a group could have, and ratio = scale / row in fp16; the GEMM rounds d as it unpacks codes.
A token or a row of the weight with NaN or infinity has the scale NaN.

Of 128 k, lane t = 0 .. 3 of the GEMM reads 16 bytes of codes, four words j, and finds codes 0, 1, 4, 5 of a word in one register
and 2, 3, 6, 7 in another. x is stored in the order of k in which its MMAs take them, so that no code moves.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.linear.ring import Weights
from halfbyte.plans.gemm_spec import WgmmaSpec
from halfbyte.plans.weight_spec import multiple

#: Scales of weights that a thread reads.
_SCALES = 8


@gluon.constexpr_function
def _row_layout(block, warps, ordered):
    """A batch row: a thread loads 16 bytes of each lane t, and stores 32 bytes, in the order of MMAs (`ordered`)."""
    registers, lanes = ([1, 2, 4, 8, 16], [32, 64]) if ordered else ([1, 2, 4, 32, 64], [8, 16])
    across = [[1024 << i] for i in range(warps.bit_length() - 1)]
    more = [[1024 * warps << i] for i in range((block // (1024 * warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout([[k] for k in registers] + more, [[k] for k in [*lanes, 128, 256, 512]], across, [], [block])


@gluon.constexpr_function
def _scale_layout(groups, warps):
    """[rows, groups] of scales."""
    lanes = min(32, groups)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _factors(bits):
    """127 over the largest magnitude, given the largest of the bits of magnitudes in fp32; and its inverse, NaN for what is not
    finite. Below 2^-100 all count as zeros.
    """
    largest = gl.maximum(bits, 0x0D800000).to(gl.float32, bitcast=True)
    return gl.div_rn(127.0, largest), gl.where(bits < 0x7F800000, gl.div_rn(largest, 127.0), float("nan"))


@gluon.jit
def _magnitude(v):
    """Bits of |v|, which order numbers, NaN above all."""
    return v.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def _round_token(X, Y, Tokens, m, K, x_stride, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """A batch row."""
    k = gl.arange(0, BLOCK, layout=_row_layout(BLOCK, WARPS, False))
    x = gl.load(X + m.to(gl.int64) * x_stride + k, mask=k < K, other=0.0).to(gl.float32)
    inverse, token = _factors(gl.max(_magnitude(x), axis=0))
    # 1.5 * 2^23: a number of that size has no fraction, and its last byte is that of the nearest integer.
    c = gl.fma(x, inverse + gl.zeros_like(x), gl.full([BLOCK], 12582912.0, gl.float32, x.type.layout))
    c = gl.reshape(c.to(gl.int32, bitcast=True).to(gl.int8), [BLOCK // 128, 4, 4, 2, 2, 2])
    c = gl.reshape(gl.permute(c, [0, 2, 4, 1, 3, 5]), [BLOCK])
    c = gl.convert_layout(c, _row_layout(BLOCK, WARPS, True), assert_trivial=True)
    width = (K + 127) // 128 * 128
    at = gl.arange(0, BLOCK, layout=_row_layout(BLOCK, WARPS, True))
    gl.store(Y + m.to(gl.int64) * width + at, c, mask=at < width)
    gl.store(Tokens + m, token)


@gluon.jit
def _round_rows(
    scales, zeros, ratios, rows, first, N, G, S: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr
):
    """Per-channel scales of a weight, from `first` on."""
    layout: gl.constexpr = _scale_layout(GROUPS, W)
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    g = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, layout))[None, :]
    at = n.to(gl.int64)[:, None] * G + g
    there = (n[:, None] < N) & (g < G)
    scale = gl.load(scales + at, mask=there, other=0.0).to(gl.float32)
    reach = gl.full([ROWS, GROUPS], 8.0, gl.float32, layout)
    if S.zero:
        zero = gl.load(zeros + at, mask=there, other=0).to(gl.float32)
        reach = gl.maximum(zero, 15.0 - zero)
    inverse, row = _factors(gl.max(_magnitude(scale * reach), axis=1))
    gl.store(ratios + at, (scale * inverse[:, None]).to(gl.float16), mask=there)
    gl.store(rows + n, row, mask=n < N)


@gluon.jit(do_not_specialize=["M"])
def round_operands(
    X,  # x [M, K], rows x_stride from each other
    Y,  # int8 [M, K in whole 128]: x in the order of MMAs
    Tokens,  # fp32 [M]
    M,
    K,
    x_stride,
    weights: Weights,
    made: Weights,  # the same with ratios, fp16 [N, G], in place of scales, and rows, fp32 [N], in place of factors
    C: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A program takes a batch row or, behind those, ROWS rows of a weight."""
    S: gl.constexpr = C.weights[0]
    program = gl.program_id(0)
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()
    if program < M:
        _round_token(X, Y, Tokens, program, K, x_stride, BLOCK, WARPS)
    else:
        first = M
        for i in gl.static_range(gl.constexpr(len(C.weights))):
            N = weights.features[i]
            after = first + (N + ROWS - 1) // ROWS
            if (program >= first) & (program < after):
                zeros = weights.codes[i] if weights.zeros[i] is None else weights.zeros[i]
                given = (weights.scales[i], zeros, made.scales[i], made.factors[i])
                _round_rows(*given, (program - first) * ROWS, N, K // S.group, S, GROUPS, ROWS, WARPS)
            first = after


def rounding(x: torch.Tensor, weights: Weights, spec: WgmmaSpec) -> tuple[torch.Tensor, torch.Tensor, Weights, list[Launch]]:
    """x [M, K] and weights as the GEMM takes them, per-token scales, and the launch that makes them."""
    (rows, width), group = x.shape, spec.weights[0].group
    y, tokens = x.new_empty(rows, multiple(width, 128), dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    ratios = tuple(x.new_empty(n, width // group, dtype=torch.float16) for n in weights.features)
    scales = tuple(x.new_empty(n, dtype=torch.float32) for n in weights.features)
    made = weights._replace(scales=ratios, factors=scales)
    warps = warps_of(width)
    block = max(1024 * warps, triton.next_power_of_2(width))
    groups = triton.next_power_of_2(width // group)
    each = max(warps * max(1, 32 // groups), _SCALES * 32 * warps // groups)
    programs = rows + sum(-(-n // each) for n in weights.features)
    arguments = (x, y, tokens, rows, width, x.stride(0), weights, made, spec, block, groups, each, warps)
    launch = Launch(round_operands, (programs,), arguments, {"launch_pdl": spec.use_pdl, "num_warps": warps})
    return y, tokens, made, [launch]


def warps_of(width: int) -> int:
    """Of a program, which takes a batch row of so many k: 1,024 of them a warp; more than eight are slower, on an H200."""
    return min(8, max(4, triton.next_power_of_2(width) // 1024))
