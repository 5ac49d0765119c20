"""What a whole model gains: the first token, and a decode step, of transformers' generate(), in 16 bits and with halfbyte.

python examples/06_tokens_per_second.py [--model FOLDER or Hub id] [--batch 8] [--context 8192] [--weights nvfp4] [--keys int8] ...

A model's 16-bit weights must fit one GPU. `--model llama-3-8b` has that model's sizes and random weights, which take as long. On a
GPU generate() compiles both sides and captures them in CUDA graphs: 16 bits with transformers' static cache, halfbyte with its
packed one, and q, k, v and gate, up in one launch each; then halfbyte records each step itself, also with fused blocks. Prompts are
random tokens, times are medians, and the first token is subtracted from the steps. Each step stands with the time of only reading
its weights and cache: a step far above that is not bound by bandwidth. Look at the speed-up; where the calls of both sides took
overlapping times, noise decides it, and a line says so. `halfbyte bench model` also shows where the time goes.
"""

import argparse
import copy
from pathlib import Path

from halfbyte.device import describe
from halfbyte.settings import KEYS, VALUES, WEIGHTS
from halfbyte_lab.measure.records import append
from halfbyte_lab.model_sizes import SIZES, of_sizes
from halfbyte_lab.model_step import Formats, Steps, load, measure

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo")
parser.add_argument("--layers", type=int, help="of known sizes, in place of all: compiling takes seconds a layer")
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
parser.add_argument("--new", type=int, default=64, help="tokens that are generated behind it")
parser.add_argument("--weights", default=WEIGHTS, help="README's figure is of int4_g128")
parser.add_argument("--lm-head", help="format of the output layer; left out, it stays in 16 bits")
parser.add_argument("--keys", default=KEYS)
parser.add_argument("--values", default=VALUES)
parser.add_argument("--output", type=Path, help="append a record of each side to this file")
given = parser.parse_args()
if given.layers and given.model not in SIZES:
    parser.error(f"--layers: only with --model {' or '.join(SIZES)}")

machine = describe()
formats = Formats(given.weights, given.keys, given.values, given.lm_head)
if given.model in SIZES:
    config = copy.deepcopy(SIZES[given.model])
    config.num_hidden_layers = given.layers or config.num_hidden_layers
    model = of_sizes(config, machine, formats)
else:
    model = load(given.model, machine, formats)
layers = model.config.num_hidden_layers
print(f"{given.model}, {layers} layers, batch {given.batch}, prompts of {given.context:,} tokens, on {machine.name}")
plain = None
for record in measure(model, formats, Steps(given.batch, given.context, given.new), machine, traced=False):
    step, least = record.seconds, record.nbytes / record.roof_gb_per_s / 1e9
    plain = plain or record
    faster = plain.seconds / step
    print(f"  {record.implementation}, {record.formats}: {record.note}; {1e3 * step:.2f} ms a step, {faster:.2f}x,")
    rate, gigabytes = given.batch / step, record.nbytes / 1e9
    print(f"    {rate:,.0f} tokens a second; reading the {gigabytes:.3g} GB of a step takes {1e3 * least:.2f} ms")
    if record is not plain and record.p10 <= plain.p90 and plain.p10 <= record.p90:
        sides = (f"{1e3 * side.p10:.2f} to {1e3 * side.p90:.2f} ms" for side in (plain, record))
        print(f"    noise decides: steps of {' and of '.join(sides)} overlap; run it on a quieter machine, or with more --new")
    if given.output:
        append(given.output, [record])
