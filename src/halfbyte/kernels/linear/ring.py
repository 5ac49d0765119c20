"""The linear kernels' weights, and which one a tile belongs to; for warp-group MMA how scales and zero points come to registers."""

# ruff: noqa: RUF005
# Triton compiles a part of Python: tuples are joined with `+`.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.linear.operands import halves, scale_layout
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


class Routed(NamedTuple):
    """What decides which experts of a stack a token uses: ids, gates [T, top_k], contiguous; and how many experts there are."""

    ids: torch.Tensor
    gates: torch.Tensor | None
    experts: int


def stack_of(stack: QuantTensor, bias: torch.Tensor | None, rows: torch.Tensor) -> Weights:
    """A stack [E, N, K] and its bias [E, N], whose results go to `rows`, as kernels take it."""
    return weights_of([stack], [bias], [rows])._replace(features=(stack.shape[1],))


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


@gluon.constexpr_function
def _in_word(C, size):
    """Numbers of `size` bytes in one of the words that they stay in until they are used: else each would take a register."""
    return min(C.scales_per_load, 4 // size)


@gluon.constexpr_function
def _word_type(C, size):
    return {1: gl.int8, 2: gl.int16, 4: gl.int32}[size * _in_word(C, size)]


@gluon.jit
def _groups_at(base, n0, rows, step, K, size: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Addresses of the scales (or zero points, numbers of so many bytes) of a step of `rows` rows from n0 on, [tile, words].

    Further rows repeat the last.
    """
    words: gl.constexpr = gl.constexpr(C.columns(S) // _in_word(C, size))
    together: gl.constexpr = gl.constexpr(C.scales_per_load // _in_word(C, size))
    layout: gl.constexpr = scale_layout(C, words)
    row = gl.minimum(gl.arange(0, C.tile, layout=gl.SliceLayout(1, layout))[:, None], rows - 1)
    c = gl.arange(0, words, layout=gl.SliceLayout(0, layout))[None, :]
    width = K // (S.scale_k * C.scales_per_load) * together  # of a row: the compiler sees that loads are aligned
    base = base.to(gl.pointer_type(_word_type(C, size)), bitcast=True)
    return base + (n0.to(gl.int64) * width + step * words) + (row * width + c)


@gluon.jit
def _load_groups(pointers, left, S: gl.constexpr, C: gl.constexpr):
    """The words there, 0 beyond the K that is `left`."""
    words: gl.constexpr = pointers.shape[1]
    together: gl.constexpr = gl.constexpr(words * C.scales_per_load // C.columns(S))
    c = gl.arange(0, words, layout=gl.SliceLayout(0, scale_layout(C, words)))[None, :]
    there = c < left // (S.scale_k * C.scales_per_load) * together
    return gl.load(pointers, mask=there.broadcast_to(pointers.shape), other=0)


@gluon.jit
def load_scales(scales, zeros, n0, rows, step, left, K, S: gl.constexpr, C: gl.constexpr):
    """Scales and zero points of a step of `rows` rows from n0 on, of which so many k are left, as words; 0 where there are none."""
    scale = 0
    zero = 0
    if S.groups > 0:
        scale = _load_groups(_groups_at(scales, n0, rows, step, K, C.scale_bytes, S, C), left, S, C)
    if S.zero:
        zero = _load_groups(_groups_at(zeros, n0, rows, step, K, 1, S, C), left, S, C)
    return scale, zero


@gluon.jit
def numbers(words, size: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or zero points) of a step [tile, words] as one tensor [tile] of their bits a group; of groups of 16, of two."""
    n: gl.constexpr = words.shape[1].bit_length() - 1
    parts = halves(gl.reshape(words, [C.tile] + [2] * n), n)
    per: gl.constexpr = _in_word(C, size)
    made = ()
    for i in gl.static_range(gl.constexpr(C.columns(S))):
        word = parts[i // per].to(gl.int32) >> 8 * size * (i % per)
        made = made + (word.to(gl.uint8 if size == 1 else gl.int16 if size == 2 and S.group != 16 else gl.int32),)
    return made


@gluon.jit
def typed(bits, S: gl.constexpr):
    """Bits as scales of their type."""
    made = ()
    for i in gl.static_range(len(bits)):
        one = bits[i]
        if S.scale == "f16":
            one = one.to(gl.float16, bitcast=True)
        elif S.scale == "f32":
            one = one.to(gl.float32, bitcast=True)
        made = made + (one,)
    return made
