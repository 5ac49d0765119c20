"""What an engine is built with, read from one word: `int4_g128+int8_col/int8+int4_g32`.

weights  bf16, gptq, awq, or a weight format of halfbyte; behind a + the output layer's format, which is bf16 otherwise
cache    KEYS+VALUES of halfbyte, or a `kv_cache_dtype` of vLLM; without it vLLM's own cache in 16 bits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.engine import PAGE_FORMATS
from halfbyte.errors import InvalidArgument
from halfbyte.formats import weight_format

#: Weights that are no format of halfbyte: random ones that vLLM makes itself, and files that its own kernels read.
PLAIN, FOREIGN = "bf16", ("gptq", "awq")


@dataclass(frozen=True)
class Mode:
    """Weights, output layer and cache of an engine; `str` gives the word back."""

    weights: str
    lm_head: str = ""
    cache: str = ""

    @classmethod
    def parse(cls, word: str) -> Mode:
        """Raises `InvalidArgument` where a part names nothing."""
        weights, _, cache = word.partition("/")
        weights, _, lm_head = weights.partition("+")
        mode = cls(weights, lm_head, cache)
        for name in (*([weights] if mode.own_weights else []), *([lm_head] if lm_head else [])):
            weight_format(name)
        if lm_head and not mode.own_weights:
            raise InvalidArgument(f"mode {word!r}: only weights of halfbyte have an output layer of another format")
        if unknown := [name for name in mode.pair if name not in PAGE_FORMATS]:
            raise InvalidArgument(f"mode {word!r}: {unknown[0]!r} is no page format; choose from {', '.join(PAGE_FORMATS)}")
        return mode

    @property
    def own_weights(self) -> bool:
        """Whether halfbyte's GEMM runs."""
        return self.weights != PLAIN and self.weights not in FOREIGN

    @property
    def pair(self) -> tuple[str, ...]:
        """Formats of keys and values where the cache is halfbyte's."""
        return tuple(self.cache.split("+")) if "+" in self.cache else ()

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        cache = {"attention_backend": f"HALFBYTE_{'__'.join(self.pair).upper()}"} if self.pair else {"kv_cache_dtype": self.cache}
        return {**({"quantization": "halfbyte"} if self.own_weights else {}), **(cache if self.cache else {})}

    def __str__(self) -> str:
        return "/".join(filter(None, ("+".join(filter(None, (self.weights, self.lm_head))), self.cache)))
