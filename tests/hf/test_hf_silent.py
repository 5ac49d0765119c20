"""Faults that nobody would see: each way either gives the right tokens or says what it does not do."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys

import pytest
import torch
import transformers as tf
from families import tiny_model
from tiny_models import LLAMA, SIZES, before, left_padding
from transformers.cache_utils import DynamicLayer
from transformers.generation import configuration_utils
from transformers.quantizers import auto

import halfbyte.hf as hf
from halfbyte import errors
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.hf.attention import attention
from halfbyte.hf.weights import packed_share
from halfbyte.nn import QuantLinear
from halfbyte.paths import shipped_model
from saved_folders import edit

# ------------------------------------------------------------------------------------- saved folders, opened without halfbyte


@pytest.fixture
def folder(build, tmp_path):
    return hf.save(hf.quantize(build("llama"), "nf4"), tmp_path / "model")


@pytest.fixture
def unknown(monkeypatch):
    """transformers as it is where halfbyte was not imported."""
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "halfbyte")
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "halfbyte")


@pytest.mark.parametrize("load", [tf.AutoModelForCausalLM, tf.AutoModel, tf.LlamaForCausalLM])
@pytest.mark.parametrize("given", [{}, {"config": tf.LlamaConfig(**LLAMA)}], ids=["", "config="])
def test_a_saved_folder_never_runs_with_random_weights(folder, unknown, load, given):
    with pytest.raises(RuntimeError, match="mismatched"):
        load.from_pretrained(folder, **given)


def test_a_pipeline_without_halfbyte_fails(folder, unknown):
    with pytest.raises(ValueError, match="Could not load model"):
        tf.pipeline("text-generation", model=str(folder))


@pytest.fixture
def shards(build, tmp_path):
    hf.quantize(build("gpt2"), "nf4").save_pretrained(tmp_path / "model", max_shard_size="40KB")
    return tmp_path / "model"


def test_transformers_own_save_pretrained_stops_them_too(shards, unknown):
    with pytest.raises(RuntimeError, match="mismatched"):
        tf.AutoModelForCausalLM.from_pretrained(shards)


def test_a_folder_whose_cache_is_packed_stops_them_too(build, tmp_path, monkeypatch):
    """Its weights are plain: transformers would run it with a 16-bit cache."""
    folder = hf.save(hf.quantize(build("llama"), keys="int8", values="int8"), tmp_path / "model")
    for known in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(known, "halfbyte")
    names = tuple(n for n in configuration_utils.ALL_CACHE_IMPLEMENTATIONS if n != "halfbyte")
    monkeypatch.setattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", names)
    with pytest.raises(ValueError, match=r"cache_implementation. \(halfbyte\)"):
        tf.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="Could not load model"):
        tf.pipeline("text-generation", model=str(folder))


LOADERS = """
import sys, torch, transformers as tf
ids = torch.arange(1, 22)[None]
for folder in sys.argv[1:]:
    for load in ("AutoModelForCausalLM", "AutoModel", "LlamaForCausalLM"):
        try:
            model = getattr(tf, load).from_pretrained(folder)
            if load == "AutoModel":
                print(round(float(model(ids).last_hidden_state.sum()), 2))
            else:
                print(model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist())
        except Exception as error:
            print(type(error).__name__)
    try:
        tf.pipeline("text-generation", model=folder)
    except Exception as error:
        print(str(error)[:20])
