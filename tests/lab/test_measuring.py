"""The core of the bench: what is timed, what is refused, what reaches the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from benches import BRIEF, CPU, GPU, make_tables, quick

from halfbyte import device as device_module
from halfbyte.cache import KVCache
from halfbyte.device import describe
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte_lab.cases import append_case, chain, decode_cases, overhead, targets
from halfbyte_lab.cases.targets import Target, judge
from halfbyte_lab.measure import caches, charts, checks, decode, linear, records, tables
from halfbyte_lab.measure.caches import DecodeCase
from halfbyte_lab.measure.checks import Accuracy, BenchmarkRefused, attention_accuracy, linear_accuracy
from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.page import write_page
from halfbyte_lab.measure.records import DamagedRecords, Record, Verdict
from halfbyte_lab.measure.roofline import READERS, Roofline, torch_readers
from halfbyte_lab.measure.session import Candidate, Case, Options
from halfbyte_lab.measure.timing import (
    Effort,
    Work,
    copies_beyond_l2,
    is_cold,
    make_sampler,
    measure,
    measure_interleaved,
    paired_launches,
)
from halfbyte_lab.suites import section_of

# ------------------------------------------------------------------------------------------------------------------ timing


def test_a_slower_function_measures_slower_and_about_right() -> None:
    times = measure_interleaved({"2 ms": [lambda: time.sleep(2e-3)], "6 ms": [lambda: time.sleep(6e-3)]}, device=CPU, effort=BRIEF)
    assert 1.9e-3 < times["2 ms"].median < times["6 ms"].median
    assert times["6 ms"].median >= 5.9e-3
    for timing in times.values():
        assert timing.p10 <= timing.median <= timing.p90
        assert timing.repeats == 3
        assert "cpu" in timing.method


def test_contenders_are_sampled_in_turn_and_buffers_rotate() -> None:
    order: list[str] = []

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            time.sleep(1e-3)

        return run

    effort = dataclasses.replace(BRIEF, repeats=4, settle_seconds=0.0)
    measure_interleaved({"a": [step("a0"), step("a1")], "b": [step("b0")]}, device=CPU, effort=effort)
    tail = "".join(name[0] for name in order[-8:])
    assert tail == "abababab"
    assert {"a0", "a1"} <= set(order[-8:])  # the rotation goes on from sample to sample


def test_threads_are_fixed_while_measuring_and_restored() -> None:
    before = torch.get_num_threads()
    seen: set[int] = set()
    measure([lambda: seen.add(torch.get_num_threads())], device=CPU, threads=before + 1, effort=BRIEF)
    assert seen == {before + 1}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("nbytes", [100, 4096, 10**6, 10**8])
def test_rotation_exceeds_the_cache(nbytes: int) -> None:
    copies = copies_beyond_l2(nbytes, 50 * 2**20, limit_bytes=2**40, most=10**9)
    assert (copies - 1) * nbytes >= 2 * 50 * 2**20
    assert (copies - 2) * nbytes < 2 * 50 * 2**20  # and no more than that
    assert copies_beyond_l2(nbytes, 50 * 2**20, limit_bytes=10**6) <= max(1, 10**6 // nbytes)
    assert copies_beyond_l2(nbytes, 2**40, limit_bytes=2**60, most=7) == 7
    assert copies_beyond_l2(nbytes, 0) == 1
    assert is_cold(copies, nbytes, 50 * 2**20)
    assert not is_cold(copies - 1, nbytes, 50 * 2**20)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: measure([], device=CPU), "has no function to time"),
        (lambda: measure([int], device=CPU, threads=-1), "threads=-1"),
        (lambda: Effort(repeats=0), "repeats=0"),
        (lambda: copies_beyond_l2(0, 1), "nbytes=0"),
        (lambda: decode.DecodeShape(q_heads=6, kv_heads=4), "q_heads=6 is not a multiple of kv_heads=4"),
        (lambda: linear.LinearShape(1, 0, 4), "n=0"),
        (lambda: decode.parse_formats("int9"), "formats='int9'"),
        (lambda: decode.parse_formats("int8+int4_channel"), "for keys only"),
        (lambda: Options(pattern="("), "filter='\\('"),
        (lambda: describe("nowhere"), "device='nowhere'"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        call()


# ---------------------------------------------------------------------------------------------------- device and settings


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "gpu_count", lambda: 0)
    assert describe().kind == "cpu"
    with pytest.raises(Unsupported, match="sees no GPU"):
        describe("cuda")
    with pytest.raises(Unsupported, match="'cpu' and 'cuda'"):
        describe("meta")


# ------------------------------------------------------------------------------------------------- accuracy before a figure


def test_the_promise_tells_right_from_wrong() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, t, 32, generator=generator).bfloat16() for h, t in ((4, 1), (2, 64), (2, 64)))
    ref, base = checks.float64_attention(4 * q, k, v, 0.2), checks.eager_attention(4 * q, k, v, 0.2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        (4 * q).double(), k.double(), v.double(), scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(ref, expected)
    assert attention_accuracy(ref.bfloat16(), base, ref).ok
    for wrong in (torch.zeros_like(base), base.flip(1), base * 1.05, torch.full_like(base, torch.nan)):
        with pytest.raises(BenchmarkRefused, match="against float64 exceeds"):
            attention_accuracy(wrong, base, ref).require("mutant")
    y = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    assert linear_accuracy(y.bfloat16(), y.bfloat16(), y).ok
    assert not linear_accuracy(1.02 * y.bfloat16(), y.bfloat16(), y).ok


def test_every_buffer_of_the_rotation_is_checked() -> None:
    good, bad = torch.zeros(1), torch.ones(1)
    who = Candidate("x", "bf16", 1024, [lambda: good, lambda: bad], lambda out: Accuracy(float(out), 0.5, "max abs"))
    (record,) = quick().measure(Case("op", "case", {"B": 1}, lambda: [who]))
    assert record.seconds is None
    assert record.refused


# ----------------------------------------------------------------------------------------------------- decode, linear, roof


def test_decode_measures_every_contender() -> None:
    s = quick()
    measured = s.run(decode.cases(s, [decode.DecodeShape(1, 4, 2, 64, 96)], ["int8", "int8+int4_g32"]))
    names = [(r.implementation, r.formats) for r in measured]
    assert names == [
        ("torch sdpa", "bf16"),
        ("torch sdpa, folded heads", "bf16"),
        ("halfbyte cpu", "int8"),
        ("halfbyte cpu", "int8+int4_g32"),
    ]
    for r in measured:
        assert not r.refused
        assert r.seconds is not None
        assert r.gb_per_s == pytest.approx(r.nbytes / r.seconds / 1e9)
        assert r.error is not None
        assert r.error_allowed is not None
        assert r.error <= r.error_allowed
        assert r.roof_share is not None
        assert r.environment.versions["torch"] == torch.__version__
    # int8: 64 codes and a 2-byte scale for each of 2 x 96 keys and values, and q and out in 16 bits.
    assert measured[2].nbytes == 2 * 2 * 96 * (64 + 2) + 2 * 2 * 4 * 64
    assert measured[0].nbytes == 2 * 2 * 96 * 64 * 2 + 2 * 2 * 4 * 64
    # The tail of per-channel keys is empty behind whole blocks: an offset and a scale for each dim of 32 tokens.
    (case,) = decode.cases(s, [decode.DecodeShape(1, 4, 2, 64, 96)], ["int8_channel+int8"])
    (ours,) = [c for c in case.candidates() if c.formats == "int8_channel+int8"]
    assert ours.nbytes == 2 * 96 * (64 + 64 + 2) + 2 * 3 * 64 * 2 + 2 * 2 * 4 * 64


def test_linear_measures_every_contender() -> None:
    s = quick()
    measured = s.run(linear.cases(s, [linear.LinearShape(2, 64, 128)], ["nf4", "int8_col"]))
    assert [(r.implementation, r.formats, bool(r.seconds), r.refused) for r in measured] == [
        ("torch linear", "bf16", True, ""),
        ("torch linear", "fp16", True, ""),
        ("halfbyte cpu", "nf4", True, ""),
        ("halfbyte cpu", "int8_col", True, ""),
    ]
    assert measured[2].nbytes == 64 * 64 + 4 * 64 * 2 + 2 * (2 * 128 + 2 * 64)


def test_the_target_of_the_foundation_is_a_default_case() -> None:
    assert decode.DecodeShape(1, 32, 8, 128, 8192) == decode.DEFAULT_SHAPES[0]
    assert {"int8", "int4_g32"} <= set(decode.DEFAULT_FORMATS)


def test_filter_chooses_contenders() -> None:
    s = quick(pattern="T96 int8 .*cpu")
    measured = s.run(decode.cases(s, [decode.DecodeShape(1, 4, 2, 64, 96)], ["int8", "int4"]))
    assert [r.formats for r in measured] == ["int8"]


def test_the_roof_is_measured_once_for_each_size() -> None:
    meter = Roofline(CPU, 1, BRIEF)
    roof = meter.read(1_000_001)
    assert roof.gb_per_s > 0.01
    assert meter.read(1_000_001) is roof
    assert meter.copy(10**6) > 0.01
    assert meter.matmul(64) > 0
    with pytest.raises(InvalidArgument, match="nbytes=10"):
        meter.read(10)


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    s = quick(output=tmp_path / "r.jsonl")
    first = decode.cases(s, [decode.DecodeShape(1, 4, 2, 64, 32)], ["int8"])
    measured = s.run([*first, Case("op", "interrupted", {}, Mock(side_effect=KeyboardInterrupt)), *first])
    assert s.interrupted
    assert len(measured) == 3
    assert records.read(tmp_path / "r.jsonl").records == measured


# ----------------------------------------------------------------------------------------------------------------- records


def record(n: int = 0) -> Record:
    where = Environment("CPU é", "", 2, {"torch": "2"}, "abc", "halfbyte bench", "2026-01-01T00:00:00+00:00")
    return Record("linear", {"M": n}, "nf4", "cpu", 10, where, seconds=1.0, p10=0.9, p90=1.1, repeats=3, error=1e-3)


def test_records_append_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.jsonl"
    assert records.append(path, [record(0)]) == ""
    records.append(path, [record(1), record(2)])
    assert records.read(path) == records.Records([record(0), record(1), record(2)])
    assert len(path.read_text().splitlines()) == 3
    assert json.loads(path.read_text().splitlines()[0])["environment"]["device"] == "CPU é"


def test_any_cut_loses_only_the_last_line(tmp_path: Path) -> None:
    path, whole = tmp_path / "r.jsonl", (record(0).to_json() + "\n" + record(1).to_json() + "\n").encode()
    first = len(record(0).to_json().encode()) + 1
    for cut in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        found = records.read(path)
        assert found.records == [record(0)]
        assert "was cut" in found.notice
    notice = records.append(path, [record(2)])
    assert "was cut" in notice
    assert records.read(path) == records.Records([record(0), record(2)])
    path.write_bytes(whole[:-1])  # whole, but for the line break
    assert records.append(path, [record(2)]) == ""
    assert records.read(path).records == [record(0), record(1), record(2)]


@pytest.mark.parametrize("line", ["{", "[]", '{"op": "x"}', "null", "\x00"])
def test_damage_elsewhere_raises(tmp_path: Path, line: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f"{record().to_json()}\n{line}\n{record().to_json()}\n")
    with pytest.raises(DamagedRecords, match="line 2"):
        records.read(path)


def test_noisy_times_are_told() -> None:
    assert not tables.is_noisy(record())
    assert tables.is_noisy(dataclasses.replace(record(), p90=2.0))
    assert not tables.is_noisy(dataclasses.replace(record(), p10=None))


def test_ratios_are_against_the_fastest_16_bit_of_the_same_case() -> None:
    peers = [dataclasses.replace(record(1), formats="bf16", seconds=s) for s in (4.0, 2.0)]
    other = dataclasses.replace(record(2), formats="bf16", seconds=0.5)
    rows = tables.plain_table([*peers, other, record(1)])[1]
    assert [row[tables.HEADERS.index("vs 16-bit")] for row in rows] == ["2.00x", "1.00x", "1.00x", "0.50x"]


# -------------------------------------------------------------------------------------------------------------------- bars

SMALL = decode.DecodeShape(3, 4, 2, 32, 64)


def small(layout: caches.Layout = "heads first", **options: object) -> DecodeCase:
    return DecodeCase("small", SMALL, layout, **options)  # type: ignore[arg-type]


def job(problem: DecodeCase, *formats: str) -> decode_cases.AttentionJob:
    return decode_cases.AttentionJob(problem, formats, ("auto",))


@pytest.fixture
def small_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of the small case that anything meets, and one that nothing does."""
    table = (
        Target("small", "int8", "roof_share", 1e-9),
        Target("small", "int8", "times_16_bit", 1e9),
        Target("small", "int8", "times_even", 1e9),
        Target("small", "int4", "over_copy", 1e9),
    )
    monkeypatch.setattr(targets, "TARGETS", table)


