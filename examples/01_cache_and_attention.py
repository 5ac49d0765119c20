"""A KV cache with 8-bit keys and 4-bit values, and attention that reads it as it is stored.

python examples/01_cache_and_attention.py
"""

import torch

import halfbyte

torch.manual_seed(0)
batch, q_heads, kv_heads, dim = 2, 8, 2, 128

cache = halfbyte.KVCache(batch, kv_heads, dim, capacity=4096, keys="int8", values="int4_g32")
plain = halfbyte.KVCache(batch, kv_heads, dim, capacity=4096, keys="bf16", values="bf16")

# A prompt of 1,000 tokens, then ten tokens one by one. Sequence 1 is shorter: counts says how many of the tokens are real.
prompt = torch.randn(2, batch, kv_heads, 1000, dim)
for c in (cache, plain):
    c.append(*prompt, counts=torch.tensor([1000, 640], dtype=torch.int32))
for _ in range(10):
    k, v = torch.randn(2, batch, kv_heads, 1, dim)
    cache.append(k, v)
    plain.append(k, v)

q = torch.randn(batch, q_heads, 1, dim)
out, lse = halfbyte.decode_attention(q, cache, window=512, return_lse=True)
exact = halfbyte.decode_attention(q, plain, window=512)

print(cache)
print(f"lengths {cache.lengths.tolist()}, {plain.bytes_per_token / cache.bytes_per_token:.2f}x smaller than 16 bits")
print(f"relative error of the output {float((out - exact).norm() / exact.norm()):.3f}, lse {lse[0, 0, 0]:.3f}")

# Rolling back (speculative decoding) and branching (beams).
cache.crop(torch.tensor([1005, 645]))
cache.reorder(torch.tensor([0, 0]))
print(f"lengths after crop and reorder {cache.lengths.tolist()}")
