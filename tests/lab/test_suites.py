"""What the bench commands measure, all of them under one bar, and the peers beside them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import BRIEF, CPU, GPU, quick

import halfbyte
from command_line import run
from halfbyte_lab import bench, precompile, suites
from halfbyte_lab.baselines import Baseline, Prepared, attention
from halfbyte_lab.baselines import linear as linear_adapters
from halfbyte_lab.baselines import run as run_baselines
from halfbyte_lab.cases import decode_cases, linear_cases
from halfbyte_lab.cases.linear_targets import LinearCase
from halfbyte_lab.measure import decode, linear, records
from halfbyte_lab.measure.caches import DecodeCase
from halfbyte_lab.measure.checks import float64_attention
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.linear import LinearShape
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.report_sections import plain
from halfbyte_lab.measure.session import Session
from halfbyte_lab.measure.timing import GRAPHS, MANY_GRAPHS, Effort
from halfbyte_lab.studies import QUESTIONS, Study


@dataclasses.dataclass(frozen=True)
class FakeJob:
    """A job that gives one record and remembers what session it ran in; or fails, or is interrupted."""

    name: str
    seen: list[Session]
    fails: type[BaseException] | None = None
    op: str = "fake"

    def measure(self, s: Session) -> Iterable[Record]:
        self.seen.append(s)
        if self.fails:
            raise self.fails
        yield Record(self.op, {}, "int4", "halfbyte auto", 1, s.environment, seconds=1e-3, p10=1e-3, p90=1e-3, case=self.name)


def suite(jobs: Sequence[FakeJob], name: str, effort: Effort = GRAPHS) -> suites.Suite:
    def says(measured: Sequence[Record]) -> list[str]:
        return [f"{name} has {len(measured)}"]

    told = dataclasses.replace(plain("fake"), title=name, says=says)
    return suites.Suite(lambda _: jobs, told, effort, study=name)


# -------------------------------------------------------------------------------------------------------------------- suites


def test_suites_share_a_run_and_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Session] = []
    s = quick(output=tmp_path / "r.jsonl")
    first = suite([FakeJob("a", seen), FakeJob("b", seen, ZeroDivisionError)], "first")
    suites.run(s, [first, suite([FakeJob("c", seen)], "second", MANY_GRAPHS)])
    assert [(r.case, r.study, bool(r.refused)) for r in s.records] == [
        ("a", "first", False),
        ("b", "first", True),
        ("c", "second", False),
    ]
    assert records.read(tmp_path / "r.jsonl").records == s.records
    assert [(r.job, r.of_whole_job) for r in s.records] == [("fake: a", False), ("fake: b", True), ("fake: c", False)]
    assert {r.environment.date for r in s.records} == {s.environment.date}  # one run
    shown = capsys.readouterr().out
    assert "first has 2" in shown
    assert "second has 1" in shown
    # A study that looks back over its session sees its own records only.
    assert seen[0].records == s.records[:2]
    assert seen[2].records == s.records[2:]
    assert seen[0].roofline.known is seen[2].roofline.known is s.roofline.known


def test_ctrl_c_ends_all_suites_and_keeps_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Session] = []
    s = quick()
    suites.run(
        s, [suite([FakeJob("a", seen), FakeJob("b", seen, KeyboardInterrupt)], "first"), suite([FakeJob("c", seen)], "second")]
    )
    assert s.interrupted
    assert [r.case for r in s.records] == ["a"]
    shown = capsys.readouterr()
    assert "first has 1" in shown.out
    assert "second" not in shown.out
    assert "what was measured so far is kept" in shown.err


def test_a_gpu_that_does_not_answer_ends_all_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_recovered", lambda _: False)
    seen: list[Session] = []
    s = quick()
    suites.run(s, [suite([FakeJob("a", seen, RuntimeError)], "first"), suite([FakeJob("b", seen)], "second")])
    assert s.broken
    assert [r.case for r in s.records] == ["a"]


def test_a_part_takes_its_own_effort_on_a_gpu() -> None:
    s = quick()
    assert s.part(MANY_GRAPHS).effort == BRIEF
    s.device = GPU
    part = s.part(MANY_GRAPHS, "study")
    assert (part.effort, part.roofline.effort, part.study, part.records) == (MANY_GRAPHS, MANY_GRAPHS, "study", [])


def test_what_is_known_to_be_launched_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the tuned levels, one by one, would take more minutes than the measuring."""
    pytest.importorskip("triton")
    s = quick()
    s.device = dataclasses.replace(GPU, name="NVIDIA H200")
    asked: list[tuple[int, tuple[int, int], int]] = []

    def compiled(pairs: Iterable[precompile.Pair], capability: tuple[int, int], fewest: int) -> None:
        found = list({precompile._variant(*pair): pair for pair in pairs}.values())
        if not asked:
            for problem, plan in found[:: len(found) // 8]:  # each is what a launch compiles
                assert list(precompile.configurations(problem, plan))
        asked.append((len(found), capability, fewest))
        raise KeyboardInterrupt

    monkeypatch.setattr(suites, "compile_ahead", compiled)
    jobs = [suites.Suite(one.jobs, one.section, one.effort) for one in suites.every(s)]
    suites.run(s, jobs)
    assert s.interrupted
    assert not s.records
    assert [(70 < count < 140, *rest) for count, *rest in asked] == [(True, (9, 0), suites._WORTH)]
    precompiled = {type(job).__name__ for suite in jobs for job in suite.jobs(s) if isinstance(job, precompile.Precompiled)}
    assert precompiled == {"AttentionJob", "LayerJob", "VariantsJob", "FusedJob", "BatchJob", "CaseJob", "StepJob", "CapacityJob"}


def test_all_has_every_command_and_every_study() -> None:
    every = suites.every(quick())
    assert [s.study for s in every if s.study] == ["peers", *QUESTIONS]
    assert {s.section.title for s in every} >= {"Decode attention", "Linear", "Peers", *QUESTIONS}
    on_gpu = quick()
    on_gpu.device = GPU
    assert [s.section for s in suites.every(on_gpu)][:3] == [suites.DECODE, suites.LINEAR, suites.BASELINES]


def test_a_study_is_told_as_it_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Session] = []
    study = Study(
        "w4a16-splitk",
        lambda measured: (("x", "y"), [(r.case, "1") for r in measured]),
        says=lambda _: ["One.", "Two."],
        jobs=lambda _: [FakeJob("a", seen)],
    )
    monkeypatch.setattr(suites.studies, "study", lambda _: study)
    s = quick()
    suites.run(s, [suites.study("w4a16-splitk")])
    assert s.records[0].study == "w4a16-splitk"
    shown = capsys.readouterr().out
    assert "no GPU here" in shown
    assert "One.\nTwo.\n" in shown


