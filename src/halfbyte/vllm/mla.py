"""vLLM's attention backend for multi-head latent attention (MLA), with latents in packed pages.

A token is stored once: its latent as values of one KV head, its rotary key as keys (`LatentHeads`). vLLM's layer keeps what it
does: decodes in the absorbed form, prompts expanded, a chunk's past in pieces that fit its workspace. This backend appends,
attends to packed latents, and unpacks them into that workspace. With prefill "cache", the default, a chunk's own latents are
replaced by the stored ones, so that every query sees the same numbers, however a prompt is cut.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from halfbyte.cache_plan import LayerFormats
from halfbyte.engine import PagedView, PageLayout, append_slots, unpack_pages
from halfbyte.errors import HalfbyteError, Unsupported
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops.compiling import cache_folder, compiling_only
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.ops.workspace import replay_in_turn
from halfbyte.vllm.backend import PackedPages, log_blocks
from halfbyte.vllm.names import backend_name, backend_names
from halfbyte.vllm.options import EXACT_TOKENS, Options, Pair, check_cache, check_cache_dtype, layer_formats, layer_index
from halfbyte.vllm.warm_up import Limits, warm_up

#: Why latents are not packed.
_SPARSE = "a sparse indexer picks the cached latents (MLA) that a query reads; start without --attention-backend"
#: Dims of a rotary key and of a latent.
Dims = tuple[int, int]


class HalfbyteMLABackend(PackedPages, MLACommonBackend):  # type: ignore[misc]
    """What vLLM queries before it allocates the cache. Subclasses have their pair of formats: of rotary keys, and of latents.

    dims: None until weights are loaded, when each layer gets the class of its own formats and dims.
    """

    dims: ClassVar[Dims | None]

    @classmethod
    def get_impl_cls(cls) -> type[HalfbyteMLAImpl]:
        return _impl_of(cls.pair)

    @staticmethod
    def get_builder_cls() -> type[HalfbyteMLABuilder]:
        return HalfbyteMLABuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """All: the impl refuses what fits no page, with the reason."""
        return []

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec of a layer with packed pages. vLLM calls it again with its result."""
        if spec.state_content_bytes is not None:
            return spec
        if cls.pair is None or cls.dims is None:
            raise Unsupported(f"{cls.__name__}: vLLM sizes pages of this model before its layers are built; leave the backend out")
        content = PageLayout(*cls.pair, *cls.dims).token_head_bytes
        return replace(spec, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NONE, state_content_bytes=content)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        *args: Any,
        **options: Any,
    ) -> str | None:
        try:
            check_cache_dtype(cls.pair, kv_cache_dtype or "auto")
        except HalfbyteError as error:
            return str(error)
        return _SPARSE if use_sparse else None


@dataclass
class HalfbyteMLAMetadata(MLACommonMetadata):  # type: ignore[misc]
    """vLLM's, of latents of any size."""

    def __post_init__(self) -> None:
        """Leave out the check of sizes that vLLM's own kernels take."""

    @functools.cached_property
    def stored_prompts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lengths, block table and bounds of prompts, once for all layers. They are copies, as kernels take aligned ones only."""
        prefill = self.prefill
        lengths, past = prefill.query_start_loc.diff(), prefill.chunked_context
        lengths = lengths if past is None else lengths + past.context_lens
        return lengths, prefill.block_table.clone(), prefill.query_start_loc.clone()

    @functools.cached_property
    def stored_past(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The same of what was stored before them, for each piece that fits vLLM's workspace."""
        prefill = self.prefill
        bounds = [chunk.cu_seq_lens.clone() for chunk in prefill.chunked_context.chunks]
        return [
            (chunk.starts + ends.diff(), prefill.block_table[chunk.request_slice].clone(), ends)
            for chunk, ends in zip(prefill.chunked_context.chunks, bounds, strict=True)
        ]


