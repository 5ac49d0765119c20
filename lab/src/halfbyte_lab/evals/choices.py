"""The formats that are suggested, and which loss is safe.

Where the 16-bit model predicts a text well, the logarithm of perplexity grows by about the mean KL divergence: 0.002 nats are
0.2 %, and 0.01 nats are 1 %. For scale: the 8-bit weights of llama.cpp (Q8_0) raise the perplexity of Llama 3 8B by 0.04 %, its
4-bit ones (Q4_K_M) by 2.8 % (ggml-org/llama.cpp#6936). KL divergence decides, as it has less noise than a change of perplexity.

One rule says what is safe: at most twice the floor of the same run, which is what 16-bit arithmetic costs by itself. A run without
a floor calls nothing safe.
"""

from __future__ import annotations

from halfbyte.settings import KEYS, VALUES


def caches(dtype: str = "bf16") -> dict[str, tuple[str, str]]:
    """Formats of keys and values, each with what it is chosen for, from the most bits on; `dtype` is the one of 16 bits."""
    return {
        "16 bits": (dtype, dtype),
        "Default": (KEYS, VALUES),
        "8 bits, fastest": ("int8", "int8"),
        "6.6 bits": ("int4_channel", "int8"),
        "Smallest": ("int4_channel", "int4"),
        "4 bits, fastest": ("int4", "int4"),
    }


def limit(floor: float) -> float:
    """The largest mean KL divergence that is safe, in nats: twice what 16-bit arithmetic costs in the same run, `floor`."""
    return 2 * floor


def is_safe(kl: float, noise: float, floor: float) -> bool:
    """Whether a mean KL divergence with its noise, both in nats, is small enough; not where it is not known (NaN)."""
    return kl + noise <= limit(floor)
