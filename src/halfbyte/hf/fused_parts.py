"""Modules of a decoder block in few launches: attention and gated MLPs in a fused form, where it gives the numbers of their own;
recurrences are in `fused_forms.py`.

On a CPU a step of one token a sequence, of a block of attention and gated MLPs, all quantized, is one of compiled loops.
Any other step, and any error, is that of the ops one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from halfbyte.cache import KVCache
from halfbyte.cpu import step as loops
from halfbyte.cpu.block import NUMBERS
from halfbyte.cpu.derived import Derived
from halfbyte.hf.attention import Attended, attention, sees_all
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.fused_forms import (
    AsItIs,
    Compared,
    Form,
    Recurrence,
    alike,
    layers_of,
    project,
    quantized_layer,
    recurred,
    recurrences,
    whole,
)
from halfbyte.hf.model_support import CACHE
from halfbyte.hf.routers import Routers
from halfbyte.hf.structure import SCALES, Part, Reading, signature
from halfbyte.kv_buffer import HeadNorms, Rope, RopeLike
from halfbyte.ops.block import gated, norm_rows
from halfbyte.ops.block_linear import Rows, gated_projection, halves
from halfbyte.reference.block import ACTIVATIONS, Norm


def fused_part(
    part: Part,
    number: int,
    steps: tuple[Reading, Reading],
    norms: dict[int, Norm],
    tables: Tables,
    routers: Routers,
    known: dict[Hashable, int],
    repeats: list[Callable[[], object]],
) -> Form:
    """The fused form of a module of layer `number`; where none gives its numbers, the module as it is, but for its routers.

    known: signature of a module -> which of the forms its like has. Then its result of the recorded step is compared only.
    repeats: gets comparisons that a form passed.
    """
    attention_forms = _heads(part, steps[0].attended[number], norms, tables)
    forms: list[Form] = [*attention_forms, *recurrences(part, steps[0]), *_gated_mlps(part)]
    key = signature(part.call.module)
    likely = [forms[i] for i in (known.get(key),) if i is not None and i < len(forms)]
    for i, form in enumerate([*likely, *forms]):
        again = i < len(likely)
        pairs: Compared = _attended if isinstance(form, Heads) else recurred if isinstance(form, Recurrence) else _mapped
        if (agrees := partial(alike, pairs, form, part, number, steps, again))():
            repeats.append(agrees)
            known[key] = forms.index(form)
            return form
    return AsItIs(routers.fused(part))


# ----------------------------------------------------------------------------------------------------------------------- MLP


def _gated_mlps(part: Part) -> Iterator[GatedMlp]:
    """What a branch may be as a gated MLP: by activation, and by which of two projections is the gate."""
    first, last = layers_of(part)
    if last is None or len(first) not in (1, 2) or last in first or CACHE in part.renames.values():
        return
    for activation in ACTIVATIONS:
        for layers in itertools.permutations(first):
            yield GatedMlp(list(layers), last, activation)


class GatedMlp:
    """A gated MLP in two launches: the layer or layers of gate and up, and `last`."""

    def __init__(self, layers: list[Any], last: nn.Module, activation: str) -> None:
        self.layers, self.last, self.activation = layers, last, activation

    def __call__(self, x: Rows, block: dict[str, Any]) -> tuple[torch.Tensor, nn.Module]:
        layers: list[Any] = [quantized_layer(layer) for layer in self.layers]
        if any(layer is None or layer.weight.perm is not None or layer.weight.nested is not None for layer in layers):
            gate, up = (t for y in project(x, self.layers) for t in y.chunk(2 // len(layers), -1))
            return gated(gate, up, self.activation), self.last
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if len(layers) == 1:
            weights, biases = halves(weights[0], biases[0])
        return gated_projection(x, weights, biases, self.activation), self.last


def _mapped(
    form: GatedMlp, part: Part, number: int, steps: tuple[Reading, Reading], again: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The result of a fused MLP and that of the family's own in the step; unless `again`, for a larger input as well."""
    call, own = part.call, AsItIs(part)
    for scale in SCALES[:1] if again else SCALES:
        x = call.x * scale
        yield whole(form, x, call.kwargs), call.y if scale == 1 else whole(own, x, part.block_of(call))


# ----------------------------------------------------------------------------------------------------------------- attention


class Tables:
    """cos and sin of a step as `append` takes them, made once for all blocks; two pairs, of layers with a window and without."""

    held: tuple[tuple[tuple[torch.Tensor, int, bool], Rope], ...] = ()

    def __call__(self, embeddings: RopeLike, batch: int, half: int, interleaved: bool) -> Rope:
        """float32 [B, L, half], or [L, half] where all sequences are alike, from cos and sin [1 or B, L, half or more]."""
        for (cos, *form), rope in self.held:
            if cos is embeddings[0] and form == [half, interleaved]:
                return rope
        cos, sin = (t[..., :half].float().contiguous() for t in embeddings[:2])
        rope = Rope(*((cos, sin) if len(cos) == batch else (cos[0], sin[0])), interleaved)
        self.held = (*self.held[-1:], ((embeddings[0], half, interleaved), rope))
        return rope


