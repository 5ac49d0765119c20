"""The router of a mixture on the GPU: against float64 by hand, determinism, and a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import same_bits
from gpu_place import PLACE

from halfbyte.ops.route import route
from route_cases import PUBLISHED, by_hand, draw

pytestmark = pytest.mark.compile_first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_routers(name: str, dtype: torch.dtype) -> None:
    experts, routing, has_bias = PUBLISHED[name]
    logits, bias = draw(experts, has_bias, dtype, tokens=PLACE.size(1000, 5))
    wanted, weights = by_hand(logits, routing, bias)
    on_device = logits.to(PLACE.device), routing, None if bias is None else bias.to(PLACE.device)
    ids, gates = route(*on_device)
    assert torch.equal(ids.cpu(), wanted)
    torch.testing.assert_close(gates.cpu().double(), weights, rtol=1e-5, atol=1e-9)
    assert all(map(same_bits, (ids, gates), route(*on_device)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_ids_are_experts_whatever_the_logits_are(value: float) -> None:
    for experts, routing, has_bias in PUBLISHED.values():
        logits, bias = (None if t is None else t.to(PLACE.device) for t in draw(experts, has_bias, torch.float32))
        logits[0], logits[1, 3:] = value, value
        ids = route(logits, routing, bias)[0].cpu()
        assert 0 <= int(ids.min()) <= int(ids.max()) < experts
        assert all(len(set(row)) == routing.top_k for row in ids.tolist())


@pytest.mark.skipif(PLACE.dry, reason="needs a GPU")
def test_in_a_graph_behind_its_logits() -> None:
    """Launched behind a GEMM, which it may start ahead of the end of: a replay reads new logits."""
    experts, routing, _ = PUBLISHED["qwen3_30b"]
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 2048, generator=rng).bfloat16().to(PLACE.device) for n in (8, experts))
    route(x @ weight.T, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = route(x @ weight.T, routing)
    for _ in range(20):
        x.copy_(torch.randn(8, 2048, generator=rng))
        graph.replay()
        assert all(map(same_bits, results, route(x @ weight.T, routing)))
