"""Long chunks of prompts: their tokens are unpacked into 16-bit scratch once, and vLLM's FlashAttention attends over it.

FlashAttention 3 runs at several times the rate of kernels that read codes, and a chunk of thousands of tokens pays for unpacking
many times over (`halfbyte.plans.prompts`). Queries see the same numbers as everywhere: codes times scales, rounded to 16 bits once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import envs
from vllm.platforms import current_platform

from halfbyte.cache_plan import LayerFormats
from halfbyte.engine import PagedView, unpack_pages
from halfbyte.formats import KV_FORMATS

#: The names of dtypes as formats.
_PLAIN = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass
class Ragged:
    """Requests that are neighbors in a batch.

    rows            their tokens in the batch
    cu_seqlens_q    int32 [requests + 1], counted from the first of `rows`
    max_query_len   on the host: at least the most tokens of one request (`attention_varlen`)
    lengths         int32 [requests], tokens in the cache, this step's included
    page_table      int32 [requests, pages]
    exact           this step's tokens are read unquantized
    host            (tokens, an upper bound of the length) of each request, if they are to be attended over unpacked tokens
    code_lengths    of pages in 16 bits, int32 [requests]: as in `ExactTokens`, and so is sink_tokens
    """

    rows: slice
    cu_seqlens_q: torch.Tensor
    max_query_len: int
    lengths: torch.Tensor
    page_table: torch.Tensor
    exact: bool = False
    host: tuple[tuple[int, int], ...] = ()
    code_lengths: torch.Tensor | None = None
    sink_tokens: torch.Tensor | None = None
    _kept: dict[int | None, tuple[torch.Tensor, int, int]] = field(default_factory=dict, repr=False)

    def visible(self, window: int | None) -> tuple[torch.Tensor, int, int]:
        """`_visible`, computed once a step and not once a layer. Without functools.cache, whose cycle would keep GPU memory."""
        if window not in self._kept:
            self._kept[window] = self._visible(window)
        return self._kept[window]

    def _visible(self, window: int | None) -> tuple[torch.Tensor, int, int]:
        """Of the newest tokens of each request that its queries see: cu_seqlens_k; how many rows they take; the most of one."""
        bounds, lengths = [length for _, length in self.host], self.lengths
        if window is not None:
            bounds = [min(length, count + window - 1) for count, length in self.host]
            lengths = torch.minimum(lengths, self.cu_seqlens_q.diff() + (window - 1))
        sums = lengths.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(sums, (1, 0)), sum(bounds), max(bounds)


@dataclass(frozen=True)
class FlashPrompts:
    """How a layer attends over unpacked tokens.

    attention   vLLM's `flash_attn_varlen_func`
    options     its arguments that are the layer's
    window      sliding window, or None
    shapes      (heads, dim) of keys
    dtype       of scratch
    tokens      that the scratch holds: 16-bit keys and values of one layer, which all layers share
    """

    attention: Callable[..., Any]
    options: dict[str, Any]
    window: int | None
    shape: tuple[int, int]
    dtype: torch.dtype
    tokens: int

    def scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for keys and values [tokens, H, D]. vLLM's workspace grows before it measures memory, and then no more."""
        from vllm.v1.worker.workspace import current_workspace_manager

        shape = (self.tokens, *self.shape)
        keys, values = current_workspace_manager().get_simultaneous((shape, self.dtype), (shape, self.dtype))
        return keys, values

    def attend(
        self, part: Ragged, query: torch.Tensor, cache: PagedView, new: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor
    ) -> None:
        """query [T, Hq, D] over its requests' tokens into out [T, Hq, D]; new: k and v [T, H, D] of this step, unquantized."""
        cu_seqlens_k, rows, longest = part.visible(self.window)
        keys, values = (x[:rows] for x in self.scratch())
        own = None if new is None else (*new, part.cu_seqlens_q)
        unpack_pages(cache, cu_seqlens_k, keys, values, new=own)
        self.attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=part.cu_seqlens_q,
            max_seqlen_q=max(count for count, _ in part.host),
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_k=longest,
            causal=True,
            **self.options,
        )


def flash_prompts(impl: Any, layer: Any, formats: LayerFormats, dtype: torch.dtype, tokens: int) -> FlashPrompts | None:
    """How a layer with these formats attends over unpacked tokens in `dtype`; None where vLLM has no such kernel for it."""
    formats_of_layer = [KV_FORMATS[name] for name in (formats.keys, formats.values)]
    same = all(fmt.is_quantized or fmt.name == _PLAIN.get(dtype) for fmt in formats_of_layer)
    if dtype not in _PLAIN or not same or layer.head_size_v != impl.head_size or envs.VLLM_BATCH_INVARIANT:
        return None
    version = _version(impl)
    if version is None:
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    options = {
        "softmax_scale": impl.scale,
        "window_size": None if impl.sliding_window is None else [impl.sliding_window - 1, 0],
        "softcap": impl.logits_soft_cap or 0.0,
        "alibi_slopes": impl.alibi_slopes,
        "s_aux": impl.sinks,
        "fa_version": version,
    }
    shape = (impl.num_kv_heads, impl.head_size)
    return FlashPrompts(flash_attn_varlen_func, options, impl.sliding_window, shape, dtype, tokens)


def _version(impl: Any) -> int | None:
    """The version of FlashAttention that takes this layer's options. Not 4, which compiles kernels during inference."""
    if not current_platform.is_cuda():
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_fa_version_supported

    preferred = get_flash_attn_version(requires_alibi=impl.alibi_slopes is not None, head_size=impl.head_size)
    version = 2 if preferred == 4 else preferred
    fits = version is not None and impl.head_size % 8 == 0 and impl.head_size <= 256 and is_fa_version_supported(version)
    return version if fits and (impl.sinks is None or version == 3) else None
