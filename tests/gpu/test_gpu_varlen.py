"""What engines call: mixed batches over pages of bytes, by what `auto` picks and by the portable kernel; appends by slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_place import PLACE
from test_gpu_graphs import Captured

from halfbyte import engine
from halfbyte.reference.rope import rope_tables
from test_attention_varlen import OPTIONS, assert_same, in_chunks
from varlen_cases import MIXED, Batch, WithExactTokens, batch_of

#: A prompt, a chunk far into one, and decodes behind short and long ones.
SERVED = [(PLACE.size(700, 20), PLACE.size(700, 20)), (PLACE.size(300, 9), PLACE.size(5000, 60)), (0, 0)] + [
    (1, 1 + 977 * b % PLACE.size(3000, 50)) for b in range(PLACE.size(62, 3))
]
FORMATS = [("int8", "int4_g32"), ("int4", "int4"), ("fp8", "int8"), ("bf16", "bf16")]


def batch(sequences: list[tuple[int, int]], formats: tuple[str, str], **options: Any) -> Batch:
    return batch_of(sequences, *formats, heads=(8, 2), dim=128, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("formats", FORMATS)
def test_a_served_batch(formats: tuple[str, str], impl: str) -> None:
    batch(SERVED, formats, padding=19).check(impl, device=PLACE.device)
    batch(SERVED[1:], formats, page=64).check(impl, device=PLACE.device, window=200, sinks=torch.ones(8))


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: str, impl: str) -> None:
    given = {name: x.repeat(2) if isinstance(x, torch.Tensor) else x for name, x in OPTIONS[options].items()}
    batch(MIXED, ("int8", "int4_g32"), rotate_keys=True, padding=3).check(impl, device=PLACE.device, **given)


@pytest.mark.parametrize("window", [None, 100])
def test_exact_prompts(window: int | None, impl: str) -> None:
    batch(SERVED, ("int4", "int4"), padding=5).check(impl, exact=True, device=PLACE.device, window=window)


@pytest.mark.parametrize("prefill", ["cache", "exact"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("most", [0, 1, 4])
def test_sink_and_recent_tokens(most: int, window: int | None, prefill: str, impl: str) -> None:
    """Ragged (most 0) and even batches, of whose short sequences no query reads codes."""
    sequences = [(most, most + 99 * b) for b in range(9)] if most else SERVED[1:9]
    options: dict[str, Any] = {"heads": (8, 2), "dim": 128, "dtype": torch.bfloat16, "rotate_keys": True}
    exact = WithExactTokens.of(sequences, 4, 64, ("int8", "int4_g32"), **options)
    exact.check(impl, prefill, PLACE.device, window=window)


@pytest.mark.parametrize("most", [1, 4])
def test_even_batches(most: int, impl: str) -> None:
    """As `decode_attention` takes them, and what it writes it writes where it was told to."""
    even = batch([(most, 40 + 99 * b) for b in range(9)] + [(0, 0)], ("int8", "int4_g32"), padding=most)
    even.check(impl, device=PLACE.device)
    there = even.to(PLACE.device)
    expected = there.attend(impl=impl)[0]
    out = torch.full_like(expected, torch.nan)
    assert there.attend(impl=impl, out=out)[0] is out
    assert_same((out,), (expected,))


@pytest.mark.parametrize(("formats", "window"), [(FORMATS[0], 60), (FORMATS[1], None), (FORMATS[3], 1100)])
def test_bits_do_not_depend_on_chunks_if_asked(formats: tuple[str, str], window: int | None, impl: str) -> None:
    """By the tuned kernel and by the portable one: at once, in chunks over other pages, token after token, next to others."""
    prompt = [(PLACE.size(1100, 40), PLACE.size(1100, 40)), (3, 70), (1, 77)]
    given = {"impl": "gluon" if impl == "auto" else impl, "deterministic_batch": True, "window": window}
    whole = batch(prompt[:1], formats).to(PLACE.device).attend(**given)
    for page, chunk in ((64, 33), (16, 1)):
        assert_same(in_chunks(batch(prompt[:1], formats, page=page).to(PLACE.device), chunk, **given), whole)
    mixed = batch(prompt, formats).to(PLACE.device).attend(**given)
    assert_same(tuple(x[: prompt[0][0]] for x in mixed), whole)


@pytest.mark.parametrize("exact", [False, True])
def test_a_graph_follows_the_bounds(exact: bool, impl: str) -> None:
    """Recorded for one batch, replayed for another of as many sequences and tokens, padding included."""
    first = batch([(19, 119), (33, 170), (1, 141), (0, 0), (7, 150), (1, 1)], FORMATS[0], padding=9).to(PLACE.device)
    then = batch([(1, 41), (0, 0), (7, 150), (1, 1), (30, 90), (20, 20)], FORMATS[0], padding=11).to(PLACE.device)
    first.most = then.most = 33
    given: dict[str, Any] = {"impl": impl, "prefill": "exact", "k": first.k, "v": first.v} if exact else {"impl": impl}
    out = torch.empty_like(first.q)
    first.attend(out=out, **given)
    PLACE.sync()
    graph = Captured(lambda: first.attend(out=out, **given))
    expected = then.attend(**given | ({"k": then.k, "v": then.v} if exact else {}))
    first.memory[: len(then.memory)] = then.memory
    assert first.view.page_table is not None
    assert then.view.page_table is not None
    first.view.page_table[:, : then.view.page_table.shape[1]] = then.view.page_table
    for mine, theirs in ((first.q, then.q), (first.k, then.k), (first.v, then.v), (first.bounds, then.bounds)):
        mine.copy_(theirs)
    first.view.lengths.copy_(then.view.lengths)
    replayed = graph.replay()
    assert_same(tuple(replayed), expected)
    assert_same((out,), expected[:1])


@pytest.mark.parametrize("formats", [*FORMATS, ("int8_g32", "fp8")])
def test_appends_by_slot_store_what_a_cpu_stores(formats: tuple[str, str]) -> None:
    layout, tokens = engine.PageLayout(*formats, 128), PLACE.size(500, 20)
    memory = torch.full((64, 2, 16, layout.token_head_bytes), 0xFF, dtype=torch.uint8)
    k, v, q = (torch.randn(tokens, heads, 128).bfloat16() for heads in (2, 2, 8))
    slots = torch.randperm(1024)[:tokens].masked_fill(torch.rand(tokens) < 0.1, -1)
    rope = rope_tables(torch.arange(tokens), 128)
    found = []
    for device in ("cpu", PLACE.device):
        pages, (cos, sin) = memory.to(device, copy=True), (x.to(device) for x in rope)
        rotated = engine.append_slots(
            k.to(device), v.to(device), *layout.buffers(pages), slots.to(device), rope=(cos, sin), q=q.to(device)
        )
        assert rotated is not None
        found.append((pages.cpu(), rotated.cpu()))
    assert_same(*found)
