"""A batch as vLLM's model runner describes it, in groups of requests that one call of attention takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from halfbyte.errors import Unsupported
from halfbyte.plans.prompts import bucket, groups
from halfbyte.vllm.exact_tokens import ExactTokensLayer
from halfbyte.vllm.prompts import Ragged


@dataclass
class HalfbyteMetadata(AttentionMetadata):  # type: ignore[misc]
    """A batch: the requests that decode, which come first, and those with longer queries, in groups."""

    parts: list[Ragged]


def scratch_of(vllm_config: Any) -> int:
    """Tokens that the scratch of long prompts holds, one for all layers: batches are divided alike for pages of every kind."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    prompts = [getattr(getattr(layer, "impl", None), "prompts", None) for layer in layers]
    return max((one.tokens for one in prompts if one is not None), default=0)


class HalfbyteBuilder(AttentionMetadataBuilder[HalfbyteMetadata]):  # type: ignore[misc]
    """Splits a batch by what the host knows, without synchronizing."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    #: (code lengths, sink tokens) of as many requests as a batch can have, in memory that CUDA graphs read: of `ExactTokensLayer`.
    _exact_rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        impl = layer.impl
        self.query_heads, self.exact = impl.num_heads // impl.num_kv_heads, impl.options.prefill == "exact"
        self.exact_tokens, self.scratch = sum(impl.options.exact_tokens), scratch_of(vllm_config)
        if isinstance(layer, ExactTokensLayer):
            rows = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
            self._exact_rows, self._recent = (rows, torch.full_like(rows, layer.sink_tokens)), layer.recent_tokens

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HalfbyteMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise Unsupported("this model's attention is not causal; halfbyte's cache serves decoders")
        threshold = self.reorder_batch_threshold or 1
        decodes, prefills, tokens, _ = split_decodes_and_prefills(m, threshold, require_uniform=True)
        parts = []
        if decodes:
            longest = tokens // decodes if prefills else m.max_query_len
            some = slice(0, decodes)
            parts.append(
                Ragged(slice(0, tokens), m.query_start_loc[: decodes + 1], longest, m.seq_lens[some], m.block_table_tensor[some])
            )
        if prefills:
            parts += self._groups(m, decodes, threshold)
        if self._exact_rows is not None:
            for part in parts:
                self._add_exact_tokens(part, *self._exact_rows)
        return HalfbyteMetadata(parts)

    def _add_exact_tokens(self, part: Ragged, rows: torch.Tensor, sinks: torch.Tensor) -> None:
        """What `ExactTokens` says of requests. Those that decode begin the batch, and graphs read what this writes for them."""
        lengths, number = (part.lengths - self._recent).clamp_min(0), len(part.lengths)
        part.code_lengths = rows[:number].copy_(lengths) if part.rows.start == 0 else lengths
        part.sink_tokens = sinks[:number]

    def _groups(self, m: CommonAttentionMetadata, first: int, threshold: int) -> list[Ragged]:
        """The requests from `first` on. Index tensors are copied, since kernels are compiled for aligned ones."""
        starts = m.query_start_loc_cpu[first : m.num_reqs + 1].tolist()
        bounds = m.seq_lens_cpu_upper_bound
        lengths = [m.max_seq_len] * (m.num_reqs - first) if bounds is None else bounds[first : m.num_reqs].tolist()
        queries = [end - begin for begin, end in pairwise(starts)]
        parts = []
        limits = {"scratch": self.scratch, "exact_tokens": self.exact_tokens, "drafts": threshold}
        for group in groups(queries, lengths, query_heads=self.query_heads, **limits):
            mine, some = slice(group.first, group.last), slice(first + group.first, first + group.last)
            begin, end = starts[group.first], starts[group.last]
            if begin == end:  # requests that pad the batch
                continue
            parts.append(
                Ragged(
                    slice(begin, end),
                    m.query_start_loc[some.start : some.stop + 1] - begin,
                    bucket(max(queries[mine]), threshold),
                    m.seq_lens[some].clone(),
                    m.block_table_tensor[some].clone(),
                    self.exact and not group.decodes,  # drafts are read as stored, whatever their neighbors in the batch
                    tuple(zip(queries[mine], lengths[mine], strict=True)) if group.unpacked else (),
                )
            )
        return parts