@pytest.mark.parametrize(
    ("quantity", "bound", "value", "met"),
    [
        ("roof_share", 0.94, 0.94, True),
        ("roof_share", 0.94, 0.9399, False),
        ("times_16_bit", 3.5, 3.6, True),
        ("seconds", 22e-6, 22e-6, True),
        ("seconds", 22e-6, 22.1e-6, False),
        ("times_even", 1.15, 1.2, False),
        ("over_copy", 2e-6, -1e-6, True),
        ("over_launch", 12e-6, 13e-6, False),
        ("flops", 350e12, 340e12, False),
        ("roof_share", 0.94, None, False),
        ("seconds", 22e-6, None, False),
        ("roof_share", 0.94, float("nan"), False),
        ("seconds", 22e-6, float("nan"), False),
    ],
)
def test_a_bar_is_met_or_not(quantity: str, bound: float, value: float | None, met: bool) -> None:
    (verdict,) = judge([Target("x", "int8", quantity, bound)], {} if value is None else {quantity: value})
    assert verdict.met is met
    text = targets.verdict_text(verdict)
    assert text.startswith("not measured" if value is None else "met: " if met else "missed: ")
    assert targets.bound_text(verdict)


def test_how_far_a_missed_bar_is() -> None:
    assert targets.verdict_text(Verdict("seconds", 20e-6, 22e-6, False)) == "missed: 22.0 us (by 10 %)"
    assert targets.verdict_text(Verdict("roof_share", 0.8, 0.72, False)) == "missed: 72.0 % (by 10 %)"
    assert targets.verdict_text(Verdict("times_16_bit", 3.5, 3.52, True)) == "met: 3.52x"


