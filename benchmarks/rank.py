"""One of eight tensor-parallel ranks of Llama 2 70B: its share of a layer's weights, one decode step through it, what it holds.

Weights are random. q, k, v and o are in bf16; the feed-forward is in FP8 (E4M3, one scale a tensor, activations cast without one)
through torch's scaled product where `Model.fp8` says so, else in bf16. There is no all-reduce: this is one rank by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from halfbyte.cache import KVCache
from halfbyte.device import Device
from halfbyte.measure.decode import DecodeShape, parse_formats
from halfbyte.reference.rope import rope_tables

#: Attention of the queries [B, Hq, 1, D] over one layer's cache, [B, Hq, 1, D].
Attend = Callable[[torch.Tensor, KVCache], torch.Tensor]


@dataclass(frozen=True)
class Rank:
    """Sizes of what one rank holds: its heads, its columns of the feed-forward, its part of the vocabulary."""

    hidden: int = 8192
    q_heads: int = 8
    kv_heads: int = 1
    dim: int = 128
    ffn: int = 3584
    layers: int = 80
    vocabulary: int = 4000

    @property
    def qkv(self) -> int:
        """Rows of the fused projection of q, k and v."""
        return (self.q_heads + 2 * self.kv_heads) * self.dim

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head, or of the embedding, in bf16."""
        return 2 * self.vocabulary * self.hidden

    def shape(self, batch: int, context: int) -> DecodeShape:
        """The attention of one layer."""
        return DecodeShape(batch, self.q_heads, self.kv_heads, self.dim, context)

    def layer_bytes(self, fp8: bool) -> int:
        """Bytes of one layer's weights."""
        attention = self.hidden * (self.qkv + self.q_heads * self.dim)
        return 2 * attention + (1 if fp8 else 2) * 3 * self.hidden * self.ffn

    def cache_bytes(self, batch: int, context: int, formats: str) -> int:
        """Bytes of one layer's cache."""
        shape = (batch, self.kv_heads, context, self.dim)
        return sum(f.nbytes(shape) for f in parse_formats(formats))

    def step_bytes(self, batch: int, context: int, formats: str, fp8: bool) -> int:
        """Bytes that a step reads at least: all layers' weights and caches, and the output head."""
        layers = self.layers * (self.layer_bytes(fp8) + self.cache_bytes(batch, context, formats))
        return layers + self.head_bytes

    def held_bytes(self, batch: int, context: int, formats: str, fp8: bool) -> int:
        """Bytes in memory: what a step reads, and the embedding. Activations and what CUDA takes for itself come on top."""
        return self.step_bytes(batch, context, formats, fp8) + self.head_bytes


@dataclass(frozen=True)
class Product:
    """y = x w^T for a weight [N, K], in bf16, or in FP8 with the scales of x and of the weight."""

    weight: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scales is None:
            return F.linear(x, self.weight)
        x8 = x.to(self.weight.dtype)
        return torch._scaled_mm(x8, self.weight.t(), *self.scales, out_dtype=torch.bfloat16, use_fast_accum=True)


@dataclass(frozen=True)
class RankLayer:
    """The rank's part of one layer."""

    qkv: Product
    o: Product
    up: Product
    down: Product


class Model:
    """Random weights of `count` layers and of `heads` output heads to rotate over, made when they are first needed."""

    def __init__(self, rank: Rank, device: Device, count: int, heads: int = 1) -> None:
        self.rank, self.count, self._heads, self._device = rank, count, heads, device.torch
        #: Whether the feed-forward is in FP8: on GPUs that multiply it.
        self.fp8 = device.kind == "cuda" and (device.capability or (0, 0)) >= (8, 9)

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(0)

    def _normal(self, n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, generator=self._generator, device=self._device, dtype=torch.bfloat16)

    def _product(self, n: int, k: int, fp8: bool = False) -> Product:
        """A weight whose products are about as large as what they multiply."""
        weight = self._normal(n, k)
        if not fp8:
            return Product(weight.mul_(k**-0.5))
        return Product(
            weight.to(torch.float8_e4m3fn), (torch.ones((), device=self._device), torch.tensor(k**-0.5, device=self._device))
        )

    @cached_property
    def layers(self) -> list[RankLayer]:
        """The layers, all different."""
        return [self._layer() for _ in range(self.count)]

    def _layer(self) -> RankLayer:
        r = self.rank
        qkv = self._product(r.qkv, r.hidden)
        # Four times larger queries see a few keys rather than the mean of all, as in the other benchmarks of attention.
        qkv.weight[: r.q_heads * r.dim].mul_(4)
        up, down = self._product(2 * r.ffn, r.hidden, self.fp8), self._product(r.hidden, r.ffn, self.fp8)
        return RankLayer(qkv, self._product(r.hidden, r.q_heads * r.dim), up, down)

    @cached_property
    def heads(self) -> list[Product]:
        """From hidden states to the rank's part of the logits; all the same, so that each is cold when its turn comes again."""
        first = self._product(self.rank.vocabulary, self.rank.hidden)
        return [first, *(Product(first.weight.clone()) for _ in range(self._heads - 1))]

    def inputs(self, batch: int) -> torch.Tensor:
        """Hidden states in front of the first layer, [batch, hidden]."""
        return torch.randn(batch, self.rank.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(
            self._device, torch.bfloat16
        )


class Step:
    """One decode step: a token of every sequence through the layers, each over its own cache of `context - 1` tokens."""

    def __init__(self, model: Model, caches: Sequence[KVCache], context: int, attend: Attend) -> None:
        self._model, self.caches, self._attend = model, caches, attend
        self._start = self._x = model.inputs(caches[0].batch)
        position = torch.tensor([context - 1], device=self._start.device)
        self._rope = rope_tables(position, model.rank.dim)

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """RankLayer i, from the hidden states of the layer before it; the queries and what attention gave, both [B, Hq, 1, D]."""
        rank, layer, cache = self._model.rank, self._model.layers[i], self.caches[i]
        x = self._x if i else self._start
        heads = layer.qkv(_normed(x)).unflatten(-1, (-1, rank.dim)).unsqueeze(2)
        q, k, v = heads.split((rank.q_heads, rank.kv_heads, rank.kv_heads), 1)
        q = cache.append(k, v, rope=self._rope, q=q)
        out = self._attend(q, cache)
        x = x + layer.o(out.flatten(1))
        gate, up = layer.up(_normed(x)).chunk(2, -1)
        self._x = x + layer.down(F.silu(gate) * up)
        return q, out

    def logits(self, i: int) -> torch.Tensor:
        """The rank's part of the logits by output head i, from the hidden states of the last layer that ran."""
        return self._model.heads[i](_normed(self._x))


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)
