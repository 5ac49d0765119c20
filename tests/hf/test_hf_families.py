"""Every decoder family of the installed transformers: right, or refused in one sentence before anything was changed.

What comes out is compared with the record, results/families.jsonl, of which docs/reference/models.md is made. A sample runs here;
`make hf-suite` runs all of them. After a change that is meant: python tests/hf/test_hf_families.py writes the record again.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from families import FAMILIES, OTHERS, default_share, tiny_config, tiny_model
from mixtures import expand
from rounded_cache import rounded_cache
from tiny_models import VOCAB, left_padding
from transformers import DynamicCache

import halfbyte.hf as hf
from halfbyte.errors import HalfbyteError
from halfbyte.hf import fused_blocks, graph_generate
from halfbyte.hf.fused_blocks import FusedBlock, fused_view
from halfbyte.hf.fused_forms import AsItIs
from halfbyte.hf.mixtures import layout
from halfbyte.hf.model_support import blocks
from halfbyte.hf.recorded_step import Forward
from halfbyte.memory import packed_layers
from saved_folders import same

RECORD = Path(__file__).parents[2] / "results" / "families.jsonl"
KV, WEIGHTS = ("bf16", "int8", "int4"), ("int8_col", "int4_g32", "nf4")
#: Largest difference of a logit, in standard deviations of the logits. 4-bit codes of values at a tie may differ by one step.
CLOSE = {"bf16": 1e-2, "int8": 2e-2, "int4": 1e-1, "weights": 1e-3}


def greedy(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, logits) of six more tokens for two prompts of 21 and 18 tokens, padded on the left."""
    ids = torch.randint(1, VOCAB, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = left_padding(ids, 0, 3)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        out = model.generate(ids * mask, attention_mask=mask, **settings, **options)
    return out.sequences, torch.stack(out.logits, 1)


def fingerprint(model: Any) -> Any:
    """What `quantize` may change."""
    owned = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    return owned, {n: p.data_ptr() for n, p in model.named_parameters()}, model.config.to_dict(), model.config._attn_implementation


def refusal(model: Any, **formats: str) -> str | None:
    """Quantize; the reason if that was refused, in one sentence and with the model as it was."""
    before = fingerprint(model)
    try:
        hf.quantize(model, **formats)
    except HalfbyteError as error:
        reason = str(error)
    else:
        return None
    assert fingerprint(model) == before
    assert "\n" not in reason
    return reason


def cache_outcome(family: str) -> str | None:
    """None if every format gives the tokens of a cache rounded in the same way; else the reason of the refusal."""
    for fmt in KV:
        packed, plain = tiny_model(family), tiny_model(family)
        if (reason := refusal(packed, keys=fmt, values=fmt)) is not None:
            return reason
        plain.set_attn_implementation("eager")
        expected, wanted = greedy(plain, past_key_values=rounded_cache(plain, fmt))
        tokens, logits = greedy(packed)
        assert torch.equal(tokens, expected), fmt
        assert (logits - wanted).abs().max() < CLOSE[fmt] * wanted.std(), fmt
    return None


def steps_outcome(family: str) -> str:
    """How plain `generate()` runs the steps of a family whose cache is served: a recorded one for every token, or why not."""
    model, reasons, steps = hf.quantize(tiny_model(family), keys="int8", values="int8"), [], []
    run = Forward.__call__
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graph_generate, "warn_once", reasons.append)
        patched.setattr(fused_blocks, "warn_once", pytest.fail)  # a fused block that runs as it is after all
        patched.setattr(Forward, "__call__", lambda *a: steps.append(1) or run(*a))
        greedy(model)
    if reasons:
        return f"transformers' loop: {reasons[0].partition('not recorded: ')[2]}"
    assert len(steps) == 5, "a step for every token behind the first"
    view = fused_view(model)
    if view is None:
        return "recorded; blocks are not residual branches behind an RMSNorm"
    layers = [m for m in view.get_decoder().modules() if isinstance(m, FusedBlock)]
    forms = [part for m in layers for form, _, _ in m.branches for part in getattr(form, "forms", [form])]
    own = {_kind(form.module) for form in forms if isinstance(form, AsItIs)}
    unfused = ["some blocks"] * (len(layers) < len(blocks(model)))
    left = [*unfused, *sorted(own)]
    return f"recorded and fused, but for {', '.join(left)}" if left else "recorded and fused"


def _kind(module: Any) -> str:
    """What kind of branch a module is."""
    if any(layout(m) is not None for m in module.modules()):
        return "experts"
    name = type(module).__name__.lower()
    kinds = {"mamba": "recurrences", "attention": "attention", "mlp": "MLPs", "feedforward": "MLPs", "moe": "experts"}
    return next((kind for word, kind in kinds.items() if word in name), "recurrences")


def weights_outcome(family: str) -> str | None:
    """None if the formats that fit give the logits of the dequantized model; else the reason why none does."""
    reasons = []
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    for fmt in WEIGHTS:
        packed, plain = tiny_model(family), tiny_model(family)
        if (reason := refusal(packed, weights=fmt)) is not None:
            reasons.append(reason)
            continue
        expand(packed, plain)
        try:
            with torch.no_grad():
                logits, wanted = (m(ids, use_cache=False).logits for m in (packed, plain))
        except HalfbyteError as error:  # a model that computes with a weight as a tensor
            reasons.append(str(error))
            continue
        assert (logits - wanted).abs().max() < CLOSE["weights"] * wanted.std(), fmt
    return reasons[0] if len(reasons) == len(WEIGHTS) else None


