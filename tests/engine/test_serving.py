"""What servers use beside the cache: connectors, eviction, windows whose pages are freed, structured outputs, heads that draft."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from engines import EXACT, SHIPPED, TEXT, Said, assert_same, engine, generate, metric, refused, save
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA, made
from transformers import GraniteMoeHybridConfig, MistralConfig

from halfbyte.vllm.names import backend_name

PAIR = backend_name("int8", "int4_g32")
PROMPTS = [list(TEXT[2000 * i :][: 60 + 30 * i]) for i in range(4)]


def connector(name: str, folder: Path) -> dict[str, object]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


def test_pages_move_between_engines(tmp_path: Path) -> None:
    """An engine stores the pages of prompts; another loads them."""
    said = []
    for _ in range(2):
        with engine(backend=PAIR, block_size=16, kv_transfer_config=connector("ExampleConnector", tmp_path)) as llm:
            said.append(generate(llm, PROMPTS))
            hits = metric(llm, "vllm:external_prefix_cache_hits")
    assert hits >= sum((len(p) - 2) // 16 * 16 for p in PROMPTS)
    assert_same(said[1], said[0], within=1e-4)


def test_connectors_that_move_parts_of_pages(tmp_path: Path) -> None:
    said = refused(backend=PAIR, kv_transfer_config=connector("DecodeBenchConnector", tmp_path))
    assert "KV connector DecodeBenchConnector may move parts of a page" in said


def test_evicted_prefixes_are_computed_again() -> None:
    """A pool for two of four prompts: each round finds only what is left of the one before."""
    with engine(backend=PAIR, block_size=16) as llm:
        expected = [generate(llm, [p])[0] for p in PROMPTS]
    with engine(backend=PAIR, block_size=16, num_gpu_blocks_override=20) as llm:
        said = [generate(llm, [p])[0] for p in (*PROMPTS, *reversed(PROMPTS), *PROMPTS)]
        hits = metric(llm, "vllm:prefix_cache_hits")
    assert 0 < hits < 2 * sum(len(p) // 16 * 16 for p in PROMPTS)
    assert_same(said, [*expected, *reversed(expected), *expected], within=1e-4)


def test_windows_free_their_pages(tmp_path: Path) -> None:
    """240 tokens by 8 pages of 16."""
    model = save(made(MistralConfig(**LLAMA, sliding_window=33)), tmp_path / "mistral")
    prompt = [[i % 100 for i in range(200)]]
    said = []
    for blocks in (64, 9):
        options = {"block_size": 16, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": 32}
        with engine(model, backend=PAIR, **options) as llm:
            said.append(generate(llm, prompt, 40))
            assert metric(llm, "vllm:num_preemptions") == 0
    assert_same(said[1], said[0], within=1e-4)


def test_structured_outputs() -> None:
    """Under a grammar the model says what the grammar allows, and the same as beside other requests."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    digits = SamplingParams(max_tokens=8, temperature=0, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}-[0-9]{4}"))
    plain = SamplingParams(max_tokens=8, temperature=0)
    with engine(backend=PAIR, skip_tokenizer_init=False) as llm:
        alone = llm.generate([{"prompt_token_ids": PROMPTS[0]}], digits, use_tqdm=False)
        mixed = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], [digits, plain, digits, plain], use_tqdm=False)
    texts = [output.outputs[0].text for output in mixed]
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", texts[0])
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", texts[2])
    assert texts[0] == alone[0].outputs[0].text
    assert not re.match(r"[0-9]{3}-", texts[1])


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_drafts_with_exact_prompts_do_not_depend_on_neighbors() -> None:
    """Drafts are read as stored, alone and beside requests with fewer of them."""
    options = {"additional_config": EXACT, "speculative_config": NGRAM, "enable_prefix_caching": False}
    with engine(backend=backend_name("int4", "int4"), **options) as llm:
        alone = [generate(llm, [p], 40)[0] for p in PROMPTS]
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
        assert_same(generate(llm, PROMPTS, 40), alone, within=1e-4)


def eagle_head(folder: Path) -> Path:
    """An EAGLE head for the shipped model: one of its layers behind a projection of the token and the hidden state."""
    config = json.loads((SHIPPED / "config.json").read_text())
    tensors = load_file(SHIPPED / "model.safetensors")
    hidden = config["hidden_size"]
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    head = {"layers.0." + name.removeprefix(last): t.float() for name, t in tensors.items() if name.startswith(last)}
    head.pop("layers.0.input_layernorm.weight")
    head["fc.weight"] = torch.cat((torch.eye(hidden), torch.eye(hidden)), 1)
    head["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].float()
    config |= {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    config.pop("layer_types", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in head.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_eagle_head_drafts(tmp_path: Path) -> None:
    speculation = {"method": "eagle", "model": str(eagle_head(tmp_path / "eagle")), "num_speculative_tokens": 2}
    with engine(backend=backend_name("int4", "int4")) as llm:
        expected = generate(llm, PROMPTS, 40)
    with engine(backend=backend_name("int4", "int4"), speculative_config=speculation) as llm:
        said = generate(llm, PROMPTS, 40)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
    assert_same(said, expected, within=1e-4)


def test_hybrids(tmp_path: Path) -> None:
    """Attention between layers with states: at first what stock says, before rounding parts texts; chunks change nothing."""
    sizes = LLAMA | {"hidden_size": 128, "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2}
    states = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
    config = GraniteMoeHybridConfig(**sizes, **states, num_local_experts=0, shared_intermediate_size=128)
    model, prompts = save(made(config), tmp_path / "granite"), [[7 * i % 100 for i in range(n)] for n in (20, 90, 40)]
    said = []
    for backend, most in ((None, 256), (backend_name("fp16", "fp16"), 256), (backend_name("fp16", "fp16"), 32)):
        options = {"max_num_batched_tokens": most, "enable_prefix_caching": False, "gpu_memory_utilization": 0.1}
        with engine(model, backend=backend, **options) as llm:
            said.append(generate(llm, prompts))
    assert_same(said[2], said[1], within=1e-3)
    first = [[Said(text.tokens[:2], text.logprobs[:2]) for text in texts] for texts in said]
    assert_same(first[1], first[0])