@pytest.mark.parametrize(
    "problem",
    [
        DecodeCase("MLA", decode.DecodeShape(2, 4, 1, 96, 70), latent=64),
        DecodeCase("lengths", decode.DecodeShape(3, 4, 2, 64, 90), runs=((1, 90), (1, 16), (1, 33))),
    ],
    ids=lambda problem: problem.name,
)
def test_latents_and_unequal_lengths_are_judged(problem: DecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "TARGETS", (Target(problem.name, "int8", "flops", 1e3),))
    (found,) = job(problem, "int8").measure(quick())
    assert not found.refused
    assert found.bars[0].value == pytest.approx(2 * problem.tokens * 4 * (problem.shape.dim + 64) / (found.seconds or 1))
    assert found.bars[0].met
    monkeypatch.setattr(decode_cases, "attend", lambda q, cache, impl: decode.attend(q, cache, impl) * 1.5)
    assert "exceeds" in quick().run([job(problem, "int8")])[0].refused


def test_every_bar_has_a_case_that_measures_it() -> None:
    names = [p.name for p in (*targets.PROBLEMS, targets.APPEND)]
    assert len(set(names)) == len(names)
    assert {bar.case for bar in targets.TARGETS} == {*names, targets.CALL}
    assert set(targets.QUICK_CASES) <= {*names, targets.CALL}
    assert len({(b.case, b.formats, b.quantity) for b in targets.TARGETS}) == len(targets.TARGETS)
    for bar in targets.TARGETS:
        decode.parse_formats(bar.formats)
    for problem in targets.PROBLEMS:
        wanted = {b.quantity for b in targets.TARGETS if b.case == problem.name}
        assert "times_16_bit" not in wanted or problem.baselines
        if problem in targets._SHAPES:  # 128 MB and more of cache in the smallest format
            assert problem.tokens * problem.shape.kv_heads * (problem.shape.dim + 8) >= 128e6
    assert len(targets.SKEWED.evened().spans) == 1
    assert targets.SKEWED.evened().tokens == targets.SKEWED.tokens == 63 * 512 + 65536
    assert [j.name for j in decode_cases.jobs(["auto"], "cpu")] == [targets.CALL, *names]
    assert {j.name for j in decode_cases.jobs(["auto"], "cpu", quick=True)} == set(targets.QUICK_CASES)


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "pages"])
def test_layouts_hold_the_same_numbers(layout: caches.Layout) -> None:
    inputs = caches.Inputs.random(small(layout), torch.device("cpu"))
    plain = caches.Inputs.random(small(), torch.device("cpu"))
    cache, expected = caches.fill(inputs, "int8+int4_g32"), caches.fill(plain, "int8+int4_g32")
    for mine, theirs in zip(cache.dequantized(), expected.dequantized(), strict=True):
        assert torch.equal(mine, theirs)
    assert (cache.page_table is not None) == (layout == "pages")
    if layout == "tokens first":
        assert cache.keys.codes.stride(1) < cache.keys.codes.stride(2)
        assert caches.clone(cache.keys).codes.stride() == cache.keys.codes.stride()
    promise = caches.Promise(inputs.q, caches.held_by(cache))
    assert promise.judge([decode.attend(inputs.q, cache, "auto")]).ok
    assert not promise.judge([decode.attend(inputs.q, cache, "auto"), torch.zeros_like(inputs.q)]).ok


