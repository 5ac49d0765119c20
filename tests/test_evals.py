"""The evaluation: its figures against direct computation, its command line on random models of many architectures."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from command_line import refusal, run

sys.path.insert(0, str(Path(__file__).parent / "hf"))
import tiny_models

from halfbyte.cli.shared import parse_layers
from halfbyte.device import describe
from halfbyte.errors import CheckpointError, InvalidArgument
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS
from halfbyte.hf.model_support import half_type
from halfbyte.paths import shipped_model
from halfbyte.text import ByteTokenizer, heldout_text, load_tokenizer, windows
from halfbyte_lab.evals import demo, present
from halfbyte_lab.evals import model as models
from halfbyte_lab.evals.choices import caches, is_safe
from halfbyte_lab.evals.own_attention import in_half, own_attention
from halfbyte_lab.evals.pages import add_results, append_records, by_model, cards, merged, model_table, write_report
from halfbyte_lab.evals.present import verdict
from halfbyte_lab.evals.quality import (
    Quality,
    Setting,
    _Tally,
    cache_for,
    evaluate,
    every_kv_setting,
    every_weight_setting,
    steps,
    weight_bytes,
)
from halfbyte_lab.report import Report


@pytest.fixture(scope="module")
def shipped() -> Any:
    torch.set_num_threads(1)
    return models.load("demo")


def cut(shipped: Any, count: int = 2, length: int = 96) -> torch.Tensor:
    return windows(shipped[1].encode(heldout_text()), length, count)


def test_the_shipped_model_is_what_it_says(shipped: Any) -> None:
    """Byte tokens, at most 12 MB, and at most 1.3 bits a byte on text it never saw, with transformers' own attention."""
    model, tokenizer = shipped
    text = heldout_text()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (shipped_model() / "model.safetensors").stat().st_size <= 12_000_000
    assert 100_000 <= len(text.encode()) <= 200_000
    ids = cut(shipped, 12, 1024)
    with torch.no_grad(), own_attention(model):
        logits = model(input_ids=ids).logits
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(nll) / math.log(2) <= 1.3


def test_figures_against_direct_computation(shipped: Any) -> None:
    """Perplexity, KL and agreement by hand from two full forward passes; chunks must not matter."""
    model, ids = shipped[0], cut(shipped)
    results = evaluate(model, [Setting(), Setting(weights="int4_col")], ids, chunk=7, batch=1)
    from halfbyte import hf

    quantized = hf.quantize(models.load("demo")[0], weights="int4_col")
    with torch.no_grad():
        p, q = (torch.log_softmax(m(input_ids=ids, use_cache=False).logits, -1)[:, :-1] for m in (model, quantized))
    for result, logs in zip(results, (p, q), strict=True):
        nll = -logs.gather(-1, ids[:, 1:, None]).mean()
        assert result.perplexity == pytest.approx(float(nll.exp()), rel=3e-3)  # the cache rounds to bf16, the full pass does not
        assert result.tokens == ids[:, 1:].numel()
    kl = (p.exp() * (p - q)).sum(-1)
    assert results[1].kl_mean == pytest.approx(float(kl.mean()), rel=0.05)
    lost = (p - q).gather(-1, ids[:, 1:, None]).flatten().double()
    assert results[1].noise == pytest.approx(
        200 * float(lost.mean().exp() * lost.std(correction=0)) / lost.numel() ** 0.5, rel=0.02
    )
    assert results[0].noise == 0
    ranked = kl.flatten().sort().values
    assert results[1].kl_p99 == pytest.approx(float(ranked[math.ceil(0.99 * len(ranked)) - 1]), rel=0.1)
    assert results[1].top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=0.02)
    assert results[0].kl_mean == 0
    assert results[0].top1 == 1
    assert results[0].layer_error == [0.0] * 6
    assert 0 < results[1].layer_error[0] < 1


