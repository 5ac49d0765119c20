"""halfbyte in Hugging Face transformers: packed KV caches and quantized weights with one call.

    model = halfbyte.hf.quantize(model)  # in the default formats
    model.generate(...)                   # unchanged

Importing this module registers attention, experts and quantization method "halfbyte" with transformers, so that
`AutoModelForCausalLM.from_pretrained` loads folders that `save` wrote.
"""

from __future__ import annotations

from halfbyte.errors import require

require("transformers", "halfbyte.hf")

from halfbyte.hf.attention_weights import KeyBiasWarning, key_biases
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.checkpoint import load, save
from halfbyte.hf.default_cache import Generate
from halfbyte.hf.every_forward import packed_forwards
from halfbyte.hf.model_support import NAME, REFUSED
from halfbyte.hf.quantization_config import HalfbyteConfig
from halfbyte.hf.quantize_model import quantize
from halfbyte.hf.quantizer import HalfbyteQuantizer as HalfbyteQuantizer  # its import registers it
from halfbyte.hf.recorded_step import release
from halfbyte.hf.rehearsal import warm_up
from halfbyte.text import Chat

__all__ = [
    "quantize",
    "Generate",
    "release",
    "warm_up",
    "load",
    "save",
    "HalfbyteConfig",
    "PackedCache",
    "Chat",
    "packed_forwards",
    "key_biases",
    "KeyBiasWarning",
    "NAME",
    "REFUSED",
]
