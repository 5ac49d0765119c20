"""`halfbyte memory`: a model's memory, from its configuration alone. No weights are read.

The model is built on the meta device, so parameters are counted, not estimated. Activations, the CUDA context and fragmentation
come on top.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from halfbyte.errors import CheckpointError, InvalidArgument, check
from halfbyte.formats import Format, check_window, key_format, value_format, weight_format
from halfbyte.paging import SPARE, ring_tokens
from halfbyte.paths import resolve_model
from halfbyte.settings import HALVES, KEYS, VALUES, WEIGHTS

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: Share of a GPU's memory left to activations, the CUDA context and the allocator; engines leave as much by default.
RESERVED = 0.1
#: Characters of a size; Python itself refuses to read numbers of some thousand digits.
_LONGEST = 1000


@dataclass(frozen=True)
class Estimate:
    """Bytes. `kv_bytes` is for `batch` sequences of `context` tokens; `kv_bytes_per_token` for one token of one sequence.

    weight_bytes      everything: quantized linears, and the rest in 16 bits; `plain_...`: the same with nothing quantized
    tokens_that_fit   tokens of all sequences together in `memory` less `RESERVED` and the weights; None without `memory`
    """

    model: str
    batch: int
    context: int
    keys: str
    values: str
    weights: str
    lm_head: str
    skip_layers: tuple[int, ...]
    sink_tokens: int
    recent_tokens: int
    parameters: int
    quantized_parameters: int
    weight_bytes: int
    plain_weight_bytes: int
    kv_layers: int
    kv_heads: int
    head_dim: int
    kv_bytes_per_token: float
    kv_bytes: int
    plain_kv_bytes: int
    memory: int | None = None
    tokens_that_fit: int | None = None
    plain_tokens_that_fit: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def plain_total_bytes(self) -> int:
        return self.plain_weight_bytes + self.plain_kv_bytes

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "total_bytes": self.total_bytes, "plain_total_bytes": self.plain_total_bytes}


def estimate(
    model: str,
    *,
    batch: int = 1,
    context: int = 8192,
    keys: str = KEYS,
    values: str = VALUES,
    weights: str | None = "bf16",
    lm_head: str = "bf16",
    skip_layers: Collection[int] = (),
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    memory: int | None = None,
) -> Estimate:
    """Estimate for a model folder, a Hub id or "demo".

    weights, lm_head   weight formats, or bf16 for none; a folder of `halfbyte quantize` has its own. weights None: the default of
                       `hf.quantize`, unless the model is quantized already
    sink_tokens, recent_tokens   stay in 16 bits, in memory of their own
    skip_layers        layers whose cache stays in 16 bits; negative numbers count from the end

    Raises `InvalidArgument` for sizes that are not above 0 and formats that do not exist or do not fit; `CheckpointError` when
    there is no usable configuration; `Unsupported` for models that packed caches do not support.
    """
    for name, value in (("batch", batch), ("context", context), ("memory", memory)):
        check(value is None or 0 < value < 2**63, f"{name}={value}; it must be above 0 and below 2^63")
    check_window(sink_tokens, recent_tokens, key_format(keys), value_format(values), context)  # before any download
    head = None if lm_head == "none" else weight_or_plain(lm_head)
    weight = None if weights in (None, "none") else weight_or_plain(weights)
    config = load_config(resolve_model(model))
    if weights is None:
        weights = "bf16" if quant_method(config) else WEIGHTS
        weight = weight_or_plain(weights)
    skeleton, checkpoint = meta_model(config, model), stored_weights(config)
    cache = replace(packed_layers(config, keys, values, skip_layers), window=sink_tokens + recent_tokens)
    plain_weights = plain_bytes(skeleton)
    if checkpoint is None:
        saving, quantized = quantized_bytes(skeleton, weight, head)
    else:
        checkpoint.check(None if weight is None else weight.name, model)
        check(head is None, f"lm_head={lm_head!r}, and the weights of {model} are stored quantized; leave --lm-head out")
        (saving, quantized), weights, weight = checkpoint.quantized_bytes(skeleton), checkpoint.name, None
    kv, plain_kv = cache.nbytes(batch, context), cache.plain_nbytes(batch, context)

    def fit(weights_bytes: int, kv_bytes: int) -> int | None:
        return None if memory is None else max(0, int((room(memory) - weights_bytes) / (kv_bytes / (batch * context))))

    return Estimate(
        model=model,
        batch=batch,
        context=context,
        keys=keys,
        values=values,
        weights=weights,
        lm_head=lm_head,
        skip_layers=tuple(sorted(set(skip_layers))),
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        parameters=plain_weights // 2,
        quantized_parameters=quantized,
        weight_bytes=plain_weights - saving,
        plain_weight_bytes=plain_weights,
        kv_layers=len(cache.layers),
        kv_heads=cache.layers[0].kv_heads,
        head_dim=cache.layers[0].key_dim,
        kv_bytes_per_token=kv / (batch * context),
        kv_bytes=kv,
        plain_kv_bytes=plain_kv,
        memory=memory,
        tokens_that_fit=fit(plain_weights - saving, kv),
        plain_tokens_that_fit=fit(plain_weights, plain_kv),
        notes=notes(skeleton, cache, weight, head, None if checkpoint else quant_method(config)),
    )


def room(memory: int) -> int:
    """Bytes of memory for weights and caches: all but `RESERVED`."""
    return int(memory * (1 - RESERVED))


def parse_bytes(text: str, argument: str = "memory") -> int:
    """Bytes of "24GB" (10^9), "24GiB" (2^30), "512 MB" or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or len(text) > _LONGEST:
        excerpt = repr(text) if len(text) <= _LONGEST else f"{text[:20]!r}... ({len(text)} characters)"
        raise InvalidArgument(f"{argument}={excerpt}; give a number with a unit, such as 24GB or 24GiB")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def load_config(model: str) -> Any:
    """The transformers configuration of a folder or Hub id."""
    from halfbyte.hf.model_support import read_config

    try:
        return read_config(model)
    except Exception as error:  # transformers meets a damaged configuration with whatever its checks run into
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"model={model!r}: no usable config.json there or on the Hub: {reason}") from error


