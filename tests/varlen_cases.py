"""Mixed batches over pages: what tests of `attention_varlen` are made of, on every level."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from accuracy import attention_errors
from halfbyte import engine
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, PagedView
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import rotate

#: (queries, length) of each sequence: a whole prompt, a chunk, a decode, an empty slot, a later chunk, another decode.
MIXED = [(19, 19), (33, 70), (1, 41), (0, 0), (7, 150), (1, 1)]
#: Bounds of `MIXED` that no engine makes, and memory may hold.
BAD_BOUNDS = ([0, 5, 3, 99, -7, 10, 2], [9, 9, 9, 9, 9, 9, 10**6], [-(2**31)] * 7, [2**31 - 1] * 7)


@dataclass
class Batch:
    """Sequences in the pages of an engine, all of whose other bytes are NaN as scales, and the queries of their newest tokens."""

    view: PagedView
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bounds: torch.Tensor
    most: int
    memory: torch.Tensor
    layout: engine.PageLayout

    def to(self, device: str) -> Batch:
        """A copy on another device, its pages as they lie."""
        memory, view = self.memory.to(device, copy=True), self.view
        lengths, table = view.lengths.to(device), None if view.page_table is None else view.page_table.to(device)
        q, k, v, bounds = (x.to(device) for x in (self.q, self.k, self.v, self.bounds))
        moved = PagedView(*self.layout.buffers(memory), lengths, table, view.rotate_keys)
        return Batch(moved, q, k, v, bounds, self.most, memory, self.layout)

    def attend(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = engine.attention_varlen(self.q, self.view, self.bounds, self.most, return_lse=True, **options)
        assert isinstance(found, tuple)
        return found

    def call(self, impl: str) -> DecodeCall:
        """As kernels get it, of what nobody has looked at."""
        options = AttentionOptions(self.view.keys.dim**-0.5, rotate_keys=self.view.rotate_keys)
        keys, values, lengths, table = self.view[:4]
        call = DecodeCall(self.q.transpose(0, 1)[None], keys, values, lengths, None, table, options, impl)
        return call._replace(cu_seqlens_q=self.bounds, max_query_len=self.most)

    def check(self, impl: str, *, exact: bool = False, device: str = "cpu", **options: Any) -> None:
        """Within the accuracy promise."""
        there = self if device == "cpu" else self.to(device)
        given = {"prefill": "exact", "k": there.k, "v": there.v} if exact else {}
        given |= {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        out, lse = (x.cpu() for x in there.attend(impl=impl, **given))
        truth, base = (self.truth(dtype, exact, **options) for dtype in (torch.float64, self.q.dtype))
        assert out.dtype is self.q.dtype
        assert not attention_errors(out, lse, truth, base)

    def truth(self, dtype: torch.dtype, exact: bool = False, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Computed in this dtype, one sequence after the other, over dequantized tokens; `exact`: over the newest as they came."""
        view = self.view
        out = torch.zeros(*self.q.shape[:2], view.values.dim, dtype=dtype)
        lse = torch.full(out.shape[:2], -torch.inf, dtype=dtype)
        o = AttentionOptions(**{"sm_scale": view.keys.dim**-0.5} | options)
        for b, (begin, end) in enumerate(pairwise(self.bounds.tolist())):
            length, table = view.lengths[b : b + 1], None if view.page_table is None else view.page_table[b : b + 1]
            k, v = (reference.read(x, length, table)[:, :, : int(length)] for x in (view.keys, view.values))
            if view.rotate_keys:
                k = rotate(k)  # back: its own inverse
            if exact and begin < end:
                k[0, :, begin - end :], v[0, :, begin - end :] = (x[begin:end].transpose(0, 1).double() for x in (self.k, self.v))
            q = self.q[begin:end].to(dtype).transpose(0, 1)[None]
            own = o._replace(**{name: x[b : b + 1] for name in ("starts", "ends") if (x := getattr(o, name)) is not None})
            part, sums = reference.attend(q, k.to(dtype), v.to(dtype), own.limit(length), length - (end - begin), own)
            out[begin:end], lse[begin:end] = part[0].transpose(0, 1), sums[0].t()
        return out, lse


