"""`attention_varlen` by the portable kernel, interpreted: within the promise, and where batches are even as `decode_attention`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfbyte.ops import decode_attention as on_gpu
from test_attention_varlen import OPTIONS, assert_same, in_chunks
from varlen_cases import BAD_BOUNDS, MIXED, WithExactTokens, batch_of
from watched import watched

#: numpy warns of what a GPU computes silently, and as meant: log2 of 0, NaN that was put there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: More sequences than one load takes, most of them decoding.
MANY = [(1, 1 + 3 * b % 40) for b in range(132)] + [(18, 30), (0, 0), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_a_mixed_batch(options: str) -> None:
    dtype = [torch.float16, torch.bfloat16][len(options) % 2]
    batch_of(MIXED, dtype=dtype, padding=21).check("triton", **OPTIONS[options])


@pytest.mark.parametrize("heads", [(6, 2), (1, 1), (40, 1)])
def test_heads(heads: tuple[int, int]) -> None:
    """With more query heads than rows of a tile, too, so that a token's rows lie in two."""
    batch_of(MIXED[2:], "int4", "int8", heads=heads, rotate_keys=True, dtype=torch.float16, padding=2).check("triton")


@pytest.mark.slow
def test_many_sequences() -> None:
    batch_of(MANY, heads=(2, 1), dtype=torch.float16, padding=1).check("triton")


def test_few_rows_are_split() -> None:
    """A decode beside a short prompt over many tokens: a second kernel adds up, sinks included."""
    batch = batch_of([(1, 700), (3, 3)], heads=(2, 1), dtype=torch.float16, padding=1)
    batch.check("triton", sinks=torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("options", ["plain", "window"])
def test_exact_prompts(options: str) -> None:
    batch_of(MIXED, "int4", "int4", dtype=torch.bfloat16, padding=3).check("triton", exact=True, **OPTIONS[options])


@pytest.mark.parametrize("prefill", ["cache", "exact"])
@pytest.mark.parametrize("sequences", [MIXED, [(3, 40), (3, 13), (3, 3)]], ids=["mixed", "even"])
def test_sink_and_recent_tokens(sequences: list[tuple[int, int]], prefill: str) -> None:
    """Of short sequences no query reads codes."""
    WithExactTokens.of(sequences, 4, 12, dtype=torch.bfloat16).check("triton", prefill, **OPTIONS["everything"])


@pytest.mark.parametrize("most", [1, 3])
def test_even_batches_take_the_kernels_of_decoding(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With empty sequences behind; what the bounds are is not looked at."""
    batch = batch_of([(most, 40), (most, 17), (most, most), (0, 0)], dtype=torch.float16, padding=most)
    expected = batch.attend(impl="reference")
    problems = watched(monkeypatch, on_gpu, "_plans", lambda p, *_: p)
    out, lse = batch.attend(impl="triton")
    assert [p.ragged for p in problems] == [False]
    torch.testing.assert_close(out, expected[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-4)
    into = torch.empty_like(out)
    assert_same((batch.attend(impl="triton", out=into)[0], into), (out, out))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_bits_do_not_depend_on_chunks_if_asked(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"impl": "triton", "deterministic_batch": True, **OPTIONS[options]}
    prompt = [(50, 50), (3, 60), (1, 77)]
    whole = batch_of(prompt[:1], dtype=torch.bfloat16).attend(**given)
    assert_same(in_chunks(batch_of(prompt[:1], page=64, dtype=torch.bfloat16), 13, **given), whole)
    mixed = batch_of(prompt, dtype=torch.bfloat16).attend(**given)
    assert_same(tuple(x[:50] for x in mixed), whole)
    others = batch_of(prompt, dtype=torch.bfloat16, cut=slice(1, None)).attend(**given)
    assert_same(tuple(x[50:] for x in mixed), others)
    # Two splits of a sequence, and a workspace for a few tokens at a time.
    monkeypatch.setattr(on_gpu, "MOST_FLOATS", 23 * 4 * 2 * (64 + 2))
    roomy = batch_of(prompt, dtype=torch.bfloat16)
    table = torch.nn.functional.pad(roomy.view.page_table, (0, 64))  # type: ignore[arg-type]
    assert_same(roomy.attend(**given), mixed)
    roomy.view = roomy.view._replace(page_table=table)
    assert_same(roomy.attend(**given), mixed)


def test_bounds_that_no_engine_makes_reach_no_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody looks at them."""
    batch = batch_of(MIXED, dtype=torch.float16)
    rows = torch.full((3, *batch.q.shape), torch.nan, dtype=torch.float16)
    rows[1] = batch.q
    batch.q = rows[1]
    for bounds in BAD_BOUNDS:
        batch.bounds = torch.tensor(bounds, dtype=torch.int32)
        memory = torch.full_like(rows, 7.0)
        on_gpu.run_on_gpu(batch.call("triton"), into=memory[1].transpose(0, 1)[None])
        assert bool((memory[::2] == 7).all())
        assert not memory.isnan().any()
