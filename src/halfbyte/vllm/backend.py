"""vLLM's attention backend over `halfbyte.engine`: one class for each pair of formats, HALFBYTE_INT8__INT4_G32 and so on.

vLLM queries the bytes of a token from the backend class, so each pair of formats has a class. It queries the class of each layer
once weights are loaded: until then a layer's class can be replaced. A page of a layer is uint8 [H, N, C], see `PageLayout`; slots
and page tables are vLLM's. With prefill "cache", the default, every query sees the stored codes, however a prompt is cut. Long
chunks read them rounded to 16 bits (`prompts.py`), so chunks, prefix hits and preemption change results by rounding only.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from itertools import repeat
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from halfbyte.cache_plan import LayerFormats
from halfbyte.engine import ExactTokens, PagedView, PageLayout, append_slots, attention_varlen
from halfbyte.errors import HalfbyteError, Unsupported
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops.compiling import cache_folder
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.ops.workspace import replay_in_turn
from halfbyte.plans.prompts import MOST_SCRATCH, scratch_tokens
from halfbyte.tensors import KeyTransform
from halfbyte.vllm.batches import HalfbyteBuilder, HalfbyteMetadata
from halfbyte.vllm.calibrated import layer_transform
from halfbyte.vllm.exact_tokens import ExactTokensLayer
from halfbyte.vllm.names import PLAN, backend_name, backend_names
from halfbyte.vllm.options import Options, Pair, check_cache, is_draft, layer_formats, layer_index
from halfbyte.vllm.prompts import FlashPrompts, flash_prompts
from halfbyte.vllm.warm_up import Limits, warm_up

#: A child of vLLM's logger, so that vLLM prints it.
logger = init_logger("vllm.halfbyte")


class PackedPages:
    """What vLLM queries of every backend over packed pages, of keys and values or of latents."""

    pair: ClassVar[Pair]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts in which a page of a layer is contiguous."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: batches are split by the query lengths that the host knows."""
        return False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """True: `supports_combination` refuses, with the reason."""
        return True


