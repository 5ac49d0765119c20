"""The gated delta rule: published sizes against float64, the same bits each time and in any batch, and tokens of a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import same_bits
from gpu_place import PLACE
from test_gpu_graphs import Captured

from delta_cases import Case, Shape, drawn, error, truth
from halfbyte.ops.gated_delta import gated_delta

pytestmark = pytest.mark.compile_first

HEADS, DIM = PLACE.size(16, 2), PLACE.size(128, 16)
#: Key heads of one, two and three value heads; projections of each kind, and those that lie key head by key head.
SHAPES = [
    Shape(1, HEADS, 2, DIM, DIM),
    Shape(8, HEADS, 2, DIM, DIM, by_head=True),
    Shape(3, HEADS, 3, DIM, DIM, has_bias=True),
    Shape(5, HEADS, 1, DIM, DIM, taps=3),
    Shape(2, PLACE.size(30, 3), 1, PLACE.size(96, 12), PLACE.size(192, 24)),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def on_device(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Case:
    return drawn(shape, dtype, PLACE.device, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_further_from_the_truth_than_the_modules(shape: Shape, dtype: torch.dtype) -> None:
    case = on_device(shape, dtype)
    expected, found, modules = truth(case), case.run("auto"), case.run("reference")
    for one, other, wanted in zip(found, modules, expected, strict=True):
        assert error(one, wanted) <= 1.1 * error(other, wanted) + 1e-6
    assert torch.equal(found[1], modules[1])


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_the_same_bits_each_time_and_alone(shape: Shape) -> None:
    """Many times, so that programs of a key head come in another order; torch code on a CPU sums up by what a batch holds."""
    case = on_device(shape, torch.bfloat16)
    first = case.run("auto")
    for _ in range(PLACE.size(200, 2)):
        assert all(map(same_bits, first, case.run("auto")))
    for row in range(PLACE.size(shape.batch, 0)):
        assert all(same_bits(one[row : row + 1], other) for one, other in zip(first, case.row(row).run("auto"), strict=True))


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_tokens_of_a_graph_are_those_of_calls(shape: Shape) -> None:
    """States in place, token after token; counters are zero again behind each."""
    cases = [on_device(shape, torch.bfloat16, seed) for seed in range(3)]
    eager, replayed = ([cases[0].conv_state.clone(), cases[0].state.clone()] for _ in range(2))
    inputs = [t.clone() for t in cases[0].projections]
    gated_delta(*inputs, cases[0].weights, *(t.clone() for t in replayed))  # type: ignore[misc]  # compiles
    PLACE.sync()
    graph = Captured(lambda: gated_delta(*inputs, cases[0].weights, *replayed))  # type: ignore[misc]
    for i in range(PLACE.size(30, 6)):
        for mine, t in zip(inputs, cases[i % 3].projections, strict=True):
            mine.copy_(t)
        out = gated_delta(*inputs, cases[0].weights, *eager)  # type: ignore[misc]
        assert same_bits(graph.replay(), out)
        assert all(map(same_bits, replayed, eager))


def test_more_sequences_than_programs_run_at_once() -> None:
    """Of which some are NaN: others are as they are without."""
    case = on_device(Shape(PLACE.size(96, 6), HEADS, 2, DIM, DIM), torch.bfloat16)
    clean = case.run("auto")
    case.state[1::2] = torch.nan
    found = case.run("auto")
    assert bool(found[0][1::2].isnan().all())
    assert all(same_bits(one[::2], other[::2]) for one, other in zip(found, clean, strict=True))
