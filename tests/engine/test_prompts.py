"""Long chunks of prompts over unpacked tokens, with an attention in plain torch in FlashAttention's place.

Each call is held to what kernels that read codes make of it, in every layer and step: log probabilities say less, because a
difference in the last bit of a layer moves codes of the next.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import TEXT, engine, generate, later, metric

from halfbyte.engine import attention_varlen
from halfbyte.plans import prompts as plan
from halfbyte.vllm import prompts
from halfbyte.vllm.names import backend_name
from halfbyte.vllm.prompts import FlashPrompts, FlashPromptsWithExactTokens, Ragged, visible
from varlen_cases import flash_attention

pytestmark = pytest.mark.cpu_platform
#: More than one chunk of 96 tokens, and short ones.
PROMPTS = [list(TEXT[at : at + n]) for at, n in ((0, 20), (1000, 150), (3000, 40), (5000, 230), (7000, 3))]
#: In 16 bits: more recent ones than the shorter prompts have.
TOKENS = {"sink_tokens": 4, "recent_tokens": 40}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Ragged]:
    """The calls over unpacked tokens, each checked; chunks from 16 query rows on are unpacked."""
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.worker import workspace

    parts: list[Ragged] = []

    def check(kind: type[FlashPrompts]) -> None:
        attend = kind.attend

        def checked(self: FlashPrompts, part: Ragged, q: torch.Tensor, cache: Any, new: Any, out: torch.Tensor, exact: Any) -> None:
            parts.append(part)
            attend(self, part, q, cache, new, out, exact)
            options: dict[str, Any] = {
                "window": self.window,
                "softcap": self.options["softcap"] or None,
                "sinks": self.sinks,
                "exact_tokens": exact,
            }
            if new is not None:
                options |= {"prefill": "exact", "k": new[0], "v": new[1]}
            scale = self.options["softmax_scale"]
            expected = attention_varlen(q, cache, part.cu_seqlens_q, part.max_query_len, sm_scale=scale, **options)
            torch.testing.assert_close(out, expected, rtol=0, atol=4 * torch.finfo(out.dtype).eps * float(expected.abs().max()))

        monkeypatch.setattr(kind, "attend", checked)

    for kind in (FlashPrompts, FlashPromptsWithExactTokens):
        check(kind)
    manager = workspace.WorkspaceManager(torch.device("cpu"))
    monkeypatch.setattr(workspace, "current_workspace_manager", lambda: manager)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    monkeypatch.setattr(prompts, "_version", lambda impl: 3)
    monkeypatch.setattr(plan, "ROWS", 16)
    return parts


def measure_memory(llm: Any) -> None:
    """What a GPU worker does before it allocates the cache: a forward without metadata. No workspace grows from then on."""
    from vllm.v1.worker import workspace

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in (layer for layer in layers.values() if hasattr(layer, "num_heads")):
        out = torch.ones(3, layer.num_heads, layer.head_size)
        layer.impl.forward(layer, out, None, None, None, None, out)
    workspace.current_workspace_manager().lock()


@pytest.mark.parametrize(("prefill", "tokens"), [("cache", {}), ("exact", {}), ("cache", TOKENS), later("exact", TOKENS)])
def test_long_chunks_are_unpacked(prefill: str, tokens: dict[str, int], calls: list[Ragged]) -> None:
    """In chunks, beside decodes and short ones, behind prefix hits."""
    options: dict[str, Any] = {"dtype": "float16", "block_size": 16, "max_num_batched_tokens": 96, "max_model_len": 512}
    options["additional_config"] = {"halfbyte": {"prefill": prefill, "rotate_keys": True, **tokens}}
    with engine(backend=backend_name("int8", "int4_g32"), **options) as llm:
        measure_memory(llm)
        generate(llm, PROMPTS, 4)
        generate(llm, [PROMPTS[3][:200] + PROMPTS[1], PROMPTS[1]], 4)
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert hits >= 160 if tokens else hits > 200
    hosts = [part.host for part in calls]
    assert any(len(host) > 1 for host in hosts), "no call had several requests"
    assert any(count < length for host in hosts for count, length in host), "no chunk had a past"
    assert all(part.exact == (prefill == "exact") for part in calls)


@pytest.mark.parametrize(("dtype", "are_unpacked"), [("float16", False), ("bfloat16", True)])
def test_sinks(dtype: str, are_unpacked: bool, calls: list[Ragged], tiny) -> None:
    """FlashAttention 3 takes them in bf16 only."""
    options: dict[str, Any] = {"dtype": dtype, "block_size": 16, "max_num_batched_tokens": 96, "max_model_len": 512}
    with engine(tiny("gpt_oss"), backend=backend_name("int8", "int4_g32"), **options) as llm:
        measure_memory(llm)
        generate(llm, [[7 * i % 100 for i in range(230)]], 2)
    assert bool(calls) == are_unpacked


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows(family: str, calls: list[Ragged], tiny) -> None:
    """Of a window only the tokens that are seen are unpacked; softcap with it."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
    options = {"dtype": "bfloat16", "block_size": 16, "max_num_batched_tokens": 32}
    with engine(tiny(family), backend_name("int8", "int8"), **options) as llm:
        measure_memory(llm)
        generate(llm, prompts, 4)
    assert any(part.kept(visible, 8).total < part.kept(visible, None).total for part in calls)