class HalfbyteBackend(PackedPages, AttentionBackend):  # type: ignore[misc]
    """What vLLM queries before it allocates the cache. Subclasses have their pair of formats."""

    forward_includes_kv_cache_update = False

    def __init_subclass__(cls) -> None:
        if "get_builder_cls" in vars(cls):  # it would be dropped: a layer takes the backend of its own formats
            reason = "chunked attention, or another that vLLM builds around a backend, is not served by halfbyte's"
            raise Unsupported(f"{cls.__name__}: {reason}; start without --attention-backend: weights can be quantized all the same")

    @classmethod
    def get_impl_cls(cls) -> type[HalfbyteImpl]:
        return _impl_of(cls.pair)

    @staticmethod
    def get_builder_cls() -> type[HalfbyteBuilder]:
        return HalfbyteBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec of a layer with packed pages. vLLM calls it again with its result."""
        if spec.state_content_bytes is not None:
            return spec
        if cls.pair is None:  # a layer has a backend of its own by the time that vLLM asks about it
            raise Unsupported(f"{PLAN}: vLLM gives all layers of this model pages of one size; name one pair of formats instead")
        layout = PageLayout(*cls.pair, spec.head_size, spec.head_size_v)
        return replace(spec, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NONE, state_content_bytes=layout.token_head_bytes)

    @staticmethod
    def is_supported_on_current_device(**sizes: int) -> bool:
        """What models ask whose values have fewer dims than keys, before they take a backend of vLLM's."""
        return True

    @staticmethod
    def set_head_size_v(head_size_v: int) -> None:
        """What they tell it: unused, since a layer says it."""

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """True: `Options.current` refuses those that move parts of pages."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **options: Any
    ) -> str | None:
        try:
            check_cache(cls.pair, head_size, kv_cache_dtype or "auto")
        except HalfbyteError as error:
            return str(error)
        return None


class HalfbyteImpl(AttentionImpl[HalfbyteMetadata]):  # type: ignore[misc]
    """The attention of one layer. Subclasses have their pair of formats."""

    pair: ClassVar[Pair]
    formats: LayerFormats

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **other: Any,
    ) -> None:
        if other or attn_type != AttentionType.DECODER:
            raise Unsupported(f"attention of type {attn_type} with {sorted(other)} is not implemented for halfbyte's cache")
        check_cache(self.pair, head_size, kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.sliding_window, self.logits_soft_cap, self.sinks = sliding_window, logits_soft_cap or None, sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options = Options.current(self.pair)
        config = get_current_vllm_config()
        self._layers, self._skipped = (
            config.compilation_config.static_forward_context,
            config.cache_config.kv_cache_dtype_skip_layers,
        )
        longest, scheduler = config.model_config.max_model_len, config.scheduler_config
        self._config = config
        most = scheduler.max_num_batched_tokens
        self._scratch_tokens = min(scratch_tokens(most, longest, sum(self.options.exact_tokens)) + most, MOST_SCRATCH)
        self.prompts: FlashPrompts | None = None
        self.transform: KeyTransform | None = None
        self.exact_tokens: ExactTokensLayer | None = None
        self._slots: torch.Tensor | None = None
        self._limits, self._warm = Limits.of_engine(config), False
        self.block_size = config.cache_config.block_size or 16
        self._memory: tuple[int, int] | None = None
        self._buffers: tuple[KVBuffer, KVBuffer] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Choose the formats of this layer: vLLM has named it by now, and allocates its pages next."""
        name, layer = next((name, layer) for name, layer in self._layers.items() if getattr(layer, "impl", None) is self)
        index = layer_index(self.kv_sharing_target_layer_name or name)
        in_16_bits = str(index) in self._skipped or (self.sliding_window is not None and "sliding_window" in self._skipped)
        self.formats = layer_formats(self.options, self.pair, index, in_16_bits, act_dtype)
        if self.options.calibration is not None and KV_FORMATS[self.formats.keys].is_quantized:
            self.transform = layer_transform(self, layer, self._config.model_config, index, act_dtype)
            self.formats = replace(self.formats, rotate_keys=False)
        layer.attn_backend = _backend_of(backend_name(self.formats.keys, self.formats.values))
        self.exact_tokens = self._exact_tokens(name, layer, index, act_dtype)
        if self.alibi_slopes is not None:  # buffers outlast a sleep of level 2
            layer.register_buffer("halfbyte_alibi_slopes", self.alibi_slopes, persistent=False)
        self.prompts = flash_prompts(self, layer, self.formats, act_dtype, self._scratch_tokens)
        self._begin_to_compile(layer, act_dtype)

    def _exact_tokens(self, name: str, layer: Any, index: int, dtype: torch.dtype) -> ExactTokensLayer | None:
        """The pages of this layer's sink and recent tokens, if it has some: not of 16-bit formats, nor of a draft model."""
        sinks, recent = self.options.exact_tokens
        is_quantized = any(KV_FORMATS[name].is_quantized for name in (self.formats.keys, self.formats.values))
        if not (sinks or recent) or not is_quantized or is_draft(self._config, index):
            return None
        if self.kv_sharing_target_layer_name is not None:
            other: ExactTokensLayer = self._layers[f"{self.kv_sharing_target_layer_name}.exact_tokens"]
            return other
        plain = "fp16" if dtype is torch.float16 else "bf16"
        own = ExactTokensLayer(f"{name}.exact_tokens", self, layer, _backend_of(backend_name(plain, plain)), sinks, recent)
        self._layers[own.name] = own
        return own

    def _begin_to_compile(self, layer: Any, dtype: torch.dtype) -> None:
        """Compile in the background what attention needs, while vLLM compiles the model: kernels do not depend on addresses.

        They are kept where Triton keeps its kernels, for all models: vLLM would soon name a folder of this model and configuration.
        """
        if not current_platform.is_cuda():
            return
        os.environ.setdefault("TRITON_CACHE_DIR", cache_folder())
        sizes = (self.num_heads, self.head_size), (self.num_kv_heads, self.head_size), (self.num_kv_heads, layer.head_size_v)
        q, k, v = (torch.empty(1, *size, dtype=dtype, device="cuda") for size in sizes)
        replay_in_turn(q.device)
        layout = PageLayout(self.formats.keys, self.formats.values, self.head_size, layer.head_size_v)
        page = torch.empty(1, self.num_kv_heads, self.block_size, layout.token_head_bytes, dtype=torch.uint8, device=q.device)
        table = torch.zeros(1, -(-self._limits.longest // self.block_size), dtype=torch.int32, device=q.device)
        warm_up(self, self._limits, q, k, v, layout.buffers(page), table, wait=False)

    def buffers(self, layer: Any, kv_cache: torch.Tensor) -> tuple[KVBuffer, KVBuffer]:
        """Keys and values in the memory of a layer; viewed again when vLLM has moved it."""
        memory = kv_cache.data_ptr(), kv_cache.shape[0]
        if self._buffers is None or self._memory != memory:
            layout = PageLayout(self.formats.keys, self.formats.values, self.head_size, layer.head_size_v)
            self._buffers, self._memory = layout.buffers(kv_cache), memory
            log_blocks(layout, kv_cache.shape[0], layer.dtype)
        return self._buffers

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store this step's keys and values, calibrated ones together with queries in `forward`. Slots are -1 for padding."""
        if self.transform is not None:
            self._slots = slot_mapping
            return
        tokens = slot_mapping.shape[0]
        keys, values = self.buffers(layer, kv_cache)
        if self.exact_tokens is not None:
            key, value = self.exact_tokens.store(key, value)
        append_slots(key[:tokens], value[:tokens], keys, values, slot_mapping, rotate_keys=self.formats.rotate_keys)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HalfbyteMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, Hq, D] over the layer's pages into output [T, Hq, Dv]; key and value [T, H, D] are stored already."""
        if attn_metadata is None:  # vLLM measures memory
            if self.prompts is not None:
                self.prompts.scratch()
            return output.fill_(0)
        keys, values = self.buffers(layer, kv_cache)
        if not self._warm and key is not None and attn_metadata.parts:  # vLLM's warm-up has come to attention
            self._warm = True
            warm_up(self, self._limits, query, key, value, (keys, values), attn_metadata.parts[0].page_table)
        if self.transform is not None:
            query = self._store_calibrated(self.transform, query, key, value, (keys, values))
            if any(part.exact for part in attn_metadata.parts) and key is not None:
                key = transform_heads(key.unsqueeze(2), self.transform.keys, self.transform.shift).squeeze(2)
        exact_tokens = repeat(None) if self.exact_tokens is None else self.exact_tokens.of_batch()
        for part, exact in zip(attn_metadata.parts, exact_tokens, strict=False):
            q, out = query[part.rows], output[part.rows]
            new = (key[part.rows], value[part.rows]) if part.exact and key is not None else None
            cache = PagedView(keys, values, part.lengths, part.page_table, self.formats.rotate_keys)
            if part.host and self.prompts is not None:
                self.prompts.attend(part, q, cache, new, out, exact)
            else:
                self.attend_codes(cache, part.cu_seqlens_q, part.max_query_len, q, new, out, exact)
        return output

    def _store_calibrated(self, transform: KeyTransform, query: Any, key: Any, value: Any, sides: tuple[KVBuffer, KVBuffer]) -> Any:
        """Store this step's keys and values in one launch with its queries, which come back as they read such keys."""
        slots, self._slots = self._slots, None
        if slots is None:  # the keys are those of another layer
            return transform_heads(query.unsqueeze(2), transform.queries).squeeze(2)
        query, key, value = (x[: len(slots)] for x in (query, key, value))
        if self.exact_tokens is not None:
            self.exact_tokens.store(key, value, transform)
        return append_slots(key, value, *sides, slots, q=query, transform=transform)

    def attend_codes(
        self,
        cache: PagedView,
        cu_seqlens_q: torch.Tensor,
        max_query_len: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        exact_tokens: ExactTokens | None = None,
    ) -> None:
        """query [T, Hq, D] into out [T, Hq, Dv], by kernels that read codes.

        new: k and v of this step, unquantized; exact_tokens: sink and recent ones in 16 bits
        """
        k, v = (None, None) if new is None else new
        attention_varlen(
            query,
            cache,
            cu_seqlens_q,
            max_query_len,
            sm_scale=self.scale,
            alibi_slopes=self.alibi_slopes,
            window=self.sliding_window,
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            prefill="cache" if new is None else "exact",
            k=k,
            v=v,
            exact_tokens=exact_tokens,
            out=out,
            deterministic_batch=envs.VLLM_BATCH_INVARIANT,
        )


def log_blocks(layout: PageLayout, blocks: int, dtype: torch.dtype) -> None:
    """Log, once, how many blocks there are, and how many vLLM's own caches would have, in the model's type and in fp8."""
    plain, fp8 = (blocks * layout.token_head_bytes // ((layout.head_dim + layout.value_dim) * n) for n in (dtype.itemsize, 1))
    text = "KV cache in %s / %s: %s blocks; the same memory has %s in %s and %s in fp8"
    name = str(dtype).removeprefix("torch.")
    logger.info_once(text, layout.keys, layout.values, f"{blocks:,}", f"{plain:,}", name, f"{fp8:,}")


@functools.cache
def _impl_of(pair: Pair) -> type[HalfbyteImpl]:
    return type("HalfbyteImpl", (HalfbyteImpl,), {"pair": pair})


@functools.cache
def _backend_of(name: str) -> type[HalfbyteBackend]:
    return type(name, (HalfbyteBackend,), {"pair": backend_names()[name], "__module__": __name__})


def __getattr__(name: str) -> type[HalfbyteBackend]:
    """The backend of this name, as vLLM's registry imports it."""
    if name not in backend_names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend_of(name)