def outcome(family: str) -> dict[str, Any]:
    """The line of the record; `built` says why there is none where transformers cannot make the model."""
    try:
        tiny_model(family)
    except Exception as error:
        return {"family": family, "built": f"{type(error).__name__}: {error}".splitlines()[0]}
    cache = cache_outcome(family)
    steps = None if cache else steps_outcome(family)
    return {"family": family, "cache": cache, "weights": weights_outcome(family), "steps": steps}


def fails_by_itself(family: str) -> str:
    """What another transformers than that of the record raises for a family that nobody has changed; "" where it runs."""
    if json.loads(RECORD.read_text(encoding="utf-8").partition("\n")[0])["transformers"] == version("transformers"):
        return ""
    try:
        tiny_model(family)(torch.ones(1, 3, dtype=torch.long))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def recorded() -> dict[str, dict[str, Any]]:
    return {line["family"]: line for line in map(json.loads, RECORD.read_text(encoding="utf-8").splitlines()) if "family" in line}


@pytest.mark.parametrize("family", [name for name in ("dbrx", "llama", "mimo_v2_flash") if name in FAMILIES])
def test_bytes_of_a_cache_follow_from_the_configuration(family: str) -> None:
    """KV heads in a part of it, under their own name, or twice as many in some layers."""
    formats = {"keys": "int4_channel", "values": "int8"}
    model = hf.quantize(tiny_model(family), **formats)
    cache = hf.PackedCache(model, 64, **formats)
    with torch.no_grad():
        model(torch.ones(2, 20, dtype=torch.long), past_key_values=cache)
    assert cache.bytes_per_token == sum(layer.kv.bytes_per_token for layer in cache.packed if layer.kv is not None)
    sizes = packed_layers(model.config, "int4_channel", "int8", ())
    assert (sizes.nbytes(2, 64), sizes.plain_nbytes(1, 1)) == (cache.nbytes, plain_bytes_of_a_token(cache))


def plain_bytes_of_a_token(cache: Any) -> int:
    return sum(2 * layer.kv.kv_heads * (layer.kv.head_dim + layer.kv.value_dim) for layer in cache.packed)


ALL = os.environ.get("HALFBYTE_FAMILIES") == "all"
SAMPLE = FAMILIES if ALL else FAMILIES[::8]


@pytest.mark.slow
@pytest.mark.parametrize("family", SAMPLE)
def test_right_or_refused(family: str) -> None:
    try:
        found, known = outcome(family), recorded().get(family)
    except Exception:
        if why := fails_by_itself(family):
            pytest.skip(f"this transformers, not that of the record, cannot run it with attention of its own: {why}")
        raise
    if "built" in found and (why := fails_by_itself(family)):
        pytest.skip(f"this transformers, not that of the record, cannot build it: {why}")
    if known is None:
        assert not ALL, f"{family} is not in the record: run python tests/hf/test_hf_families.py"
        return
    assert found == {name: said for name, said in known.items() if name != "share"}


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS if ALL else ("unlimited_ocr", *OTHERS[::12]))
def test_folders_of_encoder_decoders_and_of_several_modalities_load(family: str, tmp_path: Path) -> None:
    try:
        model = tiny_model(family)
    except Exception as error:
        pytest.skip(f"transformers cannot build it: {error}")
    folder = hf.save(hf.quantize(model, "int8_col"), tmp_path / "model")
    again = hf.load(folder)
    assert type(again) is type(model)
    same(again, model)


#: Published decoders that see images, too, and so are not among `FAMILIES`: how their steps run.
SEEING = {
    "exaone4_5": "recorded and fused",
    "kimi_k25": "recorded and fused, but for attention, experts",
    "mistral4": "recorded and fused, but for attention, experts",
    "step3p7": "recorded and fused, but for attention",
}


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("family", SEEING)
def test_decoders_that_see_images_write_the_tokens_of_transformers(family: str) -> None:
    assert (cache_outcome(family), weights_outcome(family), steps_outcome(family)) == (None, None, SEEING[family])


CROSS = {"bart": {}, "mbart": {}, "bert": {"add_cross_attention": True}}


@pytest.mark.parametrize("family", CROSS)
def test_cross_attention_has_a_cache_of_its_own(family: str) -> None:
    config = tiny_config(family)
    config.update(CROSS[family])
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    seen = {"encoder_hidden_states": torch.randn(2, 5, 64), "encoder_attention_mask": torch.ones(2, 5, dtype=torch.long)}
    seen["encoder_attention_mask"][1, :2] = 0
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    cache = tf.EncoderDecoderCache(rounded_cache(plain, "int8"), DynamicCache())
    expected, wanted = greedy(plain, past_key_values=cache, **seen)
    tokens, logits = greedy(hf.quantize(model, keys="int8", values="int8"), **seen)
    assert torch.equal(tokens, expected)
    assert (logits - wanted).abs().max() < CLOSE["int8"] * wanted.std()
    with pytest.raises(HalfbyteError, match="EncoderDecoderCache"):
        model(
            torch.ones(1, 3, dtype=torch.long),
            past_key_values=hf.PackedCache(model, 64, values="int8"),
            encoder_hidden_states=seen["encoder_hidden_states"][:1],
        )


def write_record(families: list[str]) -> None:
    """Run families and put their lines into the record; a wrong one fails."""
    lines = recorded() if RECORD.exists() else {}
    for family in families:
        lines[family] = {**outcome(family), "share": default_share(family)}
        print(json.dumps(lines[family]), flush=True)
    first = {"transformers": version("transformers"), "torch": torch.__version__.split("+")[0]}
    RECORD.write_text("".join(json.dumps(x) + "\n" for x in (first, *(lines[f] for f in sorted(lines)))), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_record(sys.argv[1:] or list(FAMILIES))
