"""Mixtures of experts on a GPU: drawn calls against float64, the same bits again, graphs that follow their ids, bad ids."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from gpu_cases import differs, poisoned, same_bits
from gpu_place import PLACE, TALLY
from test_gpu_graphs import Captured

import halfbyte as hb
from accuracy import linear_accuracy
from experts_cases import ACTIVATIONS, OAI, Mixture, routed, sorted_pairs
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.ops.experts_mlp import Projection, experts_mlp
from halfbyte.reference.experts import Activation
from halfbyte.reference.experts import experts_linear as reference

#: (E, N, K): a few experts, many; those of Qwen3-30B-A3B and of GPT-OSS-20B.
SHAPES: tuple[tuple[int, int, int], ...] = ((5, 130, 384), (512, 64, 128), (128, 1536, 2048), (32, 5760, 2880))
if PLACE.dry:
    SHAPES = ((5, 34, 384), (9, 64, 128), (6, 48, 128), (4, 96, 160))
TOKENS = (1, 2, 4, 16, 17, 63, 64, 65, PLACE.size(300, 70), PLACE.size(2048, 80))


@dataclass(frozen=True)
class Case:
    """One projection of `tokens` tokens by `top_k` of the experts of a stack [E, N, K]."""

    fmt: str
    shape: tuple[int, int, int]
    tokens: int
    top_k: int
    dtype: str = "bfloat16"
    activation: Activation | None = None
    gated: bool = False
    bias: bool = False
    act_order: bool = False
    seed: int = 0


def drawn(count: int) -> list[Case]:
    rng, names = random.Random(7), list(WEIGHT_FORMATS)
    cases = []
    for i in range(count):
        fmt, shape = WEIGHT_FORMATS[names[i % len(names)]], SHAPES[i % 3 if i % 7 else 3]
        if shape[2] % fmt.group_size(shape[2]):
            shape = SHAPES[0]
        tokens, top_k = rng.choice(TOKENS), rng.choice((1, 2, 4, 8, 16))
        kinds = rng.choice(("bfloat16", "bfloat16", "float16")), rng.choice(ACTIVATIONS), rng.random() < 0.5, rng.random() < 0.5
        cases.append(Case(fmt.name, shape, tokens, top_k, *kinds, rng.random() < 0.2, i))
    return cases


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(PLACE.device).manual_seed(seed), device=PLACE.device)


def build(case: Case) -> Mixture:
    experts, n, k = case.shape
    weight = hb.quantize(normal(*case.shape, seed=case.seed) * 0.1, case.fmt)
    if case.act_order:
        perm = torch.stack([torch.randperm(k, device=PLACE.device) for _ in range(experts)]).int()
        weight = hb.QuantTensor(weight.format, weight.shape, **weight.parts(), perm=perm)
    x = normal(case.tokens, *((case.top_k,) if case.gated else ()), k).to(getattr(torch, case.dtype))
    ids = routed(case.tokens, case.top_k, experts, case.seed).to(PLACE.device)
    gates = normal(case.tokens, case.top_k).softmax(1) if case.gated else None
    return Mixture(x, weight, ids, gates, normal(experts, n) if case.bias else None, case.activation)


def run(call: Mixture, impl: str) -> torch.Tensor:
    return hb.experts_linear(*call[:4], bias=call.bias, activation=call.activation, impl=impl)


def check(call: Mixture, out: torch.Tensor) -> None:
    """Within the promise; the 16-bit computation of the same numbers is eager torch's, expert by expert."""
    wide = reference(call._replace(x=call.x.double()))
    linear_accuracy(out, in_half(call), wide).require(str(call.weight))


def in_half(call: Mixture) -> torch.Tensor:
    dtype, rows = call.x.dtype, call.x if call.x.ndim == 3 else call.x.unsqueeze(1).expand(-1, call.ids.shape[1], -1)
    values = call.weight.dequantize(dtype)
    y = rows.new_zeros(*call.ids.shape, values.shape[1])
    for expert in call.ids.unique().tolist():
        here = call.ids == expert
        bias = None if call.bias is None else call.bias[expert].to(dtype)
        y[here] = torch.nn.functional.linear(rows[here], values[expert], bias)
    y = y if call.activation is None else call.activation(y)
    return y if call.gates is None else (y * call.gates.to(dtype).unsqueeze(-1)).sum(1)