def test_the_demo_promises(shipped: Any) -> None:
    """int8 per head within 0.1 % of the 16-bit perplexity, int4 in groups of 32 within 2 %, and each cost where it belongs."""
    settings = [Setting(), Setting("int8", "int8"), Setting("int4_g32", "int4_g32")]
    base, int8, int4 = evaluate(shipped[0], settings, cut(shipped, 2, 512))
    assert abs(int8.change) < 0.1
    assert abs(int4.change) < 2
    assert 0 < int8.kl_mean < int4.kl_mean
    assert int8.layer_error[0] < int4.layer_error[0]
    assert base.kv_bytes_per_token == 6 * 2 * 2 * 64 * 2
    assert int8.kv_bytes_per_token == 6 * 2 * 2 * (64 + 2)
    assert int4.kv_bytes_per_token == 6 * 2 * 2 * (32 + 2 * 4)


@pytest.mark.parametrize("granularity", ["", "_g32"])
def test_fewer_bits_are_further_from_the_16_bit_model(shipped: Any, granularity: str) -> None:
    """With the same granularity: by KL, and in every layer."""
    names = [f"int{bits}{granularity}" for bits in (8, 4, 2)]
    _, *results = evaluate(shipped[0], [Setting(), *(Setting(n, n) for n in names)], cut(shipped, 1, 384))
    for int8, int4, int2 in zip(*([r.kl_mean, *r.layer_error] for r in results), strict=True):
        assert 0 < int8 < int4 < int2


def test_every_format_has_its_row() -> None:
    rows = [*every_kv_setting(), *every_weight_setting()]
    assert {s.keys for s in rows} | {s.values for s in rows} == {n for n in KV_FORMATS if n != "fp16"}
    assert {s.weights for s in rows} == {None, *WEIGHT_FORMATS}
    assert len(set(rows)) == len(rows)
    left = {s.keys for s in every_kv_setting(128)} - {s.keys for s in every_kv_setting(64)}
    assert left == {"int8_g64", "int4_g64"}  # 64 neighbours are a whole head; int2_g64 saturates elsewhere than int2
    assert {pair for pair in caches().values() if pair != ("bf16", "bf16")} <= {(s.keys, s.values) for s in rows}


def test_the_noise_of_a_divergence_is_two_standard_errors_over_its_tokens() -> None:
    tally = _Tally(Setting())
    kl, other = torch.tensor([[1.0, 3.0], [1.0, 3.0]]).double(), torch.zeros(2, 2).double()
    tally._tokens, tally._error = [torch.stack([kl, other, other, other])], [torch.zeros(1, 2)]
    found = tally.result()
    assert (found.kl_mean, found.kl_noise) == (2.0, 1.0)  # a standard deviation of 1 over 4 tokens


def test_weights_are_counted_as_stored(shipped: Any) -> None:
    from halfbyte import hf

    plain = weight_bytes(shipped[0])
    assert plain == 2 * 5_573_888
    quantized = hf.quantize(models.load("demo")[0], weights="nf4")
    linears = 6 * (2 * 256 * 512 + 2 * 256 * 128 + 3 * 256 * 768)
    assert weight_bytes(quantized) == plain - 2 * linears + linears // 2 + 4 * linears // 64


def test_steps_and_the_first_row(shipped: Any) -> None:
    seen = []
    settings = [Setting(), Setting("int8", "int8", skip_layers=(0, 5))]
    ids = cut(shipped, 3, 20)
    results = evaluate(shipped[0], settings, ids, chunk=6, batch=2, on_step=lambda: seen.append(0))
    assert len(seen) == steps(settings, ids, 6, 2) == 2 * 2 * 4
    assert results[1].layer_error[0] == 0  # layer 0 keeps 16 bits
    assert "2 layers 16-bit" in results[1].setting.kv
    with pytest.raises(InvalidArgument, match="16-bit run"):
        evaluate(shipped[0], settings[1:], ids)


def test_windows_are_spread_and_checked() -> None:
    assert windows(list(range(100)), 10, 2).tolist() == [list(range(10)), list(range(50, 60))]
    assert windows(list(range(25)), 10).shape == (2, 10)
    for bad in ({"length": 1}, {"length": 200}, {"length": 10, "count": 0}):
        with pytest.raises(InvalidArgument):
            windows(list(range(100)), **bad)


