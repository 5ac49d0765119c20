"""Building engines, and transcripts: what a model says to prompts, with the log probability of each token.

Engines run on vLLM's CPU platform in fp32, or, where torch sees a GPU, there in fp16, which the tuned kernels take.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import halfbyte.hf
from halfbyte.cache_plan import CachePlan, LayerFormats
from halfbyte.errors import HalfbyteError
from halfbyte.hf.model_support import model_sizes
from halfbyte.paths import shipped_model

SHIPPED = shipped_model()
TEXT = (SHIPPED.parent / "heldout.txt").read_bytes()
#: All longer than the 16 tokens up to which halfbyte.hf reads a prompt from the cache.
PROMPTS = [list(TEXT[at : at + n]) for at, n in ((0, 20), (1000, 150), (3000, 40))]
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.float16) if ON_GPU else ("cpu", torch.float32)
#: Of an engine beside others on its GPU: 64 MiB of pages, and no profile of memory, which others change meanwhile.
SHARED_GPU = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 26} if ON_GPU else {}
#: By how much log probabilities differ in fp16 at most: kernels of other numbers of rows round their sums differently, and a code
#: that flips is a large step. Seen on an H200: 0.15 with codes of 8 bits, 0.27 with 4, 0.03 with packed weights alone.
_NOISE = 0.3
#: Prefill as transformers does it: a prompt attends to its own 16-bit keys.
EXACT = {"halfbyte": {"prefill": "exact"}}


def later(*values: Any) -> Any:
    """A parameter of a test that nightly runs add."""
    return pytest.param(*values, marks=pytest.mark.nightly)


class Said(NamedTuple):
    """A continuation: token ids, and the log probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@contextmanager
def engine(model: str | Path = SHIPPED, backend: str | None = None, **options: Any) -> Iterator[Any]:
    """A vLLM engine of this process; its memory is given back at the end."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import rotary_embedding

    defaults = {"max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True, "max_num_seqs": 16}
    defaults |= {"dtype": str(DTYPE).removeprefix("torch."), **SHARED_GPU}
    rotary_embedding._ROPE_DICT.clear()  # else this engine rotates by the custom op, or in torch, as the one before did
    llm = None
    try:
        llm = LLM(model=str(model), attention_backend=backend, disable_log_stats=False, **(defaults | options))
        yield llm
    finally:
        if llm is not None:  # a failed test keeps its frame, and with it the engine
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def refused(model: str | Path = SHIPPED, backend: str | None = None, **options: Any) -> str:
    """What an engine says that does not start."""
    if ON_GPU:
        pytest.skip("what a process of an engine refuses is told in its log alone")
    with pytest.raises((ValueError, RuntimeError, HalfbyteError)) as caught, engine(model, backend, **options):
        pass
    return str(caught.value)


def generate(
    llm: Any, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 24, lora: Path | None = None, **sampling: Any
) -> list[Said]:
    """The greedy continuation of each prompt, all in one batch; by a LoRA adapter, if a folder of one is given."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=0, **({"temperature": 0} | sampling))
    adapter = None if lora is None else LoRARequest("adapter", 1, str(lora))
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False, lora_request=adapter)
    return [_said(completion) for output in outputs for completion in output.outputs]


def _said(completion: Any) -> Said:
    tokens = tuple(completion.token_ids)
    return Said(tokens, tuple(found[t].logprob for t, found in zip(tokens, completion.logprobs, strict=True)))


def metric(llm: Any, name: str) -> int:
    """A counter of the engine."""
    return int(next(m.value for m in llm.get_metrics() if m.name == name))


def by_transformers(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 24) -> list[Said]:
    """The same from transformers, one prompt at a time."""
    found = []
    model = model.to(DEVICE)
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=DEVICE)
        options = {
            "do_sample": False,
            "return_dict_in_generate": True,
            "output_logits": True,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=tokens, **options)
        said = out.sequences[0, len(prompt) :].tolist()
        scores = [torch.log_softmax(logits[0].double(), -1)[t].item() for logits, t in zip(out.logits, said, strict=True)]
        found.append(Said(tuple(said), tuple(scores)))
    return found


def quantized(model: str | Path = SHIPPED, **formats: Any) -> Any:
    """A transformers model that halfbyte has quantized."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPE)
    loaded.generation_config.eos_token_id = None
    return halfbyte.hf.quantize(loaded, **formats)


def plan_for(model: Path, folder: Path, pairs: Sequence[tuple[str, str]]) -> Path:
    """A cache plan for a model, whose layers have these formats by turns."""
    from transformers import AutoConfig

    sizes = model_sizes(AutoConfig.from_pretrained(model))
    layers = [LayerFormats(*pairs[i % len(pairs)], rotate_keys=i % 2 == 1) for i in range(sizes.layers)]
    return CachePlan(sizes, tuple(layers), bits=6.0).write(folder / "plan.json")


def save(model: Any, folder: Path) -> Path:
    """The folder with this model in it, written unless it is there."""
    if not folder.exists():
        model.save_pretrained(folder)
    return folder


def assert_same(found: Sequence[Said], expected: Sequence[Said], within: float = 0.02) -> None:
    """The same tokens, and log probabilities within `within`. On a GPU within `_NOISE`, and tokens up to a tie within it."""
    assert len(found) == len(expected)
    within, worst = max(within, _NOISE) if ON_GPU else within, 0.0
    for f, e in zip(found, expected, strict=True):
        assert len(f.tokens) == len(e.tokens)
        same = next((i for i, (a, b) in enumerate(zip(f.tokens, e.tokens, strict=True)) if a != b), len(f.tokens))
        assert ON_GPU or same == len(f.tokens), f"{f.tokens} is not {e.tokens}"
        apart = [abs(a - b) for a, b in zip(f.logprobs[: same + 1], e.logprobs[: same + 1], strict=True)]
        worst = max(worst, *apart)
    assert worst <= within, f"log probabilities differ by up to {worst:.3g}"
