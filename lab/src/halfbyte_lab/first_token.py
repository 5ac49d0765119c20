"""First tokens and cold starts of a whole model by the user's clock, and a prompt's linear layers by the GPU's, as JSON lines.

    python -m halfbyte_lab.first_token --out results/first-token.jsonl     # a cold start in a process of its own, then warm times
    python -m halfbyte_lab.first_token --sizes qwen3-1.7b --batches 1 8 --tokens 32 1024

`ms` of a first token is a call of `generate()` for one token, the median of warm calls; `first_call_ms` the same call when its
prompt length is new. A cold start is what a fresh process takes from a loaded model to its first token. Linear layers of several
blocks run as one CUDA graph, packed and in bf16.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

import halfbyte
import halfbyte.hf as hf
from halfbyte.device import Device, describe
from halfbyte.hf.model_support import head_dims
from halfbyte_lab.measure.environment import environment
from halfbyte_lab.measure.timing import GRAPHS, Work, make_sampler, sample_in_turn
from halfbyte_lab.model_sizes import SIZES, of_sizes
from halfbyte_lab.model_step import Formats

FORMATS = Formats(weights="int4_g128", keys="int8", values="int4_g32")
#: Calls whose median is taken.
REPEATS = 5
#: Blocks of linear layers, their formats and their tokens.
LAYERS, WEIGHTS, PROMPTS = 8, ("int4_g128", "int4_sym_g128", "nf4", "mxfp4", "nvfp4"), (512, 1024)


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
    """Milliseconds of the first call and of warm ones, and the peak of memory in GB, of which the model is a part."""
    ids = prompts(model, batch, tokens)
    once, _ = seconds(model, ids, 1), seconds(model, ids, 1)
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ms = 1e3 * statistics.median(seconds(model, ids, 1) for _ in range(REPEATS))
    more = {"model_gb": before / 1e9, "peak_gb": torch.cuda.max_memory_allocated() / 1e9} if ids.is_cuda else {}
    return {"ms": ms, "first_call_ms": 1e3 * once, **more}


def linear_layers(config: Any, machine: Device, weights: str, tokens: int) -> dict[str, float]:
    """Milliseconds of the linear layers of some blocks over so many tokens: q, k and v as one, output, gate and up as one, down."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, head_dims(config)[0]
    query, key = (heads * dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    shapes = [(query + 2 * key, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)] * LAYERS
    plain = [torch.randn(n, k, device=machine.torch, dtype=torch.bfloat16) * k**-0.5 for n, k in shapes]
    packed = [halfbyte.quantize(w, weights) for w in plain]
    inputs = {k: torch.randn(tokens, k, device=machine.torch, dtype=torch.bfloat16) for _, k in shapes}

    def run(layers: Sequence[Any], linear: Callable[..., torch.Tensor]) -> torch.Tensor:
        return [linear(inputs[w.shape[1]], w) for w in layers][-1]

    works = {"bf16_ms": Work([partial(run, plain, F.linear)]), "packed_ms": Work([partial(run, packed, halfbyte.linear)])}
    with torch.no_grad():
        samplers = {name: make_sampler(name, work, machine, GRAPHS) for name, work in works.items()}
        samples = sample_in_turn(samplers, GRAPHS)
    return {name: 1e3 * statistics.median(times) for name, times in samples.items()}


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
    facts = asdict(environment(machine, machine.threads))
    facts["versions"]["transformers"] = transformers.__version__
    where = {"sizes": options.sizes, "environment": facts}

    def write(what: str, **line: Any) -> None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **line, **where}) + "\n")
        print(json.dumps({"what": what, **line}), flush=True)

    if not options.no_cold:
        with tempfile.TemporaryDirectory() as caches:
            for state in ("empty", "filled"):
                write("cold_start", kernels=state, **cold(options.sizes, caches))
    if machine.kind == "cuda":
        for weights, tokens in product(WEIGHTS, PROMPTS):
            times = linear_layers(SIZES[options.sizes], machine, weights, tokens)
            write("linear_layers", layers=LAYERS, weights=weights, tokens=tokens, **times)
    model = of_sizes(SIZES[options.sizes], machine, FORMATS)
    model.generation_config.eos_token_id = None
    for side in ("bf16", "halfbyte"):
        model = quantized(model) if side == "halfbyte" else model
        for batch, tokens in product(options.batches, options.tokens):
            try:
                write("first_token", side=side, batch=batch, tokens=tokens, **timed(model, batch, tokens))
            except torch.OutOfMemoryError as error:
                write("first_token", side=side, batch=batch, tokens=tokens, error=str(error)[:200])
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
