"""Benches of linear layers and of the fused projection, in small on a CPU: what is judged, what is refused, how it is told."""

from __future__ import annotations

import dataclasses
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benches import BRIEF, CPU, WHERE, make_tables, quick

import halfbyte
from halfbyte.device import Device
from halfbyte.errors import CheckpointError, Unsupported
from halfbyte.formats import weight_format
from halfbyte_lab.cases import linear_baselines, linear_cases, linear_targets, literature, qkv_cases, qkv_layers
from halfbyte_lab.cases.decompositions import DATA_PARALLEL, EVERY, KERNELS, Decomposition, Form, resident
from halfbyte_lab.cases.linear_targets import INT4, LinearCase
from halfbyte_lab.cases.targets import judge
from halfbyte_lab.extract import Metadata, Projections
from halfbyte_lab.measure import charts, records, session
from halfbyte_lab.measure.checks import BenchmarkRefused
from halfbyte_lab.measure.cupti import Kernel
from halfbyte_lab.measure.linear import copies_of, promise
from halfbyte_lab.measure.page import write_page
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Session
from halfbyte_lab.studies import w4a16_splitk
from halfbyte_lab.suites import QKV, section_of

SMALL = LinearCase(64, 256, "small", rows=(1, 4), few=(1,))


def rec(case: str, shape: dict[str, int], formats: str, by: str, seconds: float, **more: Any) -> Record:
    return Record("linear", shape, formats, by, 1000, WHERE, seconds=seconds, p10=seconds, p90=seconds, case=case, **more)


# ------------------------------------------------------------------------------------------------------------------- bars


def test_every_row_of_the_table_of_bars() -> None:
    found = {(b.case, b.formats, b.quantity): b.bound for b in linear_targets.every_target()}
    assert len(found) == len(linear_targets.every_target())
    for case, formats, quantity, bound in (
        ("16384 x 16384, 1 row", INT4, "roof_share", 0.94),
        ("16384 x 16384, 16 rows", INT4, "roof_share", 0.78),
        ("8192 x 8192, 8 rows", INT4, "roof_share", 0.86),
        ("10240 x 8192, 2 rows", INT4, "roof_share", 0.85),
        ("4096 x 4096, 8 rows", INT4, "seconds", 5.2e-6),
        ("6144 x 4096, 1 row", INT4, "seconds", 6.4e-6),
        ("57344 x 8192, 64 rows", INT4, "times_16_bit", 1.7),
        ("8192 x 28672, 16 rows", INT4, "times_16_bit", 2.4),
        ("4096 x 14336, 32 rows", INT4, "times_4_bit", 1.0),
        ("8192 x 8192, 16 rows", "nvfp4", "share_of_int4", 0.9),
        ("8192 x 8192, 16 rows", "nf4", "roof_share", 0.6),
        ("6144 x 4096, 64 rows", "nf4", "times_quoted", 1.0),
        ("6144 x 4096, 64 rows", "int4_g128", "times_16_bit", 1.15),
        ("8192 x 8192, 256 rows", "int4_g128", "times_16_bit", 1.0),
        ("8192 x 8192, 256 rows", "nf4", "times_16_bit", 0.95),
        ("8192 x 8192, 4096 rows", INT4, "times_16_bit", 0.95),
        ("4096 x 14336, 2048 rows", linear_targets.INT8_X, "times_16_bit", 1.3),
    ):
        assert found[case, formats, quantity] == bound  # type: ignore[index]
    assert ("4096 x 4096, 16 rows", INT4, "seconds") not in found
    assert ("4096 x 4096, 1 row", INT4, "times_16_bit") not in found
    assert ("8192 x 8192, 256 rows", linear_targets.INT8_X, "times_16_bit") not in found  # x is not rounded there
    for layer in linear_targets.LAYERS:
        assert all(weight_format(f) for f in layer.formats)
    assert set(linear_targets.QUICK_LAYERS) <= {layer.name for layer in linear_targets.LAYERS}
    assert [j.name for j in linear_cases.jobs(["auto"], "cpu")] == [layer.name for layer in linear_targets.LAYERS]
    assert {j.name for j in linear_cases.jobs(["auto"], "cpu", quick=True)} == set(linear_targets.QUICK_LAYERS)


