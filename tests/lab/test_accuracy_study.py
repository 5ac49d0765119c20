"""The studies that time nothing, accuracy and memory, in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import CPU, WHERE, quick

from halfbyte.formats import KV_FORMATS
from halfbyte.memory import meta_model, packed_layers
from halfbyte.text import ByteTokenizer, heldout_text, windows
from halfbyte_lab.evals import calibrate, real_model
from halfbyte_lab.evals.model import load
from halfbyte_lab.evals.outliers import Heads, recorded_heads
from halfbyte_lab.evals.quality import Setting
from halfbyte_lab.measure.checks import float64_attention
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import accuracy, calibrated, evidence, memory, quality_per_bit


@pytest.fixture(scope="module")
def shipped() -> Any:
    return load("demo", torch.device("cpu"))


def some_heads(seed: int = 0) -> Heads:
    torch.manual_seed(seed)
    return Heads(*(torch.randn(2, h, t, 64).bfloat16() for h, t in ((4, 1), (2, 64), (2, 64))))


# ---------------------------------------------------------------------------------------------------------------- accuracy


def test_recorded_heads_are_what_attention_sees(shipped: Any) -> None:
    """Attention over what was recorded, through the layer's own output projection, is what the attention module returns."""
    model, tokenizer = shipped
    ids = windows(tokenizer.encode(heldout_text()), 48, 2)
    seen: list[torch.Tensor] = []
    hook = model.model.layers[2].self_attn.register_forward_hook(lambda module, given, out: seen.append(out[0][:, -1]))
    found = recorded_heads(model, ids)
    hook.remove()
    assert len(found) == 6
    heads = found[2]
    assert heads.q.shape == (2, 8, 1, 64)
    assert heads.k.shape == heads.v.shape == (2, 2, 48, 64)
    out = float64_attention(heads.q, heads.k, heads.v, 64**-0.5).flatten(1).float()
    again = model.model.layers[2].self_attn.o_proj(out).detach()
    assert (again - seen[0]).norm() < 0.02 * seen[0].norm()


def test_a_key_bias_changes_no_output_but_what_rounding_does() -> None:
    heads = some_heads()
    whole = replace(heads, k=heads.k.round())  # whole numbers stay what they are beside 200
    biased = whole.with_key_bias()
    assert biased.k.abs().max() > 190
    plain, shifted = (float64_attention(h.q, h.k, h.v, 0.125) for h in (whole, biased))
    assert (plain - shifted).abs().max() < 1e-9


def test_errors_of_keys_are_ordered_as_their_bits() -> None:
    heads, biased = some_heads(), some_heads().with_key_bias()

    def relative(h: Heads, keys: str, rotated: bool = False) -> float:
        error, norm = accuracy.key_error(h, keys, rotated)
        return error / norm

    assert 0 < relative(heads, "int8") < relative(heads, "int4_g32") < relative(heads, "int4") < 0.5
    assert 2 * relative(heads, "int4") < min(relative(heads, "int2_g32"), relative(heads, "int2"))
    assert relative(biased, "int4_g32") > 5 * relative(heads, "int4_g32")
    assert relative(biased, "int4", True) < 0.95 * relative(biased, "int4")
    assert relative(biased, "int4_channel") < 2 * relative(heads, "int4_channel")


def test_the_front_gains_a_fifth_with_every_step() -> None:
    known = [("a", 4, 0.3), ("worse", 5, 0.3), ("b", 8, 0.1), ("dear", 8, 0.2), ("close", 8.2, 0.09), ("c", 8.5, 0.05)]
    where = quick().environment
    found = accuracy.front([Record("q", {}, name, "it", 0, where, bits=bits, error=error) for name, bits, error in known])
    assert [r.formats for r in found] == ["a", "b", "c"]


def test_every_format_is_in_the_full_study_and_some_in_a_quick_one() -> None:
    full = accuracy.jobs(Session(Options(threads=1), CPU))
    assert len(full[0].settings) >= 15 and len(full[1].settings) == 17  # type: ignore[attr-defined]  # noqa: PT018
    assert len(full[2].keys) == 2 * sum(fmt.is_quantized for fmt in KV_FORMATS.values())  # type: ignore[attr-defined]
    small = accuracy.jobs(quick())
    assert {accuracy.formats_of(s) for job in small[:2] for s in job.settings} | {  # type: ignore[attr-defined]
        accuracy._name(*pair)
        for pair in small[2].keys  # type: ignore[attr-defined]
    } == set(accuracy.QUICK)


# ------------------------------------------------------------------------------------------------------------------ memory

