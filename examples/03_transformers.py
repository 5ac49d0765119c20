"""A transformers model with a packed cache and 4-bit weights, saved and loaded again. Uses the model that ships with halfbyte.

python examples/03_transformers.py [model folder or Hub id]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import halfbyte
from halfbyte.paths import resolve_model

name = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "demo")
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(name)

halfbyte.hf.quantize(model)
inputs = tokenizer("class Queue:\n    def __init__(self):\n", return_tensors="pt", return_token_type_ids=False)
tokens = model.generate(**inputs, max_new_tokens=80, do_sample=False, pad_token_id=0)
print(tokenizer.decode(tokens[0]))

with tempfile.TemporaryDirectory() as folder:
    saved = halfbyte.hf.save(model, Path(folder) / "int4")
    again = halfbyte.hf.load(saved, dtype=torch.float32)
    same = torch.equal(again.generate(**inputs, max_new_tokens=80, do_sample=False, pad_token_id=0), tokens)
    print(f"loaded again: {'the same tokens' if same else 'other tokens'}")
