"""`halfbyte advise` and evidence cards: sizes against the memory estimate, steps by hand, evidence only from cards."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import run
from halfbyte import settings as defaults
from halfbyte.device import Datasheet, datasheet_name, describe
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.memory import RESERVED, estimate
from halfbyte.paths import shipped_model
from halfbyte_lab.evals import card as cards
from halfbyte_lab.evals.advice import CPU, advise, command, python_lines
from halfbyte_lab.evals.card import TOLERATED, Card, Evidence, read_card
from halfbyte_lab.evals.choices import caches, is_safe
from halfbyte_lab.evals.pages import safe_where
from halfbyte_lab.evals.quality import Setting
from halfbyte_lab.evals.suite import settings, write

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
}
#: The largest divergence that a card of these tests calls safe: twice its floor.
SAFE = 2e-3
FIGURES = ("perplexity", "change", "noise", "kl_mean", "kl_p99", "top1", "kv_bytes_per_token", "weight_bytes")


def folder(path: Path, kind: str, **changes: object) -> str:
    transformers.AutoConfig.for_model(kind, **{**SIZES, **changes}).save_pretrained(path)
    return str(path)


def result(keys: str, values: str, weights: str, change: float, noise: float = 0.01, kl: float = 1.0) -> dict[str, object]:
    figures = dict.fromkeys(FIGURES, 1.0) | {"change": change, "noise": noise, "kl_mean": kl}
    return {"keys": keys, "values": values, "weights": weights, "rotate_keys": False, **figures}


def card(model: str, *results: dict[str, object]) -> Card:
    from halfbyte.memory import load_config
    from halfbyte_lab.evals.calibrate import sizes_of

    return Card("owner/name", sizes_of(load_config(model)), "a text", (8, 512), 16, 0, (), results, (32, 32), {}, SAFE / 2)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder(tmp_path / "llama", "llama", tie_word_embeddings=False)


def test_sizes_are_those_of_the_memory_estimate(llama: str) -> None:
    found = advise(llama, gpu="h200", batch=4, context=512)
    assert len(found.choices) == 4 * len(caches())
    for c in found.choices:
        same = estimate(llama, batch=4, context=512, keys=c.keys, values=c.values, weights=c.weights)
        assert (c.weight_bytes, c.kv_bytes) == (same.weight_bytes, same.kv_bytes)
        embedding = 2 * 100 * 128  # not tied: a step takes four of its rows
        assert c.step_bytes == same.total_bytes - embedding
        assert c.step_seconds == pytest.approx(c.step_bytes / 4.8e12)


def test_what_fits_fits_and_one_more_does_not(llama: str) -> None:
    found = advise(llama, gpu="3MB", batch=4, context=512)
    room = int(3e6 * (1 - RESERVED))
    assert {c.fits for c in found.choices} == {True, False}
    for c in found.choices:
        options = {"keys": c.keys, "values": c.values, "weights": c.weights}
        more, longer = (c.largest_batch + 1, 512), (4, c.largest_context + 1)
        for batch, context in (more, longer)[: 2 if c.largest_context < 2048 else 1]:
            assert estimate(llama, batch=batch, context=context, **options).total_bytes > room
        for batch, context in ((c.largest_batch, 512), (4, c.largest_context)):
            assert estimate(llama, batch=batch, context=context, **options).total_bytes <= room
        assert c.fits == (c.largest_batch >= 4)
        assert c.step_seconds is None


def test_no_context_is_longer_than_the_positions_of_the_model(llama: str) -> None:
    assert {c.largest_context for c in advise(llama, gpu="h200").choices} == {transformers.LlamaConfig().max_position_embeddings}


def test_nothing_fits_is_said(llama: str) -> None:
    found = advise(llama, gpu="10kB")
    assert found.recommended is None
    assert "nothing fits" in found.reason
    assert {c.largest_batch for c in found.choices} == {0}


def test_a_step_reads_no_more_than_the_window(tmp_path: Path) -> None:
    """Gemma 2 alternates; the cache keeps 64 tokens more than a window."""
    model = folder(tmp_path, "gemma2", sliding_window=64, query_pre_attn_scalar=32)
    plain = advise(model, gpu="h100", context=512).choices[0]
    per_token = 2 * 2 * 2 * 32  # keys and values of one layer, 16 bits
    assert plain.kv_bytes == 2 * per_token * (512 + 128)
    assert plain.step_bytes == plain.weight_bytes + per_token * 2 * (512 + 64)  # its embedding is tied


def test_the_windows_of_a_hybrid_are_those_of_its_attention(tmp_path: Path) -> None:
    """Layers without keys and values are numbered, too."""
    kinds = ["conv", "conv", "sliding_attention", "full_attention"]
    model = folder(tmp_path, "lfm2", layer_types=kinds, sliding_window=64, full_attn_idxs=None)
    plain = advise(model, gpu="h100", context=512).choices[0]
    assert plain.step_bytes == plain.weight_bytes + 2 * 2 * 2 * 32 * (512 + 64)  # its embedding is tied


def test_a_step_reads_the_experts_that_are_hit(tmp_path: Path) -> None:
    model = folder(tmp_path, "mixtral", num_local_experts=8, num_experts_per_tok=2)
    experts = 4 * 8 * 3 * 128 * 256 * 2  # bytes of all stacks
    for batch, share in ((1, 0.25), (2, 1 - 0.75**2)):
        found = advise(model, gpu="h100", batch=batch, context=64)
        plain = found.choices[0]
        read = plain.weight_bytes + plain.kv_bytes - 2 * 100 * 128 - experts * (1 - share)
        assert plain.step_bytes == pytest.approx(read, abs=2)
        assert any(f"{share:.0%} of the experts" in note for note in found.notes)


def test_groups_that_do_not_divide_give_way(tmp_path: Path) -> None:
    found = advise(folder(tmp_path, "llama", hidden_size=192, intermediate_size=192), gpu="h100")
    assert [c.weights for c in found.choices[:: len(caches())]] == ["bf16", "int8_col", "nvfp4", "int4_g64"]


def test_without_a_gpu_it_is_about_this_machine(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory, and the weights that are fast there."""
    found = advise(llama)
    assert (found.gpu, found.sheet.memory_bytes) == (CPU, describe("cpu").memory_bytes)
    assert found.recommended.weights == defaults.CPU_WEIGHTS
    here = replace(describe("cpu"), kind="cuda", name="NVIDIA H200", memory_bytes=2**37)
    monkeypatch.setattr("halfbyte_lab.evals.advice.describe", lambda device: here)
    assert advise(llama).sheet == Datasheet(2**37, 4.8e12)