@pytest.mark.parametrize("make", [suites.decode, suites.linear])
def test_cases_with_targets_are_those_of_a_gpu(make: Any) -> None:
    on_gpu = quick()
    assert make(on_gpu).section not in (suites.DECODE, suites.LINEAR)
    on_gpu.device = GPU
    assert make(on_gpu).section in (suites.DECODE, suites.LINEAR)


def test_bench_all_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Session] = []
    chosen = [suite([FakeJob("a", seen)], "first"), suite([FakeJob("b", seen, KeyboardInterrupt)], "second")]
    monkeypatch.setattr(suites, "every", lambda _: chosen)
    page, output = tmp_path / "p.html", tmp_path / "r.jsonl"
    assert run("all", "--quick", "--device", "cpu", "-o", str(output), "--html", str(page), "--json", command=bench.main) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["a"]
    assert [r.case for r in records.read(output).records] == ["a"]
    assert "halfbyte bench: everything" in page.read_text()


# -------------------------------------------------------------------------------------------------------------------- mutants


def test_a_mutant_of_attention_is_refused_by_every_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four oldest tokens are not seen: no time in `bench decode` with sizes, nor with bars."""
    right = halfbyte.decode_attention

    def mutant(q: torch.Tensor, cache: halfbyte.KVCache, **options: Any) -> Any:
        return right(q, cache, starts=torch.full((cache.batch,), 4, dtype=torch.int32), **options)

    monkeypatch.setattr(halfbyte, "decode_attention", mutant)
    problem = DecodeCase("small", DecodeShape(2, 4, 2, 32, 24))
    s = quick(pattern="halfbyte")
    measured = s.run([*decode.cases(s, [problem.shape], ["int8"]), decode_cases.AttentionJob(problem, ("int8",), ("auto",))])
    assert [(r.seconds, "exceeds the allowed" in r.refused) for r in measured] == [(None, True)] * 2


def test_what_is_wrong_once_it_is_timed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = halfbyte.decode_attention, count()
    monkeypatch.setattr(halfbyte, "decode_attention", lambda *a, **k: right(*a, **k) + (next(calls) > 0))
    (record,) = quick(pattern="halfbyte").run(decode.cases(quick(), [DecodeShape(2, 4, 2, 32, 24)], ["int8"]))
    assert record.seconds is None
    assert "as it was timed" in record.refused


def test_a_mutant_of_the_linear_layer_is_refused_by_every_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of 128 has the scale of its neighbour: no time in `bench linear` with sizes, nor with bars."""
    right = halfbyte.linear

    def mutant(x: torch.Tensor, weight: halfbyte.QuantTensor, **options: Any) -> torch.Tensor:
        scales = weight.scales.clone()  # type: ignore[union-attr]
        scales[:, 0] = scales[:, 1]
        return right(x, halfbyte.QuantTensor(weight.format, weight.shape, **{**weight.parts(), "scales": scales}), **options)

    monkeypatch.setattr(halfbyte, "linear", mutant)
    name = linear_cases.INT4
    layer = LinearCase(32, 256, "small", rows=(1,), formats=(name,), few=(1,))
    s = quick(pattern="halfbyte")
    measured = s.run([*linear.cases(s, [LinearShape(1, 32, 256)], [name]), linear_cases.LayerJob(layer, ("auto",))])
    ours = [r for r in measured if r.implementation.startswith("halfbyte")]
    assert [(r.seconds, "exceeds the allowed" in r.refused) for r in ours] == [(None, True)] * 2


