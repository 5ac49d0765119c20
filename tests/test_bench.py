"""The core of the bench: what is timed, what is refused, what reaches the disk."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte import device as device_module
from halfbyte.bench import checks, decode, linear, records, session
from halfbyte.bench.checks import Accuracy, BenchmarkRefused, attention_accuracy, linear_accuracy
from halfbyte.bench.page import write_page
from halfbyte.bench.records import DamagedRecords, Environment, Record
from halfbyte.bench.roof import RoofMeter
from halfbyte.bench.session import Case, Contender, Options, Session
from halfbyte.bench.timing import Effort, copies_beyond_l2, is_cold, measure, measure_interleaved
from halfbyte.device import Device, describe
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.settings import default_impl

BRIEF = Effort(seconds=0.0, repeats=3, block_seconds=1e-4, settle_seconds=0.01)
FAKE = Device("cpu", "fake", memory_bytes=2**30, cache_bytes=0, cores=1, threads=1)
GPU = Device("cuda", "fake gpu", 2**37, 50 * 2**20, 8, 8, index=0, capability=(9, 0), sm_count=132, driver="580.1")


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "QUICK", BRIEF)


def quick(**options: object) -> Session:
    return Session(Options(quick=True, **options), FAKE)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------------ timing


def test_a_slower_function_measures_slower_and_about_right() -> None:
    times = measure_interleaved({"2 ms": [lambda: time.sleep(2e-3)], "6 ms": [lambda: time.sleep(6e-3)]}, device=FAKE, effort=BRIEF)
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
    measure_interleaved({"a": [step("a0"), step("a1")], "b": [step("b0")]}, device=FAKE, effort=effort)
    tail = "".join(name[0] for name in order[-8:])
    assert tail == "abababab"
    assert {"a0", "a1"} <= set(order[-8:])  # the rotation goes on from sample to sample


def test_threads_are_fixed_while_measuring_and_restored() -> None:
    before = torch.get_num_threads()
    seen: set[int] = set()
    measure([lambda: seen.add(torch.get_num_threads())], device=FAKE, threads=1, effort=BRIEF)
    assert seen == {1}
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
        (lambda: measure([], device=FAKE), "has no function to time"),
        (lambda: measure([int], device=FAKE, threads=-1), "threads=-1"),
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


def test_the_cpu_is_described() -> None:
    cpu = describe("cpu")
    assert cpu.kind == "cpu"
    assert cpu.name
    assert cpu.cores >= 1
    assert cpu.memory_bytes > 2**28
    assert cpu.torch == torch.device("cpu")
    assert GPU.torch == torch.device("cuda", 0)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "gpu_count", lambda: 0)
    assert describe().kind == "cpu"
    with pytest.raises(Unsupported, match="sees no GPU"):
        describe("cuda")
    with pytest.raises(Unsupported, match="'cpu' and 'cuda'"):
        describe("meta")


def test_settings_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFBYTE_IMPL", raising=False)
    assert default_impl() == "auto"
    monkeypatch.setenv("HALFBYTE_IMPL", "reference")
    assert default_impl() == "reference"
    monkeypatch.setenv("HALFBYTE_IMPL", "fast")
    with pytest.raises(InvalidArgument, match="HALFBYTE_IMPL='fast'; choose one of: auto, reference, cpu"):
        default_impl()


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


def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = halfbyte.decode_attention
    s = quick(pattern="halfbyte")
    shape = decode.DecodeShape(1, 4, 2, 64, 96)
    assert all(r.seconds for r in s.run(decode.cases(s, [shape], ["int8"])))
    # Seeded mutant: the last token is not seen.
    monkeypatch.setattr(
        halfbyte,
        "decode_attention",
        lambda q, cache, impl: right(q, cache, impl=impl, starts=torch.full((1,), 48, dtype=torch.int32)),
    )
    s = quick(pattern="halfbyte")
    (record,) = s.run(decode.cases(s, [shape], ["int8"]))
    assert record.seconds is None
    assert record.gb_per_s is None
    assert "exceeds the allowed" in record.refused
    assert session.table_rows([record])[0][3] == "refused"


def test_every_buffer_of_the_rotation_is_checked() -> None:
    good, bad = torch.zeros(1), torch.ones(1)
    who = Contender("x", "bf16", 1024, [lambda: good, lambda: bad], lambda out: Accuracy(float(out), 0.5, "max abs"))
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


def test_linear_measures_every_contender() -> None:
    s = quick()
    measured = s.run(linear.cases(s, [linear.LinearShape(2, 64, 128)], ["nf4", "int8_col"]))
    assert [(r.implementation, r.formats, bool(r.seconds), r.refused) for r in measured] == [
        ("torch linear", "bf16", True, ""),
        ("halfbyte cpu", "nf4", True, ""),
        ("halfbyte cpu", "int8_col", True, ""),
    ]
    assert measured[1].nbytes == 64 * 64 + 4 * 64 * 2 + 2 * (2 * 128 + 2 * 64)


def test_the_target_of_the_foundation_is_a_default_case() -> None:
    assert decode.DecodeShape(1, 32, 8, 128, 8192) == decode.DEFAULT_SHAPES[0]
    assert {"int8", "int4_g32"} <= set(decode.DEFAULT_FORMATS)


def test_filter_chooses_contenders() -> None:
    s = quick(pattern="T96 int8 .*cpu")
    measured = s.run(decode.cases(s, [decode.DecodeShape(1, 4, 2, 64, 96)], ["int8", "int4"]))
    assert [r.formats for r in measured] == ["int8"]


def test_the_roof_is_measured_once_for_each_size() -> None:
    meter = RoofMeter(FAKE, 1, BRIEF)
    roof = meter.read(1_000_001)
    assert roof.gb_per_s > 0.01
    assert meter.read(1_000_001) is roof
    assert meter.copy(10**6) > 0.01
    assert meter.matmul(64) > 0
    with pytest.raises(InvalidArgument, match="nbytes=10"):
        meter.read(10)


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    def stop() -> list[Contender]:
        raise KeyboardInterrupt

    s = quick(output=tmp_path / "r.jsonl")
    first = decode.cases(s, [decode.DecodeShape(1, 4, 2, 64, 32)], ["int8"])
    measured = s.run([*first, Case("op", "interrupted", {}, stop), *first])
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
    assert not session.is_noisy(record())
    assert session.is_noisy(dataclasses.replace(record(), p90=2.0))
    assert not session.is_noisy(dataclasses.replace(record(), p10=None))


def test_ratios_are_against_the_fastest_16_bit_of_the_same_case() -> None:
    peers = [dataclasses.replace(record(1), formats="bf16", seconds=s) for s in (4.0, 2.0)]
    other = dataclasses.replace(record(2), formats="bf16", seconds=0.5)
    rows = session.table_rows([*peers, other, record(1)])
    assert [row[session.HEADERS.index("vs 16-bit")] for row in rows] == ["2.00x", "1.00x", "1.00x", "0.50x"]


def test_a_page_of_records(tmp_path: Path) -> None:
    refused = dataclasses.replace(record(1), seconds=None, p10=None, p90=None, refused="error too <large>")
    page = write_page([record(1), refused], "linear", tmp_path / "p.html").read_text()
    assert "M1" in page
    assert "error too &lt;large&gt;" in page
    assert "halfbyte bench" in page
    assert "<svg" in page