def test_windows_begin_with_the_bos_token() -> None:
    assert windows(list(range(1, 20)), 4, None, bos=0)[:2].tolist() == [[0, 1, 2, 3], [0, 4, 5, 6]]


def test_writing_stops_at_the_end_of_text(shipped: Any) -> None:
    model, tokenizer = shipped
    whole = "".join(models.write(model, tokenizer, "import os\n", Setting(), 30))
    model.generation_config.eos_token_id = [whole.encode()[4], 0]
    try:
        assert "".join(models.write(model, tokenizer, "import os\n", Setting(), 30)) == whole[: whole.index(whole[4])]
    finally:
        model.generation_config.eos_token_id = None


def test_tokenizers(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(str(tmp_path), 256), ByteTokenizer)
    for size in (101, 257, 32_000):
        with pytest.raises(InvalidArgument, match=f"vocabulary of {size} is not that of bytes.*copy"):
            load_tokenizer(str(tmp_path), size)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer does not load"):
        load_tokenizer(str(tmp_path), 256)


def test_skip_layers() -> None:
    assert parse_layers("0, -1,2", 6) == (0, 2, 5)
    assert parse_layers("", 6) == ()
    for bad in ("a", "6", "-7"):
        with pytest.raises(InvalidArgument, match="skip_layers"):
            parse_layers(bad, 6)


