"""What a whole model gains: the first token, and a decode step, of transformers' generate(), in 16 bits and with halfbyte.

python examples/06_tokens_per_second.py [--model FOLDER or Hub id] [--batch 8] [--context 8192] [--weights nf4] [--keys int8] ...

A model's 16-bit weights must fit one GPU. `--model llama-3-8b` has that model's sizes and random weights, which take as long. On a
GPU both sides are compiled and recorded in CUDA graphs by generate() itself: 16 bits with transformers' static cache, halfbyte with
its packed one, and q, k, v and gate, up in one launch each. Neither is faster for being measured here: prompts of
random tokens, the first token taken off the steps, medians.
"""

import argparse
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import halfbyte
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
parser.add_argument("--keys", default="int8")
parser.add_argument("--values", default="int4_g32")
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


def seconds(new: int, **options: str) -> float:
    """Of one call of generate()."""
    began = time.perf_counter()
    model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def first_and_step(**options: str) -> tuple[float, float]:
    """Seconds of a call that ends with the first token, and of a decode step: a long call less that one."""
    for _ in range(2):  # compiles, records
        print(f"  warming up: {seconds(given.new, **options):.0f} s", file=sys.stderr)
    first = statistics.median(seconds(1, **options) for _ in range(3))
    return first, (statistics.median(seconds(given.new, **options) for _ in range(3)) - first) / (given.new - 1)


plain = first_and_step(cache_implementation="static")
torch.compiler.reset()
halfbyte.hf.quantize(model, weights=given.weights, keys=given.keys, values=given.values, fuse_qkv=True, fuse_gate_up=True)
packed = first_and_step()
where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
layers = model.config.num_hidden_layers
print(f"{given.model}, {layers} layers, batch {given.batch}, prompts of {given.context:,} tokens, on {where}")
for name, (first, step) in (
    ("16 bits" if device.type == "cuda" else "32 bits", plain),
    (f"{given.weights}, {given.keys}/{given.values}", packed),
):
    print(f"  {name}: first token {1e3 * first:,.0f} ms; {1e3 * step:.2f} ms a step, {given.batch / step:,.0f} tokens a second")
print(f"  steps {plain[1] / packed[1]:.2f} times as fast, first tokens {plain[0] / packed[0]:.2f} times")