"""


@pytest.mark.slow
@pytest.mark.parametrize("imported", [False, True] if os.environ.get("HALFBYTE_FAMILIES") == "all" else [False])
def test_every_loader_in_a_new_process(build, prompt, tmp_path, imported):
    """With the import each gives what the saved model gives; a pipeline goes on to the tokenizer, which these folders lack. Without
    it all fail but one, which is right: plain weights in a model without generate().
    """
    folders, expected, ids = [], [], torch.arange(1, 22)[None]
    for number, options in enumerate(({"weights": "nf4"}, {"keys": "int8", "values": "int8"}, {"weights": "nf4", "keys": "int4"})):
        model = hf.quantize(build("llama"), **options)
        folders.append(str(hf.save(model, tmp_path / str(number))))
        tokens = str(model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist())
        states = str(round(float(model.model(ids).last_hidden_state.detach().sum()), 2))
        expected += [tokens, states, tokens, "Couldn't instantiate"]
    script = "import halfbyte.hf\n" * imported + LOADERS
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script, *folders], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    if imported:
        assert lines == expected
    else:
        assert len(lines) == len(expected)
        assert lines.pop(5) == expected[5]
        assert {*lines} <= {"RuntimeError", "ValueError", "Could not load model"}


@pytest.mark.parametrize(("family", "options"), [("llama", {"lm_head": "int8_col", "keys": "int8"}), ("gpt2", {}), ("gpt_oss", {})])
def test_the_base_model_alone(build, tmp_path, family, options):
    """AutoModel, whose names lack the beginning of those in the folder; saved, loaded once more, and never with a head made up."""
    whole, ids = hf.quantize(build(family), "int8_col", **options), torch.arange(1, 22)[None]
    hf.save(whole, tmp_path / "whole")
    base = tf.AutoModel.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        expected = whole.base_model(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, expected)
        base.save_pretrained(tmp_path / "base")
        assert torch.equal(tf.AutoModel.from_pretrained(tmp_path / "base")(ids).last_hidden_state, expected)
    for load in (tf.AutoModelForCausalLM.from_pretrained, hf.load):
        with pytest.raises(Unsupported, match="load it with AutoModel"):
            load(tmp_path / "base")


def test_a_base_model_lacks_a_part(build, tmp_path):
    folder = hf.save(hf.quantize(build("llama"), "nf4"), tmp_path / "model")
    edit(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scales"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj"):
        tf.AutoModel.from_pretrained(folder)


def test_folders_of_older_versions_load(build, prompt, tmp_path, monkeypatch):
    """They lack the empty tensors."""
    model = hf.quantize(build("llama"), "nf4")
    monkeypatch.setattr(type(model.hf_quantizer), "get_state_dict_and_metadata", lambda self, model: (None, {}))
    again = hf.load(hf.save(model, tmp_path / "model"))
    with torch.no_grad():
        assert torch.equal(again(prompt()).logits, model(prompt()).logits)


# ----------------------------------------------------------------------------------------------- attention that sees both sides

ENCODERS = {
    "bert": tf.BertConfig,
    "roberta": tf.RobertaConfig,
    "electra": tf.ElectraConfig,
    "camembert": tf.CamembertConfig,
    "ernie": tf.ErnieConfig,
    "data2vec-text": tf.Data2VecTextConfig,
    "bert-generation": tf.BertGenerationConfig,
    "xlm-roberta": tf.XLMRobertaConfig,
    "xlm-roberta-xl": tf.XLMRobertaXLConfig,
    "roberta-prelayernorm": tf.RobertaPreLayerNormConfig,
}


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_are_refused_unless_they_are_decoders(family):
    sizes = {**SIZES, "num_hidden_layers": 2, "intermediate_size": 128, "pad_token_id": 0}
    model = tf.AutoModelForCausalLM.from_config(ENCODERS[family](**sizes))
    with pytest.raises(Unsupported, match="is_decoder=True"):
        hf.quantize(model, keys="int8")
    assert model.config._attn_implementation != hf.NAME
    with pytest.raises(Unsupported, match="is_decoder=True"):
        hf.PackedCache(model, 64)
    hf.quantize(tf.AutoModelForCausalLM.from_config(ENCODERS[family](**sizes, is_decoder=True)), keys="int8")


def test_a_layer_that_is_not_causal_never_reads_a_packed_cache(build):
    """Whatever made the cache: one from a configuration, say, which has no layers to look at."""
    model = hf.quantize(build("llama"), keys="int8", values="int8")
    module = model.model.layers[0].self_attn
    module.is_causal = False
    keys, values = hf.PackedCache(model.config, 64).update(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32), 0)
    with pytest.raises(Unsupported, match="both sides"):
        attention(module, torch.zeros(1, 4, 1, 32), keys, values, None)


# ------------------------------------------------------------------------------------------------------------ Phi-3, longrope


def longrope(config, **options):
    """RoPE changes its factors after 24 tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 24}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    if config is tf.PhimoeConfig:
        rope |= {"short_mscale": 1.0, "long_mscale": 1.2}
    sizes = {**LLAMA, "head_dim": 16, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    made = config(**sizes, original_max_position_embeddings=24, rope_parameters=rope, **options)
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


@pytest.mark.skipif(before("5.20"), reason="where it drops its cache, this transformers goes on with the newest token alone")
@pytest.mark.parametrize("tokens", [19, 24, 25, 40])  # crossing while it generates, at once, and beyond from the beginning
@pytest.mark.parametrize(("config", "options"), [(tf.Phi3Config, {}), (tf.PhimoeConfig, {"num_local_experts": 4})])
def test_longrope_keeps_its_packed_cache(config, options, tokens, prompt, greedy, rounded, monkeypatch):
    model, ids = longrope(config, sliding_window=None, **options), prompt(2, tokens)
    mask = left_padding(ids, 0, 3)
    with monkeypatch.context() as patch:  # transformers drops a cache that is given: its own one must round
        patch.setattr(DynamicLayer, "update", type(rounded(model).layers[0]).update)
        patch.setattr(DynamicLayer, "fmt", "bf16", raising=False)
        patch.setattr(DynamicLayer, "keys_are", "keys", raising=False)
        expected, _ = greedy(model, ids, attention_mask=mask)
    packed = hf.quantize(copy.deepcopy(model), keys="bf16", values="bf16")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    made = packed.generate(ids, attention_mask=mask, **options)
    assert isinstance(made.past_key_values, hf.PackedCache)
    assert made.past_key_values.get_seq_length() == tokens + 11
    assert torch.equal(made.sequences, expected)


# ------------------------------------------------------------------------------------------------------- options of generate()


@pytest.fixture(scope="module")
def shipped():
    folder = str(shipped_model())
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.bos_token = tokenizer.convert_ids_to_tokens([0, 1])  # token healing uses both
    return tf.AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


@pytest.mark.parametrize("option", ["stop_strings", "token_healing"])
def test_options_that_bring_a_tokenizer(shipped, option):
    model, tokenizer = copy.deepcopy(shipped[0]), shipped[1]
    ids = tokenizer("def main(): retu", return_tensors="pt").input_ids
    given = {"stop_strings": ["n"], "token_healing": True}[option]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "tokenizer": tokenizer, option: given}
    expected = model.generate(ids, **options)
    hf.quantize(model, keys="bf16", values="bf16")
    assert torch.equal(model.generate(ids, **options), expected)


