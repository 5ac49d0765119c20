"""The shipped model with outliers: the same answers in 16 bits, and formats that tell the variants apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "hf"))
import tiny_models

from halfbyte import hf
from halfbyte.errors import Unsupported
from halfbyte.text import heldout_text, windows
from halfbyte_lab.evals import model as models
from halfbyte_lab.evals.outliers import BY_TOKEN, PROFILES, Outliers, recorded_heads, with_outliers
from halfbyte_lab.evals.quality import Setting, evaluate


@pytest.fixture(scope="module")
def shipped() -> Any:
    torch.set_num_threads(1)
    return models.load("demo")[0]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return windows(list(heldout_text().encode()), 96, 2)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = hf.PackedCache(model, ids.shape[1], keys="bf16", values="bf16")
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("outliers", PROFILES, ids=lambda p: p.name)
def test_equal_bit_for_bit_in_sixteen_bits_and_not_when_quantized(shipped: Any, ids: torch.Tensor, outliers: Outliers) -> None:
    made = with_outliers(shipped, outliers)
    assert torch.equal(logits(made, ids), logits(shipped, ids))
    plain, grown = (evaluate(m, [Setting(), Setting("int4", "int4")], ids)[1].kl_mean for m in (shipped, made))
    assert grown > 2 * plain


@pytest.mark.parametrize("exponents", [{"values": (4, 3)}, {"columns": (5, 5)}, {"keys": (6,)}, {"end_keys": (6,)}])
def test_each_transformation_alone_changes_nothing_in_sixteen_bits(shipped: Any, ids: torch.Tensor, exponents: Any) -> None:
    made = with_outliers(shipped, Outliers("one", "", **exponents))
    assert torch.equal(logits(made, ids), logits(shipped, ids))
    sizes = [(p - q).abs().max() for p, q in zip(made.parameters(), shipped.parameters(), strict=True)]
    assert sum(bool(s > 0) for s in sizes) >= 4


def test_the_magnitudes_are_those_of_the_sources(shipped: Any, ids: torch.Tensor) -> None:
    """RMS of the largest key channel over that of the median one: 5 and more; above 100 at the ends of Qwen2.5 only."""

    def ratios(outliers: Outliers) -> list[float]:
        rms = [h.k.float().square().mean((0, 2)).sqrt() for h in recorded_heads(with_outliers(shipped, outliers), ids)]
        return [float((r.amax(1) / r.median(1).values).max()) for r in rms]

    by_name = {p.name: ratios(p) for p in PROFILES}
    assert min(by_name["Llama-3"]) > 5
    assert max(by_name["Llama-3"]) < min(by_name["Qwen3"]) * 2
    ends, inner = by_name["Qwen2.5"][::5], by_name["Qwen2.5"][1:5]
    assert max(ends) > 100 > 20 > max(inner)


def test_outliers_by_token_are_followed_by_no_scale_of_a_channel(shipped: Any, ids: torch.Tensor) -> None:
    """The variant answers nearly as well, its keys are out of line at line ends alone, and per-channel keys lose by it."""
    variant = with_outliers(shipped, BY_TOKEN)
    settings = [Setting(), Setting("int8_channel", "bf16"), Setting("int8", "bf16")]
    plain, grown = (evaluate(m, settings, ids) for m in (shipped, variant))
    assert grown[0].perplexity < 1.25 * plain[0].perplexity
    assert grown[2].kl_mean > grown[1].kl_mean > 1.5 * plain[1].kl_mean
    slow = shipped.config.head_dim // 2 - 1
    for heads in recorded_heads(variant, ids):
        size = heads.k[..., slow].float().abs().amax(1)
        assert size[ids == ord("\n")].mean() > 3 * size[ids != ord("\n")].mean()


def test_rotation_saves_what_per_token_keys_lose(shipped: Any, ids: torch.Tensor) -> None:
    """As SAW-INT4 reports of Qwen3: token-wise INT4 keys collapse, rotated ones come close to 16 bits again."""
    qwen3 = next(p for p in PROFILES if p.name == "Qwen3")
    settings = [Setting(), Setting("int4", "bf16"), Setting("int4", "bf16", rotate_keys=True), Setting("int4_channel", "bf16")]
    _, plain, rotated, by_channel = evaluate(with_outliers(shipped, qwen3), settings, ids)
    assert plain.kl_mean > 10 * rotated.kl_mean > 10 * by_channel.kl_mean
    assert plain.top1 < 0.7 < 0.85 < rotated.top1


def test_other_families_are_refused() -> None:
    for family in ("gpt2", "qwen3"):
        with pytest.raises(Unsupported, match="Llama's layers"):
            with_outliers(tiny_models.base(family), PROFILES[0])
