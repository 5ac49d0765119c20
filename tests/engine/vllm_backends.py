"""vLLM's own tests of attention backends, tests/v1/attention/test_attention_backends.py, over halfbyte's.

    python tests/engine/vllm_backends.py CHECKOUT [options of pytest]

CHECKOUT is a source tree of vLLM at the installed version; its wheels lack tests. This file is also the pytest plugin that puts our
backends in the place of those that vLLM tests. What their cache holds is moved into packed pages before the step. Formats are those
that keep all bits of the models' type, so the tests' tolerance is the tests' own.

Those of single other backends, of fp8 caches, of encoders and of attention that is not causal do not apply.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import halfbyte.vllm

TESTS = "tests/v1/attention/test_attention_backends.py"
APPLY = "(test_causal_backend_correctness or test_sliding_window_backend_correctness) and not fp8"
BACKEND = "HALFBYTE_BF16__BF16"
#: Sizes of the models that the tests name, which are not on this machine: of their configurations only these matter here.
MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8},
    "microsoft/Phi-tiny-MoE-instruct": {
        "model_type": "mistral",
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "sliding_window": 2047,
    },
}
SIZES = {"architectures": ["LlamaForCausalLM"], "head_dim": 128, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}


def main(checkout: str, *options: str) -> int:
    """Run the tests; pytest's exit status."""
    if not Path(checkout, TESTS).is_file():
        raise SystemExit(f"{checkout}: no source tree of vLLM; it lacks {TESTS}")
    here = str(Path(__file__).absolute().parent)
    os.chdir(checkout)
    sys.path += [os.getcwd(), here]  # behind the installed vLLM, which is to be tested
    plugins = f"--noconftest -p {Path(__file__).stem} -p no:cacheprovider --import-mode=append"
    options = ("-k", APPLY, *options)
    return int(pytest.main([TESTS, "--rootdir", ".", "-c", os.devnull, *plugins.split(), "-q", "-W", "ignore", *options]))


@pytest.fixture
def default_vllm_config() -> Iterator[None]:
    """vLLM's own, of its conftest, which needs more than this machine has."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Our backend in the place of others."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    halfbyte.vllm.register()
    for module in {item.module for item in items}:  # type: ignore[attr-defined]
        module.BACKENDS_TO_TEST = module.SLIDING_WINDOW_BACKENDS_TO_TEST = [AttentionBackendEnum[BACKEND]]
        module.run_attention_backend = run


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with a configuration in the place of the models' names."""
    import vllm.config.model as config

    plain = config.ModelConfig.__init__

    def from_folder(self: Any, *args: Any, model: str, **options: Any) -> None:
        folder = tmp_path / model.replace("/", "-")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SIZES | MODELS[model]))
        options |= {"tokenizer": str(folder)} if "tokenizer" in options else {}
        plain(self, *args, model=str(folder), **options)

    monkeypatch.setattr(config.ModelConfig, "__init__", from_folder)


def run(
    backend: Any,
    spec: Any,
    layer_names: list[str],
    vllm_config: Any,
    device: torch.device,
    metadata: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    **other: Any,
) -> torch.Tensor:
    """One step of our backend, as vLLM's function of this name: the cache [pages, H, N, K and V] is packed first.

    vLLM tests FlexAttention by itself, with pages of 128 tokens; ours is there as well.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    cls = AttentionBackendEnum[BACKEND].get_class()
    heads, dim = query.shape[1:]
    layer = SimpleNamespace(head_size_v=dim, dtype=query.dtype)
    with set_current_vllm_config(vllm_config):
        impl = cls.get_impl_cls()(heads, dim, dim**-0.5, key.shape[1], None, sliding_window, sinks=sinks)
        layer.impl = impl
        vllm_config.compilation_config.static_forward_context["layers.0"] = layer
        impl.process_weights_after_loading(query.dtype)
    tables = zip(metadata.block_table_tensor, metadata.seq_lens.tolist(), strict=True)
    used = max(int(table[: -(-tokens // spec.block_size)].max()) for table, tokens in tables)
    pages = packed(impl, layer, kv_cache[: used + 1], cls.customize_spec(spec).state_content_bytes)
    impl.do_kv_cache_update(layer, key, value, pages, metadata.slot_mapping)
    built = cls.get_builder_cls()(spec, layer_names, vllm_config, device).build(0, metadata)
    return impl.forward(layer, query, key, value, pages, built, torch.full_like(query, torch.nan))


def packed(impl: Any, layer: Any, kv_cache: torch.Tensor, content: int) -> torch.Tensor:
    """The tokens of a 16-bit cache in pages of `content` bytes a token and head."""
    pages, heads, tokens, both = kv_cache.shape
    memory = torch.full((pages, heads, tokens, content), 255, dtype=torch.uint8)
    flat = kv_cache.transpose(1, 2).reshape(pages * tokens, heads, both)
    impl.do_kv_cache_update(layer, *flat.split(both // 2, -1), memory, torch.arange(pages * tokens))
    return memory


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