# --------------------------------------------------------------------------------------- forwards without a cache: perplexity


def test_packed_forwards_read_the_packed_cache(build, prompt, monkeypatch):
    ids, found = prompt(3, 37), {}
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, -9:] = 0, 0  # left padding, and right padding
    for kind in ("bf16", "int8", "int4"):
        model = hf.quantize(build("llama"), keys=kind, values=kind)
        with torch.no_grad():
            plain = model(ids).logits
            with hf.packed_forwards(model) as within:
                found[kind] = within(ids, labels=ids)
                padded = within(ids, attention_mask=mask).logits
            cache = hf.PackedCache(model, 64, keys=kind, values=kind)
            cache.expect_steps()
            expected = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(16, 1)], 1)
            assert torch.equal(model(ids).logits, plain)  # as before
        assert torch.equal(found[kind].logits, expected)
        torch.testing.assert_close(padded[1, :-9], expected[1, :-9])
        torch.testing.assert_close(found[kind].loss, model.loss_function(expected, ids, vocab_size=expected.shape[-1]))
        assert not torch.equal(found[kind].logits, plain)
    assert not torch.equal(found["int8"].logits, found["int4"].logits)


@pytest.mark.parametrize("chunk", [1, 16, 17, 40])
def test_packed_forwards_take_the_options_of_a_forward(build, prompt, chunk):
    """Each chunk has logits of its own to keep, and none a loss."""
    model, ids = hf.quantize(build("llama"), keys="int8", values="int8"), prompt(2, 37)
    with torch.no_grad(), hf.packed_forwards(model, chunk):
        whole = model(ids, labels=ids)
        for count in (0, 1, 5, 20, 37, 99):
            torch.testing.assert_close(model(ids, logits_to_keep=count).logits, whole.logits[:, -count:])
        torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=9).loss, whole.loss * 2 * 36 / 9)
        with pytest.raises(Unsupported, match="logits_to_keep is a tensor"):
            model(ids, logits_to_keep=torch.tensor([0]))