def test_the_context_is_no_longer_than_the_positions(llama: str, tmp_path: Path) -> None:
    assert advise(llama, gpu="h200").context == transformers.LlamaConfig().max_position_embeddings == 2048
    long = folder(tmp_path / "long", "llama", max_position_embeddings=2**17)
    assert advise(long, gpu="h200").context == 8192


def test_evidence_of_another_model_is_shown_and_decides_nothing(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real models the nearest in size; the toy is none."""
    models = {"demo": 4, "near": 8, "far": 64}
    made = {
        name: card(folder(tmp_path / name, "llama", num_hidden_layers=n), result("int8", "int8", "bf16", 9.0))
        for name, n in models.items()
    }
    monkeypatch.setattr(cards, "card_of", lambda config: None)
    monkeypatch.setattr("halfbyte_lab.evals.advice.card_of", lambda config: None)
    monkeypatch.setattr(cards, "shipped_cards", lambda: [replace(c, model=name) for name, c in made.items()])
    found = advise(llama, gpu="h200")
    assert (found.card, found.is_own) == ("near", False)
    assert [c.evidence.change for c in found.choices if c.evidence] == [9.0]
    assert (found.recommended.keys, found.recommended.weights) == (defaults.KEYS, defaults.WEIGHTS)
    assert "not known" in found.reason


def test_without_a_card_quality_is_not_known(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "shipped_cards", list)
    found = advise(llama, gpu="h200")
    assert found.card is None
    assert all(c.evidence is None for c in found.choices)
    assert (found.recommended.weights, found.recommended.keys, found.recommended.values) == (
        defaults.WEIGHTS,
        defaults.KEYS,
        defaults.VALUES,
    )
    assert "not known" in found.reason
    assert f'weights="{defaults.WEIGHTS}", clip="{defaults.CLIP}"' in python_lines(found, found.recommended)
    assert f"--weights {defaults.WEIGHTS} --clip {defaults.CLIP}" in command(found, found.recommended)


def test_the_clip_is_that_of_the_evidence(llama: str) -> None:
    for clip in (None, "search"):
        known = result("int8", "int8", "nvfp4", 0.0, kl=SAFE) | {"clip": clip}
        found = advise(llama, gpu="h200", card=card(llama, known))
        assert ("clip=" in python_lines(found, found.recommended)) is (clip is not None)


def test_a_card_decides(llama: str) -> None:
    """Fewest bytes among what is safe, else within the tolerated change, noise included; what the card lacks is not taken."""
    good, noisy = result("int8", "int8", "int8_col", 0.2), result("int4", "int4", "nvfp4", 0.2, noise=TOLERATED)
    found = advise(llama, gpu="h200", card=card(llama, result("bf16", "bf16", "bf16", 0), good, noisy))
    assert (found.recommended.keys, found.recommended.weights) == ("int8", "int8_col")
    assert found.recommended.evidence == Evidence(0.2, 0.01, 1.0, safe=False)
    assert sum(c.evidence is not None for c in found.choices) == 3
    assert "nothing that fits is safe" in found.reason
    safe = advise(llama, gpu="h200", card=card(llama, good, result("int8", "int8", "bf16", 0.2, kl=SAFE)))
    assert safe.recommended.weights == "bf16"
    assert "that are safe" in safe.reason
    bad = advise(llama, gpu="h200", card=card(llama, result("int8", "int8", "bf16", -3.0)))
    assert bad.recommended is None
    assert "less than 1 %" in bad.reason


def test_a_card_of_another_model_is_refused(llama: str, tmp_path: Path) -> None:
    other = folder(tmp_path / "other", "llama", num_hidden_layers=2)
    with pytest.raises(InvalidArgument, match="card is of owner/name"):
        advise(other, card=card(llama, result("int8", "int8", "bf16", 0)))


def test_a_gpu_may_be_written_as_its_maker_does(llama: str) -> None:
    assert [advise(llama, gpu=name).gpu for name in ("rtx4090", "RTX 4090", "A100-80GB")] == ["rtx-4090", "rtx-4090", "a100-80gb"]


@pytest.mark.parametrize("gpu", ["24", "4090", "abacus", ""])
def test_a_gpu_is_a_name_or_a_size_with_its_unit(llama: str, gpu: str) -> None:
    with pytest.raises(InvalidArgument, match=r"a100-80gb.* or a size of memory such as 24GB"):
        advise(llama, gpu=gpu)


def test_a_folder_of_our_own_tells_its_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of what is stored, skipped layers and a quantized output layer included; a format that it has not is refused."""
    from halfbyte import hf
    from halfbyte.hf.weights import weight_bytes

    made = hf.quantize(
        hf.load(shipped_model(), dtype=torch.bfloat16), weights="nf4", lm_head="int8_col", skip_modules=("model.layers.0",)
    )
    hf.save(made, tmp_path / "own")
    model = str(tmp_path / "own")
    size = weight_bytes(hf.load(model))
    found = advise(model, gpu="24GB", context=64)
    assert {(c.weights, c.weight_bytes) for c in found.choices} == {("mixed", size)}
    assert "weights=" not in python_lines(found, found.choices[1])
    assert estimate(model).weight_bytes == estimate(model, weights="nf4").weight_bytes == size
    assert estimate(model).weights == "mixed"
    for refused in (lambda: advise(model, weights="mxfp4"), lambda: estimate(model, weights="mxfp4")):
        with pytest.raises(InvalidArgument, match=r"weights='mxfp4', .* stored as int8_col, nf4"):
            refused()
    assert run("memory", model) == 0
    assert "mixed weights" in " ".join(capsys.readouterr().out.split())


def test_safe_is_a_divergence_with_its_noise(llama: str) -> None:
    """A card without that noise is read, one with a noise that is no number is not."""
    assert [is_safe(2e-3, 0.0, 1e-3), is_safe(2e-3, 1e-6, 1e-3), is_safe(float("nan"), 0.0, 1e-3)] == [True, False, False]
    assert [safe_where(safe) for safe in ([True, True], [True, False], [False, True])] == ["yes", "plain", "no"]
    for noise, safe in (({}, True), ({"kl_noise": 1e-3}, True), ({"kl_noise": 1.5e-3}, False)):
        known = result("int8", "int8", "bf16", 0.0) | {"kl_mean": 1e-3} | noise
        assert card(llama, known).evidence("int8", "int8", "bf16").safe is safe
    far = result("int8", "int8", "bf16", 0.0) | {"kl_mean": 2 * SAFE}
    for floor, safe in ((0.0, False), (SAFE / 2, False), (SAFE, True)):
        assert replace(card(llama, far), floor=floor).evidence("int8", "int8", "bf16").safe is safe


def test_quantized_models_need_their_format(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match=r"quantized already \(gptq\)"):
        advise(str(tmp_path))
    for group, named in ((64, None), (128, "int4_g128")):
        config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": False}
        config.save_pretrained(tmp_path)
        found = advise(str(tmp_path), gpu="h100", weights=named)
        assert {c.weights for c in found.choices} == {f"int4_g{group}"}
    assert (found.recommended.keys, found.recommended.values) == (defaults.KEYS, defaults.VALUES)
    assert "weights=" not in python_lines(found, found.choices[1])
    assert "--weights" not in command(found, found.choices[1])


@pytest.mark.parametrize(("kind", "error", "said"), [("deepseek_v32", Unsupported, "latents"), ("mamba", Unsupported, "recurrent")])
def test_models_without_a_packed_cache_are_refused(tmp_path: Path, kind: str, error: type[Exception], said: str) -> None:
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(error, match=said):
        advise(str(tmp_path))


def test_unknown_types_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    with pytest.raises(CheckpointError, match="never_heard_of"):
        advise(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L40S", "l40s"),
        ("Some GPU", None),
    ],
)
def test_gpus_by_the_driver_s_name(name: str, entry: str | None) -> None:
    assert datasheet_name(name) == entry


