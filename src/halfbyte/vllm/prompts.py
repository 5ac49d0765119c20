"""Long chunks of prompts: their tokens are unpacked into 16-bit scratch once, and vLLM's FlashAttention attends over it.

FlashAttention 3 runs at several times the rate of kernels that read codes, and a chunk of thousands of tokens pays for unpacking
many times over (`halfbyte.plans.prompts`). Queries see the same numbers as everywhere: codes times scales, rounded to 16 bits once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from halfbyte.cache_plan import LayerFormats
from halfbyte.engine import ExactTokens, PagedView, unpack_pages
from halfbyte.formats import KV_FORMATS
from halfbyte.ops.merge_states import merge_states

#: The names of dtypes as formats.
_PLAIN = {torch.float16: "fp16", torch.bfloat16: "bf16"}
Made = TypeVar("Made")


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
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def kept(self, make: Callable[..., Made], *args: Any) -> Made:
        """make(self, *args), once a step and not once a layer. Without functools.cache, whose cycle would keep GPU memory."""
        key = make, *args
        if key not in self._kept:
            self._kept[key] = make(self, *args)
        made: Made = self._kept[key]
        return made


class Rows(NamedTuple):
    """Tokens of each request, one request behind the other.

    cu_seqlens      int32 [requests + 1]
    total, longest  on the host: at least how many they are, and the most of one request
    """

    cu_seqlens: torch.Tensor
    total: int
    longest: int


def visible(part: Ragged, window: int | None, newest: int = 0) -> Rows:
    """The newest tokens of each request that its queries see; each query none of the `newest` ones up to its own."""
    bounds, lengths = [max(length - newest, 0) for _, length in part.host], (part.lengths - newest).clamp_min(0)
    if window is not None:
        bounds = [min(bound, count + window - 1) for bound, (count, _) in zip(bounds, part.host, strict=True)]
        lengths = torch.minimum(lengths, part.cu_seqlens_q.diff() + (window - 1))
    return Rows(cumulated(lengths), sum(bounds), max(bounds))


def cumulated(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1], starting with 0."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


@dataclass(frozen=True)
class FlashPrompts:
    """How a layer attends over unpacked tokens.

    attention   vLLM's `flash_attn_varlen_func`
    options     its arguments that are the layer's
    window      sliding window, or None
    sinks       of attention, float [Hq], or None
    shape       (heads, dim) of keys
    dtype       of scratch
    tokens      that the scratch holds: 16-bit keys and values of one layer, which all layers share
    """

    attention: Callable[..., Any]
    options: dict[str, Any]
    window: int | None
    sinks: torch.Tensor | None
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
        self,
        part: Ragged,
        query: torch.Tensor,
        cache: PagedView,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        exact: ExactTokens | None,
    ) -> None:
        """query [T, Hq, D] over its requests' tokens into out [T, Hq, D].

        new: k and v [T, H, D] of this step, unquantized; exact: sink and recent tokens in 16 bits, if the layer has some
        """
        self.over(part, query, self.unpack(part, cache, new), self.window, out=out, s_aux=self.sinks)

    def unpack(self, part: Ragged, cache: PagedView, new: tuple[torch.Tensor, torch.Tensor] | None) -> Rows:
        """What queries see, in the first rows of scratch."""
        rows = part.kept(visible, self.window)
        keys, values = (x[: rows.total] for x in self.scratch())
        unpack_pages(cache, rows.cu_seqlens, keys, values, new=None if new is None else (*new, part.cu_seqlens_q))
        return rows

    def compile(self, part: Ragged, cache: PagedView, new: tuple[torch.Tensor, torch.Tensor], exact: ExactTokens | None) -> None:
        """What launches kernels before `attention`, of some part. Within `compiling_only`."""
        for own in (None, new):
            self.unpack(part, cache, own)

    def over(self, part: Ragged, query: torch.Tensor, rows: Rows, window: int | None, **options: Any) -> Any:
        """vLLM's attention over the first rows of scratch, of which a query sees `window`."""
        keys, values = (x[: rows.total] for x in self.scratch())
        return self.attention(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=part.cu_seqlens_q,
            max_seqlen_q=max(count for count, _ in part.host),
            cu_seqlens_k=rows.cu_seqlens,
            max_seqlen_k=rows.longest,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            **self.options,
            **options,
        )