# -------------------------------------------------------------------------------------------------------------------- peers


def test_every_peer_says_whether_it_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {row[0]: row[-1] for row in run_baselines.table_rows(CPU)}
    assert listed["torch sdpa"] == listed["flex attention"] == listed["tinygemm"] == "yes"
    assert listed["torch sdpa cudnn"] == "no: needs an NVIDIA GPU"
    assert listed["humming"] == "no: not installed: pip install humming-kernels; needs an NVIDIA GPU"
    assert {"flashinfer", "row-wise fbgemm, 8 splits", "gemlite", "bitsandbytes", "hf quantized cache, quanto"} <= set(listed)
    absent = Baseline("x", "linear", "int4", packages=("no_such_package.part",), install="x", gpu=True)
    assert absent.missing(CPU) == "not installed: pip install x; needs an NVIDIA GPU"
    assert absent.missing(GPU) == "not installed: pip install x"
    assert run("baselines", "--device", "cpu", "--json", command=bench.main) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["peer"]: row["runs here"] for row in rows} == listed
    assert run("baselines", "--quick", command=bench.main) == 1
    assert "need --measure" in capsys.readouterr().err


class Layer(torch.nn.Module):
    """Humming's and Marlin's layer as their sources describe it: what it holds decodes to the weight that the adapter says."""

    def __init__(self, *sizes: int, shape_n: int = 0, shape_k: int = 0, weight_config: Any = None, **options: Any) -> None:
        super().__init__()
        self.config, self.held = weight_config, {}
        self.qweight, self.scales = (torch.nn.Parameter(torch.empty(0, dtype=t), False) for t in (torch.int32, torch.bfloat16))

    def load_from_tensors(self, parts: dict[str, torch.Tensor]) -> None:
        self.held = parts

    def transform(self) -> None:
        """Humming's own order of codes."""

    def post_init(self) -> None:
        """Marlin's own order of codes: words of 8 codes along K, K first."""
        self.held = {"weight": self.qweight.mT.contiguous(), "weight_scale": self.scales.mT}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([self.held["weight"].view(torch.uint8) >> shift & 15 for shift in (0, 4)], -1).flatten(-2)
        scales, two = self.held["weight_scale"], self.held.get("weight_scale_2", torch.ones(1))
        scales = (scales.float() - 127).exp2() if scales.dtype is torch.uint8 else scales.float()
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        signed = torch.cat([e2m1, -e2m1])[codes.long()]
        w = signed if (self.config or {}).get("quant_method") else codes.float() - 8
        return (x.double() @ (w * scales.repeat_interleave(w.shape[1] // scales.shape[1], 1) * two).double().T).to(x.dtype)


@pytest.mark.parametrize("name", ["humming", "humming nvfp4", "humming mxfp4", "Marlin, of GPTQModel"])
def test_peers_that_need_a_gpu_are_given_the_weight_in_their_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(HummingLayer=Layer, MarlinLinear=Layer)
    for adapters in ("baselines.linear", "cases.linear_baselines"):
        monkeypatch.setattr(f"halfbyte_lab.{adapters}.import_module", lambda _: module)
    (peer,) = (p for p in run_baselines.every() if p.name == name)
    x, w = torch.randn(3, 256).bfloat16(), torch.randn(16, 256)
    assert peer.prepare is not None
    prepared = peer.prepare(x, w, lambda _: 2)
    assert len(prepared.calls) == 2
    reference = x.double() @ prepared.held[0].double().T
    for call in prepared.calls:
        assert float((call().double() - reference).norm() / reference.norm()) < 3e-3
    assert float((prepared.held[0] - w).norm() / w.norm()) < 0.2


def small_attention() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return decode.inputs(DecodeShape(2, 4, 2, 32, 24), torch.device("cpu"))


def relative(out: torch.Tensor, held: Sequence[torch.Tensor], q: torch.Tensor) -> float:
    ref = float64_attention(q, held[0], held[1], q.shape[-1] ** -0.5)
    return float((out.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("name", ["flex attention", "hf quantized cache, fp8"])
def test_peers_of_attention_that_run_here_are_right(name: str) -> None:
    if "hf" in name:
        pytest.importorskip("transformers.cache_utils", reason="transformers is not installed")
        pytest.importorskip("transformers").cache_utils.Fp8QuantizedLayer  # noqa: B018  its backend fp8 is young
    (peer,) = (p for p in attention.BASELINES if p.name == name)
    q, k, v = small_attention()
    assert peer.prepare is not None
    ready = peer.prepare(q, k, v, lambda _: 3)
    assert len(ready.calls) == 3
    first = [call() for call in ready.calls]
    assert all(relative(out, ready.held, q) < 0.01 for out in first)
    # A step of a cache starts from the same state each time.
    assert all(torch.equal(a, call()) for a, call in zip(first, ready.calls, strict=True))
    assert ready.held[0].shape == k.shape
    assert ready.nbytes == (k.nbytes + v.nbytes if name == "flex attention" else 2 * (23 * 2 * 2 * 32 + 4))


def test_caches_are_stored_as_fbgemm_asks() -> None:
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored, held = attention.fbgemm_int4(x, 4)
    assert stored.shape == (3, 5, 1, 4 * 4 + 64)
    assert stored.dtype == torch.uint8
    head, codes = stored[1, 2, 0, :16].view(torch.float16).reshape(4, 2).float(), stored[1, 2, 0, 16:]
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten().float().reshape(4, 32)
    torch.testing.assert_close((nibbles * head[:, :1] + head[:, 1:]).flatten().bfloat16(), held[1, 2])
    assert float((held.float() - x.float()).norm() / x.float().norm()) < 0.1


def test_flashinfer_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that attends over the pages as FlashInfer's documentation describes them."""

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
            assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

        def plan(self, *sizes: Any, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
            self.indptr, self.indices, self.last, self.heads, kv_heads, dim, self.page = sizes
            assert (self.heads, kv_heads, dim, q_data_type) == (4, 2, 32, torch.bfloat16)
            self.dtype = kv_data_type

        def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            outs = []
            for b in range(q.shape[0]):
                own = self.indices[self.indptr[b] : self.indptr[b + 1]]
                tokens = (len(own) - 1) * self.page + int(self.last[b])
                k, v = (p[own].flatten(0, 1)[:tokens].transpose(0, 1)[None].bfloat16() for p in pages)
                assert pages[0].dtype == self.dtype
                outs.append(float64_attention(q[b, None, :, None], k, v, 32**-0.5)[0, :, 0])
            return torch.stack(outs).bfloat16()

    monkeypatch.setitem(sys.modules, "flashinfer", type("flashinfer", (), {"BatchDecodeWithPagedKVCacheWrapper": Wrapper}))  # type: ignore[arg-type]
    q, k, v = decode.inputs(DecodeShape(2, 4, 2, 32, 100), torch.device("cpu"))
    for name in ("flashinfer", "flashinfer fp8"):
        (peer,) = (p for p in attention.BASELINES if p.name == name)
        assert peer.prepare is not None
        ready = peer.prepare(q, k, v, lambda _: 2)
        assert relative(ready.calls[1](), ready.held, q) < 0.01


def test_tinygemm_is_a_peer() -> None:
    x, w = linear.inputs(LinearShape(2, 64, 256), torch.device("cpu"))
    (peer,) = (p for p in linear_adapters.BASELINES if p.name == "tinygemm")
    assert peer.prepare is not None
    ready = peer.prepare(x, w, lambda _: 2)
    ref = torch.nn.functional.linear(x.double(), ready.held[0].double())
    assert float((ready.calls[1]().double() - ref).norm() / ref.norm()) < 0.01


def test_a_wrong_peer_and_one_that_fails_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: Any) -> Prepared:
        return Prepared([lambda: torch.zeros_like(q)], 1, (k, v))

    def fails(*given: Any) -> Prepared:
        raise RuntimeError("no such kernel")

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, copies: Any) -> Prepared:
        return Prepared([lambda: float64_attention(q, k, v, q.shape[-1] ** -0.5)], 2**20, (k, v))

    found = tuple(Baseline(f.__name__, "attention", "int4", f) for f in (wrong, fails, right))
    monkeypatch.setattr(run_baselines, "every", lambda: found)
    s = quick(pattern=" (wrong|fails|right)$")
    s.run(run_baselines.jobs(s)[:1])
    told = {r.implementation: (bool(r.seconds), r.refused) for r in s.records}
    assert told["right"] == (True, "")
    assert told["wrong"][0] is False
    assert "relative L2 error 1 " in told["wrong"][1]
    assert told["fails"] == (False, "RuntimeError: no such kernel")
