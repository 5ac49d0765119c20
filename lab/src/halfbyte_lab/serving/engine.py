"""One engine, measured: its start, prompts, decode steps, prefix hits and a load of cold requests, a row of each.

The engine core stamps each of its steps, so a step's time holds no host work of the measuring process. Prompts are random tokens
that no earlier request had, unless a row is of prefix hits.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Pairs of a short and a long run until two agree within this share.
_PAIRS, _AGREE = 6, 0.05
#: Share of the tokens that fit which a batch may take.
_FILLED = 0.98
_COMPILED = re.compile(r"during inference: ([\w.<>]*[\w>])")
_Row = dict[str, Any]
_Prompts = list[list[int]]


def started(arguments: dict[str, Any]) -> tuple[Any, _Row]:
    """A `vllm.LLM`, and what its start took and gave."""
    began = time.time()
    import vllm

    imported = time.time()
    llm = vllm.LLM(**arguments)
    config = llm.llm_engine.vllm_config
    cache = config.cache_config
    row = {
        "vllm": vllm.__version__,
        "import_s": round(imported - began, 1),
        "start_s": round(time.time() - imported, 1),
        "block_size": cache.block_size,
        "kv_tokens": getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "ranks": config.parallel_config.tensor_parallel_size,
    }
    return llm, row


@dataclass
class Engine:
    """A started engine.

    tokens  of a short run, which are left out of a long one, and of a long one
    log     the file that holds the output of its processes, in which vLLM names late compilations
    """

    llm: Any
    kv_tokens: int
    vocabulary: int
    tokens: tuple[int, int]
    log: Path
    steps: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """From here on `steps` gets, for each step of the engine, when it ended and how many requests got tokens in it."""
        client = self.llm.llm_engine.engine_core
        get = client.get_output

        def get_output() -> Any:
            outputs = get()
            if outputs.outputs:
                self.steps.append((outputs.timestamp, len(outputs.outputs)))
            return outputs

        client.get_output = get_output
        self.run(self.prompts(1, 100, "first"), 4)

    def prompts(self, count: int, length: int, seed: str) -> _Prompts:
        """Random tokens; the seed decides which."""
        source = random.Random(seed)
        return [[source.randrange(min(1000, self.vocabulary // 2), self.vocabulary) for _ in range(length)] for _ in range(count)]

    def run(self, prompts: _Prompts, new: int) -> tuple[float, list[float]]:
        """Seconds until all prompts have `new` tokens, and those until the first token of each, in order."""
        from vllm import SamplingParams

        self.steps.clear()
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        took = time.perf_counter() - began
        if any(len(o.outputs[0].token_ids) != new for o in outputs):
            raise RuntimeError(f"a request ended before its {new} tokens")
        return took, sorted(o.metrics.first_token_latency for o in outputs)

    def decode(self, shape: str) -> _Row:
        """REQUESTSxCONTEXT: prompts twice, then pairs of a short and a long run, whose prompts are cached."""
        wanted, context = map(int, shape.split("x"))
        few, many = self.tokens
        length = context - many - 64
        batch = min(wanted, int(self.kv_tokens * _FILLED) // (context + 64))
        if batch < 1:
            return {"skipped": f"{self.kv_tokens} tokens fit"}
        self.run(self.prompts(-(-batch // 4), length, f"warm {shape}"), 1)
        prompts = self.prompts(batch, length, shape)
        prefill, _ = self.run(prompts, 1)
        means: list[float] = []
        while len(means) < _PAIRS and not _agree(means):
            short, _ = self.run(prompts, few)
            long, _ = self.run(prompts, many)
            each = list(self._steps_of(batch))
            means.append(statistics.mean(each) if len(each) >= 8 else (long - short) / (many - few))
        step = statistics.mean(means[-2:]) if _agree(means) else statistics.median(means)
        return {
            "batch": batch,
            "step_ms": _ms(step),
            "tok_s": round(batch / step, 1),
            "agree": _agree(means),
            "steps": len(each),
            "prefill_tok_s": round(batch * length / prefill),
            "prefill_s": round(prefill, 3),
        }

    def _steps_of(self, batch: int) -> Iterator[float]:
        """Seconds of each step that decoded the whole batch, but for the first ones and the last, behind which none is launched."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        both = [end - begin for (begin, n), (end, m) in pairs if n == m == batch]
        yield from both[self.tokens[0] : -1]

    def hits(self, shape: str) -> _Row:
        """REQUESTSxCACHED+NEW: prompts whose first tokens are cached; the medians of three."""
        count, cached, new = map(int, re.split("[x+]", shape))
        prefixes = self.prompts(count, cached, f"prefix {shape}")
        self.run(prefixes, 1)
        times = []
        for turn in range(3):
            tails = self.prompts(count, new, f"tail {turn} {shape}")
            seconds, first = self.run([a + b for a, b in zip(prefixes, tails, strict=True)], 1)
            times.append((seconds, statistics.median(first), first[-1]))
        seconds, first_token, last = (statistics.median(each) for each in zip(*times, strict=True))
        return {
            "s": round(seconds, 4),
            "new_tok_s": round(count * new / seconds),
            "first_token_ms": _ms(first_token),
            "last_first_token_ms": _ms(last),
        }

    def serve(self, shape: str) -> _Row:
        """REQUESTSxPROMPT+NEW: cold requests, all at once; what does not fit queues."""
        count, length, new = map(int, re.split("[x+]", shape))
        seconds, first = self.run(self.prompts(count, length, f"serve {shape}"), new)
        return {
            "s": round(seconds, 2),
            "out_tok_s": round(count * new / seconds, 1),
            "all_tok_s": round(count * (length + new) / seconds, 1),
            "first_token_ms": _ms(statistics.median(first)),
        }

    def row(self, what: str, shape: str) -> _Row:
        """What that measurement found, and how many kernels compiled meanwhile."""
        before = self.compiled()
        measured: _Row = getattr(self, what)(shape)
        return {"what": what, "shape": shape, **measured, "compiled": self.compiled() - before}

    def compiled(self) -> int:
        """Kernels that vLLM's monitor has seen compile during inference."""
        return len(_COMPILED.findall(self.log.read_text(errors="replace")))


def _agree(steps: Sequence[float]) -> bool:
    return len(steps) > 1 and abs(steps[-1] - steps[-2]) <= _AGREE * min(steps[-2:])


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
