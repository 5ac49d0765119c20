"""`halfbyte.hf.quantize`: quantize the weights and the KV cache of a transformers model, in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from halfbyte.cache_plan import CachePlan, read_plan
from halfbyte.errors import InvalidArgument, Unsupported, check, warn_once
from halfbyte.formats import Format, weight_format
from halfbyte.hf.default_cache import CacheSettings, use_packed_cache
from halfbyte.hf.footprint import reports_footprint
from halfbyte.hf.key_bias import check_key_bias
from halfbyte.hf.layer_options import layer_formats, layer_rotations, layer_windows
from halfbyte.hf.model_support import check_model_support, half_type, inner_model, model_sizes, text_config
from halfbyte.hf.quantization_config import HalfbyteConfig, mark_quantized
from halfbyte.hf.value_rotation import layers_to_rotate, rotate_values_of, unfolded
from halfbyte.hf.weights import find_lm_head, quantize_modules, select
from halfbyte.nn import QuantLinear
from halfbyte.nn import fuse_gate_up as _fuse_gate_up
from halfbyte.nn import fuse_qkv as _fuse_qkv
from halfbyte.reference.quantize import check_clip
from halfbyte.settings import CLIP, KEYS, VALUES, WEIGHTS


@reports_footprint
def quantize(
    model: Any,
    weights: str | None = None,
    keys: str | Sequence[str] | None = None,
    values: str | Sequence[str] | None = None,
    *,
    plan: CachePlan | str | os.PathLike[str] | None = None,
    rotate_keys: bool | Sequence[bool] | None = None,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    rotate_values: bool = False,
    skip_layers: Iterable[int] = (),
    skip_modules: Iterable[str] = (),
    lm_head: str | None = None,
    clip: str | None = None,
    fuse_qkv: bool = False,
    fuse_gate_up: bool = False,
) -> Any:
    """Quantize a transformers model in place, and return it. Without any format: weights to nvfp4 with clip="search", unless
    they are quantized already, and a cache of int4_channel keys and int8 values.

    weights        weight format of the linear layers and the experts in the transformer blocks; None: unchanged. Embeddings, norms
                   and routers are not quantized
    keys, values   formats of the KV cache that `generate()` makes, for all layers or a list with one for each; one alone leaves the
                   other in 16 bits; neither: the cache of transformers
    plan           instead of keys and values: a cache plan or its file (`halfbyte calibrate` writes one), with its sink and recent
                   tokens, if any
    rotate_keys    Hadamard-rotate cached keys (and queries) against outliers; None: as `halfbyte.KVCache` does by default
    sink_tokens    the first tokens of a sequence that stay in 16 bits, keys and values; left padding counts as tokens
    recent_tokens  the last tokens of a sequence that stay in 16 bits
    rotate_values  fold a Hadamard rotation of values into v_proj and o_proj before they are quantized: the same model up to the
                   rounding of these weights, without outlier channels in cached values. If the weights cannot take it (when they
                   are quantized already, for example), the cache rotates quantized values, and attention rotates its output back
    skip_layers    layers whose cache stays in 16 bits; negative numbers count from the end
    skip_modules   modules that keep their weights: names, or parts of names between dots
    lm_head        weight format of the output layer, such as "int8_col"; None: unchanged. One that is tied to the embedding gets
                   packed weights of its own, and the embedding stays in 16 bits: a step reads less, the model takes more memory
    clip           "search": clip the range of each group to the least squared error (`halfbyte.quantize`); slower
    fuse_qkv       compute q_proj, k_proj and v_proj in one launch (needs weights, or a model whose weights are quantized already)
    fuse_gate_up   the same for gate_proj and up_proj

    On an error the model is unchanged.
    """
    _check_model(model)
    inner = inner_model(model)
    quantized = any(isinstance(m, QuantLinear) for m in model.modules())
    if weights is keys is values is plan is lm_head is None and not (rotate_values or (quantized and (fuse_qkv or fuse_gate_up))):
        keys, values = KEYS, VALUES
        if not (quantized or _held_quantizer(inner)):
            weights, clip = WEIGHTS, CLIP
    for name, wanted in (("fuse_qkv", fuse_qkv), ("fuse_gate_up", fuse_gate_up)):
        check(not wanted or quantized or weights is not None, f"{name}=True needs quantized weights; pass weights= as well")
    check(not isinstance(skip_modules, str), f"skip_modules={skip_modules!r} is a string; pass a tuple: ({skip_modules!r},)")
    skip_modules = tuple(skip_modules)  # read more than once
    check(isinstance(skip_layers, Iterable), f"skip_layers={skip_layers!r}; pass the numbers of layers, such as (0, -1)")
    settings = _cache_settings(inner, keys, values, rotate_keys, tuple(skip_layers), (sink_tokens, recent_tokens), plan)
    check_about_weights(weights or lm_head, clip, skip_modules)
    for fmt in (weights, lm_head):
        if fmt is not None:
            check_clip(clip, weight_format(fmt))
    _check_weights_are_plain(inner, weights, lm_head, skip_modules)
    check(isinstance(rotate_values, bool), f"rotate_values={rotate_values!r}; expected True or False")
    by_cache = rotate_values and settings is not None and bool(unfolded(inner))
    to_rotate = layers_to_rotate(inner) if rotate_values and not by_cache else []
    settings = replace(settings, rotate_values=True) if settings is not None and by_cache else settings
    if settings is not None:
        by_layer = [k for k, _ in _formats(inner, settings)]
        check_key_bias(inner, by_layer, layer_rotations(text_config(inner), settings.rotate_keys, by_layer))
    if to_rotate:
        rotate_values_of(inner, to_rotate)
    if weights is not None or lm_head is not None:
        before = getattr(getattr(inner, "hf_quantizer", None), "quantization_config", None)
        kept = before.modules if isinstance(before, HalfbyteConfig) else {}
        mark_quantized(inner, {**kept, **quantize_modules(inner, weights, skip_modules, lm_head, clip)})
    if fuse_qkv and not _fuse_qkv(inner):
        warn_once("fuse_qkv=True found no module with q_proj, k_proj and v_proj; nothing was fused")
    if fuse_gate_up and not _fuse_gate_up(inner):
        warn_once("fuse_gate_up=True found no module with gate_proj and up_proj; nothing was fused")
    if settings is not None:
        use_packed_cache(inner, settings)
    return model


def check_about_weights(fmt: str | None, clip: str | None, skip_modules: Iterable[str]) -> None:
    """Raise for options about weights of a call without a format of weights, which would not use them."""
    for name, given in (("clip", clip), ("skip_modules", skip_modules)):
        check(fmt is not None or not given, f"{name}={given!r} is about weights; name weights= as well, or leave it out")


def _check_weights_are_plain(model: Any, weights: str | None, lm_head: str | None, skip_modules: Iterable[str]) -> None:
    """Raise for a model whose weights are quantized, unless halfbyte quantized a part of them (gpt-oss) and the rest is left."""
    if lm_head is not None:
        find_lm_head(model, weight_format(lm_head), skip_modules)
    if not _held_quantizer(model) or weights is lm_head is None:
        return
    own = isinstance(model.hf_quantizer.quantization_config, HalfbyteConfig)
    if own and (weights is None or select(model, skip_modules)):
        return
    asked = f"lm_head={lm_head!r}" if weights is None else f"weights={weights!r}"
    named = getattr(model, "quantization_method", "unknown")
    method = str(getattr(named, "value", named))  # an Enum or a string
    advice = {
        "gguf": "load it with quantization_config=transformers.GgufConfig(dequantize=True)",
        "fp8": "load it with quantization_config=transformers.FineGrainedFP8Config(dequantize=True)",
    }.get(method, f"leave {asked.partition('=')[0]} out")
    raise InvalidArgument(f"{asked}: the model's weights are quantized already ({method}); {advice}")


def _held_quantizer(model: Any) -> bool:
    """Whether a quantizer of transformers, halfbyte's included, holds the weights."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None and not getattr(getattr(quantizer, "quantization_config", None), "dequantize", False)


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InvalidArgument(
            f"model is a {type(model).__name__}; pass a transformers model (AutoModelForCausalLM.from_pretrained(...))"
        )


