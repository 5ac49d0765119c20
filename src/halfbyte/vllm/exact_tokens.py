"""Sink and recent tokens in 16 bits: a layer stores each token a second time, in pages that vLLM manages as a sliding window's.

So prefix hits, preemption, chunks and drafts find the recent tokens as they do in models with windows. The pages of a sequence's
first tokens are kept with them (`ExactTokensManager`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from halfbyte.engine import ExactTokens, PageLayout, append_slots
from halfbyte.kv_buffer import KVBuffer
from halfbyte.tensors import KeyTransform

#: A child of vLLM's logger, so that vLLM prints it.
logger = init_logger("vllm.halfbyte")


class ExactTokensManager(SlidingWindowManager):  # type: ignore[misc]
    """Blocks of a window, and of a sequence's first tokens."""

    def __init__(self, kv_cache_spec: ExactTokensSpec, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        self.sink_blocks = kv_cache_spec.sink_blocks

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        super()._remove_blocks_in_range(request_id, max(first_block, self.sink_blocks), last_block)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        *args: Any,
        **options: Any,
    ) -> int:
        """As of a window, and the first blocks that a hit takes out of the pool's free ones."""
        count = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **options
        )
        before = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        return int(count + self._get_num_evictable_blocks(new_computed_blocks[: min(before, self.sink_blocks)]))

    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[Any], *args: Any, **options: Any) -> None:
        """As of a window, which drops the blocks before it."""
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **options)
        blocks = self.req_to_blocks[request_id]
        for i, block in enumerate(new_computed_blocks[: self.sink_blocks]):
            if blocks[i].is_null and not block.is_null:
                self.block_pool.touch([block])
                blocks[i] = block

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: ExactTokensSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **options: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """A window's hit, if the first blocks are there, too; else none."""
        groups, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens, **options
        )
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)
        for i in range(min(kv_cache_spec.sink_blocks, len(groups[0]))):
            if groups[0][i].is_null:
                first = block_pool.get_cached_block(hashes[i], kv_cache_group_ids)
                if first is None:
                    return tuple([] for _ in groups), 0
                for blocks, block in zip(groups, first, strict=True):
                    blocks[i] = block
        return groups, length

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: ExactTokensSpec,
        *args: Any,
        **options: Any,
    ) -> list[bool] | None:
        mask: list[bool] | None = super().reachable_block_mask(
            start_block, end_block, alignment_tokens, kv_cache_spec, *args, **options
        )
        if mask is not None:
            for i in range(start_block, min(end_block, kv_cache_spec.sink_blocks)):
                mask[i - start_block] = True
        return mask


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM registers its own specs at the first use, if there are none


@register_kv_cache_spec(manager_class=ExactTokensManager)
@dataclass(frozen=True, kw_only=True)
class ExactTokensSpec(SlidingWindowSpec):  # type: ignore[misc]
    """Pages of the last `sliding_window` tokens and of the first `sink_tokens`."""

    sink_tokens: int

    @property
    def sink_blocks(self) -> int:
        return -(-self.sink_tokens // int(self.block_size))

    @property
    def num_retained_tokens(self) -> int:
        """0: vLLM 0.33 clears no entries of a block table before the window."""
        return 0

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        sinks = min(self.sink_blocks, -(-max_model_len // int(self.block_size)))
        return int(super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len) + sinks)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        alike = (self.sliding_window, self.sink_tokens)
        return all(
            isinstance(spec, ExactTokensSpec) and (spec.sliding_window, spec.sink_tokens) == alike
            for spec in kv_cache_specs.values()
        )


class ExactTokensLayer(AttentionLayerBase):  # type: ignore[misc]
    """What vLLM allocates pages for in addition to those of an attention layer.

    name         in vLLM's forward context
    impl         the attention of the layer, whose batches these pages are of
    layer        the attention layer
    backend      of pages in a 16-bit format
    sink_tokens, recent_tokens   as in `halfbyte.KVCache`
    """

    def __init__(self, name: str, impl: Any, layer: Any, backend: Any, sink_tokens: int, recent_tokens: int) -> None:
        self.name, self.impl, self.sink_tokens, self.recent_tokens = name, impl, sink_tokens, recent_tokens
        self.kv_cache = torch.tensor([])
        self._layer = layer
        self._layout = PageLayout(backend.pair[0], backend.pair[1], layer.head_size, layer.head_size_v)
        self._backend = type(backend.__name__, (_BlocksOfAllLayers, backend), {})
        self._buffers: tuple[int, tuple[KVBuffer, KVBuffer]] | None = None
        codes = PageLayout(impl.formats.keys, impl.formats.values, layer.head_size, layer.head_size_v)
        others = (sink_tokens + recent_tokens) * self._layout.token_head_bytes // codes.token_head_bytes
        text = "KV cache: %s sink and %s recent tokens of each request stay in 16 bits, in the memory of about %s other tokens"
        logger.info_once(text, sink_tokens, recent_tokens, others)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> ExactTokensSpec:
        layers = vllm_config.compilation_config.static_forward_context.values()
        windows = {getattr(layer, "sliding_window", None) for layer in layers}
        window = max(self.recent_tokens, 1)
        while window in windows:  # vLLM would take layers with equal windows for one kind
            window += 1
        return ExactTokensSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self._layer.num_kv_heads,
            head_size=self._layer.head_size,
            head_size_v=self._layer.head_size_v,
            dtype=torch.bfloat16,
            sliding_window=window,
            sink_tokens=self.sink_tokens,
        )

    def buffers(self) -> tuple[KVBuffer, KVBuffer]:
        """Keys and values in the memory of the layer; in a page of their own before vLLM has allocated it."""
        memory = self.kv_cache
        if not memory.numel():
            shape = (1, self._layer.num_kv_heads, self.impl.block_size, self._layout.token_head_bytes)
            return self._layout.buffers(torch.empty(shape, dtype=torch.uint8, device=current_platform.device_type))
        if self._buffers is None or self._buffers[0] != memory.data_ptr():
            self._buffers = memory.data_ptr(), self._layout.buffers(memory)
        return self._buffers[1]

    def store(
        self, key: torch.Tensor, value: torch.Tensor, transform: KeyTransform | tuple[()] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's tokens a second time; returns them in 16 bits, of which codes are made. transform: of keys."""
        slots, (keys, values) = get_attention_context(self.name)[3], self.buffers()
        if not transform:
            key, value = key.to(keys.codes.dtype), value.to(values.codes.dtype)
        append_slots(key[: len(slots)], value[: len(slots)], keys, values, slots, transform=transform)
        return key, value

    def of_batch(self) -> list[ExactTokens]:
        """Those of this step's groups of requests, which the layer has, too."""
        parts = get_attention_context(self.name)[0].parts
        return [self.of(part.page_table, part.code_lengths, part.sink_tokens) for part in parts]

    def of(self, page_table: torch.Tensor, code_lengths: torch.Tensor, sink_tokens: torch.Tensor) -> ExactTokens:
        """Those of requests."""
        keys, values = self.buffers()
        return ExactTokens(keys, values, page_table, sink_tokens if self.sink_tokens else None, self.recent_tokens, code_lengths)


class _BlocksOfAllLayers:
    """Of a backend: a block holds all layers, so that pages of both kinds need not have one size."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
