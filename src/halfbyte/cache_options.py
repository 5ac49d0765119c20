"""The options of a cache, their defaults, how a signature shows them, and what a token takes."""

from __future__ import annotations

import inspect
from typing import TypedDict, TypeVar

import torch

from halfbyte.formats import Format

T = TypeVar("T")


class CacheOptions(TypedDict, total=False):
    """Options of a cache; `DEFAULTS` has the defaults.

    keys, values       format names (`halfbyte.KV_FORMATS`), independent of each other
    value_dim          size of a value head, if it differs from head_dim
    rotate_keys        store keys Hadamard-rotated (attention rotates queries to match): spreads outlier channels. None: in
                       formats of at most 4 bits with a scale per token, head or group, if 16 divides head_dim
    sink_tokens        the first tokens of a sequence that stay in 16 bits, keys and values
    recent_tokens      the last tokens of a sequence that stay in 16 bits; they are quantized when they leave this window
    dtype              the 16-bit type of sink and recent tokens, and of per-channel keys that fill no block yet
    device             where the memory is
    k_scale, v_scale   the fixed scale of a per-tensor format; None: measured on the first append and then fixed
    """

    keys: str | Format
    values: str | Format
    value_dim: int | None
    rotate_keys: bool | None
    sink_tokens: int
    recent_tokens: int
    dtype: torch.dtype
    device: torch.device | str
    k_scale: float | None
    v_scale: float | None


#: Keys need more bits than values. Unlike `settings.KEYS`, the default of a model, these serve in pages of any size and next to
#: tokens that stay in 16 bits.
DEFAULTS: CacheOptions = {
    "keys": "int8",
    "values": "int4_g32",
    "value_dim": None,
    "rotate_keys": None,
    "sink_tokens": 0,
    "recent_tokens": 0,
    "dtype": torch.bfloat16,
    "device": "cpu",
    "k_scale": None,
    "v_scale": None,
}


def shows_options(kind: type[T]) -> type[T]:
    """Class decorator: shows each option and its default, in place of **options, in the signature of __init__."""
    _, *own, _ = inspect.signature(kind.__init__).parameters.values()
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in DEFAULTS.items()]
    kind.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    return kind


def token_bytes(fmt: Format, heads: int, dim: int) -> float:
    """Bytes of one token of `heads` heads, scales and offsets included; not a scale of the whole tensor, nor 16-bit tails."""
    block = fmt.token_block or 1
    scale_bytes = fmt.scale.storage.itemsize if fmt.scale is not None and fmt.granularity == "tensor" else 0
    return (fmt.nbytes((1, heads, block, dim)) - scale_bytes) / block