def test_the_inputs_are_appended_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = caches.Inputs.random(small(), torch.device("cpu"))
    whole = caches.fill(inputs, "int4").dequantized()
    monkeypatch.setattr(caches, "_FILL", 1)
    assert all(map(torch.equal, whole, caches.fill(inputs, "int4").dequantized()))


@pytest.mark.parametrize("formats", ["int8", "int4_channel+int8"])
def test_lengths_are_put_back_and_every_pass_attends_all_tokens(formats: str) -> None:
    """Also where the newest token completes a block of per-channel keys, whose codes are made of the tail."""
    inputs = caches.Inputs.random(small(runs=((2, 16), (1, 64))), torch.device("cpu"))
    cache = caches.fill(inputs, formats)
    rotation = caches.Rotation(cache, inputs, 2)
    seen: list[list[int]] = []

    def call(c: KVCache) -> torch.Tensor:
        seen.append(c.lengths.tolist())
        return decode.attend(inputs.q, c, "auto")

    promise = caches.Promise(inputs.q, caches.held_by(cache))
    times = chain.time_chain(quick(), rotation, call, inputs.last(), promise)
    assert times.note == ""
    assert len(seen) > 10
    assert all(lengths == [16, 16, 64] for lengths in seen)
    for timing in (times.alone, times.chained, times.paired, times.appends):
        assert timing is not None
    assert times.paired is not None
    assert "less appends" in times.paired.method
    rotation.restore_short()
    assert [c.lengths.tolist() for c in rotation.caches] == [[15, 15, 63]] * 2


