"""A chat of several turns over one packed cache, streamed; each turn reads the new tokens only.

python examples/07_chat.py [model folder or Hub id with a chat template]
"""

import sys

import torch
from transformers import AutoTokenizer, TextStreamer

from halfbyte import hf
from halfbyte.paths import resolve_model

name = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B")
tokenizer = AutoTokenizer.from_pretrained(name)
model = hf.load(name, dtype=torch.bfloat16).to("cuda" if torch.cuda.is_available() else "cpu")
hf.quantize(model)
cache = hf.PackedCache(model, capacity=4096, keys="int8_channel", values="int8")
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
chat = hf.Chat(model, tokenizer, cache, streamer=streamer, max_new_tokens=500)
for line in sys.stdin:
    chat.answer(line.strip())
print(f"{chat.ids.shape[1]} tokens in a cache of {cache.nbytes / 1e6:.1f} MB")