class _Rotation(NamedTuple):
    """How q and k are rotated: the block's argument with cos and sin, half of the rotated dimensions, the order of pairs."""

    source: str
    half: int
    interleaved: bool


def _heads(part: Part, attended: list[Attended], norms: dict[int, Norm], tables: Tables) -> Iterator[Heads]:
    """What a branch may be as an attention layer: by how it rotates."""
    layers, last = layers_of(part)
    if last is None or len(attended) != 1 or len(layers) not in (1, 3) or CACHE not in part.renames:
        return
    head_norms = [norms[id(call.module)] for call in part.inner if id(call.module) in norms]
    if len(head_norms) not in (0, 2):
        return
    make = partial(Heads, part, attended[0], layers, last, head_norms, tables)
    for name, x in part.call.kwargs.items():
        pair = isinstance(x, tuple) and len(x) == 2 and all(isinstance(t, torch.Tensor) and t.ndim == 3 for t in x)
        if pair and name in part.renames:
            width = x[0].shape[-1]
            for half, interleaved in itertools.product((width // 2, width), (False, True)):
                if 2 * half <= attended[0].q.shape[-1]:
                    yield make(_Rotation(part.renames[name], half, interleaved))
    yield make(None)


class Heads:
    """An attention layer: projections, norms of q and k, positions, the cache, and the output projection."""

    def __init__(
        self,
        part: Part,
        attended: Attended,
        layers: list[Any],
        last: nn.Module,
        norms: list[Norm],
        tables: Tables,
        rotation: _Rotation | None,
    ) -> None:
        self.module, self.options, self.layers, self.last, self.norms = attended.module, attended.options, layers, last, norms
        tensors = attended.q, attended.k, attended.v
        self.heads, self.sizes = [t.shape[1] for t in tensors], [t.shape[1] * t.shape[-1] for t in tensors]
        self.tables, self.rotation = tables, rotation
        #: Whether the first projection has a gate behind each head's query, for what attention gives (Qwen3.5).
        width = next(call.y.shape[-1] for call in part.inner if call.module is layers[0])
        self.gates = len(layers) == 3 and width == 2 * self.sizes[0]
        self.sources = {name: part.renames[name] for name in ("attention_mask", CACHE) if name in part.renames}
        self.number: Any = attended.module.layer_idx
        #: Norms of q and k that `append` applies before it rotates; then none are left to do.
        self.by_head = None if rotation is None else self._by_head()

    def __call__(self, x: Rows, block: dict[str, Any]) -> tuple[torch.Tensor, nn.Module]:
        """What the output projection multiplies, and that layer. The cache is a `PackedCache`."""
        flat = self._projected(x)
        batch, tokens = flat[2].shape[:2]
        first, k, v = (t.view(batch, tokens, heads, -1).transpose(1, 2) for t, heads in zip(flat, self.heads, strict=True))
        q, gate = first.chunk(2, -1) if self.gates else (first, None)
        rotated: dict[str, Any] = {}
        if self.rotation is not None:
            source, half, interleaved = self.rotation
            rotated = {"rope": self.tables(block[source], batch, half, interleaved), "q": q, "norms": self.by_head}
        keys, values = block[self.sources[CACHE]].update(k, v, self.number, **rotated)
        q = q if keys.rotated is None else keys.rotated
        mask = block.get(self.sources.get("attention_mask", ""))
        out, _ = attention(self.module, q, keys, values, mask, **self.options)
        if gate is not None:
            out = gated(gate.transpose(1, 2), out, "sigmoid")
        return out.reshape(batch, tokens, -1), self.last

    def _by_head(self) -> HeadNorms | None:
        """Norms of q and k over each head; None where there are none, or where they are over all of a token."""
        widths = {len(norm.weight) for norm in self.norms}
        if len(self.norms) != 2 or widths != {self.sizes[0] // self.heads[0]} or self.norms[0].eps != self.norms[1].eps:
            return None
        q, k = self.norms
        return HeadNorms(q.weight, k.weight, q.eps, q.kind)

    def _projected(self, x: Rows) -> Sequence[torch.Tensor]:
        """q, k and v [B, L, heads * D], normalized where the family does: over each head, or over all of a token."""
        flat: Sequence[torch.Tensor] = project(x, self.layers)
        if len(flat) == 1:
            flat = flat[0].split(self.sizes, -1)
        q, k, v = flat
        if self.norms and self.by_head is None:
            widths = [len(norm.weight) for norm in self.norms]
            q, k = norm_rows([t.unflatten(-1, (-1, n)) for t, n in zip((q, k), widths, strict=True)], self.norms)
        return q, k, v


class _Twin:
    """A layer of a cache, in place of the whole cache. A module that needs more, such as the length, fails and is not fused."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, k: torch.Tensor, v: torch.Tensor, number: int, **rotated: Any) -> Any:
        return self.layer.update(k, v, **rotated)


def _attended(
    form: Heads, part: Part, number: int, steps: tuple[Reading, Reading], again: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and values that a fused layer gave attention in both steps, and its result, with those of the family's own.

    Unless `again`, queries and values of a larger input as well.
    """
    twin, source = steps[0].twin.layers[form.number], form.sources[CACHE]

    def given(run: Form, step: Reading, scale: float) -> list[torch.Tensor]:
        """Queries, values and the result, over a cache that holds what came before the first step."""
        call = part.call_in(step, number)
        lengths, twin.calls = twin.kv.lengths.clone(), []
        try:
            y = whole(run, call.x * scale, {**part.block_of(call), source: _Twin(twin)})
        finally:
            twin.kv.crop(lengths)
        return [twin.calls[0].q, twin.calls[0].v, y]

    near, far = steps
    yield from zip(given(form, near, 1.0), (*near.attended[number][0][1:4:2], part.call.y), strict=True)
    yield from zip(given(form, far, 1.0), far.attended[number][0][1:4:2], strict=False)
    if not again:
        yield from zip(given(form, near, SCALES[1])[:2], given(AsItIs(part), near, SCALES[1])[:2], strict=True)


# ------------------------------------------------------------------------------------------------------------------- compiled loops

#: A branch of a fused block: its form, the norm behind it and the one behind the sum.
Branch = tuple[Form, Norm | None, Norm | None]


class BlockLoops:
    """Steps of a block, one for each cache and type of rows."""

    def __init__(self, branches: Sequence[Branch], multiplier: float) -> None:
        self.branches, self.multiplier = branches, multiplier
        heads = [form for form, *_ in branches if isinstance(form, Heads)]
        is_known = all(isinstance(form, Heads | GatedMlp) and after is None for form, after, _ in branches)
        self.heads = heads[0] if is_known and len(heads) == 1 and _is_plain(heads[0]) else None
        forms: list[Any] = [form for form, *_ in branches]
        layers = [layer for form in forms for layer in (*form.layers, form.last)] if self.heads else []
        if not all(quantized_layer(layer) and layer.parallel_style is None for layer in layers):
            self.heads = None
        self.parameters = [layer._parameters for layer in layers]
        norms = [before.weight for *_, before in branches if before is not None]
        self.norms = [*norms, *(norm.weight for norm in (self.heads.norms if self.heads else ()))]
        self.steps: dict[torch.dtype, Derived[loops.BlockStep | None]] = {
            dtype: Derived(partial(self._step, dtype)) for dtype in NUMBERS
        }

    def __call__(self, state: loops.State, block: dict[str, Any]) -> loops.State | None:
        """The state behind the block; None, and nothing has changed, where the loops do not run."""
        heads, hidden = self.heads, state.hidden
        if heads is None:
            return None
        cache, mask = block[heads.sources[CACHE]], block.get(heads.sources.get("attention_mask", ""))
        if not isinstance(cache, PackedCache):
            return None
        starts = None
        if mask is not None:
            if mask.dtype is not torch.int32 or mask.shape != (len(hidden), 1, 1, 1):
                return None
            starts = mask.view(-1)
        new: loops.State | None = cache.step(heads.number, partial(self._run, state, block, starts))
        return new

    def _run(self, state: loops.State, block: dict[str, Any], starts: torch.Tensor | None, kv: KVCache) -> loops.State | None:
        parts = [t for own in self.parameters for t in own.values() if t is not None]
        step = self.steps[state.hidden.dtype](kv, [*parts, *self.norms], copies=True)
        if step is None:
            return None
        rope, heads = None, self.heads
        if heads is not None and heads.rotation is not None:
            source, half, interleaved = heads.rotation
            rope = heads.tables(block[source], len(state.hidden), half, interleaved)
        return step(state, rope, starts)

    def _step(self, dtype: torch.dtype, kv: KVCache) -> loops.BlockStep | None:
        try:
            return loops.BlockStep([self._branch(*branch) for branch in self.branches], self.multiplier, kv, dtype)
        except loops.Unfit:
            return None

    def _branch(self, form: Any, after: Norm | None, before: Norm | None) -> loops.Branch:
        last = _layers([form.last])
        if isinstance(form, GatedMlp):
            gate_up = _layers(form.layers)
            if len(form.layers) == 1 and gate_up.weights[0].nested is None and gate_up.weights[0].perm is None:
                gate_up = loops.Layers(*halves(gate_up.weights[0], gate_up.biases[0]))
            return loops.Branch(loops.Gated(gate_up, form.activation), last, before)
        options, norms = form.options, form.by_head
        scale, sinks = options["scaling"], options["s_aux"]
        scale = (form.sizes[0] // form.heads[0]) ** -0.5 if scale is None else scale
        sinks = None if sinks is None else sinks.detach().float()
        return loops.Branch(loops.Heads(_layers(form.layers), norms, scale, options["softcap"], sinks), last, before)


def _is_plain(heads: Heads) -> bool:
    """Whether an attention layer sees all tokens, with no norms but those of heads, and no gates."""
    return not heads.gates and (not heads.norms or heads.by_head is not None) and sees_all(heads.module, heads.options)


def _layers(layers: Sequence[Any]) -> loops.Layers:
    return loops.Layers([layer.weight for layer in layers], [layer.bias for layer in layers])
