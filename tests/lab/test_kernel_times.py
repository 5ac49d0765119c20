"""The kernels' own times, from a profiler that is made up: what is traced, how it is taken apart, what is said without."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benches import BRIEF, CPU, GPU
from torch.profiler import ProfilerActivity

from halfbyte_lab import suites
from halfbyte_lab.cases import append_case, decode_cases, linear_cases, qkv_cases, qkv_layers
from halfbyte_lab.cases.linear_targets import LinearCase
from halfbyte_lab.measure import cupti, decode, linear, session, timing
from halfbyte_lab.measure.caches import DecodeCase
from halfbyte_lab.measure.cupti import Kernel, seconds_of, traced
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.measure.timing import Work
from halfbyte_lab.studies import int4_gqa, int4_ladder, int8_granularity, int8_splitk, w4a16_splitk

HERE = torch.device("cuda:0")
SPIN = "void at::cuda::(anonymous namespace)::spin_kernel(long)"


class FakeProfiler:
    """Remembers what is "launched", each kernel a microsecond after the other; gives it as torch.profiler would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, float]] = []
        self.profiles, self.lost, self.reversed = 0, 0, False
        monkeypatch.setattr(cupti, "profile", self.profile)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: self.launch(SPIN, 7.0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(cupti, "supported_activities", lambda: {ProfilerActivity.CUDA})

    def launch(self, name: str, us: float = 1.0) -> None:
        self.ran.append((name, us))

    def kernel(self, name: str, us: float = 1.0) -> Callable[[], None]:
        return lambda: self.launch(name, us)

    @contextlib.contextmanager
    def profile(self, activities: Sequence[ProfilerActivity]) -> Iterator[SimpleNamespace]:
        assert list(activities) == [ProfilerActivity.CUDA]
        self.profiles += 1
        self.ran.clear()
        yield SimpleNamespace(events=self.events)

    def events(self) -> list[Any]:
        kept = self.ran[self.lost if self.profiles == 1 else 0 :]
        made = [event(name, 100.0 * i, us) for i, (name, us) in enumerate(kept)]
        # Not every event is a kernel, and they come in any order.
        return [event("cudaLaunchKernel", 0.0, 5.0, "DeviceType.CPU"), event("Memset (Device)", 1.0, 5.0), *reversed(made)]


def event(name: str, start: float, us: float, kind: str = "DeviceType.CUDA") -> Any:
    span = SimpleNamespace(start=start, end=start + us, elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=kind, time_range=span, is_user_annotation=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProfiler]:
    cupti.unavailable.cache_clear()
    monkeypatch.setattr(session, "QUICK", BRIEF)
    yield FakeProfiler(monkeypatch)
    cupti.unavailable.cache_clear()


def names(calls: cupti.Calls) -> list[list[str]]:
    return [[kernel.name for kernel in kernels] for kernels in calls]


def test_kernels_are_taken_apart_by_work_and_call(fake: FakeProfiler) -> None:
    two = [fake.kernel("a", 2.0), lambda: (fake.launch("a", 3.0), fake.launch("b", 4.0))]
    found = traced({"two": Work(two, before=fake.kernel("restore")), "one": Work([fake.kernel("c", 1.0)], before=fake.kernel("r"))})
    assert fake.profiles == 1
    assert names(found["two"]) == [["a"], ["a", "b"]]  # without what puts back, and without what marks
    assert found["one"] == [[Kernel("c", 1e-6)]]
    assert seconds_of(found["two"]) == pytest.approx(4.5e-6)  # the median of 2 and 7
    assert seconds_of([[], []]) is None
    assert seconds_of([]) is None


def test_kernels_that_overlap_share_the_time(fake: FakeProfiler) -> None:
    """Each counts from where those before it have ended; the fake starts them 100 us apart."""
    work = [("a", 100.0), ("b", 250.0), ("inside", 40.0), ("late", 60.0)]

    def run() -> None:
        for name, us in work:
            fake.launch(name, us)

    times = {k.name: round(1e6 * k.seconds) for k in cupti.busy_parts_of(run)}
    assert times == {"a": 100, "b": 250, "inside": 0, "late": 10}
    assert [k.seconds for k in cupti.kernels_of(run)] == pytest.approx([1e-4, 2.5e-4, 4e-5, 6e-5])


def test_works_over_one_rotation_find_none_of_it_in_the_cache(fake: FakeProfiler) -> None:
    rotation = [fake.kernel(f"buffer {i}") for i in range(20)]
    found = traced({"a": Work(rotation), "b": Work(rotation)})
    order = [name for calls in found.values() for (name,) in names(calls)]
    assert order == [f"buffer {i % 20}" for i in range(2 * cupti.CALLS)]


def test_launches_are_kept_apart_as_the_work_says(fake: FakeProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_PDL", "1")
    call = [lambda: fake.launch(os.environ["HALFBYTE_PDL"])]
    found = traced({"apart": Work(call, paired=False), "as it is": Work(call), "over": Work(call, paired=True)})
    assert [names(calls) for calls in found.values()] == [[["0"]], [["1"]], [["1"]]]


def test_what_the_profiler_misses_at_its_start_is_traced_again(fake: FakeProfiler) -> None:
    fake.lost = 2
    assert names(traced({"it": Work([fake.kernel("a")])})["it"]) == [["a"]]
    assert fake.profiles == 2


def test_without_all_marks_there_is_nothing(fake: FakeProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    assert traced({"it": Work([fake.kernel("a")])}) == {}
    assert cupti.unavailable(HERE) == "CUPTI gives no record of a kernel; another profiler, such as nsys or ncu, may hold it"


def test_it_is_said_why_there_are_no_times(fake: FakeProfiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def because(**replaced: Any) -> str:
        cupti.unavailable.cache_clear()
        with monkeypatch.context() as patch:
            for name, value in replaced.items():
                patch.setattr(cupti, name, value)
            return cupti.unavailable(HERE)

    fails = Mock(side_effect=RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nmore"))
    assert because() == ""
    assert because(supported_activities=lambda: {ProfilerActivity.CPU}) == "this torch is built without CUPTI"
    assert because(profile=fails) == "torch.profiler fails: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert because() == "torch sees no NVIDIA GPU"


def test_a_session_traces_on_a_gpu_that_lets_it(fake: FakeProfiler, capsys: pytest.CaptureFixture[str]) -> None:
    work = {"it": Work([fake.kernel("a", 3.0)])}
    on, off, cpu = (Session(Options(quick=True, kernels=k), CPU) for k in (True, False, True))
    on.device = off.device = GPU
    assert on.kernel_seconds(work) == {"it": pytest.approx(3e-6)}
    assert off.kernel_seconds(work) == {}
    assert off.traced(work).keys() == work.keys()  # what counts launches asks for itself
    assert (cpu.no_kernel_times, cpu.kernel_seconds(work)) == ("there is no GPU here", {})
    profiles = fake.profiles
    assert on.kernel_seconds({}) == {}
    assert fake.profiles == profiles
    assert on.kernel_seconds({"big one": Work([Mock(side_effect=torch.OutOfMemoryError("full"))])}) == {}
    assert "no kernel times of big one: OutOfMemoryError: full" in capsys.readouterr().err
    suites.run(cpu, [])
    assert "no times of kernels by CUPTI: there is no GPU here" in capsys.readouterr().out
    suites.run(off, [])
    assert "CUPTI" not in capsys.readouterr().out


SMALL = DecodeCase("small", DecodeShape(2, 4, 2, 32, 48), baselines=True)
#: Every kind of job that asks for the times of its kernels. Variants of the fused projection count launches: test_qkv.py.
JOBS: dict[str, Callable[[Session], Sequence[session.Job]]] = {
    "attention of given sizes": lambda s: decode.cases(s, [SMALL.shape], ["int8"]),
    "products of given sizes": lambda s: linear.cases(s, [linear.LinearShape(1, 64, 128)], ["nf4"]),
    "attention with bars, and 16 bits": lambda _: [decode_cases.AttentionJob(SMALL, ("int8", "int4"), ("auto",))],
    "append": lambda _: [append_case.AppendJob(SMALL, ("int4",))],
    "products with bars, and peers": lambda _: [
        linear_cases.LayerJob(LinearCase(64, 256, "small", rows=(1, 4), few=(1,)), ("auto",))
    ],
    "one launch for three": lambda _: [
        qkv_cases.FusedJob(qkv_layers.AttentionShape("small layer", 128, 4, 2, 32, 24), "auto", (1,), ("nf4",))
    ],
    "int4-ladder": lambda _: [int4_ladder.LadderJob(2, 48)],
    "int4-gqa": lambda _: [int4_gqa.BatchJob(2, 64, ("bf16", "int4"))],
    "int8-splitk": lambda _: [int8_splitk.AttendJob(SMALL, baselines=True)],
    "int8-granularity": lambda _: [int8_granularity.CaseJob("GQA", DecodeShape(int8_granularity.DISTINCT, 4, 2, 32, 48))],
    "w4a16-splitk": lambda _: [w4a16_splitk.SizeJob(128, 128, (1,))],
}


@pytest.mark.parametrize("jobs", JOBS.values(), ids=JOBS)
def test_every_time_comes_with_that_of_its_kernels(
    jobs: Callable[[Session], Sequence[session.Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for once samples are taken, of what is right and of nothing else, by calls that can be made again."""
    asked, sampled = 0, 0
    sample = timing._CpuSampler.sample

    def sampling(sampler: Any) -> float:
        nonlocal sampled
        sampled += 1
        return sample(sampler)

    def known(_: Session, works: dict[str, Work]) -> dict[str, float | None]:
        nonlocal asked, sampled
        assert not works or sampled, "before anything was timed"
        asked, sampled = asked + len(works), 0
        for work in works.values():  # as they are traced
            if work.before is not None:
                work.before()
            for call in cupti._chosen(work.fns, 1):
                call()
        return dict.fromkeys(works, 2e-6)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(session, "QUICK", BRIEF)
    monkeypatch.setattr(timing._CpuSampler, "sample", sampling)
    monkeypatch.setattr(Session, "kernel_seconds", known)
    s = Session(Options(quick=True, threads=1), dataclasses.replace(CPU, memory_bytes=2**33))
    measured = s.run(jobs(s))
    timed = [r for r in measured if r.seconds]
    assert timed, [r.refused for r in measured]
    assert {r.kernel_seconds for r in timed} == {2e-6}
    assert {r.kernel_seconds for r in measured if r.refused} <= {None}
    assert asked >= len(timed)  # the ladder keeps the fastest peer only
