"""The study of prompts: what it runs, that a wrong result gets no time, and how its figures are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfbyte.device import Device, describe
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import prompts, study

GPU = Device("cuda", "fake", memory_bytes=2**36, cache_bytes=0, cores=1, threads=1, index=0)


def session(device: Device | None = None, pattern: str = "", quick: bool = True) -> Session:
    return Session(Options(quick=quick, pattern=pattern, threads=1), device or describe("cpu"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> prompts.CaseJob:
    monkeypatch.setattr(prompts, "DIM", 64)
    monkeypatch.setattr(prompts, "KV_HEADS", 1)
    monkeypatch.setattr(prompts, "Q_HEADS", 2)
    return prompts.CaseJob(2, 20, 33)


def test_it_runs_on_a_cpu(small: prompts.CaseJob) -> None:
    measured = session().run([small])
    assert [(r.formats, r.implementation) for r in measured] == [
        (formats, name) for formats in prompts.FORMATS for name in (prompts.OURS, prompts.TORCH)
    ]
    assert all(r.seconds and r.error is not None and not r.refused for r in measured)
    assert measured[0].shape == {"B": 2, "L": 20, "P": 33, "H": 1, "Hq": 2, "D": 64}
    assert len(session(pattern="int4 halfbyte").run([small])) == 1


def test_a_wrong_result_gets_no_time(small: prompts.CaseJob, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prompts.Chunk.ours
    monkeypatch.setattr(prompts.Chunk, "ours", lambda self, cache, impl="auto": 1.05 * right(self, cache, impl))
    wrong = [r for r in session().run([small]) if r.implementation == prompts.OURS]
    assert [r.seconds for r in wrong] == [None, None]
    assert "exceeds the allowed" in wrong[0].refused


def test_the_products_of_what_is_visible() -> None:
    """By hand: 3 queries behind 2 tokens see 3 + 4 + 5 keys; each of 32 heads multiplies 128 numbers of each twice."""
    assert prompts.CaseJob(1, 3, 2).products == 12 * 32 * 128 * 2 * 2


def test_cases_of_a_gpu() -> None:
    assert [job.name for job in prompts.jobs(session(GPU))] == ["prompts, 1 x 128 behind 32,768"]
    names = [job.name for job in prompts.jobs(session(GPU, quick=False))]
    assert len(names) == len(set(names)) == len(prompts.CASES)
    assert names[0] == "prompts, 1 x 1,024"


def test_how_it_is_told() -> None:
    here, measured = session(), list[Record]()
    for case in prompts.CASES:
        job = prompts.CaseJob(*case)
        for formats in prompts.FORMATS if job.past else prompts.FORMATS[:1]:
            for name, seconds in ((prompts.OURS, 2e-3), (prompts.PORTABLE, 9e-3), (prompts.TORCH, 1e-3 if job.past else 2e-3)):
                shape = {"B": job.batch, "L": job.new, "P": job.past, "H": 8, "Hq": 32, "D": 128}
                blank = Record(prompts.OP, shape, formats, name, 1, here.environment, case=job.name)
                measured.append(replace(blank, seconds=seconds, p10=seconds, p90=seconds, error=1e-3))
    headers, rows = prompts.table(measured)
    assert len(rows) == len(measured) == 3 * (3 + 2 * 4)
    assert all(len(row) == len(headers) for row in rows)
    assert rows[1] == ("prompts, 1 x 1,024", "", prompts.PORTABLE, "9,000.0", "0.22", "0.955", "0.001")
    assert prompts.says(measured) == [
        "Attention of a prompt over itself 1.00 times as fast as torch in 16 bits, behind a packed past 0.50 times "
        "as fast as torch in 16 bits, 4.5 times as fast as the portable kernel."
    ]
    assert "1 x 128 behind 32,768, int4" in prompts.drawn(measured)[0]
    assert prompts.says([]) == prompts.drawn([]) == []


def test_it_is_found_by_its_name() -> None:
    assert study("prompts") is prompts.STUDY
    assert prompts.STUDY.asks
