"""PackedCache: a transformers `Cache` whose layers store quantized keys and values, which attention reads directly."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from transformers.cache_utils import Cache

from halfbyte.arguments import integer
from halfbyte.cache import KVCache
from halfbyte.cache_options import token_bytes
from halfbyte.calibrated_keys import Calibration
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported, check, warn_once
from halfbyte.hf.cache_layers import CacheSettings, Chunk, PackedLayer, StateLayer, cache_layer, layer_options, state_bytes
from halfbyte.hf.handles import Drafts
from halfbyte.hf.latents import LatentLayer
from halfbyte.hf.model_support import (
    BUCKET,
    DECODE_QUERIES,
    STATES,
    all_head_dims,
    check_attention,
    check_model_support,
    half_type,
    is_latent,
    kv_heads,
    layer_chunk,
    layer_types,
    text_config,
)
from halfbyte.hf.progress import APPENDED, CROSS, REQUESTED, WRITTEN, Progress, half_way
from halfbyte.plans import GPU_LEVELS
from halfbyte.settings import default_impl

#: Held while a cache is marked as used.
_USE = threading.Lock()
_NO_WAY_BACK = "recurrent and convolutional states cannot go back to earlier tokens; call reset()"


def _records_graphs(model_or_config: Any) -> bool:
    """Whether generate() may capture a decode step of this model in a CUDA graph: only if every op is a kernel, as in 16 bits."""
    if not isinstance(model_or_config, torch.nn.Module) or default_impl() not in ("auto", *GPU_LEVELS):
        return False  # a configuration does not say what the model has been cast to
    return getattr(model_or_config, "dtype", None) in (torch.float16, torch.bfloat16)


class PackedCache(Cache):  # type: ignore[misc]
    """A packed KV cache for a whole model: `model.generate(..., past_key_values=PackedCache(model, capacity))`.

    model_or_config   a transformers model with the "halfbyte" attention (halfbyte.hf.quantize sets it), or its configuration
    capacity          most tokens of a sequence, prompt and answer together; rounded up to a multiple of 64. `grow` raises it
    keys, values      formats; they and their options are those of `halfbyte.hf.quantize`. Latents (MLA) are stored once, as values,
                      and rotary keys as keys. Per-tensor formats take the scales of the checkpoint, where nothing is rotated
    rotate_values     quantized values are stored Hadamard-rotated, and attention rotates its output back: two small launches a
                      layer, for models whose v_proj and o_proj cannot take the rotation
    dtype             the 16-bit type of what stays in 16 bits; None: float16 for a float16 model, else bfloat16

    Raises `Unsupported`, with the reason, for models whose attention cannot read packed data.

    `torch.save` writes it whole; `torch.load` needs `weights_only=False`. The error without it is torch's own, which stops at the
    name of the class, before any code of halfbyte runs. The `kv` of a layer, a `KVCache`, is read with `weights_only=True`.
    """

    #: Whether `generate()` made it for one call, and may reuse it unless the call returns it.
    is_default = False
    #: Whether a call of `generate()` uses it.
    _in_use = False

    def __init__(
        self,
        model_or_config: Any,
        capacity: int,
        *,
        keys: str | Sequence[str] = "int8",
        values: str | Sequence[str] = "int4_g32",
        rotate_keys: bool | Sequence[bool] | None = None,
        rotate_values: bool = False,
        calibration: Calibration | None = None,
        sink_tokens: int = 0,
        recent_tokens: int = 0,
        skip_layers: Iterable[int] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_capacity(capacity)
        check_model_support(model_or_config)
        check_attention(model_or_config)
        config, self.capacity = text_config(model_or_config), _whole_buckets(capacity)
        settings = CacheSettings(keys, values, rotate_keys, skip_layers, sink_tokens, recent_tokens, rotate_values, calibration)
        options = layer_options(model_or_config, dtype or half_type(model_or_config), settings, self.capacity)
        states, attention = int(getattr(config, "number_of_conv_states", 1)), LatentLayer if is_latent(config) else PackedLayer
        kinds = zip(layer_types(config), options, strict=True)
        cache_layers = [cache_layer(kind, attention, states, self.capacity, own) for kind, own in kinds]
        super().__init__(layers=cache_layers)
        self._packed = [number for number, layer in enumerate(cache_layers) if isinstance(layer, PackedLayer)]
        if torch.cuda.is_available() and not _records_graphs(model_or_config):
            for layer in self.packed:
                layer.records = False
        self.packed[0].checks_positions = True
        self._leader = next((n for n in self._packed if layer_chunk(config, n)), self._packed[0])
        self._lead()
        self._progress = Progress(self._packed, [n for n, kind in enumerate(layer_types(config)) if kind in STATES])
        sizes, dims = Counter[Any](), all_head_dims(config)
        for n in self._packed:
            sizes.update((side, kv_heads(config, n), dim) for side, dim in zip(options[n][:2], dims[n], strict=True))
        self.bytes_per_token = sum(count * token_bytes(*size) for size, count in sizes.items())

    def __repr__(self) -> str:
        kinds = sorted({layer.kinds for layer in self.packed})
        size = f"capacity={self.capacity}, {self.bytes_per_token:,.0f} bytes a token"
        others = f" of {len(self.layers)}" * self.has_states
        return f"PackedCache({len(self._packed)}{others} layers, keys/values {', '.join(kinds)}, {size})"

    @property
    def packed(self) -> list[PackedLayer]:
        """The layers that hold keys and values."""
        return [self.layers[number] for number in self._packed]

    @property
    def records(self) -> bool:
        """Whether `generate()` may record steps over it in CUDA graphs."""
        return all(layer.records for layer in self.packed)

    @property
    def has_states(self) -> bool:
        """Whether layers have states of a recurrence or a convolution, which cannot go back to earlier tokens."""
        return bool(self._states)

    @property
    def _states(self) -> list[Any]:
        """The layers with such a state, some of them with keys and values as well."""
        return [layer for layer in self.layers if hasattr(layer, "recurrent_states")]

    @property
    def has_latents(self) -> bool:
        """Whether layers hold latents (MLA), which compiled code cannot read."""
        return any(isinstance(layer, LatentLayer) for layer in self.layers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append to one layer. Raises if an earlier forward failed half-way (for example by NaN) and was not undone."""
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        check(
            layer_idx < len(self.layers),
            f"past_key_values holds {len(self.layers)} layers, and the model has more; make one for it",
        )
        self._reach(layer_idx, APPENDED)
        if layer_idx == self._packed[0]:
            self._check_batch(key_states.shape[0], layer_idx)
        try:
            result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except CapacityError as error:
            raise CapacityError(f"past_key_values: {error}. PackedCache.grow(n) makes room for n tokens a sequence") from None
        if self.layers[layer_idx].drafts is None:  # which are taken back later
            self._progress.ends(layer_idx, APPENDED)
        return result

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """The state of a convolution, which the layer that requests it moves on. Raises where `update` does."""
        self._reach(layer_idx, f"{REQUESTED} {state_idx}")
        self._progress.ends(layer_idx, REQUESTED)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Move the state of a convolution on. Raises for other sequences than those that are held."""
        if not torch.compiler.is_compiling():
            self._check_batch(conv_states.shape[0], layer_idx)
            if self.layers[layer_idx].is_recurrent_states_initialized[state_idx]:
                self._progress.awaits(layer_idx, WRITTEN)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Write the state of a recurrence."""
        result = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self._progress.ends(layer_idx, WRITTEN)
        return result

    def _reach(self, layer_idx: int, what: str) -> None:
        """A forward does `what` to a layer. Raises where an earlier one stopped before its end."""
        if torch.compiler.is_compiling():
            return
        if self._progress.stopped_before(layer_idx, what) and not self._level():
            count = sum(layer.kv is not None for layer in self.packed)
            raise half_way(count, len(self._packed), self.has_states)
        self._progress.begins(layer_idx, what)

    def _check_batch(self, batch: int, layer_idx: int) -> None:
        kv = self.packed[0].kv
        if kv is not None and kv.batch != batch:
            if layer_idx == self._progress.first:
                self._progress.forget()  # nothing has changed
            raise InvalidArgument(
                f"past_key_values holds {kv.batch} sequences, and the input {batch}: pass the same ones, choose by "
                f"batch_select_indices or batch_repeat_interleave of the cache, or make another cache"
            )

    def step(self, layer_idx: int, run: Callable[[KVCache], Any]) -> Any:
        """What `run` gives, which appends the next token of each sequence to a layer in place of `update`; None: it has not."""
        layer = self.layers[layer_idx]
        if self._progress.stopped_before(layer_idx, APPENDED) or not _takes_step(layer):
            return None
        result = run(layer.kv)
        if result is not None:
            layer.begins = False
            self._progress.begins(layer_idx, APPENDED)
            self._progress.ends(layer_idx, APPENDED)
        return result

    def expect_drafts(self, prompt: int | None) -> None:
        """Expect drafts after `prompt` tokens, and `crop` after each forward, as `generate()` does; None: no drafts."""
        if self._progress.is_open and self._level():
            self._progress.forget()
        for layer in self.packed:
            layer.drafts = None if prompt is None else Drafts(prompt, DECODE_QUERIES)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context manager of a call of `generate()`: raise if another one uses the cache, and warn of what has saturated."""
        with _USE:
            check(
                not self._in_use,
                "past_key_values is in use by another call of generate(); pass each a cache of its own, or call them one by one",
            )
            self._in_use = True
        try:
            yield
            self._warn_of_saturation()
        finally:
            self._in_use = False

    def _warn_of_saturation(self) -> None:
        """Warn, once, if more than 1 of 1,000 keys or values of a layer lie beyond a per-tensor scale. Waits for a GPU."""
        sides = [(layer.kv, side) for layer in self.packed if layer.kv is not None for side in (layer.kv.keys, layer.kv.values)]
        shares = [
            float(side.saturated) / max(int(kv.lengths.sum()) * side.heads * side.dim, 1)
            for kv, side in sides
            if side.saturated is not None
        ]
        if shares and max(shares) > 1e-3:
            warn_once(
                f"{max(shares):.2g} of the numbers that a layer's cache holds saturated: they lie beyond its per-tensor scale, "
                f"which the first tokens set. Begin with a longer prompt, or choose formats with a scale per token",
                key="saturation",
            )

    def expect_steps(self, tokens: int = DECODE_QUERIES) -> None:
        """Expect chunks of `tokens`: drafts of a loop of your own, or a text in parts, to measure formats.

        Up to 16 are read as a step: their own keys and values as they are stored. By default one token is; more are a prompt, which
        reads its own in 16 bits.
        """
        for layer in self.packed:
            layer.longest_step = tokens if tokens <= DECODE_QUERIES else 1

    def expect_chunk(self, counts: torch.Tensor | None, held: torch.Tensor | None = None) -> None:
        """Expect forwards of a recorded prompt, or step with drafts, whose tokens stand as a `Chunk` says; None: no such ones."""
        for layer in self.packed:
            layer.chunk = None if counts is None else Chunk(held, counts)

    def set_lengths(self, lengths: torch.Tensor) -> None:
        """Set each sequence's tokens to `lengths` [B] without synchronizing: a `crop` that reopens no block of codes."""
        buffers = [layer.kv.lengths for layer in self.packed if layer.kv is not None]
        torch._foreach_copy_(buffers, [lengths] * len(buffers))

    def _level(self) -> bool:
        """Whether all non-empty layers hold the same tokens. Reads the device. False with states, except for drafts."""
        if self.has_states and self.packed[0].drafts is None:
            return False
        lengths_by_layer = [layer.kv.lengths for layer in self.packed if layer.kv is not None]
        alike = all(
            torch.equal(lengths.to(lengths_by_layer[0].device), lengths_by_layer[0]) for lengths in lengths_by_layer
        )  # layers may be on several GPUs
        return len(lengths_by_layer) in (0, len(self._packed)) and alike

    def restore(self) -> None:
        """Undo a forward that failed half-way: every layer is cropped to the tokens that all of them hold.

        Raises `Unsupported` where layers have states, which it may have changed: `reset` such a cache.
        """
        buffers = [layer.kv for layer in self.packed if layer.kv is not None]
        if len(buffers) < len(self._packed):
            self.reset()
        elif self.has_states and self._progress.is_open:
            raise Unsupported(f"restore: {_NO_WAY_BACK}")
        else:
            shortest = torch.stack([kv.lengths.to(buffers[0].device) for kv in buffers]).amin(0)
            for layer in self.packed:
                layer.keep(shortest)
        self._progress.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is negative.

        Raises `Unsupported`, and changes nothing, where tokens are gone that a layer with a sliding window would then see, or where
        a layer has a state that cannot go back.
        """
        for layer in self.packed:
            layer.check_crop(tokens_to_remove)
        if tokens_to_remove < 0 and not all(layer.record_past and layer.is_croppable for layer in self._states):
            raise Unsupported(f"crop({tokens_to_remove}): {_NO_WAY_BACK}")
        super().crop(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at `indices`, in their order."""
        for layer in self.packed:
            layer.batch_select_indices(indices)
        for layer in self._states:
            StateLayer.reorder_cache(layer, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Hold each sequence `repeats` times, one after the other."""
        integer("repeats", repeats, 0, 2**31 - 1, "a number of copies, 0 or more")
        if (kv := self.packed[0].kv) is not None:
            self.batch_select_indices(torch.arange(kv.batch, device=kv.device).repeat_interleave(repeats))

    def reset(self) -> None:
        """Remove all tokens; the memory stays allocated."""
        super().reset()
        self._progress.forget()

    def grow(self, capacity: int) -> None:
        """Raise the capacity to `capacity` tokens per sequence, keeping the contents. `generate()` does so when needed.

        Copies the codes to new memory, layer by layer; compiled steps are captured again. A smaller capacity changes nothing.
        """
        _check_capacity(capacity)
        self.capacity = max(self.capacity, _whole_buckets(capacity))
        for layer in self.packed:
            layer.grow(self.capacity)

    def another(self, capacity: int) -> PackedCache | None:
        """A cache like this one, of its own `capacity`, without looking at the model again; None where that is not enough."""
        if self.has_states or self.nbytes or len(self._packed) < len(self.layers):
            return None
        other = self.over([copy(layer) for layer in self.layers])
        other.capacity = _whole_buckets(capacity)
        for layer in other.packed:
            layer.capacity, layer.parts = other.capacity, {}
        other._lead()
        return other

    def over(self, layers: list[Any]) -> PackedCache:
        """A shallow copy over such layers, through which no forward goes."""
        other, progress = copy(self), copy(self._progress)
        progress.forget()
        other.layers, other._progress = layers, progress
        return other

    def _lead(self) -> None:
        """Let the first layer of chunks compute where these start."""
        leader = self.layers[self._leader]
        for layer in self.packed:
            layer.leader = None if layer is leader else leader

    def expect_replays(self, expected: bool) -> None:
        """`KVCache.expect_replays` of all layers, which hold tokens from then on."""
        for layer in self.packed:
            layer.is_empty = layer.is_empty and not expected
            if layer.kv is not None:
                layer.kv.expect_replays(expected)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all layers, states included; 0 before the first forward."""
        return sum(layer.nbytes if isinstance(layer, PackedLayer) else state_bytes(layer) for layer in self.layers)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    @property
    def max_cache_len(self) -> int:
        """The capacity, for PEFT's prefix tuning, which reads it and then passes a 16-bit cache with its prefix to the model."""
        warn_once("prefix tuning (PEFT) passes a 16-bit cache of its own to the model, in place of the packed one")
        return self.capacity

    @property
    def is_updated(self) -> Any:
        """Of `EncoderDecoderCache`: a model with cross-attention reads it."""
        raise Unsupported(f"past_key_values is a {type(self).__name__}. {CROSS}")


def _check_capacity(capacity: int) -> None:
    integer("capacity", capacity, 1, 2**31 - BUCKET, f"the number of tokens to hold, 1 to 2^31 - {BUCKET}")


def _whole_buckets(capacity: int) -> int:
    return -(-capacity // BUCKET) * BUCKET


def _takes_step(layer: Any) -> bool:
    """Whether the next token of each sequence is stored as it is, and reads all before it as they are stored."""
    is_plain = type(layer.kv) is KVCache and layer.sliding is None and layer.transform is None and not layer.rotate_values
    waits = layer.drafts is None and layer.chunk is None and layer.latent_heads is None and layer.calls is None
    return is_plain and waits and not layer.is_empty
