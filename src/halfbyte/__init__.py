"""halfbyte: attention and linear layers that read low-bit data directly.

    cache = halfbyte.KVCache(batch=8, kv_heads=8, head_dim=128, capacity=32768, keys="int8", values="int4_g32")
    cache.append(k, v)
    out = halfbyte.decode_attention(q, cache)
    y = halfbyte.linear(x, halfbyte.quantize(weight, "nf4"))

`halfbyte.hf` (extra `hf`) brings both to transformers models. Importing this package needs no GPU, no Triton and, until
a name is used, no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.cache import KVCache as KVCache
    from halfbyte.errors import HalfbyteError as HalfbyteError
    from halfbyte.formats import KV_FORMATS as KV_FORMATS
    from halfbyte.formats import WEIGHT_FORMATS as WEIGHT_FORMATS
    from halfbyte.formats import Format as Format
    from halfbyte.formats import key_format as key_format
    from halfbyte.ops.decode_attention import decode_attention as decode_attention
    from halfbyte.ops.experts_linear import experts_linear as experts_linear
    from halfbyte.ops.linear import linear as linear
    from halfbyte.ops.linear import qkv_projection as qkv_projection
    from halfbyte.ops.merge_states import merge_states as merge_states
    from halfbyte.ops.prefill_attention import prefill_attention as prefill_attention
    from halfbyte.paging import PagedKVCache as PagedKVCache
    from halfbyte.reference.quantize import dequantize as dequantize
    from halfbyte.reference.quantize import quantize as quantize
    from halfbyte.tensors import QuantTensor as QuantTensor

__version__ = "0.1.0"

_HOME = {
    "KVCache": "cache",
    "PagedKVCache": "paging",
    "decode_attention": "ops.decode_attention",
    "prefill_attention": "ops.prefill_attention",
    "merge_states": "ops.merge_states",
    "quantize": "reference.quantize",
    "dequantize": "reference.quantize",
    "QuantTensor": "tensors",
    "linear": "ops.linear",
    "qkv_projection": "ops.linear",
    "experts_linear": "ops.experts_linear",
    "Format": "formats",
    "KV_FORMATS": "formats",
    "WEIGHT_FORMATS": "formats",
    "key_format": "formats",
    "HalfbyteError": "errors",
}
__all__ = [*_HOME]  # noqa: PLE0604  (the names above, and nothing else)


def __getattr__(name: str) -> Any:
    """Import a public name, or a public module, when it is first used: `halfbyte --help` need not wait for torch."""
    if name in ("hf", "engine", "paths"):
        return importlib.import_module(f"halfbyte.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"halfbyte.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "engine", "hf"])
