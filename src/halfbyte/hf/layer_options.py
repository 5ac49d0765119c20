"""Options of a packed cache layer by layer: one for all layers, or a list with one for each, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from halfbyte.errors import check
from halfbyte.formats import Format, check_window, key_format, value_format
from halfbyte.hf.model_support import head_dims
from halfbyte.reference.hadamard import rotated

#: Capacities are rounded up to a multiple of this: every new capacity costs one more compiled graph.
BUCKET = 64


def layer_formats(
    config: Any, keys: str | Sequence[str], values: str | Sequence[str], skip_layers: Iterable[int], dtype: torch.dtype
) -> list[tuple[Format, Format]]:
    """(key format, value format) of every layer; raises when head_dim or a layer number does not fit."""
    check(dtype in (torch.float16, torch.bfloat16), f"dtype={dtype}; the 16-bit type is torch.float16 or torch.bfloat16")
    count = int(config.num_hidden_layers)
    key_dim, value_dim = head_dims(config)
    k_formats = [key_format(name) for name in one_each("keys", keys, count)]
    v_formats = [value_format(name) for name in one_each("values", values, count)]
    for side, formats, dim in (("keys", k_formats, key_dim), ("values", v_formats, value_dim)):
        for fmt in dict.fromkeys(formats):
            fmt.check_shape((1, 1, BUCKET, dim), f"{side}={fmt.name!r}: a head of this model")
    plain = key_format("fp16" if dtype is torch.float16 else "bf16")
    check(isinstance(skip_layers, Iterable), f"skip_layers={skip_layers!r}; pass the numbers of layers, such as (0, -1)")
    skipped = set()
    for layer in skip_layers:
        check(
            isinstance(layer, int) and -count <= layer < count,
            f"skip_layers holds {layer!r}; the model has {count} layers: pass numbers from {-count} to {count - 1}",
        )
        skipped.add(layer % count)
    return [(plain, plain) if i in skipped else (k_formats[i], v_formats[i]) for i in range(count)]


def layer_windows(
    window: tuple[int, int], formats: Sequence[tuple[Format, Format]], capacity: int = 2**31 - 1
) -> list[tuple[int, int]]:
    """(sink tokens, recent tokens) of every layer, checked: `window`, or none where a layer is in 16 bits throughout."""
    quantized = [k.is_quantized or v.is_quantized for k, v in formats]
    for (k, v), checked in zip(formats, quantized, strict=True):
        if checked or not any(quantized):
            check_window(*window, k, v, capacity)
    return [window if has_codes else (0, 0) for has_codes in quantized]


def layer_rotations(config: Any, rotate_keys: bool | Sequence[bool] | None, keys: Sequence[Format]) -> tuple[bool, ...]:
    """Whether keys in these formats, by layer, are rotated; raises when a head cannot be."""
    wanted, dim = one_each("rotate_keys", rotate_keys, int(config.num_hidden_layers)), head_dims(config)[0]
    return tuple(rotated(rotate, fmt, dim) for rotate, fmt in zip(wanted, keys, strict=True))


def one_each(name: str, given: Any, layers: int) -> tuple[Any, ...]:
    """An option of every layer: a list or tuple with one entry for each, or one that is for all."""
    if not isinstance(given, list | tuple):
        return (given,) * layers
    check(
        len(given) == layers,
        f"{name} has {len(given)} entries, and the model {layers} layers; pass one for all layers, or one for each",
    )
    return tuple(given)