def test_quoted_figures_are_found_by_shape_rows_and_code() -> None:
    assert literature.fastest(8192, 8192, 1, "int4_sym_g128") == literature.Quoted("humming", pytest.approx(15.62e-6))  # type: ignore[arg-type]
    assert literature.fastest(8192, 8192, 16, "int4_g128") == literature.Quoted("marlin ist", pytest.approx(17.41e-6))  # type: ignore[arg-type]
    nf4 = literature.fastest(4096, 4096, 64, "nf4")
    assert nf4 is not None
    assert nf4.peer == "bitsandbytes"
    for n, k, rows, formats in ((8192, 8192, 3, "nf4"), (8192, 8193, 1, "nf4"), (8192, 8192, 1, "int8_col")):
        assert literature.fastest(n, k, rows, formats) is None
    for found in literature.MICROSECONDS.values():
        assert all(len(row) == len(literature.ROWS) and min(row) > 5 for row in found.values())
        assert {peer for peer, _ in found} == set(literature.PEERS)
    assert "another run" in literature.SOURCE


def test_figures_stand_beside_those_of_their_own_case() -> None:
    shape = {"M": 1, "N": 8192, "K": 8192}
    ours = rec("a", shape, INT4, "halfbyte auto", 10e-6, roof_share=0.8)
    nvfp4 = rec("a", shape, "nvfp4", "halfbyte auto", 20e-6, roof_share=0.6)
    others = [rec("a", shape, "bf16", "cuBLAS", 30e-6), rec("a", shape, "int4", "tinygemm", 25e-6)]
    others += [rec("a", shape, "int4", linear_targets.PUBLISHED, 50e-6)]
    beside = [ours, nvfp4, *others]
    found = linear_cases.figures(ours, beside)
    assert found["times_16_bit"] == pytest.approx(3)
    assert found["times_4_bit"] == pytest.approx(2.5)
    assert found["times_quoted"] == pytest.approx(1.562)
    assert found["share_of_int4"] == pytest.approx(1)
    found = linear_cases.figures(nvfp4, beside)
    assert found["share_of_int4"] == pytest.approx(0.75)
    assert found["times_quoted"] == pytest.approx(19.41 / 20, rel=0.02)
    assert linear_cases.figures(dataclasses.replace(ours, method="cuda, not captured (x)"), beside) == {}


# ------------------------------------------------------------------------------------------------------------------- runs


def test_a_layer_is_measured_beside_its_peers() -> None:
    measured = list(linear_cases.LayerJob(SMALL, ("auto",)).measure(quick()))
    assert not [r.refused for r in measured if r.refused]
    by = [(r.case, r.formats, r.implementation) for r in measured]
    assert by[:3] == [
        ("64 x 256, 1 row", "bf16", "cuBLAS"),
        ("64 x 256, 1 row", "int4", "tinygemm"),
        ("64 x 256, 1 row", INT4, "halfbyte auto"),
    ]
    assert [f for case, f, who in by if case == "64 x 256, 1 row" and who == "halfbyte auto"] == list(linear_targets.FORMATS)
    assert [f for case, f, who in by if case == "64 x 256, 4 rows" and who == "halfbyte auto"] == [INT4]
    ours = measured[2]
    assert ours.nbytes == 64 * 128 + 64 * 2 * 2  # codes and fp16 scales
    assert ours.seconds == ours.chained != ours.alone
    assert ours.peer_seconds == measured[0].seconds
    assert [v.quantity for v in ours.bars] == ["times_4_bit"]
    assert ours.bars[0].value == pytest.approx((measured[1].seconds or 0) / (ours.seconds or 1))
    rows = linear_targets.table(measured)[1]
    assert len(rows) == len(measured)
    assert all(len(row) == len(linear_targets.HEADERS) for row in rows)


