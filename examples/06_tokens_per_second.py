"""What a whole model gains: the first token, and a decode step, of transformers' generate(), in 16 bits and with halfbyte.

python examples/06_tokens_per_second.py [--model FOLDER or Hub id] [--batch 8] [--context 8192] [--weights nf4] [--keys int8] ...

A model's 16-bit weights must fit one GPU. `--model llama-3-8b` has that model's sizes and random weights, which take as long. On a
GPU generate() compiles both sides and captures them in CUDA graphs: 16 bits with transformers' static cache, halfbyte with its
packed one, and q, k, v and gate, up in one launch each. Prompts are random tokens, times are medians, and the first token is
subtracted from the steps. Each step stands with the time of only reading its weights and cache: a step far above that is not bound
by bandwidth.
"""

import argparse
import statistics
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import halfbyte
from halfbyte.device import describe
from halfbyte.measure.records import Record, append, environment
from halfbyte.measure.roofline import Roofline
from halfbyte.measure.timing import QUICK
from halfbyte.paths import resolve_model

LLAMA_3_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_3_8B |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo")
parser.add_argument("--layers", type=int, help="of llama-3-8b, in place of 32: compiling takes seconds a layer")
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
parser.add_argument("--new", type=int, default=64, help="tokens that are generated behind it")
parser.add_argument("--weights", default="int4_g64", help="the shipped model has no groups of 128; README's figure is of int4_g128")
parser.add_argument("--lm-head", help="format of the output layer; left out, it stays in 16 bits")
parser.add_argument("--graph", action="store_true", help="halfbyte's steps through custom_generate=halfbyte.hf.generate")
parser.add_argument("--keys", default="int8")
parser.add_argument("--values", default="int4_g32")
parser.add_argument("--output", type=Path, help="append a record of each side to this file")
given = parser.parse_args()
if given.new < 2:
    parser.error("--new: at least 2; the first token comes from the prompt")
if given.layers and given.model != "llama-3-8b":
    parser.error("--layers: only with --model llama-3-8b")

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # on a CPU 16 bits are slower in both
with device:
    if given.model == "llama-3-8b":
        sizes = LLAMA_3_8B | ({"num_hidden_layers": given.layers} if given.layers else {})
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(resolve_model(given.model), dtype=dtype).to(device)
    prompts = torch.randint(model.config.vocab_size, (given.batch, given.context))


def seconds(new: int, **options: Any) -> float:
    """Of one call of generate()."""
    began = time.perf_counter()
    model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def first_and_step(**options: Any) -> tuple[float, float]:
    """Seconds of a call that ends with the first token, and of a decode step: a long call less that one."""
    for _ in range(2):  # compiles, records
        print(f"  warming up: {seconds(given.new, **options):.0f} s", file=sys.stderr)
    first = statistics.median(seconds(1, **options) for _ in range(3))
    return first, (statistics.median(seconds(given.new, **options) for _ in range(3)) - first) / (given.new - 1)


def bytes_read(keys: str, values: str, wider: int = 1) -> int:
    """What a step reads: the weights, without embeddings that only look up a token, and the cache of the prompts."""
    weights = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    lookup = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    cache = halfbyte.hf.PackedCache(model.config, given.context, keys=keys, values=values)
    return int(weights - lookup + given.batch * given.context * cache.bytes_per_token * wider)


machine = describe(device)
layers = model.config.num_hidden_layers
roof = Roofline(machine, torch.get_num_threads(), QUICK).read(2**28 if device.type == "cuda" else 2**24)
shape = {"B": given.batch, "T": given.context, "layers": layers}
print(f"{given.model}, {layers} layers, batch {given.batch}, prompts of {given.context:,} tokens, on {machine.name}")


def report(implementation: str, formats: str, nbytes: int, first: float, step: float) -> None:
    """Print one side, and append its record."""
    least = nbytes / roof.gb_per_s / 1e9
    print(f"  {formats}: first token {1e3 * first:,.0f} ms; {1e3 * step:.2f} ms a step, {given.batch / step:,.0f} tokens a second;")
    print(f"    reading the {nbytes / 1e9:.3g} GB of a step takes {1e3 * least:.2f} ms")
    if given.output:
        rates = {"gb_per_s": nbytes / step / 1e9, "roof_gb_per_s": roof.gb_per_s, "roof_share": least / step}
        where, note = environment(machine, torch.get_num_threads()), f"first token {1e3 * first:.1f} ms"
        append(given.output, [Record("generate", shape, formats, implementation, nbytes, where, step, **rates, note=note)])


plain = first_and_step(cache_implementation="static")
name = "bf16" if device.type == "cuda" else "fp32"
report("transformers", name, bytes_read("bf16", "bf16", dtype.itemsize // 2), *plain)  # the static cache has the model's dtype
torch.compiler.reset()
formats = {"weights": given.weights, "lm_head": given.lm_head, "keys": given.keys, "values": given.values}
halfbyte.hf.quantize(model, **formats, fuse_qkv=True, fuse_gate_up=True)
packed = first_and_step(**({"custom_generate": halfbyte.hf.generate} if given.graph else {}))
name = given.weights + (f", {given.lm_head} lm_head" if given.lm_head else "")
report(
    "halfbyte, one graph a step" if given.graph else "halfbyte",
    f"{name}, {given.keys}/{given.values}",
    bytes_read(given.keys, given.values),
    *packed,
)
print(f"  steps {plain[1] / packed[1]:.2f} times as fast, first tokens {plain[0] / packed[0]:.2f} times")