@pytest.mark.parametrize("chunk", [5, 16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "longrope"])
def test_packed_forwards_read_each_text_of_a_row_alone(family, chunk, build, prompt):
    """Positions that start again begin another text, which must not attend to the ones before it."""
    model = longrope(tf.Phi3Config, sliding_window=None) if family == "longrope" else build(family)
    hf.quantize(model, keys="int8", values="int8")
    ids, lengths = prompt(2, 37), [[9, 28], [20, 1, 16]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.no_grad(), hf.packed_forwards(model, chunk):
        rows = model(ids, position_ids=positions, labels=ids)
        kept = model(ids, position_ids=positions, logits_to_keep=3).logits
        for row, texts in enumerate(lengths):
            alone = [model(text[None]).logits[0] for text in ids[row].split(texts)]
            torch.testing.assert_close(rows.logits[row], torch.cat(alone))
        torch.testing.assert_close(kept, rows.logits[:, -3:])
        torch.testing.assert_close(rows.loss, model.loss_function(rows.logits, ids, vocab_size=rows.logits.shape[-1]))
        with pytest.raises(Unsupported, match=r"cu_seq_lens_q: .* position_ids that start again"):
            model(ids, cu_seq_lens_q=torch.tensor([0, 9, 37]))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_packed_cache_refuses_rows_of_several_texts(family, build, prompt):
    """In a forward and in generate(): over a cache, transformers itself does not tell them apart."""
    model, ids = hf.quantize(build(family), keys="int8", values="int8"), prompt(2, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)
    with torch.no_grad(), pytest.raises(Unsupported, match="start again within a row"):
        model(ids, position_ids=positions, past_key_values=hf.PackedCache(model, 64))
    with pytest.raises(Unsupported, match="start again within a row"):
        model.generate(ids, position_ids=positions, max_new_tokens=2)
    with torch.no_grad(), pytest.raises(Unsupported, match="cu_seq_lens_q"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 8, 20]), past_key_values=hf.PackedCache(model, 64))
    mask = left_padding(ids, 5)
    padded = (mask.cumsum(-1) - 1).clamp_min(0)  # five times 0: padding is no text
    with torch.no_grad():
        logits = model(ids, position_ids=padded, attention_mask=mask, past_key_values=hf.PackedCache(model, 64)).logits
        own = model(ids, attention_mask=mask, past_key_values=hf.PackedCache(model, 64), position_ids=padded).logits
    assert torch.equal(logits, own)


def test_packed_forwards_refuse_router_logits(prompt):
    """Of which the last chunk would have some, and the loss none."""
    model = hf.quantize(tiny_model("mixtral"), keys="int8", values="int8")
    with torch.no_grad(), hf.packed_forwards(model):
        with pytest.raises(Unsupported, match="output_router_logits=False"):
            model(prompt(), output_router_logits=True)
        model.config.output_router_logits = True
        with pytest.raises(Unsupported, match="output_router_logits=False"):
            model(prompt(), labels=prompt())
        assert model(prompt(), labels=prompt(), output_router_logits=False).loss.isfinite()


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "roc_bert", "emu3", "llama"])
def test_packed_forwards_name_what_they_pass(family, prompt):
    """Arguments of forwards are in orders of their own: GPT-2's second one is a cache, Emu3's are images."""
    model, ids = tiny_model(family), prompt(2, 37)
    mask = left_padding(ids, 19)
    order = [*inspect.signature(model.forward).parameters]
    by_place = [{"input_ids": ids, "attention_mask": mask}.get(name) for name in order[: order.index("attention_mask") + 1]]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        hf.quantize(model, keys="bf16", values="bf16")
        with hf.packed_forwards(model):
            found = model(ids, attention_mask=mask).logits
            assert torch.equal(model(*by_place).logits, found)
            model(ids)
    assert (found - expected)[mask.bool()].norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("tokens", [20, 40])  # within the length at which RoPE changes, and beyond
