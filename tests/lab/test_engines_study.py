"""The study of engines: what it runs, that a wrong result gets no time, and how its figures are told."""

from __future__ import annotations

import pytest
import torch
from benches import GPU, quick

from halfbyte.errors import InvalidArgument
from halfbyte_lab.baselines import vllm_kernels
from halfbyte_lab.cases import engine_step
from halfbyte_lab.cases.engine_step import Dense, Packed, Requests, Step
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import engines
from watched import watched

MIXED = Requests(3, 20, prompt=6, past=15)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("DIM", 64), ("KV_HEADS", 1), ("Q_HEADS", 2)):
        monkeypatch.setattr(engines, name, size)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [Requests(2, 20), MIXED])
def test_it_runs_on_a_cpu(requests: Requests) -> None:
    measured = quick(pattern="int4|sdpa$").run([engines.StepJob(requests)])
    ours = [engines.STEP, engines.ATTENTION] + [engines.DECODE] * (not requests.prompt) + [engines.INVARIANT]
    expected = [(formats, f"halfbyte {part}") for formats in engines.FORMATS[1:] for part in ours]
    assert [(r.formats, r.implementation) for r in measured] == [*expected, ("bf16", "torch sdpa")]
    assert all(r.seconds and r.error is not None and not r.refused for r in measured)
    sizes = {"B": requests.decodes, "T": 20, "L": requests.prompt, "P": requests.past}
    assert measured[0].shape == {**sizes, "page": 16, "Hq": 2, "H": 1, "D": 64}
    tokens = 2 * 20 if not requests.prompt else 3 * 20 + 21
    assert measured[0].nbytes == tokens * (64 + 2 + 32 + 2 * 2 * 2)  # int8 and its scale; int4 with two scales and offsets


def test_what_is_said_of_deterministic_batch_ran_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = watched(monkeypatch, engine_step, "attention_varlen", lambda *_, deterministic_batch, **options: deterministic_batch)
    for name, expected in ((engines.ATTENTION, {False}), (engines.INVARIANT, {True})):
        asked.clear()
        assert quick(pattern=f"int8 halfbyte {name}$").run([engines.StepJob(MIXED)])
        assert set(asked) == expected


def test_a_step_stores_its_tokens() -> None:
    """An append that went astray would not be noticed by attention over tokens that lie there already."""
    step = Step.random(MIXED, 2, 1, 64, torch.device("cpu"))
    cache = Packed(step, "int8")
    step.fill(cache)
    filled = cache.memory.clone()
    for request, new in enumerate(MIXED.queries):
        length = MIXED.lengths[request]
        lost = engine_step.slots_of(step.page_table[request], length, 16)[-new:]
        cache.append(torch.zeros(new, 1, 64), torch.zeros(new, 1, 64), lost)
    assert not torch.equal(cache.memory, filled)
    cache.append(step.k, step.v, step.slots)
    assert torch.equal(cache.memory, filled)


def test_all_caches_hold_the_same_tokens() -> None:
    step = Step.random(MIXED, 2, 1, 64, torch.device("cpu"))
    cache = Packed(step, "int8")
    step.fill(cache)
    dense = Dense(step, "", torch.nn.functional.scaled_dot_product_attention, Dense.tokens(step))
    for request, length in enumerate(MIXED.lengths):
        for packed, plain in zip(cache.held(request, length), dense.held(request, length), strict=True):
            assert packed.shape == plain.shape == (1, 1, length, 64)
            assert (packed - plain).norm() < 0.01 * plain.norm()


def test_cases_of_a_gpu() -> None:
    names = [job.name for job in engines.jobs(Session(Options(), GPU))]
    assert len(names) == len(set(names)) == len(engines.CASES) + 1
    assert names[1] == "engines, 64 x 8,192 + prompt of 512 behind 3,584, pages of 16"
    assert len(engines.jobs(quick(GPU))) == 3


def test_sources_without_the_kernels_are_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SOURCES", str(tmp_path))
    assert vllm_kernels.missing() == ""
    with pytest.raises(InvalidArgument, match=r"lacks .*triton_attention_helpers\.py"):
        vllm_kernels.kernels()
