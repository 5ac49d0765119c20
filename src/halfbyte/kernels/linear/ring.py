"""The linear kernels' weights: which one a tile belongs to, and for warp-group MMA how codes and scales of a step come into shared
memory; zero points come straight to registers. For small M: linear/async_copy.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import copy_to_shared
from halfbyte.kernels.common.layouts import code_ring_layout
from halfbyte.kernels.linear.operands import code_copy_layout, plain, scale_copy_layout
from halfbyte.tensors import QuantTensor


class Weights(NamedTuple):
    """The weights of a launch as kernels take them, with what belongs to each: a tuple a field, an element a weight.

    codes     16-bit words [N, K / codes_per_word]
    scales    [N, K / group], or [N, 1]
    zeros     zero points, uint8, as scales; None where there are none, as biases and factors
    biases    [N], of one type
    factors   fp32 [1], scales of whole tensors
    outs      y [M, N]
    features  N
    """

    codes: Any
    scales: Any
    zeros: Any
    biases: Any
    factors: Any
    outs: Any
    features: Any


def weights_of(weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor]) -> Weights:
    """What a launch passes."""
    return Weights(
        codes=tuple(w.codes.view(torch.int16) for w in weights),
        scales=tuple(w.scales for w in weights),
        zeros=tuple(w.offsets for w in weights),
        biases=tuple(biases),
        factors=tuple(w.tensor_scale for w in weights),
        outs=tuple(outs),
        features=tuple(w.shape[0] for w in weights),
    )


@gluon.jit
def weight_rings(S: gl.constexpr, C: gl.constexpr):
    """Shared memory: codes and scales of each stage. Codes come first: a table behind them is read by its address."""
    codes = gl.allocate_shared_memory(gl.int16, [S.slots(C), C.k_slices, C.tile, S.words(C)], code_ring_layout(S.words(C)))
    scales = codes
    if C.copies_scales:
        scale_type: gl.constexpr = gl.float16 if S.scale == "f16" else gl.float32 if S.scale == "f32" else gl.uint8
        scales = gl.allocate_shared_memory(scale_type, [C.stages, C.tile, C.columns(S)], plain(2))
    return codes, scales


@gluon.jit
def place(tile, weights, C: gl.constexpr):
    """The weight that a tile belongs to: its tensors, its rows, and the number of the tile in it."""
    codes, scales, out, n = weights.codes[0], weights.scales[0], weights.outs[0], weights.features[0]
    zeros = codes if weights.zeros[0] is None else weights.zeros[0]
    bias = codes if weights.biases[0] is None else weights.biases[0]
    factor = codes if weights.factors[0] is None else weights.factors[0]
    first = tile * 0
    tiles = (n + C.tile - 1) // C.tile
    for i in gl.static_range(1, gl.constexpr(len(C.weights))):
        here = tile >= tiles
        first = gl.where(here, tiles, first)
        tiles += (weights.features[i] + C.tile - 1) // C.tile
        n = gl.where(here, weights.features[i], n)
        codes = gl.where(here, weights.codes[i], codes)
        scales = gl.where(here, weights.scales[i], scales)
        out = gl.where(here, weights.outs[i], out)
        if weights.zeros[0] is not None:
            zeros = gl.where(here, weights.zeros[i], zeros)
        if weights.biases[0] is not None:
            bias = gl.where(here, weights.biases[i], bias)
        if weights.factors[0] is not None:
            factor = gl.where(here, weights.factors[i], factor)
    return codes, scales, zeros, bias, factor, out, n, (tile - first) * C.tile


@gluon.jit
def _scale_pointers(Base, n0, step, K, S: gl.constexpr, C: gl.constexpr):
    """Addresses of the scales of a step of a tile, [tile, groups]."""
    columns: gl.constexpr = C.columns(S)
    layout: gl.constexpr = scale_copy_layout(C, columns, C.scales_per_copy)
    row = gl.arange(0, C.tile, layout=gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))[None, :]
    G = K // (S.group * C.scales_per_copy) * C.scales_per_copy  # scales of a row: the compiler sees that they are whole pieces
    return Base + (n0.to(gl.int64) * G + step * columns) + (row * G + c)


@gluon.jit
def _copy_scales(ring, pointers, rows, columns, S: gl.constexpr, C: gl.constexpr):
    """Scales of a step of a tile; 0 beyond the `rows` and `columns` that are left."""
    layout: gl.constexpr = scale_copy_layout(C, C.columns(S), C.scales_per_copy)
    row = gl.arange(0, C.tile, layout=gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, C.columns(S), layout=gl.SliceLayout(0, layout))[None, :]
    copy_to_shared(ring, pointers, mask=(row < rows) & (c < columns))


@gluon.jit
def weight_at(tile, step, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Where a step of a tile lies: addresses of its codes and scales, and the rows of the weight from there on."""
    codes, scales, _, _, _, _, N, n0 = place(tile, weights, C)
    codes, scales = rows_at(codes, scales, n0, step, K, S, C)
    return codes, scales, N - n0


@gluon.jit
def rows_at(codes, scales, n0, step, K, S: gl.constexpr, C: gl.constexpr):
    """Addresses of codes and scales of a step from row n0 of a matrix on."""
    layout: gl.constexpr = code_copy_layout(C, S.words(C))
    w = gl.arange(0, C.k_slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, C.tile, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    c = gl.arange(0, S.words(C), layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    width = K // (8 * S.codes_per_word) * 8  # words of a row: whole 16-byte pieces
    codes = codes + (n0.to(gl.int64) * width + step * (C.k_slices * S.words(C))) + (row * width + (w * S.words(C) + c))
    if C.copies_scales:
        scales = _scale_pointers(scales, n0, step, K, S, C)
    return codes, scales


@gluon.jit
def fetch_weight(rings, slot, at, step, K, S: gl.constexpr, C: gl.constexpr):
    """Ask for codes and scales of the step that `at` points to; returns where the next one is."""
    codes, scales, rows = at
    left = K - step * C.step
    if (rows >= C.tile) & (left >= C.step):
        copy_to_shared(rings[0].index(slot), codes)
    else:
        layout: gl.constexpr = code_copy_layout(C, S.words(C))
        w = gl.arange(0, C.k_slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
        row = gl.arange(0, C.tile, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
        c = gl.arange(0, S.words(C), layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        copy_to_shared(rings[0].index(slot), codes, mask=(row < rows) & (w * S.words(C) + c < left // (8 * S.codes_per_word) * 8))
    codes += C.k_slices * S.words(C)
    if C.copies_scales:
        columns = left // (S.group * C.scales_per_copy) * C.scales_per_copy
        _copy_scales(rings[1].index(slot), scales, rows, columns, S, C)
        scales += C.columns(S)
    return codes, scales, rows
