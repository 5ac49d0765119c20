"""An engine's own memory, wrapped without a copy: a paged pool in [pages, page, heads, bytes] order, seen through strides.

python examples/04_engine_memory.py
"""

import torch

import halfbyte
from halfbyte.formats import key_format
from halfbyte.kv_buffer import KVBuffer

torch.manual_seed(0)
batch, heads, dim, page, pages = 2, 4, 64, 16, 12
int8 = key_format("int8")


def pool() -> KVBuffer:
    """Tokens before heads, as engines often have it; halfbyte takes [pages, heads, page, ...], so the view is transposed."""
    codes = torch.zeros(pages, page, heads, dim, dtype=torch.int8)
    scales = torch.zeros(pages, page, heads, dtype=torch.float16)
    return KVBuffer(int8, codes.transpose(1, 2), scales.transpose(1, 2))


lengths = torch.zeros(batch, dtype=torch.int32)
table = torch.tensor([[3, 7, 1], [0, 11, 5]], dtype=torch.int32)  # the engine decides which page holds what
cache = halfbyte.KVCache.from_buffers(pool(), pool(), lengths, page_table=table)

k, v = torch.randn(2, batch, heads, 40, dim)
cache.append(k, v)
out = halfbyte.decode_attention(torch.randn(batch, 8, 1, dim), cache)
print(f"{cache.capacity} tokens a sequence, lengths {lengths.tolist()}, out {list(out.shape)}")

# One long sequence in two halves, on two devices for instance: attend each, merge by log-sum-exp.
q = torch.randn(batch, 8, 1, dim)
halves = []
for part in (slice(0, 20), slice(20, 40)):
    half = halfbyte.KVCache(batch, heads, dim, 32, keys="int8", values="int8")
    half.append(k[:, :, part], v[:, :, part])
    halves.append(halfbyte.decode_attention(q, half, return_lse=True))
merged, _ = halfbyte.merge_states(*zip(*halves, strict=True))
whole = halfbyte.decode_attention(q, cache)
print(f"merged equals whole within {float((merged - whole).abs().max()):.1e}")