#: Parameters as the model cards give them.
BILLIONS = {
    "Llama 2 7B": 6.74,
    "Mistral 7B": 7.25,
    "Qwen2.5 7B": 7.62,
    "Llama 3 8B": 8.03,
    "Qwen2.5 32B": 32.76,
    "Llama 2 70B": 68.98,
    "Llama 3 70B": 70.55,
}


@pytest.mark.parametrize("name", memory.MODELS)
def test_models_have_the_parameters_of_their_cards(name: str) -> None:
    model = meta_model(memory.configuration(name), name)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=0.01)


@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("int4", "int4"), ("int4_channel", "int4"), ("int8_tensor", "int8")])
@pytest.mark.parametrize("batch", [1, 32])
def test_the_longest_context_fits_and_a_block_more_does_not(formats: tuple[str, str], batch: int) -> None:
    sizes, room = packed_layers(memory.configuration("Qwen2.5 7B"), *formats, ()), 5 * 10**9 + 7
    tokens = memory.longest(sizes, batch, room)
    assert sizes.nbytes(batch, tokens) <= room < sizes.nbytes(batch, tokens + memory.BLOCK)
    assert memory.longest(sizes, batch, 0) == memory.longest(sizes, batch, -(10**9)) == 0


def test_records_table_and_charts() -> None:
    measured = quick(pattern="int8$|bf16 halfbyte|int8 halfbyte").run(memory.jobs(quick()))
    assert {r.formats for r in measured} == {"bf16", "int8", "int8_channel / int8", "int4_channel / int8"}
    plain, int8 = measured[0], measured[1]
    assert 1.9 < int8.shape["24 GB x 1"] / plain.shape["24 GB x 1"] < 2
    headers, rows = memory.table(measured)
    assert {len(row) for row in rows} == {len(headers)}
    whole = [row for row in rows if row[0] == "Llama 3 70B, bf16"]
    assert len(whole) == 1  # its weights fit on none of the cards
    assert set(whole[0][4:]) == {"none"}
    assert len(memory.drawn(measured)) == len(memory.says(measured)) == 2


# --------------------------------------------------------------------------------------------------------- quality per bit


def test_quality_per_bit_measures_every_format_once() -> None:
    full = quality_per_bit.jobs(Session(Options(threads=1), CPU))
    assert [job.name for job in full[::5]] == list(quality_per_bit.MODELS)
    names = [s.kv for s in full[0].settings]  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)
    as_wide_as_a_head = {"int8_g64", "int4_g64", "int2_g64"}
    assert {s.keys for s in full[0].settings} == {n for n, f in KV_FORMATS.items() if f.is_quantized} - as_wide_as_a_head  # type: ignore[attr-defined]
    assert quality_per_bit.DEFAULT.kv in names
    assert not any(KV_FORMATS[s.keys].token_block and s.rotate_keys for s in full[0].settings)  # type: ignore[attr-defined]


def test_models_that_were_measured_together_share_a_chart() -> None:
    """One that was measured later, elsewhere, takes it from nobody, and has none alone."""
    blank = Record(quality_per_bit.QUALITY, {}, "int8", "halfbyte", 0, WHERE, error=1e-3, bits=8.25)
    first, *others = (replace(blank, case=name) for name in quality_per_bit.MODELS)
    assert len(quality_per_bit.drawn([first, *others])) == len(quality_per_bit.drawn([first, *others[:-1]])) == 2
    assert quality_per_bit.drawn(others[-1:]) == []


def test_the_chart_of_a_real_model_has_the_toy_and_what_is_safe_beside() -> None:
    """Of the toy the same formats; the limit is twice the floor of the same text."""
    blank = Record("", {}, "", "halfbyte", 0, WHERE, noise=1e-5)

    def row(op: str, case: str, formats: str, kl: float, bits: float = 8.25) -> Record:
        return replace(blank, op=op, case=case, formats=formats, error=kl, bits=bits)

    floor, int8 = row(evidence.CACHE, "prose, bf16", "bf16", 1e-3, 16.0), row(evidence.CACHE, "prose, bf16", "int8", 1.9e-3)
    weights = row(evidence.OF_WEIGHTS, "prose, bf16", "nf4", 0.2, 4.5)
    toy = [row(accuracy.QUALITY, evidence.TOY, name, 1e-4) for name in ("int8", "fp8")]
    cache, of_weights = evidence.drawn([floor, int8, weights, *toy])
    assert "safe up to 2.0e-03" in cache
    assert "the shipped toy" in cache
    assert "fp8" not in cache
    assert "the shipped toy" not in of_weights
    assert "Q4_K_M" in of_weights
    assert evidence.drawn([*toy]) == []
    assert evidence.verdicts([floor, int8]) == {"bf16": True, "int8": True}