def test_charts_of_few_rows_and_of_prompts() -> None:
    measured = [
        rec(
            f"64 x 256, {m} rows",
            {"M": m, "N": 64, "K": 256},
            f,
            "halfbyte auto",
            1e-5,
            peer_seconds=1e-5 * m / 64,
            roof_share=0.5,
            roof_gb_per_s=1.0,
        )
        for m in (16, 64, 512)
        for f in (INT4, linear_targets.INT8_X)
    ]
    assert [m for m, _ in linear_targets.shares(measured)["64 x 256"]["halfbyte int4"]] == [16, 64]
    assert linear_targets.prompts(measured) == {"64 x 256": {f: [(64, 1.0), (512, 8.0)] for f in (INT4, linear_targets.INT8_X)}}
    assert linear_targets.prompts(measured[:4]) == {}
    assert len(linear_targets.figures(measured)) == 2


def test_a_prompt_is_held_against_16_bits_and_over_what_is_multiplied() -> None:
    """Peers for few rows take no part; a format that rounds x to INT8 is judged over integers, which differ from x by 1 %."""
    measured = list(linear_cases.LayerJob(LinearCase(64, 256, "prompt", (512,)), ("auto",)).measure(quick(pattern="int4_g128")))
    plain, exact, rounded = measured
    assert [r.implementation for r in measured] == ["cuBLAS", "halfbyte auto", "halfbyte auto"]
    assert [r.formats for r in measured] == ["bf16", "int4_g128", linear_targets.INT8_X]
    assert not any(r.refused for r in measured)
    assert [r.bars[0].bound for r in (exact, rounded)] == [0.95, 1.3]
    assert exact.bars[0].value == pytest.approx((plain.seconds or 0) / (exact.seconds or 1))
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = halfbyte.quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), linear_targets.INT8_X)
    assert promise(x, weight)(halfbyte.linear(x, weight)).ok
    assert not promise(x, weight)(torch.nn.functional.linear(x, weight.dequantize().bfloat16())).ok


def test_a_product_that_goes_wrong_while_it_is_timed_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = halfbyte.linear, []

    def late(x: torch.Tensor, w: Any, impl: str) -> torch.Tensor:
        calls.append(1)
        return right(x, w, impl=impl) * (1.0 if len(calls) <= 2 else 1.5)

    monkeypatch.setattr(halfbyte, "linear", late)
    measured = quick(pattern="1 row int4_sym").run([linear_cases.LayerJob(SMALL, ("auto",))])
    assert measured[-1].seconds is None
    assert "exceeds the allowed" in measured[-1].refused


def test_the_filter_leaves_layers_out_before_their_data_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halfbyte, "quantize", lambda *args: pytest.fail("made data"))
    assert quick(pattern="large").run([linear_cases.LayerJob(SMALL, ("auto",))]) == []
    monkeypatch.undo()
    monkeypatch.setattr(session, "QUICK", BRIEF)
    measured = quick(pattern="1 row.*mxfp4").run([linear_cases.LayerJob(SMALL, ("auto",))])
    assert [r.formats for r in measured] == ["bf16", "mxfp4"]  # no int4, so no peers of it


def test_weights_that_cannot_be_made_leave_their_bars_unmet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halfbyte, "quantize", Mock(side_effect=RuntimeError("out of memory")))
    measured = list(linear_cases.LayerJob(SMALL, ("auto",)).measure(quick(pattern="int4_sym")))
    assert [r.case for r in measured] == ["64 x 256, 1 row", "64 x 256, 4 rows"]
    assert all("out of memory" in r.refused and r.bars[0].value is None for r in measured)


def test_a_peer_that_cannot_be_made_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(linear_baselines, "import_module", fail)
    monkeypatch.setattr(linear_baselines, "low_bit", lambda *of: [linear_baselines.humming(*of)])
    plain, theirs, ours = quick(pattern="1 row.*int4_sym").run([linear_cases.LayerJob(SMALL, ("auto",))])
    assert theirs.refused == "64 x 256, 1 row humming: ImportError: no humming.layer"
    assert plain.seconds
    assert ours.seconds


