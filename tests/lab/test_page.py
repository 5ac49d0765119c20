"""The page of any records: told by kind and by machine, drawn, and held against records of before."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import refusal, run
from halfbyte.errors import InvalidArgument
from halfbyte_lab import bench, suites
from halfbyte_lab.cases import figures
from halfbyte_lab.measure import charts, compare, records, tables
from halfbyte_lab.measure import figures as measure_figures
from halfbyte_lab.measure import page as page_module
from halfbyte_lab.measure.compare import Change, changes, latest
from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.records import Record, Verdict
from halfbyte_lab.measure.report_sections import by_section

DEMO = Path(__file__).parents[2] / "results" / "demo.jsonl"
GPU = Environment("GPU one", "580.1", 8, {"torch": "2"}, "abc123", "halfbyte bench decode", "2026-01-01T00:00:00+00:00")
CPU = dataclasses.replace(GPU, device="CPU", driver="", threads=2, command="halfbyte bench linear")
SHAPE = {"B": 32, "Hq": 8, "H": 1, "D": 128, "T": 8192}


page_of = functools.partial(page_module.write_page, section_of=suites.section_of)


def rec(formats: str = "int4", seconds: float | None = 1e-5, by: str = "halfbyte auto", **more: Any) -> Record:
    spread = {} if seconds is None else {"p10": 0.99 * seconds, "p90": 1.01 * seconds}
    known = {"op": "decode_attention", "shape": SHAPE, "nbytes": 10**8, "environment": GPU, "case": "batch 32"}
    return Record(**{**known, **spread, "formats": formats, "implementation": by, "seconds": seconds, **more})


def attention(times: float = 1.0, where: Environment = GPU) -> list[Record]:
    """A batch of 32 and of 128 in int4, and in 16 bits."""
    found = []
    for batch in (32, 128):
        shape, case = {**SHAPE, "B": batch}, f"batch {batch}"
        peer = rec("bf16", batch * 4e-6, "torch sdpa flash", shape=shape, case=case, environment=where)
        rate = {
            "gb_per_s": 2000.0,
            "roof_gb_per_s": 4000.0,
            "roof_share": 0.5,
            "bars": (Verdict("roof_share", 0.9, 0.5, met=False),),
        }
        ours = rec("int4", times * batch * 1e-6, shape=shape, case=case, environment=where, **rate)
        found += [peer, dataclasses.replace(ours, peer="torch sdpa flash", peer_seconds=peer.seconds)]
    return found


# -------------------------------------------------------------------------------------------------------------- before and after


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (rec(seconds=1.0), rec(seconds=0.5), "faster"),
        (rec(seconds=1.0), rec(seconds=2.0), "slower"),
        (rec(seconds=1.0), rec(seconds=1.015, p10=1.0149, p90=1.0151), "same"),  # apart, but by less than 2 %
        (rec(seconds=1.0), rec(seconds=1.2, p10=0.9, p90=1.3), "within noise"),
        (rec(seconds=1.0), rec(seconds=None, refused="wrong"), "refused now"),
        (rec(seconds=None, refused="wrong"), rec(seconds=1.0), "refused before"),
        (rec(seconds=None, refused="wrong"), rec(seconds=None, refused="wrong"), "same"),
        (rec(seconds=None, nbytes=5), rec(seconds=None, nbytes=5), "same"),
        (rec(seconds=None, op="memory", shape={"24 GB x 1": 9}), rec(seconds=None, op="memory", shape={"24 GB x 1": 8}), "changed"),
        (rec(seconds=None, refused="wrong", error=1.0), rec(seconds=None, refused="wrong", error=2.0), "same"),
        (rec(seconds=1.0), rec(seconds=None), "changed"),
        (rec(seconds=None, perplexity=2.2623), rec(seconds=None, perplexity=2.2624), "same"),
        (rec(seconds=None, perplexity=2.26), rec(seconds=None, perplexity=2.28), "changed"),
        (rec(seconds=None, perplexity=2.26), rec(seconds=None), "changed"),
        (rec(seconds=None, error=1e-3), rec(seconds=None, error=1.01e-3), "same"),
        (rec(seconds=None, error=1e-3), rec(seconds=None, error=2e-3), "changed"),
        (rec(seconds=None, by_layer=(1.0, 1.0)), rec(seconds=None, by_layer=(1.0, 1.5)), "changed"),
        (rec(seconds=None, by_layer=(1.0, 1.0)), rec(seconds=None, by_layer=(1.0,)), "changed"),
        (rec(seconds=None, bits=4.5), rec(seconds=None, bits=5.0), "changed"),
        (
            rec(seconds=None, bars=(Verdict("gain", 1.0, 1.01, met=True),)),
            rec(seconds=None, bars=(Verdict("gain", 1.0, 0.99, met=False),)),
            "changed",
        ),
        (None, rec(), "new"),
        (rec(), None, "gone"),
    ],
)
def test_a_change_is_told_beyond_the_noise(before: Record | None, after: Record | None, verdict: str) -> None:
    change = Change(before, after)
    assert change.verdict == verdict
    assert change.marked == (verdict not in ("same", "within noise"))


def test_the_latest_record_of_each_thing_is_kept() -> None:
    later = dataclasses.replace(GPU, date="2026-01-02T00:00:00+00:00")
    old, new, other = rec(seconds=1.0), rec(seconds=2.0, environment=later), rec("int8", 3.0)
    assert latest([new, old, other]) == [new, other]
    assert latest([old, rec(seconds=4.0)]) == [rec(seconds=4.0)]  # of one run the last
    machines = [rec(environment=CPU), rec(), rec(environment=dataclasses.replace(CPU, threads=1))]
    apart = [*machines, rec(study="int4-gqa"), rec(case="x")]
    assert latest(apart) == apart


LATER = dataclasses.replace(GPU, date="2026-01-02T00:00:00+00:00")


def failure(where: Environment, **more: Any) -> Record:
    """What a session keeps of a job that raised."""
    known = {"job": "decode_attention: batch 32", "case": "batch 32", "refused": "batch 32: out of memory"}
    return Record("decode_attention", {}, "", "", 0, where, **{**known, **more})


def test_a_job_that_failed_as_a_whole_and_one_that_did_not_replace_each_other() -> None:
    fine = [rec(f, job="decode_attention: batch 32") for f in ("int4", "int8")]
    other = rec(case="batch 64", job="decode_attention: batch 64")
    assert latest([*fine, other, failure(LATER)]) == [other, failure(LATER)]
    again = [dataclasses.replace(r, environment=LATER) for r in fine]
    assert latest([failure(GPU), *again[:1]]) == again[:1]
    assert latest([failure(GPU), fine[0]]) == [failure(GPU), fine[0]]  # of one run: it failed after the first format
    # Records of before jobs were written down are known by their case.
    assert latest([rec(), failure(LATER)]) == [failure(LATER)]
    assert latest([failure(GPU, job=""), rec(environment=LATER)]) == [rec(environment=LATER)]
    assert latest([*fine, failure(LATER, study="int4-gqa")]) == [*fine, failure(LATER, study="int4-gqa")]


def test_a_job_that_failed_as_a_whole_is_refused_in_all_that_it_measures() -> None:
    fine = [rec(f, job="decode_attention: batch 32") for f in ("int4", "int8")]
    assert [(c.verdict, c.record.formats) for c in changes(fine, [failure(LATER)])] == [
        ("refused now", "int4"),
        ("refused now", "int8"),
    ]
    assert [c.verdict for c in changes([failure(GPU)], fine)] == ["refused before"] * 2
    assert [c.verdict for c in changes([failure(GPU)], [failure(LATER)])] == ["same"]
    assert [c.verdict for c in changes([], [failure(LATER)])] == ["new"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rec(shape={**SHAPE, "programs": 264}), rec(shape={**SHAPE, "programs": 128}, seconds=1e-6)),
        (rec(shape={**SHAPE, "splits": 2, "launches": 2}), rec(shape={**SHAPE, "splits": 1, "launches": 1}, seconds=1e-6)),
        (rec(op="memory", shape={"24 GB x 1": 60544}, seconds=None), rec(op="memory", shape={"24 GB x 1": 60512}, seconds=None)),
    ],
)
def test_another_plan_or_answer_is_the_same_thing(old: Record, new: Record) -> None:
    assert latest([old, new]) == [new]
    (change,) = changes([old], [new])
    assert change.marked
    assert change.verdict in ("faster", "changed")
    assert len(latest([old, rec(shape={**SHAPE, "B": 64})])) == 2


def test_what_changed_most_comes_first() -> None:
    before = [rec("int4", 1.0), rec("int8", 1.0), rec("bf16", 1.0), rec("nf4", 1.0)]
    after = [rec("int4", 1.0), rec("int8", 1.1), rec("bf16", 3.0), rec("fp8", 1.0)]
    found = changes(before, after)
    assert [(c.record.formats, c.verdict) for c in found[:2]] == [("bf16", "slower"), ("int8", "slower")]
    assert {c.record.formats: c.verdict for c in found[2:]} == {"fp8": "new", "nf4": "gone", "int4": "same"}
    assert found[-1].record.formats == "int4"
    assert found[0].ratio == 3.0


# -------------------------------------------------------------------------------------------------------------- figures


def test_speed_is_over_the_16_bits_of_the_same_run() -> None:
    peer, ours = rec("bf16", 4.0, "torch sdpa flash"), rec("int4", 1.0)
    assert measure_figures.times_16_bit([peer, ours], ours) == 4.0
    assert measure_figures.times_16_bit([peer, ours], peer) is None
    elsewhere = dataclasses.replace(peer, environment=dataclasses.replace(GPU, date="2026-02-01"))
    assert measure_figures.times_16_bit([elsewhere, ours], ours) is None
    assert tables.fastest_16_bit([peer, ours], ours) == 4.0
    assert tables.fastest_16_bit([elsewhere, ours], ours) is None
    assert measure_figures.times_16_bit([], dataclasses.replace(ours, peer_seconds=2.5)) == 2.5
    assert measure_figures.times_16_bit([], dataclasses.replace(ours, op="append", peer_seconds=2.5)) is None


def test_launches_are_read_from_the_note() -> None:
    noted = rec(op="qkv variants", note="random weights; naive, us a launch: dequantize q 3.0, product q, k, v 4.4, attention 7.1")
    assert figures.launches(noted) == {"dequantize q": 3.0, "product q, k, v": 4.4, "attention": 7.1}
    assert figures.launches(dataclasses.replace(noted, seconds=None)) == {}
    assert figures.launches(rec(note="anything else")) == {}
    (stacks,) = figures.of_variants([noted])
    assert "product q, k, v" in stacks
    assert ">14.5<" in stacks  # the sum


def test_time_by_size_needs_two_sizes_of_ours() -> None:
    assert measure_figures.by_size(attention()[:2]) == []
    assert measure_figures.by_size([r for r in attention() if r.formats == "bf16"]) == []
    (chart,) = measure_figures.by_size(attention())
    assert "fastest 16 bits" in chart
    assert "T=8,192" in chart


def test_the_roofline_is_that_of_the_run() -> None:
    rates, intensities = measure_figures.rooflines(attention())
    assert "read roofline of the same runs" in rates
    assert "FLOP per byte" in intensities
    assert measure_figures.flop(rec("int4", 1e-3, shape={"M": 2, "N": 3, "K": 5})) == 60
    assert measure_figures.flop(rec("int4", 1e-3, shape={"L": 2})) == 0
    assert measure_figures.rooflines([r for r in attention() if r.formats == "bf16"]) == []  # no roofline was measured in that run
    with pytest.raises(InvalidArgument, match="measured is empty"):
        charts.roofline({}, [], x_label="x", y_label="y", title="t")
    with pytest.raises(InvalidArgument, match="stacks is empty"):
        charts.stacked_bars({}, x_label="x", title="t")


def test_many_cases_have_no_chart_each() -> None:
    some = [rec(case=f"case {i}", op="other", peer_seconds=None) for i in range(13)]
    assert len(measure_figures.of_any(some[:12])) == 12
    assert measure_figures.of_any(some) == []


# -------------------------------------------------------------------------------------------------------------- the page


def test_records_are_told_by_kind() -> None:
    kinds = {
        "Decode attention and appends, with bars": rec(op="append"),
        "Linear layers, with bars": rec(op="linear"),
        "Products for q, k and v": rec(op="qkv variants"),
        "w4a16-splitk": rec(op="split-k study", study="w4a16-splitk"),
        "Peers": rec(study="peers"),
        "Decode attention": rec(case=""),
        "Something else": rec(op="something_else", study="of another version"),
    }
    assert {suites.section_of(r).title: r for r in kinds.values()} == kinds
    assert next((t.title, len(found)) for t, found in by_section([*kinds.values(), rec(op="append")], suites.section_of)) == (
        next(iter(kinds)),
        2,
    )


def test_the_page_keeps_machines_apart_and_names_commands(tmp_path: Path) -> None:
    plain = rec("nf4", 1e-3, op="linear", case="", shape={"M": 1}, environment=CPU)
    page = page_of(
        [*attention(), plain, rec("int8", 9e-6, alone=1e-5, kernel_seconds=8e-6), rec("fp8", None, refused="wrong <result>")],
        "all",
        tmp_path / "p.html",
    ).read_text()
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert headings == ["Decode attention and appends, with bars, GPU one", "Linear, CPU, 2 threads", "Where and how"]
    assert "M1" in page  # of a case without a name, its sizes
    assert page.count("halfbyte bench decode") == 2  # with its section, and among the environments
    assert "# 2026-01-01T00:00, abc123" in page
    assert "Refused: wrong &lt;result&gt;" in page
    assert "Kernel time: batch 32, int8, halfbyte auto: kernels 8.0 us of 10.0 us a call (CUPTI)" in page
    assert "0 of 2" in page  # targets met
    assert page.count("<svg") == 6  # share, speed, two rooflines, time by batch; the times of the linear layer
    with pytest.raises(InvalidArgument, match="records is empty"):
        page_of([], "none", tmp_path / "p.html")


def test_the_page_marks_what_changed(tmp_path: Path) -> None:
    before = [*attention(), rec(environment=CPU)]
    page = page_of(attention(0.5), "after", tmp_path / "p.html", before).read_text()
    assert "What changed on GPU one" in page
    rows = re.findall(r"<tr><td.*?</tr>", page)
    assert sum(">faster<" in row and ">0.50<" in row for row in rows) == 2
    assert sum(">same<" in row for row in rows) == 2
    assert "Only among the records of before: CPU, 2 threads." in page
    quality = [rec(seconds=None, op="quality", case="c", perplexity=value) for value in (2.5, 2.75)]
    page = page_of(quality[1:], "after", tmp_path / "p.html", quality[:1]).read_text()
    assert re.search(r">2.5000 perplexity<.*>2.7500 perplexity<.*>changed<", page)
    other = page_of(attention(), "after", tmp_path / "q.html", [rec(environment=CPU)]).read_text()
    assert "The records of before have none of GPU one." in other


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, page = tmp_path / "old.jsonl", tmp_path / "new.jsonl", tmp_path / "r.html"
    records.append(old, attention())
    records.append(new, attention(2.0))
    assert run("bench", "report", str(new), "--against", str(old), "-o", str(page), "--title", "two runs") == 0
    assert ">slower<" in page.read_text()
    assert "<h1>halfbyte bench: two runs</h1>" in page.read_text()
    # Cut by a kill: the last line is lost, which is said.
    new.write_bytes(new.read_bytes()[:-40])
    assert run("bench", "report", str(new), str(old), "-o", str(page)) == 0
    assert "was cut while being written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "is not a file"),
        ("", "holds no record"),
        ('{"op": ', "holds no record ("),
        ("not json\n" + json.dumps({}) + "\n", "line 1: not a record"),
        (json.dumps({"op": "linear", "environment": dataclasses.asdict(GPU)}) + "\n", "(it has no 'shape')"),
        (
            DEMO.read_text(),
            "line 1: a result of `halfbyte demo` or `halfbyte eval` and no record of the bench; their option --html",
        ),
        (
            rec().to_json().replace(json.dumps(SHAPE, sort_keys=True), "null") + "\n",
            "line 1: not a record, as `halfbyte bench ... --output` writes them (TypeError: shape is None",
        ),
        (json.dumps(json.loads(rec().to_json()) | {"seconds": "1"}) + "\n", "seconds is '1'; expected float | None"),
        (json.dumps(json.loads(rec().to_json()) | {"op": 3}) + "\n", "op is 3; expected str"),
        (json.dumps(json.loads(rec().to_json()) | {"seconds": 10**400}) + "\n", "...; expected float | None"),
        (json.dumps(json.loads(rec().to_json()) | {"nbytes": 2**63}) + "\n", "nbytes is 9223372036854775808; expected int"),
        (json.dumps(json.loads(rec().to_json()) | {"error": True}) + "\n", "error is True; expected float | None"),
        (json.dumps(json.loads(rec().to_json()) | {"shape": {"B": "x"}}) + "\n", "shape is {'B': 'x'}; expected dict[str, int]"),
        (json.dumps(json.loads(rec().to_json()) | {"by_layer": ["x"]}) + "\n", "expected tuple[float, ...]"),
        ("[" * 100_000 + "\n", "line 1: not a record"),
        (
            json.dumps(json.loads(rec().to_json()) | {"study": "int8-granularity", "op": "granularity study", "formats": "x"})
            + "\n",
            "the records of 'int8-granularity' cannot be shown (KeyError: ",
        ),
        (
            json.dumps(json.loads(rec().to_json()) | {"environment": {**dataclasses.asdict(GPU), "versions": None}}) + "\n",
            "versions is None; expected dict[str, str]",
        ),
    ],
)
def test_bad_records_are_one_line(text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    if text is not None:
        path.write_text(text)
    assert named in refusal(capsys, "report", str(path), "-o", str(tmp_path / "r.html"), command=bench.main)
    assert not (tmp_path / "r.html").exists()


def test_nothing_is_read_for_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "report", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "no" / "r.html")) == 1
    assert "must be a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["bench", "decode", "--quick", "--html"], ["bench", "report", "none.jsonl", "-o"], ["demo", "--html"]]
)
def test_nothing_is_measured_for_charts_that_cannot_be_drawn(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*command, str(tmp_path / "r.html")) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        "halfbyte: a chart needs matplotlib, which is not installed: pip install 'matplotlib>=3.8'\n",
    )


def test_every_device_has_a_name_of_its_own() -> None:
    assert compare.device_of(rec()) == "GPU one"
    assert compare.device_of(rec(environment=CPU)) == "CPU, 2 threads"
