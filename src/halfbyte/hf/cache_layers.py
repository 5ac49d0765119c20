"""Layers of a `PackedCache`: packed keys and values, the state of a recurrence or a convolution, or both.

States (Mamba, gated delta nets, short convolutions) have a fixed size; transformers keeps them, in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin

from halfbyte.cache import KVCache
from halfbyte.calibrated_keys import Calibration, digest_of_norms, read_calibration
from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.formats import Format, check_window, key_format, value_format
from halfbyte.hf.handles import PACKED, Drafts, Handle
from halfbyte.hf.model_support import (
    ATTENTION,
    BUCKET,
    STATES,
    all_head_dims,
    check_no_latents,
    head_dims,
    inner_model,
    kv_scales,
    layer_reach,
    model_sizes,
    one_each,
    text_config,
)
from halfbyte.ops.append import APPEND, append_of_parts
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.paging import SPARE, WindowKVCache
from halfbyte.reference.hadamard import check_rotation, rotated
from halfbyte.tensors import KeyTransform, LatentHeads

#: A layer with a state and no attention.
StateLayer: Any = cache_utils.LinearAttentionLayer
#: A layer with neither. That of transformers before DummyLayer has a state, which stays empty.
EmptyLayer: Any = getattr(cache_utils, "DummyLayer", StateLayer)


class Chunk(NamedTuple):
    """The tokens of a recorded forward, int32 [B]: how many come before them (None: they are a prompt), and how many are real."""

    held: torch.Tensor | None
    counts: torch.Tensor


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


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The packed keys and values of one layer. Allocated by the first `update`, when shapes and device are known."""

    is_croppable = True
    is_sliding = False  # attention applies a window itself, without a mask

    def __init__(self, capacity: int, options: LayerOptions) -> None:
        super().__init__()
        keys, values, self.options = options.keys, options.values, options
        self.capacity, self.key_format, self.value_format = capacity, keys, values
        self.rotate_values = options.rotate_values and values.is_quantized
        #: None where one measured scale is of the first tokens appended: then all are kept.
        self.sliding = None if "tensor" in (keys.granularity, values.granularity) else options.sliding
        #: As it is given, and on the device.
        self.calibrated = self.transform = options.transform if keys.is_quantized else None
        self.rotate_keys = options.rotate_keys and self.transform is None
        #: Whether `generate()` may record steps in CUDA graphs.
        self.records = True
        self.kv: KVCache | None = None
        #: Within a call of `generate()` with drafts: then attention appends what `update` is given.
        self.drafts: Drafts | None = None
        #: Whether it has held nothing since it was made or emptied, and whether its newest tokens are its first.
        self.is_empty, self.begins = True, False
        #: Tokens up to which a chunk is a step, which reads itself as it is stored; a longer one is a prompt (`expect_steps`).
        self.longest_step = 1
        #: Within a recorded prompt, or a recorded step with drafts: where its tokens stand.
        self.chunk: Chunk | None = None
        #: While a model's structure is read (`structure.py`), or keys are calibrated: a list of what attention is given.
        self.calls: Any = None
        #: How heads expand what the cache holds, where that is latents (`cache.py`).
        self.latent_heads: LatentHeads | None = None
        #: Whether attention checks that a row is one text; one layer of a cache does.
        self.checks_positions = False
        #: The layer that computes where a step's chunk starts, [B], for this one (`attention.py`); None: it does itself.
        self.leader: PackedLayer | None = None
        self.chunk_start = torch.empty(0)
        #: The tensors of `kv` and what else compiled code reads of it, flat: each attribute of `kv` would be a Dynamo guard.
        self.parts: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"PackedLayer(keys/values {self.kinds}, capacity={self.capacity})"

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile steps; never those of drafts."""
        return self.records and self.drafts is None

    @property
    def kinds(self) -> str:
        """Formats of keys and values as they are printed: "int4 rotated/int4"."""
        keys, values = self.key_format.name, self.value_format.name
        keys += " calibrated" * (self.transform is not None) + " rotated" * self.rotate_keys
        return f"{keys}/{values}{' rotated' * self.rotate_values}"

    @property
    def batch_size(self) -> int:
        """Sequences, once allocated (before that the attribute does not exist, as transformers' own layers have it)."""
        if self.kv is None:
            raise AttributeError("batch_size: the layer is allocated by its first update")
        return int(self.kv.batch)

    @property
    def nbytes(self) -> int:
        return 0 if self.kv is None else int(self.kv.nbytes)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        if self.transform is not None:
            self.transform = self.transform.like(key_states)
        kind: Any = KVCache if self.sliding is None else partial(WindowKVCache, window=self.sliding)
        changed = self.rotate_keys or self.transform is not None, self.rotate_values
        scales = zip(("k_scale", "v_scale"), self.options.scales, changed, strict=True)
        kv = kind(
            batch,
            heads,
            dim,
            self.capacity,
            keys=self.key_format,
            values=self.value_format,
            value_dim=value_states.shape[-1],
            rotate_keys=self.rotate_keys,
            sink_tokens=self.options.window[0],
            recent_tokens=self.options.window[1],
            dtype=self.options.dtype,
            device=key_states.device,
            **{name: scale for name, scale, is_changed in scales if scale is not None and not is_changed},
        )
        self._hold(kv)

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens, at least what there is; the codes are copied as they are."""
        self.capacity = max(capacity, self.capacity)
        if self.kv is not None and self.kv.capacity < self.capacity:
            self._hold(self.kv.grown(self.capacity))

    def _hold(self, kv: KVCache) -> None:
        """Use `kv` as this layer's memory. Its addresses are marked static, which CUDA graphs require."""
        measure = "tensor" in (kv.keys.format.granularity, kv.values.format.granularity)
        memory: dict[str, Any] = {"keys": kv.keys, "values": kv.values, "lengths": kv.lengths, "page_table": kv.page_table}
        self.kv, self.is_initialized = kv, True
        self.parts = APPEND.parts(**memory, rotate_keys=kv.rotate_keys, measure=measure)
        if not torch.compiler.is_compiling():
            for buffer in kv.tensors():
                torch._dynamo.mark_static_address(buffer)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Handle, Handle]:
        """Append k, v [B, H, L, D] and return handles that only the attention function can open.

        rope=, q=, norms=: as in `KVCache.append`, in eager calls; the handle of the keys holds q, rotated. Where keys are
        transformed or values rotated, their handles hold them so; attention, or this with q, transforms queries to match, and
        attention rotates its output back.
        """
        if self.rotate_values:
            value_states = transform_heads(value_states)
        if not self.parts:
            self.lazy_initialization(key_states, value_states)
        of_positions = {x: kwargs.get(x) for x in ("rope", "q", "norms")}
        if self.transform is not None and of_positions["q"] is not None:
            of_positions["transform"] = self.transform
        elif self.transform is not None:
            key_states = transform_heads(key_states, self.transform.keys, self.transform.shift)
        kv = cast(KVCache, self.kv)
        rotated = before = None
        if self.sliding is not None and key_states.shape[2] > SPARE:
            before = self._past(kv)
        if not torch.compiler.is_compiling():  # which would be guarded
            self.begins = self.is_empty
        self.is_empty = False
        if torch.compiler.is_compiling():
            append_of_parts(key_states, value_states, self.parts)
            kv.forget_length_bound()
        elif self.drafts is None:  # else attention appends
            counts = None if self.chunk is None else self.chunk.counts
            rotated = kv.append(key_states, value_states, counts, **of_positions)
        return Handle(self, key_states, "keys", rotated, before), Handle(self, value_states, "values")

    def _past(self, kv: KVCache) -> KVCache | None:
        """A copy of the window, in place of which a long chunk is about to be stored; None where nothing is held."""
        if torch.compiler.is_compiling():
            raise Unsupported(
                f"a compiled forward of more than {SPARE} tokens over a layer with a sliding window; compile steps only, as "
                f"generate() does"
            )
        return None if kv.length_bound == 0 or self.drafts is not None else kv.repeat_interleave(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(capacity, PACKED): the second number tells the mask function that a packed cache is asking."""
        return self.capacity, PACKED

    def get_seq_length(self) -> Any:
        """Tokens held: a number on the CPU; a tensor inside graphs and on a GPU, where a number would wait for the device."""
        lengths = self.parts.get("lengths")
        if lengths is None or lengths.shape[0] == 0:
            return 0
        first = lengths[0]
        return first if torch.compiler.is_compiling() or first.device.type != "cpu" else int(first)

    def get_max_length(self) -> int:
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is negative. Lossy within a block of per-channel keys, as `KVCache.crop`."""
        if tokens_to_remove > 0:
            raise InvalidArgument(
                f"tokens_to_remove={tokens_to_remove}; pass a negative number: crop(-3) forgets the last three tokens"
            )
        taken_back = self.kv is not None and self.drafts is not None and self.drafts.take_back(self.kv, -tokens_to_remove)
        if tokens_to_remove and self.kv is not None and not taken_back:
            self.keep((self.kv.lengths + tokens_to_remove).clamp_min(0))

    def keep(self, lengths: torch.Tensor) -> None:
        """Forget what is beyond the first `lengths` [B] tokens. Waits for a GPU."""
        if self.kv is not None:
            self.kv.crop(lengths.to(self.kv.device))
            self.is_empty = not bool(self.kv.lengths.any())

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove < 0 and isinstance(self.kv, WindowKVCache):
            self.kv.check_crop((self.kv.lengths + tokens_to_remove).clamp_min(0))

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.drafts = self.chunk = None
        self.is_empty = True
        if self.kv is not None:
            self.kv.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.kv is not None:
            self.kv.reorder(beam_idx.to(self.kv.lengths.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            self._hold(self.kv.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.kv is not None:
            self._hold(self.kv.select(indices.to(self.kv.lengths.device)))

    def offload(self) -> None:
        raise Unsupported("offloading a packed cache is not implemented; it is already 2 to 4 times smaller than a 16-bit one")

    prefetch = offload


class HybridLayer(PackedLayer, StateLayer):  # type: ignore[misc]
    """Packed keys and values of a layer that has a state as well."""

    is_croppable = StateLayer.is_croppable

    def __init__(self, states: int, capacity: int, options: LayerOptions) -> None:
        PackedLayer.__init__(self, capacity, options)
        StateLayer.__init__(self, number_of_states=states)

    @property
    def nbytes(self) -> int:
        return PackedLayer.nbytes.fget(self) + state_bytes(self)  # type: ignore[attr-defined, no-any-return]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come without names, states by name."""
        kind: Any = StateLayer if kwargs else PackedLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        StateLayer.reset(self)
        PackedLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Raises what transformers raises for a state that cannot go back; then nothing has changed."""
        StateLayer.crop(self, tokens_to_remove)
        PackedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        StateLayer.reorder_cache(self, beam_idx)
        PackedLayer.reorder_cache(self, beam_idx)


def cache_layer(kind: str, attention: type[PackedLayer], states: int, capacity: int, options: LayerOptions) -> Any:
    """A layer of a cache, by its type in the configuration, and by what those with attention are."""
    if kind in ATTENTION:
        return HybridLayer(states, capacity, options) if kind in STATES else attention(capacity, options)
    return StateLayer(number_of_states=states) if kind in STATES else EmptyLayer()


def state_bytes(layer: Any) -> int:
    """Bytes of the states that a layer holds."""
    states = (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values())
    return sum(t.nbytes for t in states if t is not None)


@dataclass(frozen=True)
class CacheSettings:
    """The options of a `PackedCache`. Formats are one, or one for each layer, as `rotate_keys` is."""

    keys: str | Sequence[str]
    values: str | Sequence[str]
    rotate_keys: bool | Sequence[bool] | None = None
    skip_layers: Iterable[int] = ()
    sink_tokens: int = 0
    recent_tokens: int = 0
    rotate_values: bool = False
    calibration: Calibration | None = None

    @property
    def options(self) -> dict[str, Any]:
        """By name, as `halfbyte.hf.quantize` takes them."""
        return {f.name: getattr(self, f.name) for f in fields(CacheSettings)}


def layer_options(model_or_config: Any, dtype: torch.dtype, cache: CacheSettings, capacity: int = 2**31 - 1) -> list[LayerOptions]:
    """Of every layer. Raises `InvalidArgument` or `Unsupported` where one does not fit."""
    config, window = text_config(model_or_config), (cache.sink_tokens, cache.recent_tokens)
    formats = _formats(config, cache.keys, cache.values, cache.skip_layers, dtype)
    rotations = one_each("rotate_keys", cache.rotate_keys, len(formats))
    transforms = _transforms(model_or_config, cache.calibration, len(formats))
    stored = kv_scales(config) or {"format": None, "layers": [(None, None)] * len(formats)}
    any_codes = any(fmt.is_quantized for sides in formats for fmt in sides)
    options = []
    for layer, sides in enumerate(formats):
        (key_dim, value_dim), has_codes = head_dims(config, layer), any(fmt.is_quantized for fmt in sides)
        check_rotation(cache.rotate_values, value_dim, "rotate_values")
        if has_codes or not any_codes:
            check_window(*window, *sides, capacity)
        scales = [s if fmt.name == stored["format"] else None for s, fmt in zip(stored["layers"][layer], sides, strict=True)]
        is_rotated, reach = rotated(rotations[layer], sides[0], key_dim), layer_reach(config, layer)
        own = window if has_codes else (0, 0)
        options.append(LayerOptions(*sides, is_rotated, dtype, own, cache.rotate_values, reach, scales, transforms[layer]))
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