def test_peers_give_the_right_numbers() -> None:
    w = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)) / 16
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = halfbyte.quantize(w, INT4)
    rotation = copies_of(weight, 3)
    assert len({one.codes.data_ptr() for one in rotation}) == 3
    for peer in (
        linear_baselines.cublas(w.bfloat16(), lambda n: 2),
        *linear_baselines.low_bit(weight, lambda n: 2),
    ):
        judge = linear_baselines.judged_loosely(peer.values, x)
        assert all(judge(call(x[:rows])).ok for call in peer.calls for rows in (1, 5))
        assert not judge(peer.calls[0](x) * 1.02).ok


# ------------------------------------------------------------------------------------------------------------------- split-K


class Cuttable:
    """A kernel that can be told how to cut its work, and takes longer the more programs it has. It has no splits of 16."""

    def store(self, weights: Any) -> Any:
        return weights

    def form(self, x: torch.Tensor, stored: Any, cut: Decomposition, device: Device) -> Form:
        if cut.splits == 16:
            raise Unsupported("no")
        return Form([lambda w=w: halfbyte.linear(x, w) for w in stored], 8 * cut.splits, 2)


def test_the_study_cuts_every_kernel_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "halfbyte", Cuttable())
    s = quick()
    measured = s.run([w4a16_splitk.SizeJob(128, 128, (1, 3))])
    names = [r.implementation for r in measured if r.case == "split-k study, 128, 1 row"]
    assert names == [
        *(f"halfbyte, {cut}" for cut in EVERY if cut.splits != 16),
        w4a16_splitk.OURS,
        w4a16_splitk.SAME,
    ]  # the published one needs Triton
    assert measured[0].shape == {"M": 1, "N": 128, "K": 128, "programs": 8, "resident": 2, "SMs": 1}
    rows = w4a16_splitk.table(measured)[1]
    assert [row[:2] for row in rows[:2]] == [("split-k study, 128, 1 row", "halfbyte"), ("split-k study, 128, 3 rows", "halfbyte")]
    assert all(len(row) == len(w4a16_splitk.HEADERS) for row in rows)
    assert rows[0][3] == "4.00"  # 8 programs, 2 at a time on one multiprocessor
    (summary,) = w4a16_splitk.SummaryJob().measure(s)
    assert [v.quantity for v in summary.bars] == ["gain", "peak_gain"]
    assert [j.name for j in w4a16_splitk.jobs(quick())][-1] == w4a16_splitk.SUMMARY


def test_gains_are_of_the_best_cut_over_data_parallel_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "halfbyte", Cuttable())

    def one(case: str, cut: Decomposition, seconds: float) -> Record:
        return dataclasses.replace(rec(case, {"M": 1, "N": 8, "K": 8}, INT4, f"halfbyte, {cut}", seconds), op=w4a16_splitk.OP)

    measured = [one("a", DATA_PARALLEL, 6.0), one("a", EVERY[1], 3.0), one("a", EVERY[-1], 2.0), one("b", DATA_PARALLEL, 1.0)]
    assert w4a16_splitk.gains(measured, "halfbyte") == {"a": 3.0}
    assert w4a16_splitk.gains(measured, "published") == {}
    splits = {2: 5.0, 4: 4.0, 16: 4.4}
    theirs = [rec("s, 8, 1 row", {"M": 1, "N": 8, "K": 8}, INT4, f"published, split-k {n}", t) for n, t in splits.items()]
    theirs = [dataclasses.replace(r, op=w4a16_splitk.OP) for r in theirs]
    assert w4a16_splitk._by_splits(theirs) == {"8": [(2, 1.25), (4, 1.0), (16, 1.1)]}
    assert "slower in 1 of 1 cases, at most 1.10x (s, 8, 1 row)" in w4a16_splitk.says(theirs)[0]
    assert w4a16_splitk.table(theirs)[1][0][9:12] == ("4000000.0", "4400000.0", "0.91x")
    s = quick()
    s.records = measured
    (record,) = w4a16_splitk.SummaryJob().measure(s)
    assert [v.met for v in record.bars] == [True, False]
    ours = dataclasses.replace(rec("a", {"M": 1}, INT4, "halfbyte auto", 1.0), op=w4a16_splitk.OP)
    published = dataclasses.replace(ours, implementation=w4a16_splitk.SHIPPED, seconds=2.9)
    assert w4a16_splitk._held_against(ours, published).bars[0].met is False
    assert w4a16_splitk._held_against(ours, dataclasses.replace(published, seconds=3.1)).bars[0].met is True


