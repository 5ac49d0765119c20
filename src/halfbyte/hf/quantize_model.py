"""`halfbyte.hf.quantize`: quantize the weights and the KV cache of a transformers model in place, and tell its memory on stderr."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers.utils import logging

from halfbyte.cache_plan import CachePlan, read_plan
from halfbyte.calibrated_keys import Calibration, read_calibration
from halfbyte.errors import InvalidArgument, Unsupported, check, warn_once
from halfbyte.formats import Format, weight_format
from halfbyte.hf.attention_weights import check_key_bias, check_value_rotation, layers_to_rotate, rotate_values_of
from halfbyte.hf.cache_layers import CacheSettings, layer_options
from halfbyte.hf.calibrated_weights import calibrated_layers, check_targets, token_windows
from halfbyte.hf.default_cache import SAVED, make_default, saved
from halfbyte.hf.model_support import NAME, Decoder, check_model_support, half_type, inner_model, model_sizes
from halfbyte.hf.quantization_config import HalfbyteConfig, mark_quantized, with_own_config
from halfbyte.hf.weights import (
    Target,
    check_fits,
    check_replaceable,
    find_lm_head,
    nearest_formats,
    packed_share,
    quantize_modules,
    select,
)
from halfbyte.nn import QuantLayer, QuantLinear
from halfbyte.nn import fuse_gate_up as _fuse_gate_up
from halfbyte.nn import fuse_qkv as _fuse_qkv
from halfbyte.reference.quantize import WIDEST, check_clip, has_searched_clip
from halfbyte.settings import CLIP, CPU_WEIGHTS, KEYS, VALUES, WEIGHTS

P = ParamSpec("P")
ModelT = TypeVar("ModelT")

#: Whether a decorated function is running: of nested ones only the outermost reports.
_REPORTING: ContextVar[bool] = ContextVar("_REPORTING", default=False)


def reports_footprint(make: Callable[P, ModelT]) -> Callable[P, ModelT]:
    """Decorator of functions that return a model: print its memory on stderr, if transformers shows progress bars.

    Nothing is printed for a model without quantized weights.
    """

    @functools.wraps(make)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> ModelT:
        if _REPORTING.get():
            return make(*args, **kwargs)
        token = _REPORTING.set(True)
        try:
            model = make(*args, **kwargs)
        finally:
            _REPORTING.reset(token)
        if logging.is_progress_bar_enabled() and (line := footprint(model)):
            print(line, file=sys.stderr, flush=True)
        return model

    return reporting


def footprint(model: Any) -> str:
    """Bytes of a model's parameters and buffers, the share of them that is packed, and the peaks of memory; "" without any packed.

    Peaks are those of the process so far: torch's allocator on each GPU of the model, and resident memory.
    """
    every = {id(t): t for t in (*model.parameters(), *model.buffers())}
    packed = {id(p): p for m in model.modules() if isinstance(m, QuantLayer) for p in m.weight.parts().values()}
    if not packed or all(t.is_meta for t in packed.values()):  # a rehearsal on the meta device takes nothing
        return ""
    total, inside = (sum(t.nbytes for t in tensors.values()) for tensors in ({**every, **packed}, packed))
    return (
        f"halfbyte: {type(model).__name__} takes {_size(total)}, {inside / total:.1%} of it packed ({packed_share(model):.1%} of "
        f"its weights); peak memory of this process: {', '.join(_peaks(model))}"
    )


def _peaks(model: nn.Module) -> list[str]:
    devices = {t.device for t in model.parameters() if t.is_cuda}
    peaks = [f"{_size(torch.cuda.max_memory_allocated(d))} on {d}" for d in sorted(devices, key=str)]
    return [*peaks, f"{_size(peak)} on the host" if (peak := resident_peak()) else "unknown on the host"]


def resident_peak() -> int | None:
    """Peak resident memory of this process in bytes; None where the system does not report it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.4g} GB"