class Older(NamedTuple):
    """What is read of each request in one piece with its codes: sink tokens, and what is behind them, two pieces of a request.

    rows          of both
    lengths       int32 [2 * requests]: where a piece ends
    cu_seqlens    int32 [2 * requests + 1]: how many tokens of it are read
    exact         the same of those that are in 16 bits: sink tokens, and the newest ones of the piece behind them
    """

    rows: Rows
    lengths: torch.Tensor
    cu_seqlens: torch.Tensor
    exact: Rows


def older(part: Ragged, window: int | None, sinks: int, newest: int, recent: int | None) -> Older:
    """`visible(part, window, newest)`; recent: of that the tokens of this step, and so many before them, are in 16 bits, too."""
    rows, zeros = part.kept(visible, window, newest), torch.zeros_like(part.lengths)
    end = (part.lengths - newest).clamp_min(0)
    first = end - rows.cu_seqlens.diff()
    behind = torch.minimum(first.clamp_min(sinks), end)
    last = zeros if recent is None else torch.minimum(part.cu_seqlens_q.diff() + recent, end - behind)
    lengths, counts, exact = (
        torch.stack(two, 1).flatten() for two in ((behind, end), (behind - first, end - behind), (behind - first, last))
    )
    most = [min(length, sinks + (0 if recent is None else count + recent)) for count, length in part.host]
    return Older(rows, lengths, cumulated(counts), Rows(cumulated(exact), sum(most), max(most)))


@dataclass(frozen=True)
class FlashPromptsWithExactTokens(FlashPrompts):
    """Of a layer with sink and recent tokens in 16 bits.

    A query's recent tokens are a sliding window over rows in 16 bits; its codes end before them, which again is causal attention,
    over shorter requests; both are merged. Where all queries of a chunk read the same recent tokens (prefill "exact"), those, like
    sink tokens everywhere, take the place of the codes instead.
    """

    sink_tokens: int
    recent_tokens: int

    def attend(
        self,
        part: Ragged,
        query: torch.Tensor,
        cache: PagedView,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        exact: ExactTokens | None,
    ) -> None:
        assert exact is not None
        plain = PagedView(exact.keys, exact.values, cache.lengths, exact.page_table)
        newest = self.recent_tokens if new is None else 0
        window = None if self.window is None else self.window - newest
        own = newest if self.window is None else min(newest, self.window)

        def over_older(**options: Any) -> Any:
            return self.over(part, query, self.unpack_older(part, cache, plain, newest, new is not None), window, **options)

        def over_recent(**options: Any) -> Any:
            return self.over(part, query, self.unpack_recent(part, plain, own), own, **options)

        if not newest:
            over_older(out=out, s_aux=self.sinks)
        elif (window is not None and window <= 0) or not part.kept(visible, window, newest).total:
            over_recent(out=out, s_aux=self.sinks)
        else:
            out.copy_(merged([over(return_softmax_lse=True) for over in (over_older, over_recent)], self.sinks))

    def compile(self, part: Ragged, cache: PagedView, new: tuple[torch.Tensor, torch.Tensor], exact: ExactTokens | None) -> None:
        assert exact is not None
        plain = PagedView(exact.keys, exact.values, cache.lengths, exact.page_table)
        self.unpack_older(part, cache, plain, 0, True)
        self.unpack_recent(part, plain, 1)

    def unpack_older(self, part: Ragged, cache: PagedView, plain: PagedView, newest: int, exact: bool) -> Rows:
        """What queries see but for their `newest` tokens, in the first rows of scratch. exact: the chunk's own in 16 bits, too."""
        window = None if self.window is None else self.window - newest
        recent = max(self.recent_tokens - 1, 0) if exact else None
        pieces = part.kept(older, window, self.sink_tokens, newest, recent)
        at, count = pieces.rows.total, pieces.exact.total
        keys, values = self.scratch()
        own = keys[at : at + count], values[at : at + count]
        unpack_pages(_pieces(plain, pieces.lengths), pieces.exact.cu_seqlens, *own)
        new = (*own, pieces.exact.cu_seqlens)
        unpack_pages(_pieces(cache, pieces.lengths), pieces.cu_seqlens, keys[:at], values[:at], new=new)
        return pieces.rows

    def unpack_recent(self, part: Ragged, plain: PagedView, window: int) -> Rows:
        """The tokens in 16 bits that queries see through a window, in the first rows of scratch."""
        rows = part.kept(visible, window)
        keys, values = self.scratch()
        unpack_pages(plain, rows.cu_seqlens, keys[: rows.total], values[: rows.total])
        return rows