@dataclass
class WithExactTokens:
    """A batch of codes, and the same tokens in 16 bits, of which only pages that attention may read hold them."""

    codes: Batch
    plain: Batch
    sinks: int
    recent: int

    @classmethod
    def of(
        cls,
        sequences: list[tuple[int, int]],
        sinks: int,
        recent: int,
        formats: tuple[str, str] = ("int4", "int4"),
        rotate_keys: bool = False,
        **options: Any,
    ) -> WithExactTokens:
        name = "bf16" if options.get("dtype") is torch.bfloat16 else "fp16"
        codes = batch_of(sequences, *formats, rotate_keys=rotate_keys, **options)
        return cls(codes, batch_of(sequences, name, name, **options), sinks, recent)

    def exact_tokens(self, device: str = "cpu") -> engine.ExactTokens:
        lengths = self.codes.view.lengths
        page, table = self.plain.view.keys.codes.shape[2], self.plain.view.page_table
        assert table is not None
        nothing = len(self.plain.memory) - 1  # a page of NaN
        table = table.clone()
        for row, (begin, end), length in zip(table, pairwise(self.codes.bounds.tolist()), lengths.tolist(), strict=True):
            row[-(-self.sinks // page) : max(length - (end - begin) - max(self.recent - 1, 0), 0) // page] = nothing
        view = self.plain.to(device).view
        sinks = torch.full_like(lengths, self.sinks).to(device) if self.sinks else None
        code_lengths = (lengths - self.recent).clamp_min(0).to(device)
        return engine.ExactTokens(view.keys, view.values, table.to(device), sinks, self.recent, code_lengths)

    def check(self, impl: str, prefill: str = "cache", device: str = "cpu", **options: Any) -> None:
        """Within the accuracy promise."""
        there = self.codes if device == "cpu" else self.codes.to(device)
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        moved |= {"prefill": "exact", "k": there.k, "v": there.v} if prefill == "exact" else {}
        out, lse = (x.cpu() for x in there.attend(impl=impl, exact_tokens=self.exact_tokens(device), **moved))
        truth, base = (self._truth(dtype, prefill, **options) for dtype in (torch.float64, self.codes.q.dtype))
        assert not attention_errors(out, lse, truth, base)

    def _truth(self, dtype: torch.dtype, prefill: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Query by query, over the tokens that it reads in either form."""
        codes, o = self.codes, AttentionOptions(**{"sm_scale": self.codes.view.keys.dim**-0.5} | options)
        out = torch.zeros(*codes.q.shape[:2], codes.view.values.dim, dtype=dtype)
        lse = torch.full(out.shape[:2], -torch.inf, dtype=dtype)
        for b, (begin, end) in enumerate(pairwise(codes.bounds.tolist())):
            length, sides = codes.view.lengths[b : b + 1], []
            for batch in (codes, self.plain):
                assert batch.view.page_table is not None
                table = batch.view.page_table[b : b + 1]
                sides.append([reference.read(x, length, table)[:, :, : int(length)] for x in (batch.view.keys, batch.view.values)])
            if codes.view.rotate_keys:
                sides[0][0] = rotate(sides[0][0])
            if prefill == "exact" and begin < end:
                for x, new in zip(sides[1], (codes.k, codes.v), strict=True):
                    x[0, :, begin - end :] = new[begin:end].transpose(0, 1).double()
            first, token = int(length) - (end - begin), torch.arange(int(length))[:, None]
            for row in range(begin, end):
                position = first + row - begin
                newest = first if prefill == "exact" else position
                in_16_bits = (token < self.sinks) | (token > newest - max(self.recent, int(prefill == "exact")))
                k, v = (torch.where(in_16_bits, plain, coded).to(dtype) for coded, plain in zip(*sides, strict=True))
                q = codes.q[row : row + 1].to(dtype).transpose(0, 1)[None]
                part, sums = reference.attend(q, k, v, length, torch.tensor([position]), o)
                out[row], lse[row] = part[0, :, 0], sums[0, :, 0]
        return out, lse


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, window_size: list[int] | None, softcap: float, out: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None, return_softmax_lse: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """vLLM's `flash_attn_varlen_func` as halfbyte calls it, in plain torch. Version 2 says inf where a query sees nothing."""
    assert others == {"causal": True, "alibi_slopes": None, "fa_version": 3}
    out, lse = torch.full_like(q, torch.nan) if out is None else out, torch.full((q.shape[1], len(q)), torch.nan)
    options = AttentionOptions(
        softmax_scale, softcap or None, sinks=s_aux, window=None if window_size is None else window_size[0] + 1
    )
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (first, last), (begin, end) in spans:
        assert last - first <= max_seqlen_q
        assert end - begin <= max_seqlen_k
        length = torch.tensor([end - begin])
        rows = (x[None].transpose(1, 2).double() for x in (q[first:last], k[begin:end], v[begin:end]))
        result, sums = reference.attend(*rows, length, length - (last - first), options)
        out[first:last], lse[:, first:last] = result[0].transpose(0, 1), sums[0]
    return (out, lse.masked_fill(lse == -torch.inf, torch.inf)) if return_softmax_lse else out


def batch_of(
    sequences: list[tuple[int, int]],
    keys: str = "int8",
    values: str = "int4_g32",
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    value_dim: int | None = None,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    rotate_keys: bool = False,
    padding: int = 0,
    seed: int = 0,
    cut: slice = slice(None),
) -> Batch:
    """Sequences of (queries, length), and rows of padding behind them. `cut`: only some of those, with the same numbers."""
    value_dim = value_dim or dim
    layout = engine.PageLayout(keys, values, dim, value_dim)
    generator = torch.Generator().manual_seed(seed)
    drawn = [[torch.randn(h, length, d, generator=generator) for h, d in ((heads[1], dim), (heads[1], value_dim), (heads[0], dim))]
             for _, length in sequences][cut]  # fmt: skip
    sequences = sequences[cut]
    pages = [-(-length // page) for _, length in sequences]
    order = torch.randperm(sum(pages) + 2, generator=generator).int()
    memory = torch.full((len(order), heads[1], page, layout.token_head_bytes), 0xFF, dtype=torch.uint8)
    table = torch.full((len(sequences), max([1, *pages]) + 1), 2**31 - 1, dtype=torch.int32)
    view = PagedView(*layout.buffers(memory), torch.tensor([n for _, n in sequences], dtype=torch.int32), table, rotate_keys)
    q, k, v = ([torch.zeros(0, h, d)] for h, d in ((heads[0], dim), (heads[1], dim), (heads[1], value_dim)))
    for b, ((new, length), (keys_of, values_of, queries)) in enumerate(zip(sequences, drawn, strict=True)):
        table[b, : pages[b]] = order[sum(pages[:b]) : sum(pages[: b + 1])]
        position = torch.arange(length)
        slots = table[b, position // page].long() * page + position % page
        rows = [x.to(dtype).transpose(0, 1) for x in (queries, keys_of, values_of)]
        engine.append_slots(*rows[1:], view.keys, view.values, slots, rotate_keys=rotate_keys, impl="reference")
        for whole, part in zip((q, k, v), rows, strict=True):
            whole.append(part[length - new :])
    nan = [torch.full((padding, *x[0].shape[1:]), torch.nan) for x in (q, k, v)]
    flat = [torch.cat([*x, rest]).to(dtype) for x, rest in zip((q, k, v), nan, strict=True)]
    bounds = torch.tensor([0, *(n for n, _ in sequences)]).cumsum(0).int()
    return Batch(view, *flat, bounds, max([1, *(n for n, _ in sequences)]), memory, layout)