# --------------------------------------------------------------------------------------------------------------- the model


def meta_model(config: Any, name: str) -> torch.nn.Module:
    """The model without storage: shapes only."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise CheckpointError(
            f"model={name!r} is of type {config.model_type!r}, which transformers has no causal language model for"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"model={name!r}: transformers cannot build what its config.json describes ({reason})") from error
    return model


def weight_or_plain(name: str) -> Format | None:
    """The weight format of this name; None for the name of a 16-bit type, in which weights stay."""
    return None if name in HALVES else weight_format(name)


def packed_layers(config: Any, keys: str | Sequence[str], values: str | Sequence[str], skip_layers: Collection[int]) -> CacheSizes:
    """The cache as `halfbyte.hf` would make it: its checks, its refusals."""
    from halfbyte.hf.cache_layers import CacheSettings, layer_options
    from halfbyte.hf.model_support import ATTENTION, STATES, check_model_support, head_dims, kv_heads, layer_types, text_config

    check_model_support(config)
    text, kinds = text_config(config), layer_types(text_config(config))
    options = layer_options(config, torch.bfloat16, CacheSettings(keys, values, skip_layers=skip_layers))
    layers = tuple(
        LayerSizes(own.keys, own.values, kv_heads(text, layer), *head_dims(text, layer), own.sliding)
        for layer, (own, kind) in enumerate(zip(options, kinds, strict=True))
        if kind in ATTENTION
    )
    return CacheSizes(layers, sum(kind in STATES for kind in kinds))


@dataclass(frozen=True)
class LayerSizes:
    """Formats and sizes of a layer that has keys and values of its own; `sliding`: the window of its attention."""

    keys: Format
    values: Format
    kv_heads: int
    key_dim: int
    value_dim: int
    sliding: int | None = None

    def nbytes(self, batch: int, tokens: int, exact: int = 0) -> int:
        """Bytes, with `exact` tokens of a sequence in 16 bits as well. Per-channel keys: room for whole blocks on both sides."""
        block = self.keys.token_block or 1
        if self.sliding is not None and "tensor" not in (self.keys.granularity, self.values.granularity):
            tokens = min(tokens, ring_tokens(self.sliding))
        rows = (batch, self.kv_heads, math.ceil(tokens / block) * block)
        tail = block * self.key_dim if self.keys.token_block else 0
        if self.keys.is_quantized:
            tail += exact * (self.key_dim + self.value_dim)
        codes = self.keys.nbytes((*rows, self.key_dim)) + self.values.nbytes((*rows, self.value_dim))
        return codes + 2 * batch * self.kv_heads * tail

    def plain_nbytes(self, batch: int, tokens: int) -> int:
        """Bytes in 16 bits, as engines and transformers keep them."""
        tokens = tokens if self.sliding is None else min(tokens, self.sliding)
        return 2 * batch * self.kv_heads * tokens * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class CacheSizes:
    """Every layer that has keys and values of its own.

    states   layers with a recurrent or convolutional state
    window   tokens of a sequence that layers with codes also hold in 16 bits
    """

    layers: tuple[LayerSizes, ...]
    states: int = 0
    window: int = 0

    @cached_property
    def _alike(self) -> dict[LayerSizes, int]:
        """Layers of one kind, counted: those who ask for the bytes of many contexts would wait for all layers of each."""
        return Counter(self.layers)

    def nbytes(self, batch: int, tokens: int) -> int:
        return sum(count * layer.nbytes(batch, tokens, self.window) for layer, count in self._alike.items())

    def plain_nbytes(self, batch: int, tokens: int) -> int:
        return sum(layer.plain_nbytes(batch, tokens) for layer in self.layers)


def plain_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters in 16 bits."""
    return 2 * sum(p.numel() for p in model.parameters())