def test_blocks_that_a_multiprocessor_holds() -> None:
    gpu = Device("cuda", "fake gpu", 2**37, 50 * 2**20, 8, 8, index=0, capability=(9, 0), sm_count=132, driver="580.1")

    def made(registers: int, shared: int, warps: int) -> Any:
        return SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(shared=shared, num_warps=warps))

    assert resident(made(96, 49536, 4), gpu) == 4  # shared memory: 228 KB
    assert resident(made(250, 0, 8), gpu) == 1  # registers
    assert resident(made(16, 0, 4), gpu) == 16  # threads
    assert resident(made(96, 0, 4), CPU) == 1


# ------------------------------------------------------------------------------------------------------------------- qkv

SHAPE = qkv_layers.AttentionShape("small layer", 128, 4, 2, 32, 24)


def test_the_four_variants_are_the_published_ones() -> None:
    assert {v.name: len(v.launches) for v in qkv_layers.VARIANTS} == {
        "naive": 7,
        "projection-fused": 5,
        "semi-fused": 3,
        "two-kernel": 2,
    }
    assert len({id(v.launches[-1]) for v in qkv_layers.VARIANTS}) == 1  # attention is the same
    assert qkv_cases.FORMATS == ("mxfp4", "nf4", "nvfp4")


@pytest.mark.parametrize("fmt", qkv_cases.FORMATS)
def test_the_variants_give_the_same_numbers(fmt: str) -> None:
    layer = qkv_layers.build(qkv_layers.random_weights(SHAPE), fmt, torch.device("cpu"))
    layer.biases[1].fill_(0.5)
    layer = qkv_layers.QkvLayer(SHAPE, layer.x, layer.weights, layer.biases)
    right = qkv_layers.promise(layer)
    for v in qkv_layers.VARIANTS:
        assert right(v.run(layer.copy())).ok, v.name
    assert not right(v.run(dataclasses.replace(layer, weights=(layer.weights[0], layer.weights[2], layer.weights[1])))).ok


def test_variants_are_measured_launch_by_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    job = qkv_cases.VariantsJob(qkv_layers.shipped_weights(SHAPE), "auto", ("nf4",))
    measured = list(job.measure(quick()))
    assert [r.implementation for r in measured] == [v.name for v in qkv_layers.MEASURED]
    assert measured[-1].nbytes == 2 * sum(SHAPE.rows) * SHAPE.hidden > measured[0].nbytes
    assert all(r.seconds and r.seconds == r.chained and r.alone and not r.refused for r in measured)
    assert measured[0].note.startswith("weights of the shipped model")
    assert measured[0].note.count("dequantize") == 3
    assert measured[3].bars[0].value == pytest.approx((measured[0].seconds or 0) / (measured[3].seconds or 1))
    rows = qkv_cases.table(measured)[1]
    assert [row[3] for row in rows] == ["7", "5", "3", "2", "2"]
    assert qkv_cases.table([dataclasses.replace(measured[3], note=qkv_cases._ORDERS)])[1][0][3] == "2 + 1"
    assert all(len(row) == len(qkv_cases.HEADERS) for row in rows)
    # Seeded mutant: the fused projection takes the scales of q for k.
    monkeypatch.setattr(halfbyte, "qkv_projection", lambda x, w, b, impl: tuple(halfbyte.linear(x, one) * 1.1 for one in w))
    measured = list(job.measure(quick()))
    assert [bool(r.refused) for r in measured] == [False, False, False, True, False]
    assert measured[3].bars[0].value is None


def ran(*names: str) -> list[Kernel]:
    """Kernels of 1, 2, 3 ... us."""
    return [Kernel(name, 1e-6 * us) for us, name in enumerate(names, 1)]


