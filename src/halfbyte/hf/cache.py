"""PackedCache: a transformers `Cache` whose layers store quantized keys and values, which attention reads directly."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from halfbyte.cache import KVCache
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported, check, warn_once
from halfbyte.formats import Format
from halfbyte.hf.attention import DECODE_QUERIES, PACKED, Handle
from halfbyte.hf.drafts import Chunk, Drafts
from halfbyte.hf.layer_options import BUCKET, layer_formats, layer_rotations, layer_windows
from halfbyte.hf.model_support import check_model_support, half_type, head_dims, text_config
from halfbyte.ops.append import Stored, append_parts, stored
from halfbyte.ops.rotate_heads import rotate_heads
from halfbyte.plans import GPU_LEVELS
from halfbyte.reference.hadamard import check_rotation
from halfbyte.settings import default_impl

#: What `crop` makes of a positive number: transformers 5.16 gave its argument another name and meaning.
_KEEPS_POSITIVE = "max_length" in inspect.signature(Cache.crop).parameters

_CROSS = "A model with cross-attention needs a second cache: past_key_values=EncoderDecoderCache(cache, DynamicCache())"


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The packed keys and values of one layer. Allocated by the first `update`, when shapes and device are known."""

    is_croppable = True
    is_sliding = False  # a window is applied when reading; every token stays, so that crop can bring it back

    def __init__(
        self,
        capacity: int,
        keys: Format,
        values: Format,
        rotate_keys: bool,
        dtype: torch.dtype,
        window: tuple[int, int] = (0, 0),
        rotate_values: bool = False,
    ) -> None:
        """`window`: sink tokens and recent tokens in 16 bits. `rotate_values`: those of 16 bits throughout stay as they are."""
        super().__init__()
        self.rotate_values = rotate_values and values.is_quantized
        self.sink_tokens, self.recent_tokens = window
        self.capacity, self.key_format, self.value_format = capacity, keys, values
        self.rotate_keys, self.buffer_dtype = rotate_keys, dtype
        #: Whether `generate()` may record steps in CUDA graphs.
        self.records = True
        self.kv: KVCache | None = None
        #: Within a call of `generate()` with drafts: then attention appends what `update` is given.
        self.drafts: Drafts | None = None
        #: Within a recorded step with drafts: where its tokens stand.
        self.chunk: Chunk | None = None
        #: The tensors of `kv` and what else compiled code reads of it, flat: each attribute of `kv` would be a Dynamo guard.
        self.parts: Stored = ()
        self.formats, self.measures = (keys.name, values.name), "tensor" in (keys.granularity, values.granularity)

    def __repr__(self) -> str:
        return f"PackedLayer(keys/values {self.kinds}, capacity={self.capacity})"

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile steps; never those of drafts, for which transformers 5.4 requires this to be False."""
        return self.records and self.drafts is None

    @property
    def kinds(self) -> str:
        """Formats of keys and values as they are printed: "int4 rotated/int4"."""
        keys, values = self.key_format.name, self.value_format.name
        return f"{keys}{' rotated' * self.rotate_keys}/{values}{' rotated' * self.rotate_values}"

    @property
    def batch_size(self) -> int:
        """Sequences, once allocated (before that the attribute does not exist, as transformers' own layers have it)."""
        if self.kv is None:
            raise AttributeError("batch_size: the layer is allocated by its first update")
        return int(self.kv.batch)

    @property
    def nbytes(self) -> int:
        """Bytes allocated; 0 before the first update."""
        return 0 if self.kv is None else int(self.kv.nbytes)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        kv = KVCache(
            batch,
            heads,
            dim,
            self.capacity,
            keys=self.key_format,
            values=self.value_format,
            value_dim=value_states.shape[-1],
            rotate_keys=self.rotate_keys,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            dtype=self.buffer_dtype,
            device=key_states.device,
        )
        self._hold(kv)

    def grow(self, capacity: int) -> None:
        """Room for `capacity` tokens, at least what there is; the codes are copied as they are."""
        self.capacity = max(capacity, self.capacity)
        if self.kv is not None and self.kv.capacity < self.capacity:
            self._hold(self.kv.grown(self.capacity))

    def _hold(self, kv: KVCache) -> None:
        """Use `kv` as this layer's memory. Its addresses are marked static, which CUDA graphs require."""
        self.kv, self.parts, self.is_initialized = kv, stored(kv.keys, kv.values, kv.lengths), True
        if not torch.compiler.is_compiling():
            for buffer in kv.tensors():
                torch._dynamo.mark_static_address(buffer)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Handle, Handle]:
        """Append k, v [B, H, L, D] and return handles that only the attention function can open.

        rope=, q=, norms=: as in `KVCache.append`, in eager calls; the handle of the keys holds q, rotated. Where values are
        rotated, their handle holds them so, and attention rotates its output back.
        """
        if self.rotate_values:
            value_states = rotate_heads(value_states)
        if not self.parts:
            self.lazy_initialization(key_states, value_states)
        kv = cast(KVCache, self.kv)
        rotated = None
        if torch.compiler.is_compiling():
            options = (self.rotate_keys, self.measures, self.sink_tokens)
            append_parts(key_states, value_states, self.parts, self.formats, *options)
            kv.forget_length_bound()
        elif self.drafts is None:  # else attention appends
            counts = None if self.chunk is None else self.chunk.counts
            rotated = kv.append(key_states, value_states, counts, **{x: kwargs.get(x) for x in ("rope", "q", "norms")})
        return Handle(self, key_states, "keys", rotated), Handle(self, value_states, "values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(capacity, PACKED): the second number tells the mask function that a packed cache is asking."""
        return self.capacity, PACKED

    def get_seq_length(self) -> Any:
        """Tokens held: a number on the CPU; a tensor inside graphs and on a GPU, where a number would wait for the device."""
        lengths = self.parts[-1] if self.parts else None
        if lengths is None or lengths.shape[0] == 0:
            return 0
        first = lengths[0]
        return first if torch.compiler.is_compiling() or first.device.type != "cpu" else int(first)

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name up to transformers 5.15

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is negative. Up to transformers 5.15 a positive one is how many stay."""
        if tokens_to_remove > 0:
            if not _KEEPS_POSITIVE:
                raise InvalidArgument(
                    f"tokens_to_remove={tokens_to_remove}; pass a negative number: crop(-3) forgets the last three tokens"
                )
            tokens_to_remove = min(0, tokens_to_remove - int(self.get_seq_length()))
        taken_back = self.kv is not None and self.drafts is not None and self.drafts.take_back(self.kv, -tokens_to_remove)
        if tokens_to_remove and self.kv is not None and not taken_back:
            self.kv.crop((self.kv.lengths + tokens_to_remove).clamp_min(0))

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.drafts = self.chunk = None
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


def _records_graphs(model_or_config: Any) -> bool:
    """Whether generate() may capture a decode step of this model in a CUDA graph: only if every op runs as a kernel.

    In 16 bits, attention and quantized linear layers do.
    """
    if not isinstance(model_or_config, torch.nn.Module) or default_impl() not in ("auto", *GPU_LEVELS):
        return False  # a configuration does not say what the model has been cast to
    return getattr(model_or_config, "dtype", None) in (torch.float16, torch.bfloat16)


class PackedCache(Cache):  # type: ignore[misc]
    """A packed KV cache for a whole model: `model.generate(..., past_key_values=PackedCache(model, capacity))`.

    model_or_config   a transformers model with the "halfbyte" attention (halfbyte.hf.quantize sets it), or its configuration
    capacity          tokens a sequence may reach, prompt and answer together; rounded up to a multiple of 64. `grow` adds more
    keys, values      formats; `halfbyte.formats.KV_FORMATS` lists them. One for all layers, or a list with one for each
    rotate_keys       Hadamard-rotate keys (and queries) against outliers: one for all layers, or one for each. None: as
                      `halfbyte.KVCache` does by default
    rotate_values     store quantized values Hadamard-rotated, too, and rotate the output of attention back: two small launches a
                      layer. For models whose v_proj and o_proj cannot take the rotation (`halfbyte.hf.quantize`)
    sink_tokens       the first tokens of a sequence that stay in 16 bits; left padding counts as tokens
    recent_tokens     the last tokens of a sequence that stay in 16 bits
    skip_layers       layers that keep 16 bits; negative numbers count from the end
    dtype             the 16-bit type of what stays in 16 bits; None: float16 for a float16 model, else bfloat16

    Raises `Unsupported`, with the reason, for models whose attention cannot read packed data.
    """

    #: Whether `generate()` made it, for one call: it is free afterwards, unless the call returns it.
    is_default = False

    def __init__(
        self,
        model_or_config: Any,
        capacity: int,
        *,
        keys: str | Sequence[str] = "int8",
        values: str | Sequence[str] = "int4_g32",
        rotate_keys: bool | Sequence[bool] | None = None,
        rotate_values: bool = False,
        sink_tokens: int = 0,
        recent_tokens: int = 0,
        skip_layers: Iterable[int] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_capacity(capacity)
        check_model_support(model_or_config)
        check_attention(model_or_config)
        config, dtype = text_config(model_or_config), dtype or half_type(model_or_config)
        formats = layer_formats(config, keys, values, skip_layers, dtype)
        rotations = layer_rotations(config, rotate_keys, [k for k, _ in formats])
        self.capacity = _whole_buckets(capacity)
        windows = layer_windows((sink_tokens, recent_tokens), formats, self.capacity)
        layers = zip(formats, rotations, windows, strict=True)
        check_rotation(rotate_values, head_dims(config)[1], "rotate_values")
        made = [PackedLayer(self.capacity, k, v, turned, dtype, window, rotate_values) for (k, v), turned, window in layers]
        super().__init__(layers=made)
        if torch.cuda.is_available() and not _records_graphs(model_or_config):
            for layer in self.layers:
                layer.records = False
        self._open = False  # a forward has begun and not reached the last layer
        self.bytes_per_token = sum(_token_bytes(config, k, v) for k, v in formats)

    def __repr__(self) -> str:
        kinds = sorted({layer.kinds for layer in self.layers})
        size = f"capacity={self.capacity}, {self.bytes_per_token:,.0f} bytes a token"
        return f"PackedCache({len(self.layers)} layers, keys/values {', '.join(kinds)}, {size})"

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append to one layer. A forward that failed half-way (NaN in a layer, say) must be undone before the next one."""
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        check(
            layer_idx < len(self.layers),
            f"past_key_values holds {len(self.layers)} layers, and the model has more; make one for it",
        )
        if layer_idx == 0:
            if self._open and not self._level():
                raise InvalidArgument(
                    "past_key_values: an earlier forward stopped half-way, and its tokens are in some layers only; "
                    f"call restore() on the cache to forget them, or reset(). {_CROSS}"
                )
            self._open = True
        try:
            made = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except CapacityError as error:
            raise CapacityError(f"past_key_values: {error}. PackedCache.grow(n) makes room for n tokens a sequence") from None
        self._open = self._open and (layer_idx != len(self.layers) - 1 or self.layers[layer_idx].drafts is not None)
        return made

    def expect_drafts(self, prompt: int | None) -> None:
        """Drafts will come behind `prompt` tokens, and `crop` after each forward, as `generate()` does it; None: no drafts."""
        for layer in self.layers:
            layer.drafts = None if prompt is None else Drafts(prompt, DECODE_QUERIES)

    def expect_chunk(self, chunk: Chunk | None) -> None:
        """Forwards of a recorded step with drafts come, whose tokens stand where `chunk` says; None: no more of them."""
        for layer in self.layers:
            layer.chunk = chunk

    def set_lengths(self, lengths: torch.Tensor) -> None:
        """Let each sequence hold `lengths` [B] tokens, without a look at the device: `crop` where no block of codes is reopened."""
        held = [layer.kv.lengths for layer in self.layers]
        torch._foreach_copy_(held, [lengths] * len(held))

    def _level(self) -> bool:
        """Whether all layers that hold anything hold the same tokens. Reads the device."""
        held = [layer.kv.lengths for layer in self.layers if layer.kv is not None]
        alike = all(torch.equal(lengths.to(held[0].device), held[0]) for lengths in held)  # layers may be on several GPUs
        return len(held) in (0, len(self.layers)) and alike

    def restore(self) -> None:
        """Undo a forward that failed half-way: every layer is cropped to the tokens that all of them hold."""
        if any(layer.kv is None for layer in self.layers):
            self.reset()
        else:
            first = self.layers[0].kv.device
            shortest = torch.stack([layer.kv.lengths.to(first) for layer in self.layers]).amin(0)
            for layer in self.layers:
                layer.kv.crop(shortest.to(layer.kv.device))
        self._open = False

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a sequence; what is held stays as it is. `generate()` does it by itself where it must.

        Copies the codes to new memory, layer by layer; compiled steps are captured again. A smaller capacity changes nothing.
        """
        _check_capacity(capacity)
        self.capacity = max(self.capacity, _whole_buckets(capacity))
        for layer in self.layers:
            layer.grow(self.capacity)

    def expect_replays(self, expected: bool) -> None:
        """`KVCache.expect_replays` of all layers."""
        for layer in self.layers:
            if layer.kv is not None:
                layer.kv.expect_replays(expected)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all layers; 0 before the first forward."""
        return sum(layer.nbytes for layer in self.layers)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name up to transformers 5.15

    @property
    def max_cache_len(self) -> int:
        """The capacity, for PEFT's prefix tuning, which reads it and then passes a 16-bit cache with its prefix to the model."""
        warn_once("prefix tuning (PEFT) passes a 16-bit cache of its own to the model, in place of the packed one")
        return self.capacity

    @property
    def is_updated(self) -> Any:
        """Of `EncoderDecoderCache`: a model with cross-attention reads it."""
        raise Unsupported(f"past_key_values is a {type(self).__name__}. {_CROSS}")

    def activate_past_recording(self) -> None:
        """Nothing to do: every token stays in the cache, so any of them can be cropped."""


def _check_capacity(capacity: int) -> None:
    check(isinstance(capacity, int) and capacity > 0, f"capacity={capacity!r}; pass the number of tokens to hold, at least 1")


def _whole_buckets(capacity: int) -> int:
    return -(-capacity // BUCKET) * BUCKET


def check_attention(model_or_config: Any) -> None:
    """Raise for a model whose attention is not halfbyte's: it could not read the handles of a packed cache."""
    from halfbyte.hf.attention import NAME

    current = getattr(getattr(model_or_config, "config", None), "_attn_implementation", None)
    if isinstance(model_or_config, torch.nn.Module) and current != NAME:
        raise InvalidArgument(
            f"model_or_config uses the attention implementation {current!r}, which cannot read a packed cache; "
            f'call model.set_attn_implementation("{NAME}") first (halfbyte.hf.quantize does it)'
        )


def _token_bytes(config: Any, k: Format, v: Format) -> float:
    """Bytes one token of one sequence takes in one layer, by the configuration."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    key_dim, value_dim = head_dims(config)
    shape = (1, heads, BUCKET)
    return (k.nbytes((*shape, key_dim)) + v.nbytes((*shape, value_dim))) / BUCKET
