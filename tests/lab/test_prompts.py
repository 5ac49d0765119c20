"""The study of prompts: what it runs, that a wrong result gets no time, and how its figures are told."""

from __future__ import annotations

import pytest
from benches import GPU, quick

from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import prompts


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> prompts.CaseJob:
    monkeypatch.setattr(prompts, "DIM", 64)
    monkeypatch.setattr(prompts, "KV_HEADS", 1)
    monkeypatch.setattr(prompts, "Q_HEADS", 2)
    return prompts.CaseJob(2, 20, 33)


def test_it_runs_on_a_cpu(small: prompts.CaseJob) -> None:
    measured = quick().run([small])
    assert [(r.formats, r.implementation) for r in measured] == [
        (formats, name) for formats in prompts.FORMATS for name in (prompts.OURS, prompts.TORCH)
    ]
    assert all(r.seconds and r.error is not None and not r.refused for r in measured)
    assert measured[0].shape == {"B": 2, "L": 20, "P": 33, "H": 1, "Hq": 2, "D": 64}
    assert len(quick(pattern="int4 halfbyte").run([small])) == 1


def test_the_products_of_what_is_visible() -> None:
    """By hand: 3 queries behind 2 tokens see 3 + 4 + 5 keys; each of 32 heads multiplies 128 numbers of each twice."""
    assert prompts.CaseJob(1, 3, 2).products == 12 * 32 * 128 * 2 * 2


def test_cases_of_a_gpu() -> None:
    assert [job.name for job in prompts.jobs(quick(GPU))] == ["prompts, 1 x 128 behind 32,768"]
    names = [job.name for job in prompts.jobs(Session(Options(), GPU))]
    assert len(names) == len(set(names)) == len(prompts.CASES)
    assert names[0] == "prompts, 1 x 1,024"
