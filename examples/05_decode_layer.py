"""One attention layer as an engine writes it: on a GPU a launch for q, k and v, one that rotates and appends, attention, output.

python examples/05_decode_layer.py
"""

import torch

import halfbyte
from halfbyte.reference.rope import rope_tables

torch.manual_seed(0)
batch, hidden, q_heads, kv_heads, dim = 2, 512, 8, 2, 64
sizes = {"q": q_heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
weights = tuple(halfbyte.quantize(torch.randn(n, hidden) / hidden**0.5, "int4_g64") for n in sizes.values())
w_out = halfbyte.quantize(torch.randn(hidden, q_heads * dim) / hidden**0.5, "int4_g64")


def layer(x: torch.Tensor, cache: halfbyte.KVCache, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [B, L, hidden], up to 16 new tokens of each sequence."""
    q, k, v = (y.unflatten(-1, (-1, dim)).transpose(1, 2) for y in halfbyte.qkv_projection(x, weights))
    q = cache.append(k, v, rope=rope, q=q)
    out = halfbyte.decode_attention(q, cache)
    return halfbyte.linear(out.transpose(1, 2).flatten(2), w_out)


def tables(cache: halfbyte.KVCache, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the next tokens: from the lengths, which a CUDA graph reads anew. Once a step, for all layers of a model."""
    return rope_tables(cache.lengths.unsqueeze(1) + torch.arange(count), dim)


x = torch.randn(batch, 12, hidden)
at_once, one_by_one = (halfbyte.KVCache(batch, kv_heads, dim, 64, keys="int8", values="int4_g32") for _ in range(2))
y = layer(x, at_once, tables(at_once, 12))
steps = [layer(x[:, i : i + 1], one_by_one, tables(one_by_one, 1)) for i in range(12)]
print(f"lengths {one_by_one.lengths.tolist()}, y {list(y.shape)}")
print(f"token by token equals all at once within {float((torch.cat(steps, 1) - y).abs().max()):.1e}")