def test_calibrated_weights_are_judged_on_other_text() -> None:
    """On the shipped model: both ways of rounding, and how much less one diverges."""
    session = Session.start(Options(device="cpu", quick=True))
    records = list(evidence.CalibratedJob("int4_g64", False).measure(session))
    assert [(r.case, r.formats) for r in records] == [("prose, fp32", "int4_g64"), ("prose, fp32", "int4_g64 calibrated")]
    nearest, less = (r.error or 0.0 for r in records)
    assert 0 < less < 0.8 * nearest
    assert all(0 < (r.noise or 0.0) < (r.error or 0.0) for r in records)
    (row,) = evidence.calibrated_table(records)[1]
    assert row == ("prose, fp32", "int4_g64", f"{nearest:.3f}", f"{less:.3f}", f"{100 * (1 - less / nearest):.0f}")
    read, judged = calibrated.calibration_tokens(session, ByteTokenizer(), (1, 64), (1, 64))
    assert bytes(judged["prose"][0].tolist()) not in bytes(read.flatten().tolist())


@pytest.mark.slow
def test_formats_by_layer_of_a_real_model(tmp_path: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two layers of the shipped model: a plan and uniform choices within its bits, on other text; a second run resumes."""
    monkeypatch.setattr("halfbyte.paths.shipped_model", lambda: two_layers)
    monkeypatch.setattr(real_model, "FOLDER", tmp_path)
    monkeypatch.setattr(calibrated, "QUICK_READ", (1, 256))
    monkeypatch.setattr(calibrated, "CHUNK", 128)  # what a chunk reads of itself is in 16 bits
    monkeypatch.setattr(calibrated, "FORMATS", ("int4", "int4_g32", "int2"))
    monkeypatch.setattr(calibrate, "WINDOWS", ((0, 0), (4, 0)))
    session = Session.start(Options(device="cpu", quick=True))
    records = list(calibrated.PlansJob((3.5,)).measure(session))
    assert {r.case for r in records} == {"prose, within 3.5 bits"}
    assert [r.formats.startswith("by layer") for r in records] == [True] + [False] * (len(records) - 1)
    assert 2 <= len(records) <= 1 + calibrated.BESIDE
    assert all(r.bits <= 3.5 and r.error > 0 for r in records)  # type: ignore[operator]
    assert len([*tmp_path.glob("quick-plans/measured*.jsonl")]) == 4
    assert [row[0] for row in evidence.table(records)[1]] == ["prose, within 3.5 bits"] * len(records)
    best = min(r.error for r in records[1:]) / records[0].error  # type: ignore[type-var, operator]
    assert calibrated.gains(records)[0].endswith(f"by a factor of {best:.2f} to {best:.2f}.")
    monkeypatch.setattr(Session, "earlier", lambda self: records)
    assert list(calibrated.PlansJob((3.5,)).measure(session)) == []


def test_dither_moves_weights_by_half_a_step_at_most() -> None:
    model = SimpleNamespace(model=SimpleNamespace(layers=torch.nn.ModuleList([torch.nn.Linear(64, 8)])))
    before = model.model.layers[0].weight.detach().clone()
    after = real_model.dithered(model).model.layers[0].weight.detach()
    groups = before.unflatten(-1, (-1, 32))
    steps = (after - before).unflatten(-1, (-1, 32)) / ((groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15)
    assert 0.45 < float(steps.abs().max()) <= 0.5 + 1e-4
    assert float(steps.std()) == pytest.approx(12**-0.5, rel=0.1)
    assert torch.equal(model.model.layers[0].weight, before)


def test_a_group_that_fails_is_measured_setting_by_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record says why, and the others have their figures."""

    def records_of(session: Any, op: str, case: str, model: Any, cut: Any, settings: Any, base: Setting, late: bool) -> Any:
        if any(s.keys == "int4" for s in settings):
            raise RuntimeError("no such kernel")
        yield from (Record(op, {}, accuracy.formats_of(s), "halfbyte", 0, WHERE, case=case, error=1.0) for s in settings)

    monkeypatch.setattr(evidence, "quality_records", records_of)
    monkeypatch.setattr(evidence, "model_of", lambda session, arithmetic: (None, ByteTokenizer()))
    monkeypatch.setattr(evidence, "_tokens", lambda session, text, tokenizer: list(range(200)))
    session = Session.start(Options(device="cpu", quick=True))
    job = evidence.TextJob("prose", "bf16", (Setting("int8", "int8"), Setting("int4", "int4"), Setting("fp8", "fp8")), 1, 64)
    figures = {r.formats: (r.error, r.refused) for r in job.measure(session)}
    assert figures == {"int8": (1.0, ""), "": (None, "prose, bf16: RuntimeError: no such kernel"), "fp8": (1.0, "")}
