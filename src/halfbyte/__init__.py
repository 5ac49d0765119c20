"""halfbyte: attention and linear layers that read low-bit data directly.

    cache = halfbyte.KVCache(batch=8, kv_heads=8, head_dim=128, capacity=32768, keys="int8", values="int4_g32")
    cache.append(k, v)
    out = halfbyte.decode_attention(q, cache)
    y = halfbyte.linear(x, halfbyte.quantize(weight, "nf4"))

`halfbyte.hf` (extra `hf`) brings both to transformers models. Importing this package needs no GPU and no Triton.
"""

from halfbyte.cache import KVCache
from halfbyte.errors import HalfbyteError
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS, Format, key_format, value_format
from halfbyte.ops.decode_attention import decode_attention, merge_states, prefill_attention
from halfbyte.ops.linear import linear, qkv_projection
from halfbyte.paging import PagedKVCache
from halfbyte.reference.quantize import dequantize, quantize
from halfbyte.tensors import QuantTensor

__version__ = "0.1.0"
__all__ = [
    "KVCache",
    "PagedKVCache",
    "decode_attention",
    "prefill_attention",
    "merge_states",
    "quantize",
    "dequantize",
    "QuantTensor",
    "linear",
    "qkv_projection",
    "Format",
    "KV_FORMATS",
    "WEIGHT_FORMATS",
    "key_format",
    "HalfbyteError",
]
