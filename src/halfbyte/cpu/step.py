"""One token a sequence through a whole decoder block, by compiled loops over fixed memory.

In a small model an operator of torch, a check or an allocation takes longer than a loop. So all of that is done once, for a block,
a cache, a batch and a type of rows, bf16 or fp32: a `BlockStep` is the loops of the block with their arguments. It has the results
of the ops one by one.

A product of a bf16 x is in tiles where `cpu.linear` takes these. Else x, in fp32, is multiplied by the codes. What is between
products is rounded to the type of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from halfbyte.cpu import append, block
from halfbyte.cpu.attention_codes import number_of, width_of
from halfbyte.cpu.linear import by_codes, compiled, in_tiles, tile_rows
from halfbyte.cpu.profiled import profiled
from halfbyte.cpu.sides import sides_of
from halfbyte.cpu.threads import Bound
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
    """Rows [B, 1, N] between two blocks: the residual and its norm; as tensors, and as arrays [B, N] of `block.NUMBERS`.

    The arrays are the tensors' memory, which belongs to a step: its next call writes there.
    """

    hidden: torch.Tensor
    x: torch.Tensor
    hidden_rows: Array
    x_rows: Array


def state_of(hidden: torch.Tensor, x: torch.Tensor) -> State:
    """Of tensors [B, 1, N], bf16 or fp32."""
    return State(hidden, x, block.array_of(hidden).reshape(len(hidden), -1), _rows(x))


def _rows(x: torch.Tensor) -> Array:
    """[M, K] of x [..., K], for loops; of bf16 as tiles take it."""
    is_half = x.dtype is torch.bfloat16
    return tile_rows(x).view(np.uint16) if is_half else block.array_of(x.reshape(-1, x.shape[-1]).contiguous())


class Unfit(Exception):
    """A block, or a cache, that is not for these loops."""


class _Product:
    """x W^T in fp32 [M, N], in memory of its own: `sums`, behind which there may be unused rows."""

    def __init__(self, weight: QuantTensor, bias: torch.Tensor | None, x: torch.Tensor, numbers: dict[bool, Array]) -> None:
        """numbers: memory for x in fp32, by whether even columns come first."""
        from halfbyte.cpu.compiled.block import finish
        from halfbyte.cpu.compiled.linear import products

        if weight.perm is not None or weight.nested is not None or not block.is_bias(bias, weight):
            raise Unfit
        is_tiled, (batch, width) = in_tiles(x, (weight,)), x.shape
        if not is_tiled and not by_codes(x, weight):
            raise Unfit
        own, rows, self.finish = compiled(weight), _rows(x), finish
        self.bound: tuple[Any, Sequence[Any], int]
        if is_tiled:
            count = 1 << (batch - 1).bit_length()
            memory = np.empty((count, own.features), np.float32)
            (loop, self.steps), self.sums = own.tile_loop(count), memory[:batch]
            self.bound = loop, (*own.tiles, rows.view(np.int32), memory, width // own.piece), -(-own.features // 16)
        else:
            memory = np.empty((own.features, batch), np.float32)
            self.steps, self.sums = memory.size * width, memory.T
            if x.dtype is not torch.float32 or own.nibbles:
                rows = numbers.setdefault(own.nibbles, np.empty(x.shape, np.float32))
            self.bound = products, (*own.arrays(), rows, memory), own.features
        self.scales, self.bias = (_of_rows(t, own.features) for t in (own.tensor_scale, bias))
        self.is_plain, self.like = not self.scales.size and not self.bias.size, np.empty(0, block.NUMBERS[x.dtype])

    def complete(self) -> Array:
        """`sums` with scales and bias, and then rounded, where there are any: what follows rounds."""
        if not self.is_plain:
            self.finish(self.sums, self.scales, self.bias, self.like)
        return self.sums


def _of_rows(t: torch.Tensor | None, count: int) -> Array:
    """A number for each row of a weight in fp32, or none."""
    return _NO_BIAS if t is None else np.ascontiguousarray(t.detach().float().expand(count).numpy())


class _Products:
    """Those of one x with `Layers`."""

    def __init__(self, layers: Layers, batch: int, dtype: torch.dtype) -> None:
        from halfbyte.cpu.compiled.block import arrange

        x = torch.empty(batch, layers.weights[0].shape[-1], dtype=dtype)
        self.rows, self.numbers = _rows(x), dict[bool, Array]()
        self.all = [_Product(weight, bias, x, self.numbers) for weight, bias in zip(*layers, strict=True)]
        self.arrange, self.steps = arrange, sum(product.steps for product in self.all)
        self.bound = Bound([product.bound for product in self.all])

    def __call__(self, rows: Array) -> None:
        np.copyto(self.rows, rows)
        profiled("linear", self._multiply)

    def _multiply(self) -> None:
        for halves, x in self.numbers.items():
            self.arrange(self.rows, x, halves)
        self.bound(self.steps)


class _Projections:
    """q, k and v [B, H, 1, D] of `Heads`: in fp32, rounded to the type of rows."""

    def __init__(self, heads: Heads, cache: Cache, batch: int, dtype: torch.dtype) -> None:
        from halfbyte.cpu.compiled.block import norm_heads

        keys, values = cache.keys, cache.values
        self.products, self.norm_heads = _Products(heads.layers, batch, dtype), norm_heads
        sums, widths = [product.sums for product in self.products.all], [side.heads * side.dim for side in (keys, values)]
        if len(sums) == 1:
            first = sums[0].shape[1] - sum(widths)
            sums = np.split(sums[0], (first, first + widths[0]), 1)
        if [part.shape[1] for part in sums[1:]] != widths or sums[0].shape[1] < 1 or sums[0].shape[1] % widths[0]:
            raise Unfit
        dims = keys.dim, keys.dim, values.dim
        self.all = [part.reshape(batch, -1, 1, dim) for part, dim in zip(sums, dims, strict=True)]  # views
        self.norms: list[tuple[Array, Array, float, int]] = []
        if (norms := heads.norms) is not None:
            if not all(block.is_row(weight, keys.dim, dtype) for weight in norms[:2]):
                raise Unfit
            kind = block.KINDS[norms.kind]
            self.norms = [(x, block.array_of(weight), norms.eps, kind) for x, weight in zip(self.all, norms[:2], strict=False)]

    def __call__(self, rows: Array) -> None:
        self.products(rows)
        for product in self.products.all:
            product.finish(product.sums, product.scales, product.bias, product.like)
        for norm in self.norms:
            self.norm_heads(*norm)


class _Append:
    """k and v of `_Projections` to a cache, whose lengths stay; and q by position, `q` [B, H, 1, D]."""

    def __init__(self, projections: _Projections, cache: Cache, batch: int, dtype: torch.dtype) -> None:
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
        self.code, self.rotation = append.code_of(dtype), block_size(cache.keys.dim) if cache.rotate_keys else 0
        self.units, self.steps = batch * k.shape[1], 8 * k.size
        places = self.before, self.one, _NO_PAGES, np.zeros((2, self.units), np.int64)
        self.sides = sides_of(cache.keys), sides_of(cache.values)
        stored = *self.rows[:2], *self.sides, *(append.rule(side.format) for side in sides), *places
        self.bound = Bound([(self.store, stored, self.units)])

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
        self.bound(self.steps)
        return True


class _Attention:
    """`Heads` over a cache."""

    def __init__(self, heads: Heads, cache: Cache, batch: int, dtype: torch.dtype) -> None:
        from halfbyte.cpu.compiled import attention
        from halfbyte.cpu.compiled.block import count_token, store

        self.project = _Projections(heads, cache, batch, dtype)
        self.append = _Append(self.project, cache, batch, dtype)
        self.lengths, self.places = cache.lengths.numpy(), np.empty((batch, 4), np.int64)
        self.count_token, self.store = count_token, store
        self.number = number_of(dtype)
        self.loops, self.split = attention.loops(self.number), attention.SPLIT
        self.options = attention.Options(1, 2**40, heads.softcap or 0.0)
        self.sm_scale, self.sinks = heads.sm_scale, _NO_BIAS if heads.sinks is None else heads.sinks.numpy()
        (_, q_heads, _, dim), kv_heads, wide = self.append.q.shape, cache.keys.heads, cache.values.dim
        self.queries = np.empty((batch, kv_heads, q_heads // kv_heads, width_of(dim)), self.number)
        self.out, self.lse = np.empty((batch, q_heads, 1, wide), self.number), np.empty((batch, q_heads, 1), np.float32)
        self.flat, self.rows = self.out.reshape(batch, -1), np.empty((batch, q_heads * wide), block.NUMBERS[dtype])
        self.splits, self.width = 0, width_of(wide)

    def _allocate(self, splits: int) -> None:
        """Memory for partial results of so many splits."""
        self.splits, (batch, heads, group, _) = splits, self.queries.shape
        self.parts = np.empty((batch, heads, splits, group, self.width), self.number)
        self.states = np.empty((*self.parts.shape[:-1], 2), self.number)
        keys, values = self.append.sides
        rows = self.queries, keys, values, _NO_PAGES, self.places, _NO_BIAS, self.options, self.states, self.parts
        self.bound = Bound([(self.loops[1], rows, self.append.units * splits)])

    def __call__(self, x: Array, rope: Rope | None, starts: Array) -> Array | None:
        """Rows of the result, whose token is stored but not counted; None, and nothing has changed, where it cannot be."""
        self.project(x)
        longest = self.count_token(self.lengths, starts, self.append.before, self.places)
        if not profiled("append_", self.append, rope):
            return None
        profiled("decode_attention", self._attend, longest)
        return self.rows

    def _attend(self, longest: int) -> None:
        if (splits := -(-longest // self.split)) != self.splits:
            self._allocate(splits)
        prepare, _, finish = self.loops
        keys, values = self.append.sides
        prepare(self.append.q.astype(self.number, copy=False), self.sm_scale, self.append.rotation, keys[0][3].parts, self.queries)
        self.bound(self.queries.size * longest * 2)
        finish(self.states, self.parts, self.sinks, values[0][3].parts, self.out, self.lse)
        self.store(self.flat, self.rows)


class _GatedMlp:
    """`Gated`."""

    def __init__(self, form: Gated, batch: int, dtype: torch.dtype) -> None:
        from halfbyte.cpu.compiled.block import store

        self.products, self.activation = _Products(form.layers, batch, dtype), form.activation
        shapes = [product.sums.shape for product in self.products.all]
        if len(set(shapes)) != 1 or len(shapes) != 2:
            raise Unfit
        self.store, self.rows = store, [np.empty(shape, block.NUMBERS[dtype]) for shape in shapes]
        self.gate, self.up = map(block.tensor_of, self.rows)

    def __call__(self, x: Array, *_: Any) -> Array:
        self.products(x)
        for product, rows in zip(self.products.all, self.rows, strict=True):
            self.store(product.complete(), rows)
        return _rows(gated(self.gate, self.up, self.activation))


class _Sum:
    """The residual sum behind a branch, and its norm."""

    def __init__(self, branch: Branch, multiplier: float, batch: int, dtype: torch.dtype) -> None:
        from halfbyte.cpu.compiled.block import add_norm

        self.products, self.add_norm = _Products(branch.last, batch, dtype), add_norm
        (self.product,), before = self.products.all, branch.before
        shape = self.product.sums.shape
        self.hidden = np.empty(shape, block.NUMBERS[dtype])
        if before is not None and not block.is_row(before.weight, shape[1], dtype):
            raise Unfit
        self.out = self.hidden if before is None else np.empty_like(self.hidden)
        norm = self.hidden[0, :0] if before is None else block.array_of(before.weight)
        self.rest = norm, float(multiplier), *((0.0, 0) if before is None else (before.eps, block.KINDS[before.kind]))
        hidden, out = (block.tensor_of(rows).unsqueeze(1) for rows in (self.hidden, self.out))
        self.state = State(hidden, out, self.hidden, self.out)

    def __call__(self, x: Array, residual: Array) -> State:
        self.products(x)
        self.add_norm(self.product.complete(), residual, self.hidden, self.out, *self.rest)
        return self.state


class BlockStep:
    """A block's step. Raises `Unfit` where the loops do not run it."""

    def __init__(self, branches: Sequence[Branch], multiplier: float, cache: Cache, dtype: torch.dtype) -> None:
        batch = len(cache.lengths)
        self.branches: list[tuple[Callable[[Array, Rope | None, Array], Array | None], _Sum]] = []
        if sum(isinstance(branch.form, Heads) for branch in branches) != 1:
            raise Unfit
        for branch in branches:
            form = branch.form
            loops = _GatedMlp(form, batch, dtype) if isinstance(form, Gated) else _Attention(form, cache, batch, dtype)
            self.branches.append((loops, _Sum(branch, multiplier, batch, dtype)))
        self.lengths = cache.lengths

    def __call__(self, state: State, rope: Rope | None, starts: torch.Tensor | None) -> State | None:
        """The rows behind the block, of those before it; None, and nothing has changed, where something is wrong with them.

        starts: int32 [B], contiguous; tokens before it are padding.
        """
        if len(state.hidden) != len(self.lengths) or state.x.dtype is not state.hidden.dtype:
            return None
        own = _NO_STARTS if starts is None else starts.numpy()
        for form, add in self.branches:
            if (x := form(state.x_rows, rope, own)) is None:
                return None
            state = add(x, state.hidden_rows)
        self.lengths.add_(1)
        return state