@pytest.mark.parametrize("kind", ["longrope", "phimoe", "dynamic", "dynamic, positions given"])
def test_packed_forwards_rotate_by_the_length_of_the_text(kind, tokens, prompt):
    """A chunk's own positions end before those of the text do."""
    if "dynamic" in kind:
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        config = tf.LlamaConfig(**{**LLAMA, "max_position_embeddings": 24, "initializer_range": 0.3}, rope_parameters=rope)
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    else:
        model = longrope(tf.PhimoeConfig if kind == "phimoe" else tf.Phi3Config, sliding_window=None)
    ids = prompt(2, tokens)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        hf.quantize(model, keys="bf16", values="bf16")
        given = {"position_ids": torch.arange(tokens).expand(2, -1)} if "given" in kind else {}
        with hf.packed_forwards(model):
            found = model(ids, **given).logits
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.1  # of a token, as a few may take other experts
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_packed_forwards_leave_generation_alone(build, prompt, greedy):
    model, ids = hf.quantize(build("llama"), keys="int8", values="int8"), prompt()
    expected, _ = greedy(model, ids)
    with hf.packed_forwards(model):
        assert torch.equal(greedy(model, ids)[0], expected)
    assert "forward" not in vars(model)


def test_packed_forwards_need_formats(build):
    with pytest.raises(InvalidArgument, match="no KV formats"), hf.packed_forwards(build("llama")):
        pass


def test_a_forward_without_a_cache_says_so(build, prompt, monkeypatch, recwarn):
    monkeypatch.setattr(errors, "_WARNED", set())
    model = hf.quantize(build("llama"), keys="int4", values="int4")
    for _ in range(2):
        model(prompt())
    assert sum("packed_forwards" in str(w.message) for w in recwarn) == 1


# ---------------------------------------------------------------------------------------------------------- weights that stay


def test_the_share_of_a_mixture_that_is_quantized(monkeypatch):
    """All of them, but for routers; without the experts half of the layers by number, and little of the weights."""
    monkeypatch.setattr(errors, "_WARNED", set())
    config = tf.MixtralConfig(**{**LLAMA, "intermediate_size": 512}, num_local_experts=8)
    model = hf.quantize(tf.AutoModelForCausalLM.from_config(config), "nf4")
    assert packed_share(model) > 0.99
    says = r"1,573,888 weights of MixtralForCausalLM in MixtralExperts.*stay in 16 bits; 3\.0% of the model's weights"
    with pytest.warns(UserWarning, match=says):
        model = hf.quantize(tf.AutoModelForCausalLM.from_config(config), "nf4", skip_modules=("lm_head", "experts"))
    assert packed_share(model) == pytest.approx(49152 / (49152 + 1572864 + 2 * 101 * 64 + 2 * 8 * 64 + 5 * 64))


# --------------------------------------------------------------------------------------------------------------- right padding


@pytest.mark.parametrize("shape", [(3, 30), (1, 30), (30,)])
def test_positions_are_moved_with_their_tokens(build, prompt, shape):
    model, ids = hf.quantize(build("llama"), keys="int8", values="int8"), prompt(3, 30)
    mask = torch.ones_like(ids)
    mask[0, -9:] = mask[1, -4:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    positions = torch.arange(30).expand(shape)
    assert torch.equal(model.generate(ids, position_ids=positions, **options), model.generate(ids, **options))


def test_a_batched_pipeline(shipped):
    """Pipelines pad with the tokenizer's padding_side, which is the right by default."""
    model, tokenizer = copy.deepcopy(shipped[0]), shipped[1]
    assert tokenizer.padding_side == "right"
    hf.quantize(model, keys="int8", values="int8")
    run = tf.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts, options = ["def main():\n    ", "import os, sys, json"], {"max_new_tokens": 8, "do_sample": False}
    alone = [run(text, **options)[0]["generated_text"] for text in texts]
    assert [made[0]["generated_text"] for made in run(texts, batch_size=2, **options)] == alone


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_models_made_from_one_configuration_stay_apart(tmp_path, family):
    """Quantizing one must not make a folder of the other claim formats, nor a packed cache."""
    first = tiny_model(family)
    second = type(first)(first.config)
    held, before = first.config, first.config.to_dict()
    second.generation_config = first.generation_config
    hf.quantize(first, "nf4", keys="int8", values="int8", lm_head="int8_col")
    assert second.config is held
    assert second.config.to_dict() == before
    assert second.config._attn_implementation == "sdpa"
    assert second.generation_config.cache_implementation is None
    shared = {id(value) for module in first.modules() for value in vars(module).values() if isinstance(value, tf.PreTrainedConfig)}
    assert not shared & {id(held), id(held.get_text_config())}
    second.save_pretrained(tmp_path)
    assert not any(isinstance(module, QuantLinear) for module in hf.load(tmp_path).modules())
