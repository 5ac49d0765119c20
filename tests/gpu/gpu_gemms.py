"""GEMMs with quantized weights for tests: cases, drawn or written down, their tensors, and what they are judged by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import halfbyte as hb
from accuracy import check_product
from halfbyte.tensors import QuantTensor

FORMATS = list(hb.WEIGHT_FORMATS)
ROWS = (1, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129, 300, 1000)
LAYOUTS = ("rows", "columns", "slice", "expanded", "apart")


@dataclass(frozen=True)
class Case:
    """x [rows, width] with one weight, or three; `layout` is how x lies in memory, `stored` how the parts of weights do.

    mean, scale: of the numbers of x, and the size of those of weights. zero: a zero point for every n-th row, and n.
    """

    formats: tuple[str, ...]
    features: tuple[int, ...]
    rows: int
    width: int
    dtype: str = "bfloat16"
    layout: str = "rows"
    bias: bool = False
    act_order: bool = False
    seed: int = 0
    stored: str = "rows"
    mean: float = 0.0
    scale: float = 0.1
    zero: tuple[int, int] | None = None


def drawn(count: int, seed: int, *, width: int = 300, rows: int = 20, features: tuple[int, int] = (100, 64)) -> list[Case]:
    """Every format comes first alone, then with others. width, rows, features: the largest."""
    rng, cases = random.Random(seed), []
    for i in range(count):
        shards = 3 if i >= len(FORMATS) and rng.random() < 0.3 else 1
        formats = (FORMATS[i % len(FORMATS)], *rng.choices(FORMATS, k=shards - 1))
        if rng.random() < 0.5:
            formats = formats[:1] * shards
        widest = max(hb.WEIGHT_FORMATS[name].group_size(2) for name in formats)
        k = widest * rng.randint(1, max(1, width // widest))
        n = tuple(rng.choice((1, 8, 63, 64, 128, 131, *features)) for _ in formats)
        m = min(rng.choice(ROWS), rows)
        dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
        cases.append(Case(formats, n, m, k, dtype, rng.choice(LAYOUTS), rng.random() < 0.4, rng.random() < 0.2, i))
    return cases


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x [M, K] with other strides; what lies between its numbers is NaN."""
    rows, width = x.shape
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "expanded":
        return x[:1].expand(rows, width)
    if layout == "rows":
        return x
    if layout == "apart":  # the last token of sequences, say
        whole = x.new_full((rows, 3, width), torch.nan)
        whole[:, 2] = x
        return whole[:, 2]
    whole = x.new_full((rows + 2, 2 * width + 6), torch.nan)
    part = whole[1:-1, 3 : 3 + 2 * width : 2]
    part.copy_(x)
    return part


def quantized(case: Case, number: int, device: str = "cpu") -> QuantTensor:
    """One of the weights."""
    seed = case.seed + number
    weight = hb.quantize(normal(case.features[number], case.width, seed=seed, device=device) * case.scale, case.formats[number])
    if case.act_order:
        weight = replace(weight, perm=torch.randperm(case.width, device=device).int())
    if case.zero is not None and weight.offsets is not None:
        weight.offsets[:: case.zero[1]] = case.zero[0]
    if case.stored == "columns":
        return replace(weight, **{name: t.mT.contiguous().mT for name, t in weight.parts().items() if t.ndim == 2})
    if case.stored == "odd":  # from an odd address on, so that no words can be read
        bytes_ = {name: t for name, t in weight.parts().items() if t.element_size() == 1}
        return replace(weight, **{name: torch.cat([t.new_empty(1), t.flatten()])[1:].view(t.shape) for name, t in bytes_.items()})
    return weight


@dataclass
class Call:
    """The tensors of a case."""

    x: torch.Tensor
    weights: Sequence[QuantTensor]
    biases: Sequence[torch.Tensor | None]

    def run(self, impl: str, **options: Any) -> tuple[torch.Tensor, ...]:
        if len(self.weights) == 1:
            return (hb.linear(self.x, self.weights[0], self.biases[0], impl=impl, **options),)
        return hb.qkv_projection(self.x, tuple(self.weights), tuple(self.biases), impl=impl, **options)  # type: ignore[arg-type]

    def check(self, outs: tuple[torch.Tensor, ...]) -> None:
        for out, w, bias in zip(outs, self.weights, self.biases, strict=True):
            check_product(out, self.x, w, bias)


def build(case: Case, device: str = "cpu") -> Call:
    x = normal(case.rows, case.width, seed=case.seed, device=device) + case.mean
    x = laid_out(x.to(getattr(torch, case.dtype)), case.layout)
    weights = [quantized(case, i, device) for i in range(len(case.formats))]
    return Call(x, weights, [normal(n, device=device) if case.bias else None for n in case.features])