def _cache_settings(
    model: Any,
    keys: str | Sequence[str] | None,
    values: str | Sequence[str] | None,
    rotate_keys: bool | Sequence[bool] | None,
    skip_layers: tuple[int, ...],
    window: tuple[int, int],
    plan: CachePlan | str | os.PathLike[str] | None,
) -> CacheSettings | None:
    """Checked settings of the cache; None when the cache stays transformers' own."""
    others = bool(rotate_keys or skip_layers)
    if keys is None and values is None and plan is None:
        check(
            not others and window == (0, 0),
            "rotate_keys, sink_tokens, recent_tokens and skip_layers are about the KV cache; name keys= or values= as well",
        )
        return None
    check_model_support(model)
    if plan is not None:
        check(keys is None and values is None and not others, "plan sets formats, rotation and layers; leave these options out")
        plan = read_plan(plan)
        plan.check_model(model_sizes(text_config(model)))
        window = plan.exact_tokens(window)
        settings = CacheSettings(plan.keys, plan.values, plan.rotate_keys, (), *window)
    else:
        plain = "fp16" if half_type(model) is torch.float16 else "bf16"
        settings = CacheSettings(_hashable(keys or plain), _hashable(values or plain), False, skip_layers, *window)
        settings = replace(settings, rotate_keys=_rotations(model, rotate_keys, settings))
    layer_windows(window, _formats(model, settings))
    check_can_read_packed(model)
    return settings


def _hashable(given: Any) -> Any:
    """A list with one entry for each layer as a tuple, anything else as it is."""
    return tuple(given) if isinstance(given, list) else given


def _rotations(model: Any, rotate_keys: Any, settings: CacheSettings) -> bool | tuple[bool, ...]:
    """Which layers rotate keys, with None resolved, so that a saved model keeps its setting. One bool if all layers agree."""
    each = layer_rotations(text_config(model), rotate_keys, [k for k, _ in _formats(model, settings)])
    return each[0] if len(set(each)) == 1 else each


def _formats(model: Any, settings: CacheSettings) -> list[tuple[Format, Format]]:
    """(key format, value format) of every layer, checked."""
    return layer_formats(text_config(model), settings.keys, settings.values, settings.skip_layers, half_type(model))


def check_can_read_packed(model: Any) -> None:
    """Raise `Unsupported` if this model, or this version of transformers, would ignore a packed cache."""
    if not getattr(model, "_can_set_attn_implementation", lambda: True)():
        raise Unsupported(  # transformers would warn, and go on with 16 bits
            f"{type(model).__name__} computes attention itself and does not call the attention functions that can be registered in "
            f"transformers, so nothing would read a packed cache; quantize its weights only (keys=None, values=None)"
        )
    if not hasattr(model, "_prepare_cache_for_generation") and hasattr(model, "generate"):
        raise Unsupported(
            "this transformers has no _prepare_cache_for_generation to make a packed cache the default with; quantize "
            "the weights only, and pass past_key_values=halfbyte.hf.PackedCache(...) to generate()"
        )