def test_records_and_report(shipped: Any, tmp_path: Path) -> None:
    settings = [Setting(), Setting("int8", "int8"), Setting("int4", "int4"), Setting(weights="nf4")]
    results = evaluate(shipped[0], settings, cut(shipped, 1, 32))
    append_records(results, tmp_path / "r.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["kv"] for line in lines] == ["bf16", "int8", "int4", "bf16"]
    write_report(results, "a title", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 3
    assert "nf4" in page
    assert lines[0]["environment"]["versions"]["torch"] == torch.__version__
    exact = [results[0], replace(results[1], kl_mean=0.0, layer_error=[0.0] * 6)]
    write_report(exact, "no error at all", tmp_path / "exact.html")


def test_records_name_the_device_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that was asked for, where there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    append_records([Quality(Setting())], tmp_path / "r.jsonl", device="cpu")
    assert json.loads((tmp_path / "r.jsonl").read_text())["environment"]["device"] == describe("cpu").name


@pytest.mark.parametrize(("noise", "safe"), [(0.0, "yes"), (2e-4, "no")])
def test_safe_is_a_divergence_with_its_noise(noise: float, safe: str) -> None:
    sizes = {"kv_bytes_per_token": 10.0, "weight_bytes": 10}
    sizes |= {"kl_mean": 1.9e-3, "kl_noise": noise, "floor": 1e-3}
    made = [Quality(s, **sizes) for s in (Setting(), Setting.of_transformers("bf16"), Setting("int8", "int8"))]
    ((name, *_, said),) = by_model(made)[1]
    assert (name, said) == ("int8", safe)


def test_the_demos_table_fits_a_terminal_of_80_columns() -> None:
    """Every setting on one line of its own; a divergence of 0.1 nats and more is red."""
    settings = [Setting(), *every_kv_setting(), *every_weight_setting()]
    sizes = {"perplexity": 2.0, "change": -123.45, "kv_bytes_per_token": 10.0, "weight_bytes": 10}
    losses = {"": 0.0, "Llama-3": 0.0994, "Qwen3": 0.1, "Qwen2.5": 1.234}
    made = [Quality(s, kl_mean=kl, model=name, **sizes) for name, kl in losses.items() for s in settings]
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    console.print(model_table(made))
    colored = console.export_text(clear=False, styles=True)
    header, _, *rows = console.export_text().splitlines()
    assert header.split() == ["formats", "smaller", "ppl", "%", "plain", "Llama-3", "Qwen3", "Qwen2.5", "safe"]
    assert max(map(len, rows)) <= 80
    assert [re.split(r"  +", row)[0] for row in rows] == [s.name for s in settings[1:]]
    assert re.findall(r"\x1b\[31m *([\d,]+)", colored) == ["100", "1,234"] * len(rows)


def test_the_report_begins_with_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cards, noise that decides what is said, then every row, those of one result merged; names are explained."""
    sizes = {"perplexity": 2.0, "weight_bytes": 10, "floor": 1e-3, "kl_p99": 0.1, "top1": 0.9, "kl_by_quarter": [0.0] * 3}
    made = [Quality(Setting(), kv_bytes_per_token=100.0, kl_mean=0.0, change=0.0, noise=0.0, **sizes)]
    monkeypatch.setitem(present.CARDS, "Smallest cache", ("int4_g32", "int4_g32"))
    figures = {"int8": (0.01, 0.02, 50.0), "int8_g64": (0.01, 0.02, 50.0), "int4_g32": (1.5, 0.2, 30.0)}
    for i, (name, (change, noise, nbytes)) in enumerate(figures.items()):
        quality = {"change": change, "noise": noise, "kl_mean": max(1e-3, i - 1.0), "kl_noise": 1e-4, "kv_bytes_per_token": nbytes}
        made.append(Quality(Setting(name, name), **quality, **sizes))
    made.append(Quality(Setting("int4_g32", "int4_g32", rotate_keys=True), **{**quality, "kl_mean": 0.5, "change": 1.25}, **sizes))
    made.append(Quality(Setting(weights="int4_g32"), kv_bytes_per_token=100.0, kl_mean=0.2, change=3.0, noise=1.0, **sizes))
    assert verdict(made) == (
        "INT8 cache: 2.00x smaller, perplexity unchanged within the noise of 0.02 %, safe (KL 1.0e-03 \u00b1 1e-04 nats). "
        "Smallest cache: 3.33x smaller, perplexity +1.25 % (noise 0.20 %), not safe (KL 5.0e-01 \u00b1 1e-04 nats)."
    )
    for kl, said in ((0.0018, "safe (KL"), (0.0021, "undecided, evaluate more text (KL"), (0.0024, "not safe (KL")):
        assert f" %, {said} {kl:.1e} \u00b1 2e-04" in verdict([made[0], replace(made[1], kl_mean=kl, kl_noise=2e-4)])
    assert cards(made)["Smallest cache"]["formats"] == "int4_g32 rotated"
    assert cards(made)["INT8 cache"]["tokens in 1 GB"] == "20,000,000 instead of 10,000,000"
    assert list(cards([made[0], made[-1]])) == ["int4_g32 weights"]
    assert "tokens in 1 GB" not in cards([made[0], made[-1]])["int4_g32 weights"]
    rows, hints = merged(made)
    assert [row[0] for row in rows] == ["bf16", "int8 = int8_g64", "int4_g32", "int4_g32 rotated", "bf16"]
    assert hints[0, "int4_g32"].startswith("keys: int4, offset")
    assert hints[1, "int4_g32"].startswith("weights: int4, zero point")
    report = Report("t")
    add_results(report, made)
    page = report.to_html()
    places = [
        page.index(x)
        for x in ("<p>INT8 cache: 2.00x", 'class="cards"', "<svg", "KL divergence measures", 'class="table"', "<details>")
    ]
    assert places == sorted(places)
    assert 'title="weights: int4, zero point' in page
    assert "Names joined by =" in page
    assert page.count("<tr>") == 1 + len(rows)


def test_only_the_16_bit_run_has_no_verdict() -> None:
    report = Report("t")
    add_results(report, [Quality(Setting(), kv_bytes_per_token=1.0)])
    assert 'class="cards"' not in report.to_html().partition("<body>")[2]


def test_divergence_by_quarter_of_a_window(shipped: Any) -> None:
    """The quarters' mean is the mean; a window of two tokens has one predicted token, in the first quarter."""
    model, ids = shipped[0], cut(shipped, 3, 65)
    settings = [Setting(), Setting("int4", "int4")]
    _, whole = evaluate(model, settings, ids, batch=2)
    assert len(whole.kl_by_quarter) == 4
    assert sum(whole.kl_by_quarter) / 4 == pytest.approx(whole.kl_mean)
    assert sum(whole.kl_by_quarter[2:]) / 2 == pytest.approx(whole.late_kl)
    assert 0 < whole.late_noise < 2 * whole.kl_noise
    _, first = evaluate(model, settings, ids[:, :17])
    assert first.kl_mean == pytest.approx(whole.kl_by_quarter[0], rel=1e-3)
    _, short = evaluate(model, settings, ids[:, :2])
    assert (short.kl_by_quarter, short.late_kl) == ([short.kl_mean, 0.0, 0.0, 0.0], short.kl_mean)


def test_transformers_own_attention_can_be_the_base(shipped: Any) -> None:
    """In fp32 a packed cache of 16 bits costs what rounding keys and values to 16 bits does, far less than 8 bits cost."""
    base, plain, packed = evaluate(
        shipped[0], [Setting.of_transformers("bf16"), Setting(), Setting("int8", "int8")], cut(shipped, 2, 65)
    )
    assert base.kl_mean == 0.0
    assert base.setting.name == "transformers"
    assert 0 < 5 * plain.kl_mean < packed.kl_mean < 1e-3
    assert shipped[0].config._attn_implementation == "halfbyte"


def test_the_floor_is_that_of_16_bit_arithmetic(shipped: Any) -> None:
    """A model in fp32 is compared with its own attention in bf16; what rounds less than that, as INT8 does here, is safe."""
    model, _ = shipped
    runs = [Setting(), Setting.of_transformers("bf16"), Setting("int8_channel", "int8"), Setting("int4_channel", "int8")]
    plain, own, int8, int4 = evaluate(model, runs, cut(shipped, 2, 128))
    assert in_half(model).dtype is torch.bfloat16
    assert model.dtype is torch.float32
    in_fp32 = evaluate(model, [Setting.of_transformers("bf16"), Setting()], cut(shipped, 2, 128))[1]
    assert plain.floor == own.kl_mean > 3 * in_fp32.kl_mean
    assert [is_safe(r.kl_mean, r.kl_noise, r.floor) for r in (plain, int8, int4)] == [True, True, False]


def test_writing_is_the_models_own_greedy_text(shipped: Any) -> None:
    model, tokenizer = shipped
    prompt = "import os\nimport sys\n\n\ndef main():\n"
    ours = "".join(models.write(model, tokenizer, prompt, Setting(), 40))
    ids = torch.tensor([tokenizer.encode(prompt)])
    with own_attention(model):
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert ours == tokenizer.decode(theirs[0, ids.shape[1] :].tolist())
    drawn = ["".join(models.write(model, tokenizer, prompt, Setting(), 40, temperature=1.0, seed=s)) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt_oss", "gpt2"])
def test_eval_on_random_models(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A folder of each architecture without a tokenizer: with a 16-bit cache the tokens are those of transformers' attention."""
    monkeypatch.setattr(tiny_models, "VOCAB", 256)
    monkeypatch.setitem(tiny_models.LLAMA, "vocab_size", 256)
    made = tiny_models.base.__wrapped__(family)
    made.save_pretrained(tmp_path / family)
    options = ["--windows", "2", "--length", "64", "--keys", "int8", "--values", "int4_g32", "--json"]
    assert run("eval", str(tmp_path / family), *options) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["equal_tokens"] == said["compared_tokens"] == 64
    _, own, packed = said["results"]
    assert [r["kv"] for r in said["results"]] == ["bf16", "transformers", "int8 / int4_g32"]
    assert 0 <= own["kl_mean"] == packed["floor"] < packed["kl_mean"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--keys", "int4"], "int4 rotated"),
        (["--keys", "int4", "--no-rotate-keys"], "int4"),
        (["--keys", "int8", "--values", "int8"], "int8"),
        (["--keys", "int8", "--values", "int8", "--rotate-keys"], "int8 rotated"),
        (["--keys", "int8", "--rotate-values"], "int8 / int4, values rotated"),
    ],
)
def test_eval_rotates_as_caches_do(options: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "demo", "--windows", "1", "--length", "64", "--values", "int4", "--json", *options) == 0
    said = json.loads(capsys.readouterr().out)
    assert [r["kv"] for r in said["results"]] == ["bf16", "transformers", name]
    assert all(0 < r["kl_mean"] < 0.1 for r in said["results"][1:3])  # INT8 costs less here than 16-bit arithmetic, the first


@pytest.mark.slow
def test_eval_of_an_fp16_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, the 16-bit run's cache and what a cache keeps in 16 bits are fp16, also where a CPU computes in fp32."""
    file, options = tmp_path / "results.jsonl", ["--windows", "2", "--length", "64", "--keys", "int8", "--values", "int8"]
    assert run("eval", "demo", "--dtype", "fp16", *options, "--every", "--json", "-o", str(file)) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["equal_tokens"] == said["compared_tokens"] == 64
    plain, *others = [json.loads(line) for line in file.read_text().splitlines()]
    assert (plain["keys"], plain["values"], plain["kl_mean"]) == ("fp16", "fp16", 0)
    assert {r["dtype"] for r in (plain, *others)} == {r["plain_weights"] for r in (plain, *others)} == {"fp16"}
    assert {r["kv"] for r in others if r["weights"]} == {"fp16"}
    assert not any("bf16" in (r["keys"], r["values"]) for r in others)
    model, _ = models.load("demo", "cpu", "fp16")
    stored = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float16).state_dict()
    held = model.state_dict()
    assert all(torch.equal(held[name], x.float()) for name, x in stored.items())
    assert (model.dtype, half_type(model)) == (torch.float32, torch.float16)
    layers = cache_for(model, Setting("int8_channel", "int8", skip_layers=(0,), dtype="fp16"), 64).layers
    assert [(layers[i].key_format.name, layers[i].value_format.name) for i in (0, 1)] == [("fp16",) * 2, ("int8_channel", "int8")]
    layers[1].update(torch.ones(1, 2, 3, 64), torch.ones(1, 2, 3, 64))
    assert layers[1].kv.keys.tail.dtype is torch.float16
    with pytest.raises(InvalidArgument, match="of a model in fp16, and begin with its 16-bit run"):
        evaluate(model, [Setting()], torch.zeros(1, 8, dtype=torch.int64))


def test_quantize_rotates_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte import hf

    folders = {turned: tmp_path / str(turned) for turned in (False, True)}
    for turned, folder in folders.items():
        assert run("quantize", "demo", "--weights", "int8_col", "-o", str(folder), *["--rotate-values"] * turned) == 0
    plain, rotated = (hf.load(folder).model.layers[0].self_attn for folder in folders.values())
    assert torch.equal(plain.k_proj.weight.codes, rotated.k_proj.weight.codes)
    assert not torch.equal(plain.v_proj.weight.codes, rotated.v_proj.weight.codes)
    assert run("quantize", "--from", str(folders[True]), "--rotate-values", "-o", str(tmp_path / "no")) == 1
    assert "--rotate-values changes 16-bit weights" in capsys.readouterr().err


def test_quantize_calibrates_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command as by `hf.quantize`; and less divergence on another part of the text."""
    from halfbyte import hf
    from halfbyte_lab.evals.model import load

    text, folder = tmp_path / "text", tmp_path / "packed"
    text.write_text(heldout_text()[:8000], encoding="utf-8")
    assert run("quantize", "demo", "--weights", "nf4", "--calibrate", str(text), "--device", "cpu", "-o", str(folder)) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    ours = hf.load(shipped_model(), weights="nf4", dtype=torch.bfloat16, calibrate=[text.read_text(encoding="utf-8")])
    state = hf.load(folder).state_dict()
    assert all(torch.equal(part, state[name]) for name, part in ours.state_dict().items())
    ids = windows(load("demo")[1].encode(heldout_text()[20000:]), 256, 4)
    logs = [hf.load(shipped_model(), weights=weights, dtype=torch.bfloat16) for weights in (None, "nf4")]
    plain, nearest, fed = (model(ids).logits.float().log_softmax(-1) for model in (*logs, ours))
    assert (plain.exp() * (plain - fed)).sum() < 0.8 * (plain.exp() * (plain - nearest)).sum()


def test_quantize_generate_and_their_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "nvfp4"
    assert run("quantize", "demo", "--weights", "nvfp4", "-o", str(folder)) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    assert run("generate", str(folder), "--prompt", "def f(", "--keys", "int8", "--tokens", "5", "--dtype", "fp16") == 0
    said = capsys.readouterr()
    assert said.out.startswith("def f(")
    assert len(said.out) == len("def f(") + 5 + 1
    assert re.search(r"^5 tokens, \d+\.\d tokens/s$", said.err, re.MULTILINE)
    errors = {
        ("quantize", "demo", "--weights", "nvfp4", "-o", str(folder)): "exists",
        ("quantize", "demo", "--weights", "int3", "-o", str(tmp_path / "x")): "weights='int3'",
        ("quantize", str(folder), "--weights", "nf4", "-o", str(tmp_path / "y")): "quantized already",
        ("generate", "demo", "--prompt", ""): "prompt is empty",
        ("generate", "demo", "--prompt", "a", "--values", "int4_channel"): "keys only",
        ("generate", str(tmp_path), "--prompt", "a"): "no config.json",
        ("eval", "demo", "--length", "1"): "length=1",
        ("eval", "demo", "--chunk", "0"): "chunk=0",
        ("eval", "demo", "--output", str(tmp_path / "none" / "x.jsonl")): "--output",
        ("eval", "demo", "--report", str(tmp_path)): "--html",
        ("demo", "--html", str(tmp_path)): "--html",
        ("generate", "demo", "--prompt", "a", "--temperature", "1e-45"): "temperature=1e-45",
        ("bench", "decode", "--impl", "zz"): "impl='zz'",
        ("eval", "demo", "--text", str(tmp_path / "missing.txt")): "text=",
    }
    for arguments, says in errors.items():
        assert says in refusal(capsys, *arguments)
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("quick", [True, False])
def test_the_demo_from_its_command(quick: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Sizes as small as they go: the verdict, a table within 80 columns, and a page whose sections are those that were run."""
    small = {"TEXT": (32, 1), "QUICK_TEXT": (32, 1), "OUTLIER_TEXT": (32, 1), "TOKENS": 4}
    for name, value in small.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "every_kv_setting", lambda dim: [Setting("int8", "int8"), Setting("int4_g32", "int4_g32")])
    monkeypatch.setattr(demo, "every_weight_setting", list)
    page, records = tmp_path / "demo.html", tmp_path / "demo.jsonl"
    assert run("demo", "--quick" if quick else "--wide", "--html", str(page), "-o", str(records)) == 0
    said, _, every_figure = capsys.readouterr().out.partition("Every figure")
    assert ("KL by quarter" in every_figure) is not quick
    assert "INT8 cache: 1.94x smaller, perplexity" in said
    assert max(map(len, said.splitlines())) <= max(80, len(f"Report: {page}"))
    written = page.read_text()
    assert ("Outliers" in written) is not quick
    assert ("halfbyte demo --quick" in written) is quick
    found = [json.loads(line) for line in records.read_text().splitlines()]
    variants = [] if quick else [name for outliers in demo.PROFILES for name in [outliers.name] * 4]
    assert [r["model"] for r in found if r["weights"] is None] == [""] * 4 + variants
    assert [r["model"] for r in found if r["weights"]] == ["", *variants[:1]]  # weights have the same outliers everywhere
    assert all(r["command"][name] > 0 for r in found for name in ("seconds", "cpu_seconds"))
    assert re.search(r"Took \d+ s, \d+ s of CPU time", said)