def test_kernels_belong_to_launches() -> None:
    fused = qkv_layers.VARIANTS[-1]
    halves = ran("gemm", "cublasLt::splitKreduce_kernel<32>", "attention")
    assert qkv_cases.by_launch(fused, ran("projection", "attention")) == [[k] for k in ran("projection", "attention")]
    assert qkv_cases.by_launch(fused, halves) == [halves[:2], halves[2:]]
    ahead = ran("order", "projection", "attention")
    assert qkv_cases.by_launch(fused, ahead) == [ahead[:2], ahead[2:]]
    for names in (["projection", "reduce", "attention"], ["attention"], []):
        with pytest.raises(BenchmarkRefused, match=f"launches {len(names)} kernels and is published with 2"):
            qkv_cases.by_launch(fused, ran(*names))


def test_variants_tell_the_kernels_of_each_launch_and_are_refused_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {
        "naive": [ran(*"abcdefg")] * 3,
        "projection-fused": [ran("all", "q", "cublasLt::splitKreduce_kernel", "k", "v", "attention")],
        "semi-fused": [],
        "two-kernel": [ran("projection", "more", "attention")],
    }
    s = quick()
    monkeypatch.setattr(Session, "traced", lambda _, works: {name: calls[name] for name in works})
    gpu = dataclasses.replace(CPU, kind="cuda")
    records = {
        v.name: Record(qkv_cases.OP, {}, "nf4", v.name, 1, s.environment, seconds=1.0, note="x") for v in qkv_layers.VARIANTS
    }
    s.device = gpu
    told = [qkv_cases._with_kernels(s, records[v.name], v, calls[v.name]) for v in qkv_layers.VARIANTS[:3]]
    assert told[0].kernel_seconds == pytest.approx(28e-6)
    assert list(told[0].kernels) == [launch.name for launch in qkv_layers.VARIANTS[0].launches]
    assert told[1].kernels == pytest.approx(
        {"dequantize q, k, v": 1e-6, "product q": 5e-6, "product k": 4e-6, "product v": 5e-6, "attention": 6e-6}
    )
    assert told[1].note == "cuBLAS splits 1 of the products along K, with a second kernel each; x"
    assert told[2].note == "launches were not counted: torch sees no NVIDIA GPU; x"
    with pytest.raises(BenchmarkRefused, match="launches 3 kernels"):
        qkv_cases._with_kernels(s, records["two-kernel"], qkv_layers.VARIANTS[3], calls["two-kernel"])
    headers, rows = qkv_cases.table(told)
    assert (headers[6], rows[0][6], rows[1][9]) == (
        "us of kernels",
        "28.0",
        "dequantize q, k, v 1.0, product q 5.0, product k 4.0, product v 5.0, attention 6.0",
    )
    ((headers, _),) = QKV.tables(told[2:])
    assert not any("kernels" in header for header in headers)


def test_one_launch_for_three_is_measured() -> None:
    measured = list(qkv_cases.FusedJob(SHAPE, "auto", (1, 4)).measure(quick(pattern="nf4")))
    assert [(r.implementation, len(r.bars)) for r in measured] == [
        *(("three launches", 0), ("16-bit weights", 0), ("one launch", 1)),
        *(("three launches", 0), ("16-bit weights", 0), ("one launch", 0)),
    ]
    assert measured[2].bars[0].value == pytest.approx((measured[0].seconds or 0) / (measured[2].seconds or 1))
    assert all(r.error and r.error_allowed and r.error <= r.error_allowed for r in measured)


