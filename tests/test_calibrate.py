"""Calibration: the assignment against brute force, measurements that survive an interruption, plans against uniform choices."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import refusal, run
from halfbyte import hf
from halfbyte.cache_plan import LayerFormats, read_plan
from halfbyte.calibrated_keys import read_calibration
from halfbyte.engine import page_layouts
from halfbyte.errors import InvalidArgument
from halfbyte.formats import KV_FORMATS
from halfbyte.text import heldout_text, windows
from halfbyte_lab.evals import model as models
from halfbyte_lab.evals.assignment import Options, Sensitivity, assign, candidates
from halfbyte_lab.evals.calibrate import (
    Divergence,
    Measurements,
    calibrate,
    counted_bits,
    fingerprint,
    measurements_path,
    runs,
    search,
    ways,
)
from halfbyte_lab.evals.calibrate_keys import calibrate_keys
from halfbyte_lab.evals.outliers import PROFILES, with_outliers
from halfbyte_lab.evals.quality import Setting, evaluate

FEW = ("int8", "int4", "int4_channel")
#: Of the shipped model. Each more costs a run for every format, and makes every run longer.
LAYERS = 3


@pytest.fixture(scope="module")
def shipped() -> Any:
    torch.set_num_threads(1)
    model = models.load("demo")[0]
    del model.model.layers[LAYERS:]
    model.config.num_hidden_layers = LAYERS
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return windows(list(heldout_text().encode()), 32, 2)


# -------------------------------------------------------------------------------------------------------------- assignment


def test_the_assignment_is_the_best_there_is() -> None:
    """Every choice tried, on problems with few groups: the same loss, within the budget, and None exactly where nothing fits."""
    draw = random.Random(0)
    fitted = 0
    for _ in range(200):
        groups = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]
        step = draw.choice((1, 3, 64))
        sizes = [[step * draw.randint(1, 9) for _ in range(n)] for n in groups]
        losses = [[draw.choice((0.0, 0.5, draw.random())) for _ in range(n)] for n in groups]
        budget = draw.randint(0, step * 30)
        every = itertools.product(*(range(n) for n in groups))
        totals = [
            sum(loss[i] for loss, i in zip(losses, pick, strict=True))
            for pick in every
            if sum(size[i] for size, i in zip(sizes, pick, strict=True)) <= budget
        ]
        found = assign(sizes, losses, budget)
        assert (found is None) == (not totals)
        if found is not None:
            fitted += 1
            assert sum(size[i] for size, i in zip(sizes, found, strict=True)) <= budget
            assert sum(loss[i] for loss, i in zip(losses, found, strict=True)) == pytest.approx(min(totals))
            assert found == assign(sizes, losses, budget)
    assert 50 < fitted < 195


def test_the_assignment_of_a_large_model_takes_seconds() -> None:
    """80 layers, 15 candidates a side, sizes that share no large factor."""
    draw = random.Random(1)
    sizes = [[1024 * draw.randint(60, 260) for _ in range(15)] for _ in range(160)]
    losses = [[draw.random() / size[i] for i in range(15)] for size in sizes]
    found = assign(sizes, losses, 1024 * 160 * 120)
    assert found is not None
    assert 1024 * 160 * 119 < sum(size[i] for size, i in zip(sizes, found, strict=True)) <= 1024 * 160 * 120


def test_candidates_are_the_formats_that_fit_and_differ(shipped: Any) -> None:
    found = candidates(shipped)
    names = {side: {c.format for c in group} for side, group in found.items()}
    assert found["keys"][0].format == found["values"][0].format == "bf16"
    assert names["values"] <= names["keys"] <= set(KV_FORMATS)
    assert not any(KV_FORMATS[name].granularity == "tensor" for name in names["keys"])
    assert not any(KV_FORMATS[name].token_block for name in names["values"])
    assert {"int8", "int4", "int4_g32"} <= names["values"]
    assert "int4_g64" not in names["values"]  # heads of 64: the same as int4
    assert not any(c.rotated for c in found["values"])
    assert not any(c.rotated and KV_FORMATS[c.format].token_block for c in found["keys"])
    assert {c.rotated for c in found["keys"] if c.format == "int4"} == {False, True}
    sizes = hf.PackedCache(shipped, 64, keys="int4_channel", values="int4").bytes_per_token * 64
    assert (
        LAYERS * sum(next(c.nbytes for c in found[s] if c.format == n) for s, n in (("keys", "int4_channel"), ("values", "int4")))
        == sizes
    )
    with pytest.raises(InvalidArgument, match="formats='int3' is not a format"):
        candidates(shipped, ("int3", "int8", "x"))
    with pytest.raises(InvalidArgument, match="none of int8_tensor can be chosen"):
        candidates(shipped, ("int8_tensor",))


# --------------------------------------------------------------------------------------------------------------- measuring


def test_divergence_is_that_of_an_evaluation(shipped: Any, ids: torch.Tensor) -> None:
    (_, expected) = evaluate(shipped, [Setting(), Setting("int4", "int4_g32", rotate_keys=True)], ids)
    found = Divergence(shipped, ids, 16).of([LayerFormats("int4", "int4_g32", True)] * LAYERS)
    assert found == pytest.approx(expected.kl_mean, rel=0.1)  # an evaluation leaves the last token of a window out
    assert Divergence(shipped, ids, 16).of([LayerFormats("bf16", "bf16")] * LAYERS) == 0


class Stop(Exception):
    pass


def test_an_interrupted_calibration_goes_on(shipped: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    """Stopped at any point, even within a line, and run again: the same plan, and nothing is measured twice."""
    choices, facts, path = candidates(shipped, FEW), fingerprint(shipped, ids, 16), tmp_path / "m.jsonl"
    divergence = Divergence(shipped, ids, 16)

    def run(file: Path, most: int) -> tuple[Any, list[str]]:
        seen: list[str] = []

        def step(what: str) -> None:
            seen.append(what)
            if len(seen) > most:
                raise Stop

        return calibrate(divergence, choices, Measurements(file, facts), [6.0], step), seen

    whole, every = run(tmp_path / "whole.jsonl", 1000)
    assert len(every) <= runs(choices, Measurements(path, facts), LAYERS, [6.0])
    with pytest.raises(Stop):
        run(path, 6)
    path.write_text(path.read_text()[:-7])  # as a power cut leaves it
    again, rest = run(path, 1000)
    assert again == whole
    assert len(rest) == len(every) - 5
    assert path.read_text().splitlines() == (tmp_path / "whole.jsonl").read_text().splitlines()


def test_measurements_of_something_else_are_refused(shipped: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    Measurements(path, fingerprint(shipped, ids, 16)).add(Sensitivity(0, "keys", "int8", False, 0.1))
    others = [
        fingerprint(shipped, ids, 8),
        fingerprint(shipped, ids[:1], 16),
        fingerprint(with_outliers(shipped, PROFILES[0]), ids, 16),
        fingerprint(models.load("demo", "cpu", "fp16")[0], ids, 16),
    ]
    before = path.read_text()
    for other in others:
        with pytest.raises(InvalidArgument, match="another model, dtype, text or cut, or with other"):
            Measurements(path, other)
    path.write_text(before + '{"layer": 1}\n')
    with pytest.raises(InvalidArgument, match="is damaged"):
        Measurements(path, fingerprint(shipped, ids, 16))


@pytest.mark.parametrize("outliers", [None, *PROFILES], ids=lambda p: p.name if p else "plain")
def test_a_plan_is_no_worse_than_any_uniform_choice(shipped: Any, ids: torch.Tensor, tmp_path: Path, outliers: Any) -> None:
    """On its own text, by measurement: every uniform choice of at most its bytes diverges as much or more."""
    model = shipped if outliers is None else with_outliers(shipped, outliers)
    choices, divergence = candidates(model, FEW), Divergence(model, ids, 16)
    store = Measurements(tmp_path / "m.jsonl", fingerprint(model, ids, 16))
    (made,) = calibrate(divergence, choices, store, [6.0])
    assert made.plan.bits <= 6.0
    assert made.plan.measured["kl"] == divergence.of(made.plan.layers) > 0
    budget = int(6.0 * LAYERS * 2 * 64 * 128 / 8)
    for choice in Options(choices, store.known, LAYERS).uniform(budget):
        assert choice.nbytes <= budget
        assert divergence.of(choice.layers) >= made.plan.measured["kl"]


def test_sink_and_recent_tokens_are_measured_with_the_formats(shipped: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    """Every format is measured as it would be served: with these tokens, and the other side quantized too."""
    exact, few = (2, 8), ("int8", "int2", "int4_channel", "bf16")
    choices = candidates(shipped, few, windowed=True)
    assert {side: [c.format for c in group] for side, group in choices.items()} == {
        "keys": ["int8", "int8", "int2", "int2"],
        "values": ["int8", "int2"],
    }
    divergence = Divergence(shipped, ids, 16, exact)
    store = Measurements(tmp_path / "m.jsonl", fingerprint(shipped, ids, 16, exact))
    (made,) = calibrate(divergence, choices, store, [5.5])
    assert made.plan.exact_tokens((0, 0)) == exact
    assert len(store.known) == LAYERS * 6
    budget = int(5.5 * LAYERS * 2 * 64 * 128 / 8)
    assert all(divergence.of(c.layers) >= made.plan.measured["kl"] for c in Options(choices, store.known, LAYERS).uniform(budget))
    window = {"sink_tokens": 2, "recent_tokens": 8}
    (_, expected, bare) = evaluate(shipped, [Setting(), Setting("int2", "int2", **window), Setting("int2", "int2")], ids)
    alike = divergence.of([LayerFormats("int2", "int2")] * LAYERS)
    assert alike == pytest.approx(expected.kl_mean, rel=0.2)
    assert expected.kl_mean < 0.8 * bare.kl_mean
    with pytest.raises(InvalidArgument, match="with other sink and recent tokens"):
        Measurements(tmp_path / "m.jsonl", fingerprint(shipped, ids, 16))
    with pytest.raises(InvalidArgument, match=r"none of int4_channel can be chosen .* with sink and recent tokens"):
        candidates(shipped, ("int4_channel",), windowed=True)
    with pytest.raises(InvalidArgument, match="sink_tokens=2, recent_tokens=30: nothing of a text of 32 tokens"):
        Divergence(shipped, ids, 16, (2, 30))


def test_a_search_chooses_sink_and_recent_tokens_and_calibrated_keys(shipped: Any, tmp_path: Path) -> None:
    """The best of all ways, each within the size with its 16-bit tokens counted. Where these alone take more, nothing is
    measured."""
    ids, few = windows(list(heldout_text().encode()), 96, 1), ("int4", "int2")
    keys = str(calibrate_keys(shipped, windows(list(heldout_text().encode()), 256, 1), 256).write(tmp_path / "keys.safetensors"))
    every = ways(shipped, few, keys, 96)
    assert [way.name for way in every] == ["", "-4-0", "-4-64", "-calibrated", "-calibrated-4-0", "-calibrated-4-64"]
    assert [c.rotated for c in every[3].choices["keys"]] == [False] * 3
    assert [way.exact for way in ways(shipped, few, "", 60)] == [(0, 0), (4, 0)]
    every = [every[0], every[4], every[5]]
    stores = [
        Measurements(tmp_path / f"{i}.jsonl", fingerprint(shipped, ids, 48, way.exact, way.calibration))
        for i, way in enumerate(every)
    ]
    divergence = Divergence(shipped, ids, 48)
    (made,) = search(divergence, [*zip(every, stores, strict=True)], [4.0])
    assert len(stores[2].known) == 0  # 68 of 96 tokens in 16 bits leave less than 2 bits for the others
    assert {(p.exact_tokens((0, 0)), p.calibration) for p in made.uniform} == {((0, 0), ""), ((4, 0), keys)}
    assert any(p.keys[0] == p.values[0] == "int2" for p in made.uniform)
    beside = divergence.beside(made.plan.exact_tokens((0, 0)), made.plan.calibration)
    assert made.plan.measured["kl"] == pytest.approx(beside.of(made.plan.layers))
    assert counted_bits(made.plan, 96) <= 4.0
    sinks = next(p for p in made.uniform if p.sink_tokens)
    assert counted_bits(sinks, 96) == pytest.approx((sinks.bits * 92 + 16 * 4) / 96)
    for alike in made.uniform:
        assert counted_bits(alike, 96) <= 4.0
        assert alike.measured["kl"] >= made.plan.measured["kl"]
    assert made.plan.measured["best_uniform"]["kl"] == min(alike.measured["kl"] for alike in made.uniform)
    with pytest.raises(InvalidArgument, match=r"bits=1; these formats take 2\.\d+ to 16"):
        search(divergence, [*zip(every, stores, strict=True)], [1.0])


# -------------------------------------------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_the_command_writes_plans_that_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "plan.json", tmp_path / "page.html"
    options = ["--formats", "int8,int4", "--windows", "1", "--length", "32"]
    assert run("calibrate", "demo", "--bits", "5,7", "-o", str(output), *options, "--html", str(page), "--dtype", "fp16") == 0
    assert "best uniform choice" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"plan-5.json", "plan-7.json", "plan.measured.jsonl", "page.html"}
    small, large = (read_plan(tmp_path / f"plan-{bits}.json") for bits in (5, 7))
    assert 4.5 <= small.bits <= 5 < large.bits <= 7
    assert small.measured["dtype"] == large.measured["dtype"] == "fp16"
    assert small.measured["kl"] >= large.measured["kl"] > 0
    assert page.read_text().count("<svg") == 1
    assert len(measurements_path(output).read_text().splitlines()) == 1 + 6 * (4 + 2)
    model = hf.quantize(models.load("demo")[0], plan=tmp_path / "plan-5.json")
    cache = model.generate.cache(model, 64)
    assert cache.bytes_per_token == small.bits * 6 * 2 * 128 / 8
    assert run("eval", "demo", "--plan", str(tmp_path / "plan-5.json"), "--windows", "1", "--length", "48", "--json") == 0
    *_, said = json.loads(capsys.readouterr().out)["results"]
    assert said["kv"] == f"plan, {small.bits:.2f} bits"
    assert said["kv_bytes_per_token"] == cache.bytes_per_token


@pytest.mark.slow
def test_plans_with_sink_and_recent_tokens_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    options = ["--formats", "int8,int2", "--windows", "1", "--length", "32", "--sink-tokens", "4", "--recent-tokens", "16"]
    assert run("calibrate", "demo", "--bits", "5", "-o", str(plan), *options) == 0
    capsys.readouterr()
    assert read_plan(plan).exact_tokens((0, 0)) == (4, 16)
    model = hf.quantize(models.load("demo")[0], plan=plan)
    layers = model.generate.cache(model, 64).layers
    assert [layer.options.window for layer in layers] == [(4, 16)] * 6
    assert run("eval", "demo", "--plan", str(plan), "--windows", "1", "--length", "48", "--json") == 0
    *_, said = json.loads(capsys.readouterr().out)["results"]
    assert said["kv"] == f"plan, {read_plan(plan).bits:.2f} bits, 4 + 16 tokens 16-bit"
    for options, says in (
        (("--length", "20"), "nothing of a text of 20 tokens"),
        (("--sink-tokens", "2"), "plan has sink_tokens=4"),
    ):
        assert run("eval", "demo", "--plan", str(plan), "--windows", "1", *options) == 1
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_calibrated_keys_by_the_command_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = str(tmp_path / "keys.safetensors")
    assert run("calibrate", "demo", "-o", keys, "--windows", "2", "--length", "256") == 0
    assert "512" in capsys.readouterr().out
    assert len(read_calibration(keys).layers) == 6
    options = ("--keys", "int4", "--values", "int4", "--windows", "1", "--length", "48", "--json")
    losses = []
    for calibration in ((), ("--calibration", keys)):
        assert run("eval", "demo", *options, *calibration) == 0
        *_, result = json.loads(capsys.readouterr().out)["results"]
        assert result["kv"] == f"int4 {'calibrated' if calibration else 'rotated'}"
        losses.append(result["kl_mean"])
    assert losses[1] < losses[0]
    plan = tmp_path / "plan.json"
    made = ("calibrate", "demo", "--bits", "5", "-o", str(plan), "--formats", "int8,int4", "--windows", "1", "--length", "32")
    assert run(*made, "--calibration", keys) == 0
    assert json.loads(plan.read_text())["calibration"] == "keys.safetensors"
    assert run(*made) == 1  # measurements of keys as they come
    assert "remove it" in capsys.readouterr().err
    model = hf.quantize(models.load("demo")[0], plan=plan)
    assert model.generate.settings.calibration.digest == read_calibration(keys).digest
    for (_, rotate_keys, transform), layer in zip(page_layouts(plan), read_calibration(keys).layers, strict=True):
        assert not rotate_keys
        assert torch.equal(transform.keys, layer.keys)
    with pytest.raises(InvalidArgument, match="leave these options out"):
        hf.quantize(models.load("demo")[0], plan=plan, calibration=keys)
    assert run("eval", "demo", "--calibration", keys, "--plan", str(plan)) == 1
    assert "--calibration" in capsys.readouterr().err


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, output = tmp_path / "short.txt", tmp_path / "plan.json"
    short.write_text("x" * 100)
    plan = tmp_path / "other.json"
    plan.write_text("{}")
    made = ["calibrate", "demo", "-o", str(output)]
    errors = {
        (*made, "--bits", "6", "--text", str(short)): "fewer than one window",
        (*made, "--bits", "6", "--text", str(short), "--length", "64"): "too short to calibrate on 4",
        (*made, "--bits", "6", "--text", str(tmp_path / "none.txt")): "text=",
        (*made, "--formats", "int4", "--sink-tokens", "4"): "--formats, --sink-tokens: about formats by layer",
        (*made, "--windows", "1", "--length", "100"): "text has 100 tokens; expected at least 256",
        (*made, "--bits", "1"): "bits=1; these formats take ",
        (*made, "--bits", "7", "--formats", "int8"): "bits=7; these formats take 8.25 to 16 bits",
        (*made, "--bits", "17"): "--bits '17'",
        (*made, "--bits", "6,6"): "--bits '6,6'",
        (*made, "--bits", "few"): "--bits 'few'",
        (*made, "--bits", "6", "--formats", "int3"): "formats='int3' is not a format",
        (*made, "--bits", "6", "--sink-tokens", "-1"): "--sink-tokens -1",
        (*made, "--bits", "6", "--recent-tokens", "256"): "nothing of a text of 256 tokens",
        (*made, "--bits", "6", "--sink-tokens", "4", "--formats", "int4_channel"): "can be chosen for heads of 64",
        ("calibrate", "demo", "--bits", "6", "-o", str(tmp_path)): "--output",
        ("calibrate", str(tmp_path), "--bits", "6", "-o", str(output)): "no config.json",
        ("eval", "demo", "--plan", str(plan)): "it is no plan",
    }
    for arguments, says in errors.items():
        assert says in refusal(capsys, *arguments)
    assert {p.name for p in tmp_path.iterdir()} == {"short.txt", "other.json"}
