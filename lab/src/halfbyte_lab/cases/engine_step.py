"""A step of an engine: requests that decode and the chunk of a prompt, over packed pages, as `halfbyte.vllm` computes it.

Pages lie in memory as vLLM 0.32 asks for them, bytes [pages, N, H, C], and a request's pages are drawn from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import halfbyte
from halfbyte.engine import PagedView, PageLayout, append_slots, attention_varlen
from halfbyte.reference.attention import read
from halfbyte_lab.measure.checks import eager_attention, float64_attention
from halfbyte_lab.measure.decode import parse_formats

Pair = tuple[torch.Tensor, torch.Tensor]
#: Of q, k and v.
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Requests:
    """`decodes` requests of `context` tokens, of which the last is new, then a chunk of `prompt` tokens behind `past` others."""

    decodes: int
    context: int
    prompt: int = 0
    past: int = 0
    page: int = 16

    def __str__(self) -> str:
        chunk = f" + prompt of {self.prompt} behind {self.past:,}" if self.prompt else ""
        return f"{self.decodes} x {self.context:,}{chunk}, pages of {self.page}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request, those of this step included."""
        return [self.context] * self.decodes + ([self.past + self.prompt] if self.prompt else [])

    @property
    def queries(self) -> list[int]:
        """New tokens of each request."""
        return [1] * self.decodes + ([self.prompt] if self.prompt else [])


