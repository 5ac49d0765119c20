"""The kernel that merges parts, interpreted, against the specification."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.decode.merge import launch
from halfbyte.reference.merge import merge_states

#: numpy warns of what a GPU computes silently, and as meant: the logarithm of 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("parts", "shape"), [(1, (1, 1, 1, 1)), (2, (2, 3, 5, 80)), (3, (1, 2, 33, 64)), (2, (1, 1, 2, 256))])
def test_parts_are_merged_as_specified(parts: int, shape: tuple[int, ...], sinks: bool) -> None:
    """Parts of other strides; what a part did not see is NaN; a row that nobody saw is 0 and -inf."""
    rng = torch.Generator().manual_seed(parts)
    b, heads, queries, dim = shape
    outs = [torch.randn(b, queries, heads, dim, generator=rng).bfloat16().transpose(1, 2) for _ in range(parts)]
    lses = [20 * torch.randn(b, queries, heads, generator=rng).transpose(1, 2) for _ in range(parts)]
    for out, lse in zip(outs, lses, strict=True):
        hidden = torch.rand(lse.shape, generator=rng) < 0.3
        lse[hidden], out[hidden] = -torch.inf, torch.nan
    logits = torch.randn(heads, generator=rng) if sinks else None
    out, lse = torch.full(shape, torch.nan, dtype=torch.bfloat16), torch.full(shape[:3], torch.nan)
    launch(outs, lses, logits, out, lse)
    truth, truth_lse = merge_states(outs, lses, logits)
    torch.testing.assert_close(lse, truth_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, truth, rtol=2**-8, atol=1e-6)
    assert bool((out[lse == -torch.inf] == 0).all())