def test_a_chain_that_does_not_see_its_append_gets_no_time() -> None:
    inputs = caches.Inputs.random(small(), torch.device("cpu"))
    cache = caches.fill(inputs, "int8")
    rotation = caches.Rotation(cache, inputs, 1)
    promise = caches.Promise(inputs.q, caches.held_by(cache))
    k, v = inputs.last()
    # Seeded mutants: the append writes another token, or nothing at all.
    times = chain.time_chain(quick(), rotation, lambda c: decode.attend(inputs.q, c, "auto"), (k, v + 3), promise)
    assert times.paired is None
    assert "chain" in times.note
    rotation = caches.Rotation(caches.fill(inputs, "int8"), inputs, 1)
    rotation.plant_decoys()
    rotation.restore_full()
    assert not promise.judge([decode.attend(inputs.q, rotation.caches[0], "auto")]).ok


def test_the_appends_are_taken_from_the_chain_sample_by_sample() -> None:
    timing = chain.subtract([5.0, 7.0, 9.0], [1.0, 2.0, 1.0], "how")
    assert (timing.p10, timing.median, timing.p90) == (4.0, 5.0, 8.0)


def test_launches_are_paired_inside_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFBYTE_PDL", raising=False)
    seen: list[str | None] = []
    fns = [lambda: seen.append(os.environ.get("HALFBYTE_PDL"))]
    for paired in (False, True, None):
        make_sampler("x", Work(fns, int, paired), CPU, BRIEF).sample()
        assert seen[-1] == {False: "0", True: "1", None: None}[paired]
    monkeypatch.setenv("HALFBYTE_PDL", "1")
    with paired_launches(False):
        assert os.environ["HALFBYTE_PDL"] == "0"
    assert os.environ["HALFBYTE_PDL"] == "1"