@dataclass(frozen=True)
class Step:
    """What an engine hands to an attention layer.

    q              [T, Hq, D]
    k, v           [T, H, D], the new tokens
    slots          int64 [T], where they go
    cu_seqlens_q   int32 [B + 1]
    lengths        int32 [B]
    page_table     int32 [B, pages]
    """

    requests: Requests
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    cu_seqlens_q: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    pages: int

    @staticmethod
    def random(requests: Requests, q_heads: int, kv_heads: int, dim: int, device: torch.device) -> Step:
        """Random normal, the same every time; queries four times as large, so that they see a few keys and not the mean of all."""
        counts = [-(-length // requests.page) for length in requests.lengths]
        numbers = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, mine in zip(table, numbers.split(counts), strict=True):
            row[: len(mine)] = mine
        table = table.to(device)
        tokens, sizes = sum(requests.queries), list(zip(requests.lengths, requests.queries, strict=True))
        generator = torch.Generator(device).manual_seed(0)
        q = 4 * torch.randn(tokens, q_heads, dim, generator=generator, device=device, dtype=DTYPE)
        new = [tuple(t[-n:].clone() for t in history(i, total, kv_heads, dim, device)) for i, (total, n) in enumerate(sizes)]
        slots = [slots_of(row, total, requests.page)[-n:] for row, (total, n) in zip(table, sizes, strict=True)]
        return Step(
            requests,
            q,
            torch.cat([k for k, _ in new]),
            torch.cat([v for _, v in new]),
            torch.cat(slots),
            F.pad(torch.tensor(requests.queries).cumsum(0), (1, 0)).to(device, torch.int32),
            torch.tensor(requests.lengths, dtype=torch.int32, device=device),
            table,
            sum(counts),
        )

    def fill(self, cache: Cache) -> None:
        """Store all tokens of all requests."""
        _, heads, dim = self.k.shape
        for i, length in enumerate(self.requests.lengths):
            cache.append(*history(i, length, heads, dim, self.k.device), slots_of(self.page_table[i], length, self.requests.page))

    def right(self, cache: Cache) -> Pair:
        """Attention over what a cache holds, [T, Hq, D]: eager in 16 bits, and in float64."""
        pairs: list[Pair] = []
        for i, (length, q) in enumerate(zip(self.requests.lengths, self.q.split(self.requests.queries), strict=True)):
            k, v = cache.held(i, length)
            inputs = q.transpose(0, 1)[None], k, v, q.shape[-1] ** -0.5
            pairs.append((eager_attention(*inputs)[0].transpose(0, 1), float64_attention(*inputs)[0].transpose(0, 1)))
        return torch.cat([base for base, _ in pairs]), torch.cat([ref for _, ref in pairs])


class Cache(Protocol):
    """A layer's keys and values, of halfbyte or of a peer.

    implementation, formats  as records name them
    nbytes                   bytes of all tokens
    """

    implementation: str
    formats: str
    nbytes: int

    def append(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k, v [T, H, D] at slots [T]."""

    def attend(self) -> torch.Tensor:
        """The step's attention [T, Hq, D] over stored tokens."""

    def held(self, request: int, length: int) -> Pair:
        """A request's keys and values as they are stored, float64 [1, H, length, D]."""

    def copied(self) -> Cache:
        """The same in memory of its own."""


def history(request: int, tokens: int, heads: int, dim: int, device: torch.device) -> Pair:
    """All keys and values of a request, [tokens, H, D]."""
    generator = torch.Generator(device).manual_seed(1 + request)
    k, v = torch.randn(2, tokens, heads, dim, generator=generator, device=device, dtype=DTYPE)
    return k, v


def slots_of(pages: torch.Tensor, tokens: int, page: int) -> torch.Tensor:
    """The slot of each token of a request: page * N + row, int64 [tokens]."""
    at = torch.arange(tokens, device=pages.device)
    return pages.long()[at // page] * page + at % page


class Packed:
    """halfbyte's pages. `append` and `attend` are what `HalfbyteImpl` of the plugin runs for a batch of these requests."""

    implementation = "halfbyte"

    def __init__(self, step: Step, formats: str, memory: torch.Tensor | None = None) -> None:
        keys, values = parse_formats(formats)
        heads, dim = step.k.shape[1:]
        layout = PageLayout(keys, values, dim)
        shape = (step.pages, step.requests.page, heads, layout.token_head_bytes)
        self.step, self.formats = step, formats
        self.memory = torch.zeros(shape, dtype=torch.uint8, device=step.k.device) if memory is None else memory
        self.buffers = layout.buffers(self.memory.transpose(1, 2))
        self.nbytes = sum(step.requests.lengths) * heads * layout.token_head_bytes
        n, starts = step.requests.decodes, step.cu_seqlens_q
        #: Rows of q, offsets, longest query and view of the requests that decode, then of the chunk.
        self.parts = [(slice(0, n), starts[: n + 1], 1, self._view(slice(0, n)))]
        if step.requests.prompt:
            self.parts.append((slice(n, None), starts[n:] - starts[n], step.requests.prompt, self._view(slice(n, None))))

    def _view(self, requests: slice) -> PagedView:
        return PagedView(*self.buffers, self.step.lengths[requests], self.step.page_table[requests])

    def append(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        append_slots(k, v, *self.buffers, slots)

    def attend(self, deterministic_batch: bool = False) -> torch.Tensor:
        out = torch.empty_like(self.step.q)
        for rows, starts, longest, view in self.parts:
            attention_varlen(self.step.q[rows], view, starts, longest, out=out[rows], deterministic_batch=deterministic_batch)
        return out

    def decode(self) -> torch.Tensor:
        """The same by `decode_attention`, where every request decodes."""
        out = halfbyte.decode_attention(self.step.q[:, :, None], self.parts[0][3])
        assert isinstance(out, torch.Tensor)  # the pair with lse comes only on request
        return out[:, :, 0]

    def held(self, request: int, length: int) -> Pair:
        row, lengths = self.step.page_table[request : request + 1], self.step.lengths[request : request + 1]
        k, v = (read(buffer, lengths, row[:, : -(-length // self.step.requests.page)])[:, :, :length] for buffer in self.buffers)
        return k, v

    def copied(self) -> Packed:
        return Packed(self.step, self.formats, self.memory.clone())


class Dense:
    """torch's attention in 16 bits over the same tokens, one piece of memory a request: torch's kernels read no pages."""

    formats = "bf16"

    def __init__(self, step: Step, implementation: str, attention: Callable[..., torch.Tensor], held: Sequence[Pair]) -> None:
        self.step, self.implementation, self.attention, self.keys_values = step, implementation, attention, held
        self.nbytes = sum(t.nbytes for pair in held for t in pair)

    @staticmethod
    def tokens(step: Step) -> list[Pair]:
        """k, v [requests, H, tokens, D] of the requests that decode, then of the chunk."""
        _, heads, dim = step.k.shape
        pairs = [history(i, n, heads, dim, step.k.device) for i, n in enumerate(step.requests.lengths)]
        n, batches = step.requests.decodes, []
        for some in filter(None, (pairs[:n], pairs[n:])):
            batches.append((torch.stack([k for k, _ in some]).transpose(1, 2), torch.stack([v for _, v in some]).transpose(1, 2)))
        return [(k.contiguous(), v.contiguous()) for k, v in batches]

    def append(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        raise NotImplementedError("only attention is timed")

    def attend(self) -> torch.Tensor:
        n = self.step.requests.decodes
        out = self.attention(self.step.q[:n, :, None], *self.keys_values[0])[:, :, 0]
        if not self.step.requests.prompt:
            return out
        k, v = self.keys_values[1]
        mask = causal_lower_right(self.step.requests.prompt, k.shape[2])
        q = self.step.q[n:].transpose(0, 1)[None]
        chunk = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] > k.shape[1])
        return torch.cat([out, chunk[0].transpose(0, 1)])

    def held(self, request: int, length: int) -> Pair:
        n = self.step.requests.decodes
        k, v = (t[request % n : request % n + 1] for t in self.keys_values[request // n])
        return k.double(), v.double()

    def copied(self) -> Dense:
        return Dense(self.step, self.implementation, self.attention, [(k.clone(), v.clone()) for k, v in self.keys_values])