CASES = drawn(PLACE.size(120, 20))
#: K split, an expert a slot, sorted tokens; one projection and the other; blocks of 1, 4, 8 and 16 pairs in the tuned kernel;
#: prompts through dequantized experts.
MARKED = [
    Case("int4_g128", SHAPES[2], 1, PLACE.size(8, 2), activation=Activation("silu")),
    Case("int4_g128", SHAPES[2], 1, PLACE.size(8, 2), gated=True),
    Case("mxfp4", SHAPES[3], 16, 4, activation=OAI, bias=True),
    Case("mxfp4", SHAPES[3], 16, 4, gated=True, bias=True),
    Case("nvfp4", SHAPES[2], 100, 2, gated=True, dtype="float16"),
    Case("int4_g128", SHAPES[2], 16, PLACE.size(8, 2), gated=True),
    Case("int4_sym_g128", SHAPES[2], 64, PLACE.size(8, 2), activation=Activation("silu")),
    Case("nvfp4", SHAPES[0], 64, 2, gated=True, bias=True),
    Case("int4_g128", SHAPES[0], PLACE.size(1000, 30), 2, activation=OAI, bias=True),
    Case("mxfp4", SHAPES[0], PLACE.size(1000, 30), 2, gated=True, bias=True, act_order=True),
]


def attempt(case: Case, impl: str) -> tuple[Mixture, torch.Tensor]:
    """The call and its result; what is refused is counted and skipped."""
    call = build(case)
    try:
        with poisoned():
            out = run(call, impl)
    except hb.errors.Unsupported as error:
        TALLY.refused[impl, str(error)] += 1
        pytest.skip(str(error))
    TALLY.ran[impl] += 1
    return call, out


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(CASES)))
def test_mixtures_keep_their_promise(number: int, impl: str) -> None:
    check(*attempt(CASES[number], impl))


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(MARKED)))
def test_repeats_give_the_same_bits(number: int, impl: str) -> None:
    call, first = attempt(MARKED[number], impl)
    different = torch.zeros((), dtype=torch.bool, device=PLACE.device)
    with poisoned():
        for _ in range(PLACE.size(300, 3)):
            different |= differs(run(call, impl), first)
    assert not different


@pytest.mark.compile_first
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 7, 8, 9])
def test_a_graph_follows_its_ids(number: int, impl: str) -> None:
    call, _ = attempt(MARKED[number], impl)
    PLACE.sync()
    graph = Captured(lambda: run(call, impl))
    for seed in range(3):
        call.ids.copy_(routed(*call.ids.shape, call.weight.shape[0], seed))
        replayed: Any = graph.replay()
        assert same_bits(replayed, run(call, impl))
        check(call, replayed)


@pytest.mark.skipif(PLACE.dry, reason="an error on a CPU")
@pytest.mark.parametrize("number", range(len(MARKED)))
def test_ids_out_of_range_give_zeros(number: int, impl: str) -> None:
    call, _ = attempt(MARKED[number], impl)
    bad = call.ids.clone()
    bad[0] = torch.tensor([-1, call.weight.shape[0], 2**40, -(2**40)], device=bad.device).repeat(4)[: bad.shape[1]]
    out = run(call._replace(ids=bad), impl)
    assert not out[0].any()
    assert same_bits(out[1:], run(call, impl)[1:])


@pytest.mark.parametrize("tokens", [4, PLACE.size(100, 20), PLACE.size(1000, 30)])
@pytest.mark.parametrize(("fmt", "dtype"), [("int4_g128", "bfloat16"), ("mxfp4", "float16")])
def test_both_projections_are_one_after_the_other(fmt: str, dtype: str, tokens: int) -> None:
    """The same bits, in a graph, too, whether rows stay sorted in between or not; by the tuned or the portable kernel."""
    up = build(Case(fmt, (5, 256, 384), tokens, 2, dtype, activation=OAI, bias=True))
    down = build(Case("mxfp4", (5, 130, 128), tokens, 2, dtype, gated=True, bias=True))
    weights = [Projection([*call.weight.parts().values()], call.weight.format.name, call.bias) for call in (up, down)]
    assert down.gates is not None
    call = partial(experts_mlp, up.x, *weights, up.ids, down.gates, OAI)
    graph = Captured(call)
    for seed in range(3):
        up.ids.copy_(routed(tokens, 2, 5, seed))
        expected = run(down._replace(x=run(up, "auto"), ids=up.ids), "auto")
        assert same_bits(call(), expected)
        assert same_bits(graph.replay(), expected)


@pytest.mark.skipif(PLACE.dry, reason="a kernel of GPUs")
@pytest.mark.parametrize(("pairs", "experts"), [(65, 8), (16384, 128), (65536, 128), (100_001, 512), (32768, 3)])
def test_pairs_are_sorted_as_torch_sorts_them(pairs: int, experts: int) -> None:
    for seed in range(20):
        generator = torch.Generator(PLACE.device).manual_seed(seed)
        ids = torch.randint(-1, experts + 2, (pairs, 1), generator=generator, device=PLACE.device)
        order, _, starts, found, _ = sorted_pairs(ids, experts)
        keys, expected = ids.flatten().masked_fill((ids.flatten() < 0) | (ids.flatten() >= experts), experts).sort(stable=True)
        assert torch.equal(order.long(), expected)
        assert torch.equal(found.long(), keys)
        assert torch.equal(starts.long(), torch.searchsorted(keys, torch.arange(experts + 1, device=PLACE.device)))