def _pieces(cache: PagedView, lengths: torch.Tensor) -> PagedView:
    """Each request twice."""
    assert cache.page_table is not None
    return cache._replace(lengths=lengths, page_table=cache.page_table.repeat_interleave(2, 0))


def merged(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None) -> torch.Tensor:
    """Results [T, Hq, D] of FlashAttention over disjoint tokens, with their log-sum-exp [Hq, T], inf where a query saw nothing."""
    lses = [torch.where(lse == torch.inf, -torch.inf, lse).t().contiguous().unsqueeze(2) for _, lse in parts]
    return merge_states([out.unsqueeze(2) for out, _ in parts], lses, sinks)[0].squeeze(2)


def flash_prompts(impl: Any, layer: Any, formats: LayerFormats, dtype: torch.dtype, tokens: int) -> FlashPrompts | None:
    """How a layer with these formats attends over unpacked tokens in `dtype`; None where vLLM has no such kernel for it.

    (FlashAttention counts ALiBi's distances from positions that differ between the calls that sink and recent tokens need.)
    """
    from vllm import envs

    formats_of_layer = [KV_FORMATS[name] for name in (formats.keys, formats.values)]
    same = all(fmt.is_quantized or fmt.name == _PLAIN.get(dtype) for fmt in formats_of_layer)
    if dtype not in _PLAIN or not same or layer.head_size_v != impl.head_size or envs.VLLM_BATCH_INVARIANT:
        return None
    if impl.sinks is not None and dtype is not torch.bfloat16:  # FlashAttention 3 reads sinks in bf16 only, and fails in the prompt
        return None
    version = _version(impl)
    if version is None or (impl.exact_tokens is not None and impl.alibi_slopes is not None):
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    options = {
        "softmax_scale": impl.scale,
        "softcap": impl.logits_soft_cap or 0.0,
        "alibi_slopes": impl.alibi_slopes,
        "fa_version": version,
    }
    shape = (impl.num_kv_heads, impl.head_size)
    fields = flash_attn_varlen_func, options, impl.sliding_window, impl.sinks, shape, dtype, tokens
    if impl.exact_tokens is None:
        return FlashPrompts(*fields)
    return FlashPromptsWithExactTokens(*fields, *impl.options.exact_tokens)


def _version(impl: Any) -> int | None:
    """The version of FlashAttention that takes this layer's options. Not 4, which compiles kernels during inference."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_fa_version_supported

    newest = get_flash_attn_version(requires_alibi=impl.alibi_slopes is not None, head_size=impl.head_size)
    version = 2 if newest == 4 else newest
    fits = version is not None and impl.head_size % 8 == 0 and impl.head_size <= 256 and is_fa_version_supported(version)
    return version if fits and (impl.sinks is None or version == 3) else None
