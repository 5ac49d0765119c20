"""A fused block's step by compiled loops on a CPU: of one token a sequence, where the block is an attention layer and gated MLPs,
all of them quantized. Any other step, and any error, is that of the ops one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from halfbyte.cache import KVCache
from halfbyte.cpu import step as loops
from halfbyte.cpu.derived import Derived
from halfbyte.hf.attention import sees_all
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.fused_forms import Form, quantized_layer
from halfbyte.hf.fused_parts import GatedMlp, Heads
from halfbyte.hf.model_support import CACHE
from halfbyte.ops.block_linear import halves
from halfbyte.reference.block import Norm

#: A branch of a fused block: its form, the norm behind it and the one behind the sum.
Branch = tuple[Form, Norm | None, Norm | None]


class BlockLoops:
    """Steps of a block, one for each cache."""

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
        self.steps: Derived[loops.BlockStep | None] = Derived(self._step)

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
        step = self.steps(kv, [*parts, *self.norms], copies=True)
        if step is None:
            return None
        rope, heads = None, self.heads
        if heads is not None and heads.rotation is not None:
            source, half, interleaved = heads.rotation
            rope = heads.tables(block[source], len(state.hidden), half, interleaved)
        return step(state, rope, starts)

    def _step(self, kv: KVCache) -> loops.BlockStep | None:
        try:
            return loops.BlockStep([self._branch(*branch) for branch in self.branches], self.multiplier, kv)
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