def test_one_launch_that_is_wrong_once_it_is_timed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = halfbyte.qkv_projection, count()

    def mutant(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        wrong = next(calls) > 1  # a CPU has a rotation of two
        return tuple(y + wrong for y in right(*args, **options))

    monkeypatch.setattr(halfbyte, "qkv_projection", mutant)
    three, _, one = qkv_cases.FusedJob(SHAPE, "auto", (1,)).measure(quick(pattern="nf4"))
    assert three.seconds
    assert one.seconds is None
    assert "one launch alone, as it was timed: relative L2 error" in one.refused
    assert not one.bars[0].met


def projections() -> Projections:
    q, k, v = torch.randn(64, 96), torch.randn(32, 96), torch.randn(32, 96)
    biases = (torch.randn(64), torch.randn(32), torch.randn(32))
    return Projections(Metadata("some/model", 3, None, 4, 2, 16, 96, True), (q, k, v), biases)


def test_an_extract_is_a_layer(tmp_path: Path) -> None:
    made = projections()
    made.save(tmp_path / "x")
    given = qkv_layers.extracted_weights(tmp_path / "x")
    assert given.shape.rows == (64, 32, 32)
    assert (given.shape.name, given.shape.dtype) == ("some/model layer 3", torch.float16)
    assert all(map(torch.equal, (*given.weights, *given.biases), (*made.weights, *made.biases)))
    layer = qkv_layers.build(given, "mxfp4", torch.device("cpu"))
    assert qkv_layers.promise(layer)(qkv_layers.VARIANTS[0].run(layer)).ok


@pytest.mark.parametrize("damage", ["missing", "shape", "metadata", "pickle", "field"])
def test_a_damaged_extract_is_refused(tmp_path: Path, damage: str) -> None:
    import numpy as np

    projections().save(tmp_path)
    if damage == "missing":
        (tmp_path / "bk.npy").unlink()
    elif damage == "shape":
        np.save(tmp_path / "wk.npy", np.zeros((31, 96), np.float32))
    elif damage == "pickle":
        np.save(tmp_path / "wk.npy", np.array([{}], dtype=object), allow_pickle=True)
    else:
        (tmp_path / "metadata.json").write_text("{" if damage == "metadata" else '{"model": "x"}')
    with pytest.raises(CheckpointError, match=r"wk|holds no extract"):
        qkv_layers.extracted_weights(tmp_path)


def test_the_shipped_weights_are_repeated_to_the_shape() -> None:
    given = qkv_layers.shipped_weights(qkv_layers.GPT2)
    assert [tuple(w.shape) for w in given.weights] == [(768, 768)] * 3
    q = given.weights[0]
    assert torch.equal(q[:, :256], q[:, 256:512])
    assert torch.equal(q[:256], q[512:])
    assert q.std() > 0


# ------------------------------------------------------------------------------------------------------------------- told


def some_records() -> list[Record]:
    """What a run on a GPU leaves: one layer with 1 and 4 rows."""
    layer = next(layer for layer in linear_targets.LAYERS if layer.name == "8192 x 8192")
    made = []
    for rows, time in ((1, 11e-6), (4, 12e-6)):
        shape = {"M": rows, "N": 8192, "K": 8192}
        case = layer.case(rows)
        peers = [rec(case, shape, "bf16", "cuBLAS", 34.5e-6), rec(case, shape, "int4", "tinygemm", 20e-6)]
        roof = {"roof_gb_per_s": 1000 / 9.4e-6 / 1e9, "peer": "cuBLAS", "peer_seconds": 34.5e-6}
        ours = rec(case, shape, INT4, "halfbyte auto", time, roof_share=9.4e-6 / time, chained=time, **roof)
        verdicts = session_judge(layer, rows, ours, [*peers, ours])
        made += [*peers, dataclasses.replace(ours, bars=verdicts)]
    return made


def session_judge(layer: LinearCase, rows: int, ours: Record, beside: list[Record]) -> Any:
    return judge(linear_targets.targets_of(layer, rows, INT4), linear_cases.figures(ours, beside))


def test_humming_stands_beside_ours_of_the_same_run_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make_tables()
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    made = some_records()
    case, shape = made[2].case, made[2].shape
    other = dataclasses.replace(WHERE, device="another GPU", date="2026-11-27")
    theirs = rec(case, shape, "int4", "humming", 22e-6)
    run = [dataclasses.replace(r, environment=other) for r in (made[0], dataclasses.replace(made[2], seconds=20e-6), theirs)]
    records.append(tmp_path / "results" / "gpu.jsonl", made)
    assert tables.beside_humming() == tables.NOTHING
    records.append(tmp_path / "results" / "gpu.jsonl", run)
    assert "| 8192 x 8192, M = 1 | 20.0, 22.0: 1.10x |  |  | 34.5 |" in tables.beside_humming()
    assert "another GPU" not in tables.linear()
    records.append(tmp_path / "results" / "gpu.jsonl", [dataclasses.replace(made[2], environment=WHERE, seconds=5e-6)])
    assert "5.0" not in tables.beside_humming()


def test_studies_are_told_from_their_last_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make_tables()
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "SHOWN_ROWS", 5)
    folder = tmp_path / tables.STUDIES
    folder.mkdir(parents=True)
    (folder / "memory-7.svg").touch()
    # as before they had a study's mark
    variants = list(qkv_cases.VariantsJob(qkv_layers.random_weights(SHAPE), "auto", ("nf4",)).measure(quick()))
    skipped = dataclasses.replace(
        rec("c", {}, "int4", "x", None), study="int8-splitk", refused="c: too large", op="int8 split-k study"
    )
    ours = [rec("split-k study, 8, 1 row", {"M": 1, "N": 8, "K": 8}, INT4, "halfbyte auto", t) for t in (9e-6, 5e-6)]
    cut = [dataclasses.replace(r, op=w4a16_splitk.OP, study="w4a16-splitk") for r in ours]
    there = dataclasses.replace(cut[1], environment=dataclasses.replace(cut[1].environment, device="another GPU", driver="1"))
    on_cpu = dataclasses.replace(cut[1], seconds=77e-6)
    records.append(tmp_path / "results" / "gpu.jsonl", [*cut, there, *variants, skipped])
    records.append(tmp_path / "results" / "cpu.jsonl", [on_cpu, dataclasses.replace(on_cpu, study="accuracy")])
    told = tables.study("w4a16-splitk")
    assert told.count("| case | kernel | halfbyte auto, us |") == 2  # columns that no record fills are left out
    assert [line.split("|")[3].strip() for line in told.splitlines() if line.startswith("| split-k")] == ["5.0", "5.0"]
    assert [line.partition(";")[0] for line in told.splitlines() if "torch" in line] == ["fake", "another GPU"]
    fused = tables.study("fused-qkv")
    assert "small layer: random weights. " in fused
    assert fused.count("| small layer | nf4 | naive | 7 |") == 1
    assert "<details>" not in fused
    assert "![small layer: end to end](studies/fused-qkv-1.svg)" in fused
    assert "![small layer: launch by launch](studies/fused-qkv-2.svg)" in fused
    assert "Over that of 16-bit weights: small layer, nf4: " in fused
    assert "Fastest of the four: small layer, nf4: " in fused
    assert "What has no figure, and why</summary>\n\n- c: too large\n" in tables.study("int8-splitk")
    assert "fake" in tables.study("accuracy")
    assert tables.study("memory") == tables.NOTHING
    monkeypatch.setattr(tables, "SHOWN_ROWS", 4)
    assert "<summary>Table, 5 rows</summary>\n\n| case |" in tables.study("fused-qkv")
    tables.write_charts()
    assert sorted(path.name for path in folder.iterdir()) == ["fused-qkv-1.svg", "fused-qkv-2.svg"]
    assert "prefers-color-scheme" in (folder / "fused-qkv-1.svg").read_text()


def test_panels_share_one_legend() -> None:
    svg = charts.panels(
        {"a": {"x": [(1, 2.0), (2, 3.0)]}, "b": {"x": [(1, 1.0)], "y": [(2, 5.0)]}}, x_label="r", y_label="s", title="t"
    )
    assert svg.count(">x</text>") == svg.count(">y</text>") == svg.count(">t</text>") == 1
    with pytest.raises(ValueError, match="by_title is empty"):
        charts.panels({}, x_label="r", y_label="s", title="t")


def test_a_page_of_linear_layers(tmp_path: Path) -> None:
    made = some_records()
    page = write_page(made, "linear", tmp_path / "p.html", section_of=section_of).read_text()
    assert "missed: 85.5\u00a0%" in page
    assert "fastest quoted" in page
    assert "<svg" in page
    assert linear_targets.figures([]) == []