def quantized_bytes(model: torch.nn.Module, fmt: Format | None, lm_head: Format | None = None) -> tuple[int, int]:
    """(bytes saved against 16 bits, parameters quantized) when `halfbyte.hf.quantize` gives this model the format `fmt`, and its
    output layer `lm_head`. One that is tied to the embedding saves nothing and adds its own bytes."""
    from halfbyte.hf.weights import find_lm_head, is_tied, select

    saving = parameters = 0
    if fmt is not None:
        for name, target in select(model, ()).items():
            fmt.check_shape(target.shape, f"{name}.weight {list(target.shape)}")
            saving += 2 * math.prod(target.shape) - fmt.nbytes(target.shape)
            parameters += math.prod(target.shape)
    if lm_head is not None:
        shape = next(iter(find_lm_head(model, lm_head).values())).shape
        count = 0 if is_tied(model) else math.prod(shape)
        saving += 2 * count - lm_head.nbytes(shape)
        parameters += count
    return saving, parameters


@dataclass(frozen=True)
class Stored:
    """The weights of a folder that `halfbyte quantize` wrote: module name -> format, and the modules in act-order."""

    formats: dict[str, Format]
    act_order: tuple[str, ...]

    @property
    def name(self) -> str:
        """The one format of all of them, or "mixed"."""
        names = {fmt.name for fmt in self.formats.values()}
        return names.pop() if len(names) == 1 else "mixed"

    def check(self, weights: str | None, model: str) -> None:
        """Raise for a format that was given and is none of these."""
        names = sorted({fmt.name for fmt in self.formats.values()})
        check(
            weights is None or weights in names,
            f"weights={weights!r}, and those of {model} are stored as {', '.join(names)}; leave --weights out",
        )

    def quantized_bytes(self, model: torch.nn.Module) -> tuple[int, int]:
        """(bytes saved against 16 bits, parameters quantized) of a model of the folder's configuration."""
        from halfbyte.hf.weights import targets

        layers = targets(model)
        if unknown := sorted(self.formats.keys() - layers.keys()):
            raise CheckpointError(f"quantization_config names {unknown[0]!r}, which is no linear layer and no experts of the model")
        shapes = {layers[name]: (fmt, name in self.act_order) for name, fmt in self.formats.items()}
        saving = sum(2 * math.prod(t.shape) - fmt.nbytes(t.shape) - 4 * t.shape[-1] * order for t, (fmt, order) in shapes.items())
        return saving, sum(math.prod(t.shape) for t in shapes)


def stored_weights(config: Any) -> Stored | None:
    """What a configuration says of weights that halfbyte quantized; None for other models, or where only a cache is configured."""
    from halfbyte.checkpoints.adapters import OWN
    from halfbyte.hf.quantization_config import HalfbyteConfig

    if quant_method(config) != OWN:
        return None
    section = config.quantization_config
    options = HalfbyteConfig(**section) if isinstance(section, dict) else section
    return Stored({name: weight_format(fmt) for name, fmt in options.modules.items()}, tuple(options.act_order))


def quant_method(config: Any) -> str | None:
    """How the weights of the model's files are quantized already, if they are; halfbyte may have settings of a cache alone."""
    from halfbyte.checkpoints.adapters import OWN

    section = getattr(config, "quantization_config", None)
    method, modules = (
        section.get(n) if isinstance(section, dict) else getattr(section, n, None) for n in ("quant_method", "modules")
    )
    return None if method is None or (method == OWN and not modules) else str(method)


def notes(
    model: torch.nn.Module, cache: CacheSizes, fmt: Format | None, lm_head: Format | None, method: str | None
) -> tuple[str, ...]:
    """What the figures leave out or put in that a reader may not expect."""
    from halfbyte.hf.weights import is_tied

    lines = []
    if lm_head is not None and is_tied(model):
        extra = -quantized_bytes(model, None, lm_head)[0]
        lines.append(f"lm_head is tied to the embedding, which stays in 16 bits: its own {lm_head} weights add {extra:,} bytes")
    if method is not None and fmt is None:
        lines.append(f"the weights of this model are quantized already ({method}), and counted in 16 bits; name their --weights")
    if sliding := sum(layer.sliding is not None for layer in cache.layers):
        lines.append(f"{sliding} sliding-window layers keep their window and {SPARE} to {2 * SPARE - 1} tokens more")
    if cache.states:
        lines.append(f"the states of {cache.states} recurrent or convolutional layers, whose size is fixed, are not counted")
    return tuple(lines)
