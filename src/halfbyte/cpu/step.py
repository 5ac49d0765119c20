"""One token a sequence through a whole decoder block, by compiled loops over fixed memory.

In a small model an operator of torch, a check or an allocation takes longer than a loop. So all of that is done once, for a block,
a cache and a batch: a `BlockStep` is the loops of the block with their arguments. It has the results of the ops one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from halfbyte.cpu import append, block
from halfbyte.cpu.attention_codes import width_of
from halfbyte.cpu.linear import compiled, in_tiles, tile_rows
from halfbyte.cpu.sides import sides_of
from halfbyte.cpu.threads import STEPS, over_rows
from halfbyte.kv_buffer import Cache, HeadNorms, Rope
from halfbyte.reference.block import Norm, gated
from halfbyte.reference.hadamard import block_size
from halfbyte.tensors import QuantTensor

Array = np.ndarray[Any, Any]
_NO_BIAS, _NO_STARTS, _NO_PAGES = np.empty(0, np.float32), np.empty(0, np.int32), np.empty((0, 0), np.int32)


class Layers(NamedTuple):
    """Projections of one x."""

    weights: Sequence[QuantTensor]
    biases: Sequence[torch.Tensor | None]


class Heads(NamedTuple):
    """An attention layer, up to its output projection: those of q, k and v, one by one or as one; sinks [Hq] in fp32."""

    layers: Layers
    norms: HeadNorms | None
    sm_scale: float
    softcap: float | None
    sinks: torch.Tensor | None


class Gated(NamedTuple):
    """A gated MLP, up to its last projection: those of gate and up."""

    layers: Layers
    activation: str


class Branch(NamedTuple):
    """A branch, its last projection, and the norm behind the sum."""

    form: Heads | Gated
    last: Layers
    before: Norm | None


class State(NamedTuple):
    """Rows [B, 1, N] between two blocks: the residual and its norm; as tensors, and as arrays [B, N], the norm as pairs of bf16.

    The arrays are the tensors' memory, which belongs to a step: its next call writes there.
    """

    hidden: torch.Tensor
    x: torch.Tensor
    hidden_bits: Array
    pairs: Array


def state_of(hidden: torch.Tensor, x: torch.Tensor) -> State:
    """Of bf16 tensors [B, 1, N]."""
    return State(hidden, x, block.bits(hidden).reshape(len(hidden), -1), tile_rows(x))


class Unfit(Exception):
    """A block, or a cache, that is not for these loops."""


class _Product:
    """x W^T in fp32 [M, N], in memory of its own: `sums`, behind which there may be unused rows."""

    def __init__(self, weight: QuantTensor, bias: torch.Tensor | None, batch: int) -> None:
        from halfbyte.cpu.compiled.block import finish

        own, count, self.finish = compiled(weight), 1 << (batch - 1).bit_length(), finish
        self.memory = np.empty((count, own.features), np.float32)
        self.sums = self.memory[:batch]
        (self.loop, self.steps), self.units = own.tile_loop(count), -(-own.features // 16)
        self.tiles, self.pieces = own.tiles, weight.shape[1] // own.piece
        self.scales, self.bias = (_of_rows(t, own.features) for t in (own.tensor_scale, bias))
        self.is_plain = not self.scales.size and not self.bias.size

    def __call__(self, pairs: Array) -> None:
        if self.steps < 2 * STEPS:
            self.loop(*self.tiles, pairs, self.memory, self.pieces, 0, self.units)
        else:
            over_rows(self.loop, self.units, self.steps, *self.tiles, pairs, self.memory, self.pieces)

    def complete(self, pairs: Array) -> Array:
        """`sums` with scales and bias, and then rounded to bf16, where there are any: what follows rounds."""
        self(pairs)
        if not self.is_plain:
            self.finish(self.sums, self.scales, self.bias)
        return self.sums


def _of_rows(t: torch.Tensor | None, count: int) -> Array:
    """A number for each row of a weight in fp32, or none."""
    return _NO_BIAS if t is None else np.ascontiguousarray(t.detach().float().expand(count).numpy())


def _products(layers: Layers, batch: int) -> list[_Product]:
    for weight, bias in zip(*layers, strict=True):
        x = torch.empty(batch, weight.shape[1], dtype=torch.bfloat16)
        if weight.perm is not None or weight.nested is not None or not in_tiles(x, (weight,)) or not block.is_bias(bias, weight):
            raise Unfit
    return [_Product(weight, bias, batch) for weight, bias in zip(*layers, strict=True)]


class _Projections:
    """q, k and v [B, H, 1, D] of `Heads`: bf16 numbers in fp32."""

    def __init__(self, heads: Heads, cache: Cache, batch: int) -> None:
        from halfbyte.cpu.compiled.block import norm_heads

        keys, values = cache.keys, cache.values
        self.products, self.norm_heads = _products(heads.layers, batch), norm_heads
        sums, widths = [product.sums for product in self.products], [side.heads * side.dim for side in (keys, values)]
        if len(sums) == 1:
            first = sums[0].shape[1] - sum(widths)
            sums = np.split(sums[0], (first, first + widths[0]), 1)
        if [part.shape[1] for part in sums[1:]] != widths or sums[0].shape[1] < 1 or sums[0].shape[1] % widths[0]:
            raise Unfit
        dims = keys.dim, keys.dim, values.dim
        self.all = [part.reshape(batch, -1, 1, dim) for part, dim in zip(sums, dims, strict=True)]  # views
        self.norms: list[tuple[Array, Array, float, int]] = []
        if (norms := heads.norms) is not None:
            if not all(block.is_row(weight, keys.dim) for weight in norms[:2]):
                raise Unfit
            kind = block.KINDS[norms.kind]
            self.norms = [(x, block.bits(weight), norms.eps, kind) for x, weight in zip(self.all, norms[:2], strict=False)]

    def __call__(self, pairs: Array) -> None:
        for product in self.products:
            product(pairs)
            product.finish(product.sums, product.scales, product.bias)
        for norm in self.norms:
            self.norm_heads(*norm)


class _Append:
    """k and v of `_Projections` to a cache, whose lengths stay; and q by position, `q` [B, H, 1, D]."""

    def __init__(self, projections: _Projections, cache: Cache, batch: int) -> None:
        from halfbyte.cpu.compiled.append import loops

        sides = cache.keys, cache.values
        fits = all(append.takes(side) and side.saturated is None for side in sides)
        if not fits or cache.page_table is not None or not cache.lengths.is_contiguous():
            raise Unfit
        self.fits, self.prepare, self.store = loops()
        q, k, v = projections.all
        self.new, self.rows = (k, v, q), [np.empty(t.shape, np.float32) for t in (k, v, q)]
        self.q, self.before, self.one = self.rows[2], np.empty(batch, np.int64), np.ones(batch, np.int64)
        rows, size = (cache.keys.codes.shape[i] for i in (0, 2))
        self.room = self.before, self.one, 1, _NO_PAGES, max(side.ring for side in sides), rows, size
        self.code, self.rotation = append.code_of(torch.bfloat16), block_size(cache.keys.dim) if cache.rotate_keys else 0
        self.units, self.steps = batch * k.shape[1], 8 * k.size
        places = self.before, self.one, _NO_PAGES, np.zeros((2, self.units), np.int64)
        self.sides = sides_of(cache.keys), sides_of(cache.values)
        self.stored = *self.rows[:2], *self.sides, *(append.rule(side.format) for side in sides), *places

    def __call__(self, rope: Rope | None) -> bool:
        """Store tokens `before` [B]; False, and nothing has changed, where they cannot be."""
        cos, sin, interleaved = append.angles(rope)
        turns = (
            cos.shape == sin.shape and len(cos) in (1, len(self.one)) and cos.shape[1] == 1 and 2 * cos.shape[2] <= self.q.shape[3]
        )
        if not self.fits(*self.room) or not (turns or rope is None):
            return False
        if not self.prepare(*self.new, cos, sin, interleaved, self.code, self.rotation, self.one, *self.rows):
            return False
        over_rows(self.store, self.units, self.steps, *self.stored)
        return True


class _Attention:
    """`Heads` over a cache."""

    def __init__(self, heads: Heads, cache: Cache, batch: int) -> None:
        from halfbyte.cpu.compiled import attention
        from halfbyte.cpu.compiled.block import as_bits, count_token

        self.project = _Projections(heads, cache, batch)
        self.append = _Append(self.project, cache, batch)
        self.lengths, self.places = cache.lengths.numpy(), np.empty((batch, 4), np.int64)
        self.count_token, self.as_bits = count_token, as_bits
        self.loops, self.split = attention.loops("float32"), attention.SPLIT
        self.options = attention.Options(1, 2**40, heads.softcap or 0.0)
        self.sm_scale, self.sinks = heads.sm_scale, _NO_BIAS if heads.sinks is None else heads.sinks.numpy()
        (_, q_heads, _, dim), kv_heads, wide = self.append.q.shape, cache.keys.heads, cache.values.dim
        self.queries = np.empty((batch, kv_heads, q_heads // kv_heads, width_of(dim)), np.float32)
        self.out, self.lse = np.empty((batch, q_heads, 1, wide), np.float32), np.empty((batch, q_heads, 1), np.float32)
        self.flat, self.bits = self.out.reshape(batch, -1), np.empty((batch, q_heads * wide), np.uint16)
        self.splits, self.width = 0, width_of(wide)

    def _allocate(self, splits: int) -> None:
        """Memory for partial results of so many splits."""
        self.splits, (batch, heads, group, _) = splits, self.queries.shape
        self.parts = np.empty((batch, heads, splits, group, self.width), np.float32)
        self.states = np.empty((*self.parts.shape[:-1], 2), np.float32)

    def __call__(self, pairs: Array, rope: Rope | None, starts: Array) -> Array | None:
        """Pairs of the result, whose token is stored but not counted; None, and nothing has changed, where it cannot be."""
        self.project(pairs)
        longest = self.count_token(self.lengths, starts, self.append.before, self.places)
        if not self.append(rope):
            return None
        if (splits := -(-longest // self.split)) != self.splits:
            self._allocate(splits)
        prepare, attend, finish = self.loops
        keys, values = self.append.sides
        prepare(self.append.q, self.sm_scale, self.append.rotation, keys[0][3].parts, self.queries)
        rows = self.queries, keys, values, _NO_PAGES, self.places, _NO_BIAS, self.options, self.states, self.parts
        over_rows(attend, self.append.units * splits, self.queries.size * longest * 2, *rows)
        finish(self.states, self.parts, self.sinks, values[0][3].parts, self.out, self.lse)
        self.as_bits(self.flat, self.bits)
        return self.bits.view(np.int32)


class _GatedMlp:
    """`Gated`."""

    def __init__(self, form: Gated, batch: int) -> None:
        from halfbyte.cpu.compiled.block import as_bits

        self.products, self.activation = _products(form.layers, batch), form.activation
        if len({product.sums.shape for product in self.products}) != 1 or len(self.products) != 2:
            raise Unfit
        self.as_bits = as_bits
        self.bits = [np.empty(product.sums.shape, np.uint16) for product in self.products]
        self.gate, self.up = (torch.from_numpy(bits).view(torch.bfloat16) for bits in self.bits)

    def __call__(self, pairs: Array, *_: Any) -> Array:
        for product, bits in zip(self.products, self.bits, strict=True):
            self.as_bits(product.complete(pairs), bits)
        return tile_rows(gated(self.gate, self.up, self.activation))


class _Sum:
    """The residual sum behind a branch, and its norm."""

    def __init__(self, branch: Branch, multiplier: float, batch: int) -> None:
        from halfbyte.cpu.compiled.block import add_norm

        (self.product,) = _products(branch.last, batch)
        self.add_norm = add_norm
        before, shape = branch.before, self.product.sums.shape
        self.hidden = np.empty(shape, np.uint16)
        if before is not None and not block.is_row(before.weight, shape[1]):
            raise Unfit
        self.out = self.hidden if before is None else np.empty(shape, np.uint16)
        norm = block.NONE[0] if before is None else block.bits(before.weight)
        self.rest = norm, float(multiplier), *((0.0, 0) if before is None else (before.eps, block.KINDS[before.kind]))
        hidden, out = (torch.from_numpy(bits).view(torch.bfloat16).unsqueeze(1) for bits in (self.hidden, self.out))
        self.state = State(hidden, out, self.hidden, self.out.view(np.int32))

    def __call__(self, pairs: Array, residual: Array) -> State:
        self.add_norm(self.product.complete(pairs), residual, self.hidden, self.out, *self.rest)
        return self.state


class BlockStep:
    """A block's step. Raises `Unfit` where the loops do not run it."""

    def __init__(self, branches: Sequence[Branch], multiplier: float, cache: Cache) -> None:
        batch = len(cache.lengths)
        self.branches: list[tuple[Callable[[Array, Rope | None, Array], Array | None], _Sum]] = []
        if sum(isinstance(branch.form, Heads) for branch in branches) != 1:
            raise Unfit
        for branch in branches:
            form = _GatedMlp(branch.form, batch) if isinstance(branch.form, Gated) else _Attention(branch.form, cache, batch)
            self.branches.append((form, _Sum(branch, multiplier, batch)))
        self.lengths = cache.lengths

    def __call__(self, state: State, rope: Rope | None, starts: torch.Tensor | None) -> State | None:
        """The rows behind the block, of those before it; None, and nothing has changed, where something is wrong with them.

        starts: int32 [B], contiguous; tokens before it are padding.
        """
        if len(state.hidden) != len(self.lengths):
            return None
        own = _NO_STARTS if starts is None else starts.numpy()
        for form, add in self.branches:
            if (pairs := form(state.pairs, rope, own)) is None:
                return None
            state = add(pairs, state.hidden_bits)
        self.lengths.add_(1)
        return state