class FakeCuda:
    """What the CUDA sampler asks of torch.cuda, written down; a graph runs its work again when it is replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        captured = self.captured = []

        class Graph:
            def replay(self) -> None:
                for step in captured:
                    step()

        fakes: dict[str, object] = {
            "Stream": lambda: self,
            "current_stream": lambda: self,
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
            "graph": lambda graph, capture_error_mode: contextlib.nullcontext(),
            "synchronize": lambda *a: None,
            "_sleep": lambda cycles: self.log.append("pause"),
            "Event": lambda **options: self,
            "CUDAGraph": Graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def wait_stream(self, other: object) -> None: ...
    def synchronize(self) -> None: ...
    def record(self) -> None:
        self.log.append("event")

    def elapsed_time(self, other: object) -> float:
        return 6.0


def test_a_graph_is_timed_pass_by_pass_behind_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    log = fake.log
    fns = [lambda: log.append("a"), lambda: log.append("b"), lambda: log.append("c")]
    sampler = make_sampler("x", Work(fns, lambda: log.append("before")), GPU, BRIEF)
    assert "cuda graph of 3 calls over 3 buffers" in sampler.method
    fake.captured.extend(fns)
    log.clear()
    assert sampler.sample() == 6e-3 / 3
    assert log == ["before", "pause", "event", "a", "b", "c", "event"]
    log.clear()
    assert len(sampler.run()) == 3
    assert log == ["before", "a", "b", "c"]
    # Without something to put back the rotation is repeated until the block is long enough: 6 ms here, for 20 ms.
    assert "cuda graph of 12 calls" in make_sampler("x", Work(fns), GPU, dataclasses.replace(BRIEF, block_seconds=20e-3)).method


def test_what_a_graph_reads_lives_as_long_as_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    read = torch.zeros(3)
    alive = weakref.ref(read)
    sampler = make_sampler("x", Work([partial(torch.clone, read)]), GPU, BRIEF)
    del read
    gc.collect()
    assert alive() is not None
    del sampler
    gc.collect()
    assert alive() is None


def test_what_cannot_be_captured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", Mock(side_effect=Unsupported("no kernel yet")))
    sampler = make_sampler("x", Work([int]), GPU, BRIEF)
    assert "not captured (no kernel yet)" in sampler.method
    assert sampler.run() == [0]
    # Such a time is recorded, and no bar is judged by it.
    timed = dataclasses.replace(measured_case(), method=sampler.method)
    (verdict,) = decode_cases._judged(timed, DecodeCase("x", SMALL), [Target("x", "int4", "roof_share", 0.1)], None, None).bars
    assert verdict.value is None
    assert not verdict.met


@pytest.mark.usefixtures("small_bars")
def test_a_case_is_measured_and_judged() -> None:
    measured = list(job(small(baselines=True, runs=()), "int8").measure(quick()))
    assert [(r.case, r.implementation) for r in measured] == [
        ("small", "torch sdpa"),
        ("small", "torch sdpa, folded heads"),
        ("small, spread evenly", "halfbyte auto"),
        ("small", "halfbyte auto"),
    ]
    ours = measured[-1]
    # int8: 32 codes and a 2-byte scale for each of 2 x 3 x 64 keys and values; q and out do not count.
    assert ours.nbytes == 2 * 2 * 3 * 64 * 34
    assert measured[0].nbytes == 2 * 2 * 3 * 64 * 64
    assert ours.seconds == ours.paired is not None
    assert ours.peer_seconds == min(r.seconds for r in measured[:2] if r.seconds)
    assert ours.roof_share == pytest.approx(ours.nbytes / ours.seconds / 1e9 / (ours.roof_gb_per_s or 0))
    assert [(v.quantity, v.met) for v in ours.bars] == [("roof_share", True), ("times_16_bit", False), ("times_even", True)]
    assert ours.bars[1].value == pytest.approx((ours.peer_seconds or 0) / (ours.seconds or 1))
    assert tables.count_text(measured) == "2 targets met, 1 missed, 0 not measured"
    assert len(targets.table(measured)[1][-1]) == len(targets.HEADERS)


@pytest.mark.usefixtures("small_bars")
def test_a_wrong_kernel_meets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cases, "attend", lambda q, cache, impl: decode.attend(q, cache, impl) * 1.5)
    (_, record) = job(small(), "int8").measure(quick())
    assert record.seconds is None
    assert "exceeds the allowed" in record.refused
    assert [v.met for v in record.bars] == [False] * 3
    assert tables.count_text([record]) == "0 targets met, 0 missed, 3 not measured"
    assert targets.table([record])[1][0][-1].startswith("not measured")


@pytest.mark.slow
@pytest.mark.usefixtures("small_bars")
def test_one_failing_case_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(q: torch.Tensor, cache: KVCache, impl: str) -> torch.Tensor:
        if cache.keys.format.name == "int8":
            raise RuntimeError("no such kernel")
        return decode.attend(q, cache, impl)

    monkeypatch.setattr(decode_cases, "attend", broken)
    stops = Case("op", "case", {}, Mock(side_effect=ZeroDivisionError("oh")))
    measured = quick().run([job(small(), "int8", "int4"), stops, job(small(), "int4")])
    expected = [("int8", False), ("int8", False), ("int4", True), ("", False), ("int4", True)]
    assert [(r.formats, bool(r.seconds)) for r in measured] == expected
    assert "no such kernel" in measured[1].refused
    assert measured[3].refused == "case: ZeroDivisionError: oh"


def test_the_filter_leaves_cases_out_before_their_data_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches.Inputs, "random", lambda *args: pytest.fail("made data"))
    assert quick(pattern="large").run([job(small(), "int8")]) == []


@pytest.mark.usefixtures("small_bars")
def test_an_append_is_held_against_the_specification_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    appending = append_case.AppendJob(small(), ("int4",))
    (record,) = appending.measure(quick())
    assert not record.refused
    assert record.op == "append"
    # k and v of 2 heads of 32 in bf16 are read, their codes, scales and offsets written, for 3 sequences.
    assert record.nbytes == 3 * (2 * 2 * 32 * 2 + 2 * 2 * (16 + 4))
    assert record.bars[0].value == pytest.approx((record.seconds or 0) - (record.peer_seconds or 0))
    assert record.bars[0].met
    # Seeded mutant: the lengths advance, the values are those of another token.
    right = KVCache.append
    monkeypatch.setattr(KVCache, "append", lambda self, k, v: right(self, k, v + (k.shape[2] == 1)))
    (record,) = appending.measure(quick())
    assert "unlike the specification" in record.refused
    assert not record.bars[0].met


def test_host_time_is_per_call() -> None:
    waits: list[int] = []
    times = overhead.host_seconds({"call": lambda: time.sleep(1e-4), "launch": int}, lambda: waits.append(1))
    assert times["call"].median > 1e-4 > times["launch"].median
    assert len(waits) == 2 * (times["call"].repeats + 1)
    record = overhead._record(quick(), overhead._CALLED[0], times["call"], times["launch"].median)
    assert record.bars[0].value == pytest.approx(times["call"].median - times["launch"].median)
    assert not record.bars[0].met
    refused = list(overhead.CallJob().measure(quick()))
    assert [r.case for r in refused] == [called.case for called in overhead._CALLED]
    assert all("needs a GPU" in r.refused for r in refused)
    assert not refused[0].bars[0].met


@pytest.mark.parametrize("called", overhead._CALLED, ids=lambda called: called.case)
def test_calls_whose_host_time_is_taken(called: overhead._Called) -> None:
    """Also so often as they are timed: an append must not find its cache full."""
    call = called.ready(torch.device("cpu"))
    for _ in range(3):
        call()
    if "append" in called.case:
        capacity = call.func.__self__.capacity  # type: ignore[attr-defined]
        assert capacity >= (overhead._SAMPLES + 1) * overhead._CALLS


def measured_case(seconds: float = 34.9e-6) -> Record:
    """What a run on a GPU leaves."""
    shape = decode.DecodeShape(128, 8, 1, 128, 8192).sizes
    base = Record("decode_attention", shape, "int4", "halfbyte auto", 142_606_336, record().environment)
    verdicts = judge(targets.targets_of("batch 128 x 8,192", "int4"), {"roof_share": 0.956, "times_16_bit": 3.2})
    times = {"seconds": seconds, "p10": seconds, "p90": seconds, "alone": 37e-6, "paired": seconds, "peer_seconds": 126e-6}
    known = {"case": "batch 128 x 8,192", "roof_share": 0.956, "peer": "torch sdpa cudnn", "bars": verdicts}
    return dataclasses.replace(base, **times, **known)  # type: ignore[arg-type]


def test_records_of_bars_come_back(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    records.append(path, [measured_case(), record()])
    assert records.read(path).records == [measured_case(), record()]
    old = {k: v for k, v in json.loads(record().to_json()).items() if k not in ("case", "bars", "note", "alone", "peer")}
    assert Record.from_json(json.dumps(old)) == record()  # files of before there were bars


def test_tables_and_chart_come_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make_tables()
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.all_bars() == tables.NOTHING
    tables.write_charts()
    assert not (tmp_path / tables.CHART).exists()
    (tmp_path / "docs" / "performance").mkdir(parents=True)
    records.append(tmp_path / "results" / "gpu.jsonl", [measured_case(50e-6), record(), measured_case()])
    page = tables.all_bars()
    assert "34.9" in page  # the last of two runs
    assert "50.0" not in page
    assert "1 targets met, 1 missed, 0 not measured" in page
    assert "met: 95.6 %<br>missed: 3.20x (by 3 %)" in page
    tables.write_charts()
    svg = (tmp_path / tables.CHART).read_text()
    assert "batch 128 x 8,192, int4" in svg
    assert "prefers-color-scheme" in svg
    assert svg.count("<style>") == 1


def test_a_page_of_bars(tmp_path: Path) -> None:
    page = write_page([measured_case()], "bars", tmp_path / "p.html", section_of=section_of).read_text()
    assert "missed: 3.20x" in page
    assert "read roofline" in page
    with pytest.raises(InvalidArgument, match="values is empty"):
        charts.marked_bars({}, {}, x_label="x")


def test_more_numbers_than_a_dot_of_cublas_takes_are_read_without_it() -> None:
    many = torch.zeros(1).expand(2**31)
    assert set(torch_readers(many[1:])) == set(READERS)
    assert set(READERS) - set(torch_readers(many)) == {"torch.dot"}


def test_triton_kernels_read_and_copy_everything() -> None:
    """In Triton's interpreter, which must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    code = """
import torch
from halfbyte_lab.measure import roofline_kernels as kernels
for words in (64, 8192, 3 * 8192 + 260):
    x = torch.rand(words)
    expected = int(x.view(torch.int32).sum())
    for name, reader in kernels.readers(1).items():
        assert (int(reader(x).sum()) - expected) % 2**32 == 0, (words, name)
    for name, copy in kernels.copiers().items():
        target = torch.zeros_like(x)
        copy(target, x)
        assert torch.equal(target, x), (words, name)
kernels.launch([torch.zeros(4, dtype=torch.int32) for _ in range(10)], list(range(20)))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
