"""First tokens, steps and cold starts of a whole model by the user's clock: `generate()` in bf16 and quantized, as JSON lines.

    python -m halfbyte_lab.first_token --out first.jsonl              # warm times, then a cold start in a process of its own
    python -m halfbyte_lab.first_token --sizes qwen3-1.7b --batches 1 8 --tokens 32 1024

`first_ms` of a line is a call for one token, the median of warm calls; `step_ms` what each further token adds; `first_call_ms` the
same call when its prompt length is new. A cold start is what a fresh process takes from a loaded model to its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import halfbyte.hf as hf
from halfbyte.device import describe
from halfbyte_lab.model_sizes import SIZES, of_sizes
from halfbyte_lab.model_step import Formats

FORMATS = Formats(weights="int4_g128", keys="int8", values="int4_g32")
#: Calls whose median is taken, and tokens of the longer ones.
REPEATS, NEW = 5, 33


def quantized(model: Any) -> Any:
    """The model with packed weights and cache, in place."""
    return hf.quantize(model, **FORMATS.options, fuse_qkv=True, fuse_gate_up=True)


def seconds(model: Any, ids: torch.Tensor, new: int) -> float:
    """Of one call of `generate()`, until the device has its last token."""
    began = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return time.perf_counter() - began


def prompts(model: Any, batch: int, tokens: int) -> torch.Tensor:
    """Random prompts [batch, tokens], the same each time."""
    rng = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (batch, tokens), generator=rng).to(model.device)


def timed(model: Any, batch: int, tokens: int) -> dict[str, float]:
    """Milliseconds of the first call, of warm first tokens and of a step, and the peak of memory in GB."""
    ids = prompts(model, batch, tokens)
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    once = seconds(model, ids, 1)
    seconds(model, ids, NEW)
    first = statistics.median(seconds(model, ids, 1) for _ in range(REPEATS))
    whole = statistics.median(seconds(model, ids, NEW) for _ in range(REPEATS))
    peak = torch.cuda.max_memory_allocated() / 1e9 if ids.is_cuda else 0.0
    step = (whole - first) / (NEW - 1)
    return {"first_call_ms": 1e3 * once, "first_ms": 1e3 * first, "step_ms": 1e3 * step, "peak_gb": peak}


def cold(sizes: str, caches: str) -> dict[str, float]:
    """Seconds of a fresh process from a loaded model to its first token and to its first 16, with kernels in `caches`."""
    code = f"from halfbyte_lab.first_token import start; start({sizes!r})"
    environment = {**os.environ, "TRITON_CACHE_DIR": caches}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def start(sizes: str) -> None:
    """What `cold` runs: prints seconds as JSON."""
    model = quantized(of_sizes(SIZES[sizes], describe(), FORMATS))
    ids = prompts(model, 1, 128)
    first, more = seconds(model, ids, 1), seconds(model, ids, 16)
    print(json.dumps({"first_s": first, "next_16_s": more}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write lines as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="llama-3-8b", choices=sorted(SIZES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512, 1024, 8192])
    parser.add_argument("--out", type=Path, default=Path("first_token.jsonl"))
    parser.add_argument("--no-cold", action="store_true", help="leave cold starts out")
    options = parser.parse_args(arguments)
    machine = describe()
    where = {"sizes": options.sizes, "device": machine.name, "torch": torch.__version__}

    def write(line: dict[str, Any]) -> None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**where, **line}) + "\n")
        print(json.dumps(line), flush=True)

    if not options.no_cold:
        with tempfile.TemporaryDirectory() as caches:
            for state in ("empty", "filled"):
                write({"cold_start": state, **cold(options.sizes, caches)})
    model = of_sizes(SIZES[options.sizes], machine, FORMATS)
    model.generation_config.eos_token_id = None
    for side in ("transformers bf16", "halfbyte"):
        model = quantized(model) if side == "halfbyte" else model
        for batch in options.batches:
            for tokens in options.tokens:
                try:
                    write({"side": side, "batch": batch, "tokens": tokens, **timed(model, batch, tokens)})
                except torch.OutOfMemoryError as error:
                    write({"side": side, "batch": batch, "tokens": tokens, "error": str(error)[:200]})
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