@reports_footprint
def quantize(
    model: Any,
    weights: str | None = None,
    keys: str | Sequence[str] | None = None,
    values: str | Sequence[str] | None = None,
    *,
    plan: CachePlan | str | os.PathLike[str] | None = None,
    rotate_keys: bool | Sequence[bool] | None = None,
    calibration: Calibration | None = None,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    rotate_values: bool = False,
    skip_layers: Iterable[int] = (),
    skip_modules: Iterable[str] = (),
    lm_head: str | None = None,
    clip: str | None = None,
    calibrate: str | Sequence[str] | torch.Tensor | None = None,
    fuse_qkv: bool = False,
    fuse_gate_up: bool = False,
) -> Any:
    """Quantize a transformers model in place, and return it. Without any format: weights to nvfp4 (on a CPU to int4_g32) with
    clip="search", unless they are quantized already, and a cache of int8_channel keys and int8 values. Where default weights do
    not divide a layer, it takes the nearest format that does.

    weights        weight format of the linear layers and the experts in the transformer blocks; None: unchanged. Embeddings, norms
                   and routers are not quantized
    keys, values   formats of the KV cache that `generate()` makes, for all layers or a list with one for each; one alone leaves the
                   other in 16 bits; neither: the cache of transformers
    plan           instead of keys and values: a cache plan or its file (`halfbyte calibrate` writes one), with its sink and recent
                   tokens, if any
    rotate_keys    Hadamard-rotate cached keys (and queries) against outliers; None: as `halfbyte.KVCache` does by default
    calibration    calibrated keys, or their file by `halfbyte calibrate`: quantized keys are centered and multiplied by a matrix of
                   their KV head before they are stored, with the least loss together with sink_tokens=4. Saved with the model
    sink_tokens    the first tokens of a sequence that stay in 16 bits, keys and values; left padding counts as tokens
    recent_tokens  the last tokens of a sequence that stay in 16 bits
    rotate_values  fold a Hadamard rotation of values into v_proj and o_proj before they are quantized: the same model up to the
                   rounding of these weights, without outlier channels in cached values. If the weights cannot take it (when they
                   are quantized already, for example), the cache rotates quantized values, and attention rotates its output back
    skip_layers    layers whose cache stays in 16 bits; negative numbers count from the end
    skip_modules   modules that keep their weights: names, or parts of names between dots
    lm_head        weight format of the output layer, such as "int8_col"; None: unchanged. One that is tied to the embedding gets
                   packed weights of its own, and the embedding stays in 16 bits: a step reads less, the model takes more memory
    clip           "search": clip the range of each group of at most 32 to the least squared error; slower (`halfbyte.quantize`)
    calibrate      texts that resemble the model's inputs, or tokens int64 [n, T] of them: weights in the blocks are rounded, and
                   ranges clipped, so that the outputs of a layer change least for these inputs; minutes
    fuse_qkv       compute q_proj, k_proj and v_proj in one launch (needs weights, or a model whose weights are quantized already)
    fuse_gate_up   the same for gate_proj and up_proj

    On an error the model is unchanged.
    """
    job = Quantization(model, {name: option for name, option in locals().items() if name != "model"})
    if job.takes_defaults and logging.is_progress_bar_enabled():
        print(f"halfbyte: no format was named; {job.defaults()}", file=sys.stderr, flush=True)
    job.quantize_weights()
    job.finish()
    return model


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for an option that `quantize` does not have."""
    if unknown := sorted(set(options) - (set(inspect.signature(quantize).parameters) - {"model"})):
        raise InvalidArgument(
            f"{', '.join(unknown)}: no such option; those of halfbyte.hf.quantize are taken here. device_map and the like are "
            f"transformers': give them to from_pretrained"
        )


class Quantization:
    """A call of `quantize` with its defaults, checked against the model. Making one changes nothing.

    options   those of `quantize`, all of them
    blocks    name -> weight, of those in the blocks that are to be quantized; formats: name -> format, of the same
    head      the same of the output layer
    cache     None where the cache stays transformers' own
    rotated   (v_proj, o_proj) of layers that a rotation of values is folded into
    """

    takes_defaults = False  #: Whether no format was named.

    def __init__(self, model: Any, options: Mapping[str, Any], *, loading_to: str | None = None) -> None:
        """loading_to: the model is empty, and its weights are about to be read to a device of this type."""
        _check_model(model)
        loading = loading_to is not None
        self.model = inner_model(model) if loading else with_own_config(model)
        self.device_type = loading_to or self.model.device.type
        self.decoder = Decoder(self.model)
        self.options = options = self._with_defaults(options)
        fmt, head = (None if options[name] is None else weight_format(options[name]) for name in ("weights", "lm_head"))
        for name in ("clip", "skip_modules"):
            value = options[name]
            check(
                not value or fmt is not None or head is not None,
                f"{name}={value!r} is about weights; name weights= as well, or leave it out",
            )
        for each in (fmt, head):
            if each is not None:
                check_clip(options["clip"], each)
        if options["clip"] and self.names_weights and fmt is not None and not has_searched_clip(fmt):
            warn_once(f"clip={options['clip']!r} changes nothing in {fmt.name}: groups of more than {WIDEST} keep their range")
        self.cache = self._cache_settings()
        skips = self.options["skip_modules"]
        self.head = {} if head is None else find_lm_head(self.model, head, skips)
        if (fmt or head) and _held_quantizer(self.model):
            _check_weights_are_plain(self.model, self.options)
        self.blocks = {} if fmt is None else select(self.model, skips)
        self.formats = self._formats(fmt)
        self.windows = self._windows(loading)
        if not loading:
            check_replaceable({**self.blocks, **self.head})
        self.rotated: list[tuple[nn.Linear, nn.Linear]] = []
        if options["rotate_values"]:
            self._rotate_values(loading)
        if self.cache is not None and self.cache.calibration is None:  # which centers keys
            check_key_bias(self.decoder, self.keys, self.rotations)

    def defaults(self) -> str:
        """The formats that are taken where none is named, in words."""
        weights, keys, values = (self.options[name] for name in ("weights", "keys", "values"))
        kept = "weights stay as they are" if weights is None else f"weights become {weights}, for a {self.device_type.upper()}"
        return f"{kept}, and the cache has {keys} keys and {values} values"

    def quantize_weights(self) -> None:
        """Fold the rotation, then quantize the weights: all, or, on any error, none."""
        if self.rotated:
            rotate_values_of(self.decoder, self.rotated)
        selection = {name: (target, self.formats[name]) for name, target in self.blocks.items()}
        selection |= {name: (target, weight_format(self.options["lm_head"])) for name, target in self.head.items()}
        if self.options["weights"] is not None or selection:
            clip, layers = self.options["clip"], dict[Target, QuantLayer]()
            if self.windows is not None:
                blocks = {name: selection[name] for name in self.blocks}
                layers = calibrated_layers(self.model, blocks, clip, self.windows)
            quantize_modules(self.model, selection, clip, layers)
            self.mark({name: fmt.name for name, (_, fmt) in selection.items()})

    def _formats(self, fmt: Format | None) -> dict[str, Format]:
        """The format of each weight: the one that was named, or the nearest to the default that fits."""
        if fmt is None:
            return {}
        if self.names_weights:
            check_fits(self.blocks, fmt)
            return dict.fromkeys(self.blocks, fmt)
        return nearest_formats(self.blocks, fmt)

    def _windows(self, loading: bool) -> torch.Tensor | None:
        """Tokens to calibrate weights on, int64 [n, T]."""
        if (calibrate := self.options["calibrate"]) is None:
            return None
        if loading:
            raise Unsupported("calibrate needs the whole model in 16 bits; load it without, then call halfbyte.hf.quantize")
        check(bool(self.blocks), "calibrate is about weights in the blocks; name weights= as well, or leave it out")
        check_targets(self.model, self.blocks)
        return token_windows(self.model, calibrate)

    def mark(self, modules: dict[str, str]) -> None:
        """Say of the model which weights are quantized: name -> format, and those that were before."""
        before = getattr(getattr(self.model, "hf_quantizer", None), "quantization_config", None)
        mark_quantized(self.model, {**(before.modules if isinstance(before, HalfbyteConfig) else {}), **modules})

    def finish(self) -> None:
        """Fuse projections, and let `generate()` make packed caches."""
        for name, fuse, parts in (
            ("fuse_qkv", _fuse_qkv, "q_proj, k_proj and v_proj"),
            ("fuse_gate_up", _fuse_gate_up, "gate_proj and up_proj"),
        ):
            if self.options[name] and not fuse(self.model):
                warn_once(f"{name}=True found no module with {parts}; nothing was fused")
        if self.cache is not None:
            _use_packed_cache(self.model, self.cache)

    def _with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options, checked by themselves; formats where none is named."""
        every = {**{p.name: p.default for p in [*inspect.signature(quantize).parameters.values()][1:]}, **options}
        self.names_weights = every["weights"] is not None
        packed = any(isinstance(m, QuantLinear) for m in self.model.modules())
        fuses = packed and (every["fuse_qkv"] or every["fuse_gate_up"])
        has_formats = any(every[name] is not None for name in ("weights", "keys", "values", "plan", "lm_head"))
        if not (has_formats or every["rotate_values"] or fuses):
            every |= {"keys": KEYS, "values": VALUES}
            weights = CPU_WEIGHTS if self.device_type == "cpu" else WEIGHTS
            every |= {} if packed or _held_quantizer(self.model) else {"weights": weights, "clip": CLIP}
            self.takes_defaults = True
        for name in ("fuse_qkv", "fuse_gate_up", "rotate_values"):
            check(isinstance(every[name], bool), f"{name}={every[name]!r}; expected True or False")
        for name in ("fuse_qkv", "fuse_gate_up"):
            fits = not every[name] or packed or every["weights"] is not None
            check(fits, f"{name}=True needs quantized weights; pass weights= as well")
        skips = every["skip_modules"]
        check(not isinstance(skips, str), f"skip_modules={skips!r} is a string; pass a tuple: ({skips!r},)")
        layers = every["skip_layers"]
        check(isinstance(layers, Iterable), f"skip_layers={layers!r}; pass the numbers of layers, such as (0, -1)")
        return {**every, "skip_modules": tuple(skips), "skip_layers": tuple(layers)}

    def _rotate_values(self, loading: bool) -> None:
        """Fold the rotation into the weights where they can take it; where they cannot, the cache rotates values."""
        if loading and (self.options["weights"] is not None or self.cache is None):
            raise Unsupported("rotate_values changes 16-bit weights; load the model without, then call halfbyte.hf.quantize")
        try:
            self.rotated = layers_to_rotate(self.decoder)
        except (InvalidArgument, Unsupported):
            if self.cache is None:
                raise
            check_value_rotation(self.decoder)
            self.cache = replace(self.cache, rotate_values=True)

    def _cache_settings(self) -> CacheSettings | None:
        """Checked settings of the cache; sets the formats of keys, and whether they are rotated, of every layer."""
        keys, values, plan, rotate, skips = (self.options[x] for x in ("keys", "values", "plan", "rotate_keys", "skip_layers"))
        window, calibration = (self.options["sink_tokens"], self.options["recent_tokens"]), self.options["calibration"]
        if keys is values is plan is None:
            check(
                not (rotate or skips) and window == (0, 0) and calibration is None,
                "rotate_keys, calibration, sink_tokens, recent_tokens and skip_layers are about the KV cache; name keys= or "
                "values= as well",
            )
            return None
        check_model_support(self.model)
        half = half_type(self.model)
        if plan is not None:
            fits = keys is values is calibration is None and not (rotate or skips)
            check(fits, "plan sets formats, rotation, calibration and layers; leave these options out")
            plan = read_plan(plan)
            plan.check_model(model_sizes(self.decoder.config))
            window = plan.exact_tokens(window)
            keys, values, rotate, calibration = plan.keys, plan.values, plan.rotate_keys, plan.calibration or None
        plain = "fp16" if half is torch.float16 else "bf16"
        settings = CacheSettings(_hashable(keys or plain), _hashable(values or plain), False, skips, *window)
        if calibration is not None:
            settings = replace(settings, calibration=read_calibration(calibration))
        layers = layer_options(self.model, half, replace(settings, rotate_keys=rotate))
        self.keys = [layer.keys for layer in layers]
        self.rotations = each = tuple(layer.rotate_keys for layer in layers)
        check_can_read_packed(self.model)
        # One for all layers if they agree. Resolved, so that a saved model keeps its setting.
        return replace(settings, rotate_keys=each[0] if len(set(each)) == 1 else each)