@pytest.mark.parametrize(("gpu", "shown"), [("24GB", False), ("h200", True)])
def test_steps_are_told_where_the_bandwidth_is_known(gpu: str, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("advise", "demo", "--gpu", gpu) == 0
    table, _, legend = capsys.readouterr().out.partition("batch: ")
    assert ("step" in table) is ("step: the least time of a decode step" in " ".join(legend.split())) is shown


def test_large_sizes_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("advise", "demo", "--gpu", "h200", "--batch", "4096", "--context", "1M") == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bf16")]
    assert row.split()[2] == f"{4096 * 2**20 * 3072 / 1e9:,.0f}"
    assert "e+" not in row


def test_the_table_is_short_without_evidence(
    llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bits, the recommended, INT8 and the smallest; every one if asked for, or where a card is of the model."""
    monkeypatch.setenv("COLUMNS", "120")

    def table(*options: str) -> list[str]:
        assert run("advise", llama, "--gpu", "h200", *options) == 0
        cells = re.findall(r"(?:^| )(\w+/\w+) ", capsys.readouterr().out, re.MULTILINE)  # and a part of the folder's path
        return [cell for cell in cells if tuple(cell.split("/")) in pairs]

    pairs = set(caches().values())

    assert table() == ["bf16/bf16", f"{defaults.KEYS}/{defaults.VALUES}", "int8/int8", "int4/int4"]
    assert len(table("--every")) == 4 * len(caches())
    assert run("advise", "demo", "--gpu", "h200") == 0
    said = capsys.readouterr().out
    assert "more choices" not in said
    assert "by the evidence card of demo, a toy" in " ".join(said.split())


@pytest.mark.parametrize(("gpu", "named"), [(["--gpu", "h200"], True), ([], False)])
def test_the_fast_path_is_named_on_a_gpu(gpu: list[str], named: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Above the command that runs it; on a CPU nothing is captured."""
    assert run("advise", "demo", *gpu) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("with fused blocks. Run it: halfbyte generate demo" in said) is named


def test_layers_are_looked_through_once(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a model are found once and not for each choice, and layers that are alike are counted."""
    from halfbyte import memory
    from halfbyte.hf import weights

    looked, sized = list[str](), list[int]()
    find, size = weights.targets, memory.LayerSizes.nbytes
    monkeypatch.setattr(weights, "targets", lambda model: (looked.append(""), find(model))[1])
    monkeypatch.setattr(memory.LayerSizes, "nbytes", lambda self, *sizes: (sized.append(1), size(self, *sizes))[1])
    choices = advise(llama, gpu="h200").choices
    assert len(looked) < len(choices)
    assert len(sized) < 100 * len(choices)


def test_columns_that_do_not_fit_are_shown_if_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for options, shown in (((), False), (("--wide",), True)):
        assert run("advise", "demo", "--gpu", "h200", *options) == 0
        table, _, _ = capsys.readouterr().out.partition("batch: ")
        assert ("step ms" in " ".join(table.partition("--wide")[0].split())) is shown
        assert ("--wide also shows" in table) is not shown


def test_weights_that_are_given_save_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("advise", "demo", "--gpu", "24GB", "--weights", "int8_col") == 0
    said = capsys.readouterr().out
    assert re.search(r"Take \w+ keys and \w+ values: [\d.]+ MB of cache less than in 16 bits \(", " ".join(said.split()))


def test_the_lines_run() -> None:
    found = advise("demo", gpu="h200")
    for choice in (found.choices[0], found.choices[7]):
        space: dict[str, object] = {}
        exec(python_lines(found, choice), space)
        model = space["model"]
        ids = torch.tensor([[100, 101, 102]])
        assert model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 5)


def test_the_lines_replace_the_settings_of_a_folder(tmp_path: Path) -> None:
    """A 16-bit cache is named where the folder would otherwise take its own."""
    from halfbyte import hf

    hf.save(hf.quantize(hf.load(shipped_model()), keys="int8", values="int8"), tmp_path / "own")
    found = advise(str(tmp_path / "own"), gpu="h200")
    space: dict[str, Any] = {}
    exec(python_lines(found, found.choices[0]), space)
    made = space["model"].generate(torch.tensor([[100]]), max_new_tokens=2, pad_token_id=0, return_dict_in_generate=True)
    assert {(layer.key_format.name, layer.value_format.name) for layer in made.past_key_values.packed} == {("bf16", "bf16")}


# ------------------------------------------------------------------------------------------------------------------ cards


def test_a_card_is_read_as_written(llama: str, tmp_path: Path) -> None:
    made = card(llama, result("bf16", "bf16", "bf16", 0.0), result("int4", "int4", "nvfp4", 1.25, 0.5))
    made = replace(made, environment={"device": "a CPU", "versions": {"torch": "2.13"}, "command": "halfbyte eval"})
    file, page = write(made, tmp_path / "card.json")
    assert read_card(file) == made
    assert "| int4 + nvfp4 | 1.0000 | +1.25 \u00b1 0.50 |" in page.read_text()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no card"),
        ('{"format": "halfbyte evidence card", "version": 9}', "version 9"),
        ('{"format": "halfbyte evidence card", "version": 1}', "is damaged"),
    ],
)
def test_damaged_cards_are_named(tmp_path: Path, damage: str, said: str) -> None:
    (tmp_path / "card.json").write_text(damage)
    with pytest.raises(InvalidArgument, match=said) as caught:
        read_card(tmp_path / "card.json")
    assert "card.json" in str(caught.value)


def test_figures_that_are_no_numbers_are_refused(llama: str, tmp_path: Path) -> None:
    file, _ = write(card(llama, result("int8", "int8", "bf16", float("nan"))), tmp_path / "card.json")
    with pytest.raises(InvalidArgument, match="change is nan"):
        read_card(file)


def test_the_suite_measures_what_advise_shows() -> None:
    from halfbyte_lab.evals.model import load

    model, _ = load("demo")
    shown = {(c.keys, c.values, c.weights) for c in advise("demo", gpu="h200").choices}
    measured = settings(model)
    assert {(s.keys, s.values, s.weights or "bf16") for s in measured} == shown
    assert measured[0] == Setting()
    assert {s.rotate_keys for s in measured if s.keys == "int4"} == {True}


def test_the_shipped_card_is_of_the_shipped_model() -> None:
    found = advise("demo", gpu="h200", context=1024)
    assert found.card == "demo"
    assert all(c.evidence is not None for c in found.choices)
    assert found.recommended is not None
    assert (found.recommended.keys, found.recommended.values) == (defaults.KEYS, defaults.VALUES)
    safe = {(c.keys, c.values) for c in found.choices if c.evidence and c.evidence.safe}
    assert safe == {("bf16", "bf16"), (defaults.KEYS, defaults.VALUES), ("int8", "int8")}  # as the README's table has it


def test_advice_for_fp16(llama: str) -> None:
    """16 bits are fp16, evidence in bf16 counts and is said to be, and what is printed says the type."""
    found = advise("demo", gpu="h200", context=1024, dtype="fp16", weights="bf16")
    assert {c.weights for c in found.choices} == {"fp16"}
    assert (found.choices[0].keys, found.choices[0].values) == ("fp16", "fp16")
    assert all(c.evidence is not None for c in found.choices)
    assert "the evidence card was measured in bf16, not in fp16" in found.notes
    assert command(found, found.choices[0]).endswith("--keys fp16 --values fp16 --dtype fp16")
    assert python_lines(found, found.choices[0]).endswith("halfbyte.paths.shipped_model(), dtype=torch.float16)")
    mine = advise(llama, gpu="h200", dtype="fp16", card=card(llama, result("fp16", "fp16", "fp16", 0.0)))
    assert mine.choices[0].evidence is not None
    assert not any("measured in" in note for note in mine.notes)


@pytest.mark.slow
def test_suite_and_advise_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the first layer of the shipped model: every setting quantizes its weights and searches their clip."""
    file, model = tmp_path / "card.json", str(tmp_path / "one layer")
    transformers.AutoModelForCausalLM.from_pretrained(shipped_model(), num_hidden_layers=1).save_pretrained(model)
    assert (
        run("eval", model, "--suite", "--windows", "1", "--length", "32", "--long", "96", "--card", str(file), "--dtype", "fp16")
        == 0
    )
    made = read_card(file)
    assert made.windows == (1, 32)
    assert made.dtype == "fp16"
    assert {(r["keys"], r["values"], r["weights"]) for r in made.results[:1]} == {("fp16", "fp16", "fp16")}
    assert "| fp16 + fp16 |" in file.with_suffix(".md").read_text()
    assert sum("long_context" in r for r in made.results) == 9
    capsys.readouterr()
    assert run("advise", model, "--card", str(file), "--gpu", "24GB", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["choices"][1]["evidence"]["change"] == made.results[1]["change"]