class HalfbyteMLABuilder(MLACommonMetadataBuilder[HalfbyteMLAMetadata]):  # type: ignore[misc]
    """vLLM's: decodes, all with as many drafts, and prompts."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, HalfbyteMLAMetadata)


class HalfbyteMLAImpl(MLACommonImpl[HalfbyteMLAMetadata]):  # type: ignore[misc]
    """The attention of one layer. Subclasses have their pair of formats."""

    pair: ClassVar[Pair]
    formats: LayerFormats
    #: What `warm_up` asks of a layer's attention.
    sinks = alibi_slopes = logits_soft_cap = sliding_window = prompts = exact_tokens = None

    def __init__(self, *args: Any, sliding_window: int | None = None, kv_cache_dtype: str = "auto", **options: Any) -> None:
        if options.get("indexer") is not None:
            raise Unsupported(_SPARSE)
        if sliding_window is not None:
            raise Unsupported("latents (MLA) with a sliding window are not packed; start without --attention-backend")
        super().__init__(*args, sliding_window=sliding_window, kv_cache_dtype=kv_cache_dtype, **options)
        self.dims = self.qk_rope_head_dim, self.kv_lora_rank
        check_cache(self.pair, self.qk_rope_head_dim, kv_cache_dtype, self.kv_lora_rank)
        self.options, config = Options.current(self.pair), get_current_vllm_config()
        if self.options.calibration is not None:
            raise Unsupported("halfbyte option calibration: calibrated keys over latents (MLA) are not implemented; leave it out")
        if any(self.options.exact_tokens):
            raise Unsupported(f"halfbyte options {EXACT_TOKENS} are not implemented for latents (MLA); leave them out")
        self._layers = config.compilation_config.static_forward_context
        self._skipped = config.cache_config.kv_cache_dtype_skip_layers
        self._limits, self._warm = Limits.of_engine(config)._replace(tokens=0), False  # vLLM's kernels attend to prompts
        self._block_size = config.cache_config.block_size or 16
        self._memory: tuple[int, int] | None = None
        self._buffers: tuple[KVBuffer, KVBuffer] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Choose the formats of this layer: vLLM has named it by now, and allocates its pages next."""
        name, layer = next((name, layer) for name, layer in self._layers.items() if getattr(layer, "impl", None) is self)
        index = layer_index(name)
        self.dtype = act_dtype
        self.formats = layer_formats(self.options, self.pair, index, str(index) in self._skipped, act_dtype)
        layer.attn_backend = _backend_of(backend_name(self.formats.keys, self.formats.values), self.dims)
        if current_platform.is_cuda():
            self._begin_to_compile()

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.formats.keys, self.formats.values, *self.dims)

    def _begin_to_compile(self) -> None:
        """Compile decodes in the background, while vLLM compiles the model (`HalfbyteImpl._begin_to_compile`)."""
        os.environ.setdefault("TRITON_CACHE_DIR", cache_folder())
        query = torch.empty(1, self.num_heads, sum(self.dims), dtype=self.dtype, device="cuda")
        replay_in_turn(query.device)
        page = torch.empty(1, 1, self._block_size, self.layout.token_head_bytes, dtype=torch.uint8, device=query.device)
        table = torch.zeros(1, -(-self._limits.longest // self._block_size), dtype=torch.int32, device=query.device)
        self._compile(query, self.layout.buffers(page), table, wait=False)

    def _compile(self, query: torch.Tensor, sides: tuple[KVBuffer, KVBuffer], table: torch.Tensor, wait: bool) -> None:
        """Compile decodes, and with `wait` how latents are unpacked, which a decode's warm-up does not meet."""
        keys, latents = query.new_empty(16, 1, sum(self.dims)).split(self.dims, -1)
        warm_up(self, self._limits, query, keys, latents, sides, table, wait)
        if wait:
            bounds = torch.zeros(2, dtype=torch.int32, device=query.device)
            with compiling_only():
                unpack_pages(PagedView(*sides, bounds[:1], table[:1].clone(), self.formats.rotate_keys), bounds, keys, latents)

    def buffers(self, kv_cache: torch.Tensor) -> tuple[KVBuffer, KVBuffer]:
        """Rotary keys and latents in the memory [pages, N, C] of a layer; viewed again when vLLM has moved it."""
        memory = kv_cache.data_ptr(), kv_cache.shape[0]
        if self._buffers is None or self._memory != memory:
            layout = self.layout
            self._buffers, self._memory = layout.buffers(kv_cache.unsqueeze(1)), memory
            log_blocks(layout, kv_cache.shape[0], self.dtype)
        return self._buffers

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *_: Any,
        **others: Any,
    ) -> None:
        """Store this step's latents [T, R] and rotary keys [T, 1, rotary dims]; slots are -1 for padding. others: unused scales."""
        if kv_cache.numel():
            tokens = slot_mapping.shape[0]
            latents = kv_c_normed[:tokens].unsqueeze(1)
            append_slots(k_pe[:tokens], latents, *self.buffers(kv_cache), slot_mapping, rotate_keys=self.formats.rotate_keys)

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> tuple[torch.Tensor, None]:
        """Decodes, all with as many tokens: q [T, Hq, R] and [T, Hq, rotary dims] to weighted sums of latents [T, Hq, R]."""
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        decode, sides = attn_metadata.decode, self.buffers(kv_c_and_k_pe_cache)
        if not self._warm and query.is_cuda:
            self._warm = True
            self._compile(query, sides, decode.block_table, wait=True)
        cache = PagedView(*sides, decode.seq_lens, decode.block_table, self.formats.rotate_keys)
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        self.attend_codes(cache, None, len(query) // len(decode.seq_lens), query, None, out)
        return out, None

    def attend_codes(
        self, cache: PagedView, bounds: Any, drafts: int, query: torch.Tensor, new: None, out: torch.Tensor, exact: None = None
    ) -> None:
        """Queries [T, Hq, R + rotary dims] of requests with `drafts` tokens each into out [T, Hq, R]; the rest is for `warm_up`."""
        q, into = (t.unflatten(0, (-1, drafts)).transpose(1, 2) for t in (query, out))
        decode_attention(q, cache, sm_scale=self.scale, out=into, latent=True, deterministic_batch=envs.VLLM_BATCH_INVARIANT)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **options: Any,
    ) -> None:
        """Prompts: queries [T, Hq, D] over this chunk's latents and its past, expanded by vLLM."""
        if self.options.prefill == "cache":
            lengths, table, bounds = attn_metadata.stored_prompts
            k_pe, kv_c_normed = torch.empty_like(k_pe), torch.empty_like(kv_c_normed)
            cache = PagedView(*self.buffers(kv_c_and_k_pe_cache), lengths, table, self.formats.rotate_keys)
            unpack_pages(cache, bounds, k_pe, kv_c_normed.unsqueeze(1))
        super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, *args, **options)

    def _compute_prefill_context(self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, k_scale: Any) -> Any:
        """(out [T, Hq, Dv], lse [Hq, T]) of queries over the past of their chunks, unpacked into vLLM's workspace."""
        prefill = attn_metadata.prefill
        past, sums = prefill.chunked_context, None
        for chunk, (lengths, table, bounds) in zip(past.chunks, attn_metadata.stored_past, strict=True):
            latents, keys = past.workspace[: chunk.num_context_tokens].unsqueeze(1).split(self.dims[::-1], -1)
            cache = PagedView(*self.buffers(kv_c_and_k_pe_cache), lengths, table, self.formats.rotate_keys)
            unpack_pages(cache, bounds, keys, latents)
            heads = self.kv_b_proj(latents.squeeze(1))[0].unflatten(-1, (self.num_heads, -1))
            own, v = heads.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            k = self._concat_k_nope_k_pe(own, keys)
            part = prefill.prefill_backend.run_prefill_context_chunk(chunk=chunk, q=q[chunk.token_slice], k=k, v=v)
            sums = init_mla_context_partial(past, *part, num_tokens=len(q)) if sums is None else sums
            accumulate_mla_context_chunk(chunk, *part, *sums)
        return sums


@functools.cache
def _impl_of(pair: Pair) -> type[HalfbyteMLAImpl]:
    return type("HalfbyteMLAImpl", (HalfbyteMLAImpl,), {"pair": pair})


@functools.cache
def _backend_of(name: str, dims: Dims | None = None) -> type[HalfbyteMLABackend]:
    return type(name, (HalfbyteMLABackend,), {"pair": backend_names()[name], "dims": dims, "__module__": __name__})


def __getattr__(name: str) -> type[HalfbyteMLABackend]:
    """The backend of this name, as vLLM's registry imports it."""
    if name not in backend_names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend_of(name)