def _use_packed_cache(model: Any, settings: CacheSettings) -> None:
    """Give a model halfbyte's attention and let `generate()` make packed caches. The settings are saved with the model."""
    model.set_attn_implementation(NAME)
    setattr(model.config, SAVED, saved(settings))
    if getattr(model.config, "quantization_config", None) is None:
        model.config.quantization_config = HalfbyteConfig()  # so that transformers looks for halfbyte, which restores the settings
    make_default(model, settings)


def _check_weights_are_plain(model: Any, options: Mapping[str, Any]) -> None:
    """Raise for weights that are quantized, unless halfbyte quantized a part of them (gpt-oss) and the rest is left."""
    weights, lm_head = options["weights"], options["lm_head"]
    own = isinstance(model.hf_quantizer.quantization_config, HalfbyteConfig)
    if own and (weights is None or select(model, options["skip_modules"])):
        return
    option = f"lm_head={lm_head!r}" if weights is None else f"weights={weights!r}"
    label = getattr(model, "quantization_method", "unknown")
    method = str(getattr(label, "value", label))  # an Enum or a string
    advice = {
        "gguf": "load it with quantization_config=transformers.GgufConfig(dequantize=True)",
        "fp8": "load it with quantization_config=transformers.FineGrainedFP8Config(dequantize=True)",
    }.get(method, f"leave {option.partition('=')[0]} out")
    raise InvalidArgument(f"{option}: the model's weights are quantized already ({method}); {advice}")


def _held_quantizer(model: Any) -> bool:
    """Whether a quantizer of transformers, halfbyte's included, holds the weights."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None and not getattr(getattr(quantizer, "quantization_config", None), "dequantize", False)


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise InvalidArgument(
            f"model is a {type(model).__name__}; pass a transformers model (AutoModelForCausalLM.from_pretrained(...))"
        )


def _hashable(given: Any) -> Any:
    """A list with one entry for each layer as a tuple, anything else as it is."""
    return tuple(given) if isinstance(given, list) else given


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
