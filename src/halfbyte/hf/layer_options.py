"""`LayerOptions`: what the cache of one layer is made of, from the options of a whole cache, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from halfbyte.calibrated_keys import Calibration, digest_of_norms, read_calibration
from halfbyte.errors import check
from halfbyte.formats import Format, check_window, key_format, value_format
from halfbyte.hf.latents import check_no_latents
from halfbyte.hf.model_support import (
    BUCKET,
    all_head_dims,
    head_dims,
    inner_model,
    kv_scales,
    layer_reach,
    model_sizes,
    one_each,
    text_config,
)
from halfbyte.reference.hadamard import check_rotation, rotated
from halfbyte.tensors import KeyTransform


class LayerOptions(NamedTuple):
    """Formats of one layer, and what is done to its keys and values before they are stored.

    dtype           the 16-bit type of what stays in 16 bits
    window          (sink tokens, recent tokens), which stay in 16 bits
    rotate_values   quantized ones; those of 16 bits throughout stay as they are
    sliding         tokens that attention sees at most, which are kept; None: all
    scales          fixed ones of keys and of values as a model computes them, before these are changed; None: measured
    transform       of quantized keys, in place of a rotation; attention takes that of queries
    """

    keys: Format
    values: Format
    rotate_keys: bool
    dtype: torch.dtype
    window: tuple[int, int] = (0, 0)
    rotate_values: bool = False
    sliding: int | None = None
    scales: Sequence[float | None] = (None, None)
    transform: KeyTransform | None = None


def layer_options(
    model_or_config: Any,
    dtype: torch.dtype,
    *,
    keys: str | Sequence[str],
    values: str | Sequence[str],
    rotate_keys: bool | Sequence[bool] | None = None,
    rotate_values: bool = False,
    calibration: Calibration | None = None,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    skip_layers: Iterable[int] = (),
    capacity: int = 2**31 - 1,
) -> list[LayerOptions]:
    """Of every layer. Options are those of `PackedCache`; raises `InvalidArgument` or `Unsupported` where one does not fit."""
    config, window = text_config(model_or_config), (sink_tokens, recent_tokens)
    formats = _formats(config, keys, values, skip_layers, dtype)
    rotations = one_each("rotate_keys", rotate_keys, len(formats))
    transforms = _transforms(model_or_config, calibration, len(formats))
    stored = kv_scales(config) or {"format": None, "layers": [(None, None)] * len(formats)}
    any_codes = any(fmt.is_quantized for sides in formats for fmt in sides)
    options = []
    for layer, sides in enumerate(formats):
        (key_dim, value_dim), has_codes = head_dims(config, layer), any(fmt.is_quantized for fmt in sides)
        check_rotation(rotate_values, value_dim, "rotate_values")
        if has_codes or not any_codes:
            check_window(*window, *sides, capacity)
        scales = [s if fmt.name == stored["format"] else None for s, fmt in zip(stored["layers"][layer], sides, strict=True)]
        is_rotated, reach = rotated(rotations[layer], sides[0], key_dim), layer_reach(config, layer)
        own = window if has_codes else (0, 0)
        options.append(LayerOptions(*sides, is_rotated, dtype, own, rotate_values, reach, scales, transforms[layer]))
    return options


def _formats(
    config: Any, keys: str | Sequence[str], values: str | Sequence[str], skip_layers: Iterable[int], dtype: torch.dtype
) -> list[tuple[Format, Format]]:
    """(key format, value format) of every layer; raises when head_dim or a layer number does not fit."""
    check(dtype in (torch.float16, torch.bfloat16), f"dtype={dtype}; the 16-bit type is torch.float16 or torch.bfloat16")
    count = int(config.num_hidden_layers)
    dims = set(all_head_dims(config))
    k_formats = [key_format(name) for name in one_each("keys", keys, count)]
    v_formats = [value_format(name) for name in one_each("values", values, count)]
    for side, formats, sizes in zip(("keys", "values"), (k_formats, v_formats), zip(*sorted(dims), strict=True), strict=True):
        for fmt, dim in product(dict.fromkeys(formats), dict.fromkeys(sizes)):
            fmt.check_shape((1, 1, BUCKET, dim), f"{side}={fmt.name!r}: a head of this model")
    plain = key_format("fp16" if dtype is torch.float16 else "bf16")
    check(isinstance(skip_layers, Iterable), f"skip_layers={skip_layers!r}; pass the numbers of layers, such as (0, -1)")
    skips = set()
    for layer in skip_layers:
        check(
            isinstance(layer, int) and -count <= layer < count,
            f"skip_layers holds {layer!r}; the model has {count} layers: pass numbers from {-count} to {count - 1}",
        )
        skips.add(layer % count)
    return [(plain, plain) if i in skips else (k_formats[i], v_formats[i]) for i in range(count)]


def _transforms(model_or_config: Any, calibration: Calibration | None, layers: int) -> tuple[KeyTransform | None, ...]:
    """The transform of keys of each layer; raises for the calibration of another model."""
    if calibration is None:
        return (None,) * layers
    check_no_latents(text_config(model_or_config))
    keys, is_model = read_calibration(calibration), isinstance(model_or_config, torch.nn.Module)
    digest = digest_of_norms(inner_model(model_or_config)) if is_model else ""
    return keys.of_model(model_sizes(text_config(model_or_config)), digest)
