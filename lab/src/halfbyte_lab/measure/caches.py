"""The caches that a case is timed on: filled once, copied for the rotation, put back before each pass, and what they must give.

All caches of a rotation keep their lengths in one tensor, so that one copy puts every length back after tokens were appended. An
append in the timed chain writes the last token again over a decoy, so that a chain whose attention does not see what its append
wrote gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch

from halfbyte.cache import KVCache
from halfbyte.errors import check
from halfbyte.kv_buffer import KVBuffer, new_kv_buffer
from halfbyte.reference.attention import read
from halfbyte.reference.hadamard import rotate, rotated
from halfbyte_lab.measure.checks import Accuracy, eager_attention, float64_attention, timed_attention_accuracy
from halfbyte_lab.measure.decode import DecodeShape, parse_formats

Layout = Literal["heads first", "tokens first", "pages"]
PAGE = 64
EVENLY = ", spread evenly"
#: Elements appended in one piece while a cache is filled; bounds the memory that quantizing takes.
_FILL = 2**27
#: Elements of keys that are held in float64 at once.
_WIDE = 2**24
#: Lengths of one cache begin at multiples of so many, which is where an allocation of its own would begin.
_LENGTHS_APART = 64

#: All sequences in order, some at a time: k, v [n, H, T, D], float64 or 16-bit.
Held = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class DecodeCase:
    """A case: one new token of each sequence over a cache.

    layout     memory order [B, H, T, D], [B, T, H, D], or pages of 64 tokens in random places
    runs       (sequences, tokens) in order, where lengths differ; () means that all hold `shape.context`
    baselines  whether 16-bit attention is measured too
    latent     dims of a key that are its value's too (MLA, in its absorbed form); a cache holds the others as keys
    """

    name: str
    shape: DecodeShape
    layout: Layout = "heads first"
    runs: tuple[tuple[int, int], ...] = ()
    baselines: bool = False
    latent: int = 0

    def __post_init__(self) -> None:
        total = sum(sequences for sequences, _ in self.runs)
        check(not self.runs or total == self.shape.batch, f"runs hold {total} sequences and the batch is {self.shape.batch}")
        longest = max((tokens for _, tokens in self.runs), default=self.shape.context)
        check(longest == self.shape.context, f"the longest run has {longest} tokens; context={self.shape.context} must be that")

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(sequences, tokens) in order, also where all lengths are the same."""
        return self.runs or ((self.shape.batch, self.shape.context),)

    @property
    def dims(self) -> tuple[int, int]:
        """Of a cached key, and of a value."""
        return self.shape.dim - self.latent, self.latent or self.shape.dim

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(sequences * tokens for sequences, tokens in self.spans)

    @property
    def flop(self) -> int:
        """Multiplications and additions of both products, over the tokens that there are."""
        return 2 * self.tokens * self.shape.q_heads * (self.shape.dim + self.dims[1])

    def evened(self) -> DecodeCase:
        """As many tokens in as many sequences, all of one length."""
        check(self.tokens % self.shape.batch == 0, f"{self.name}: {self.tokens} tokens do not spread evenly")
        shape = replace(self.shape, context=self.tokens // self.shape.batch)
        return replace(self, name=self.name + EVENLY, shape=shape, runs=())


@dataclass(frozen=True)
class Inputs:
    """q [B, Hq, 1, D], and k, v [sequences, H, tokens, D] for each span of the problem."""

    problem: DecodeCase
    q: torch.Tensor
    spans: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def random(problem: DecodeCase, device: torch.device) -> Inputs:
        """Random normal, made on the device, the same every time."""
        shape, generator = problem.shape, torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)

        # Four times larger queries see a few keys rather than the mean of all, so the output is far above the promise's slack.
        q = 4 * normal(shape.batch, shape.q_heads, 1, shape.dim)
        sizes = [(sequences, shape.kv_heads, tokens) for sequences, tokens in problem.spans]
        key_dim, value_dim = problem.dims
        return Inputs(problem, q, [(normal(*size, key_dim), normal(*size, value_dim)) for size in sizes])

    def half(self) -> Inputs:
        """The same numbers in fp16."""
        return Inputs(self.problem, self.q.half(), [(k.half(), v.half()) for k, v in self.spans])

    def last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest token of every sequence: k, v [B, H, 1, D]."""
        return torch.cat([k[:, :, -1:] for k, _ in self.spans]), torch.cat([v[:, :, -1:] for _, v in self.spans])

    def tail(self, like: KVBuffer) -> torch.Tensor | None:
        """The 16-bit tail [B, H, rows, D] of per-channel keys that lack the newest token; None for other keys."""
        if like.format.token_block is None or like.tail is None:
            return None
        out, first = torch.zeros_like(like.tail), 0
        for k, _ in self.spans:
            last = k.shape[2] - 1
            begin = last // like.format.token_block * like.format.token_block
            out[first : first + k.shape[0], :, : last - begin] = k[:, :, begin:last]
            first += k.shape[0]
        return out

    def decoy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A token that every query would look at before any other: the sum of the queries, as key."""
        k, v = self.last()
        key = self.q.unflatten(1, (k.shape[1], -1)).sum(2)
        latent = self.problem.latent
        return (key[..., latent:], key[..., :latent]) if latent else (key, 1 - v)


def fill(inputs: Inputs, formats: str, rotate_keys: bool | None = None) -> KVCache:
    """A cache in the problem's layout that holds the inputs. Per-tensor scales are those of the first 2^27 elements."""
    cache = empty(inputs.problem, formats, inputs.q.device, rotate_keys)
    first = 0
    for k, v in inputs.spans:
        step = max(1, _FILL // k[0].numel())
        for part_k, part_v in zip(k.split(step), v.split(step), strict=True):
            sequences(cache, first, first + part_k.shape[0]).append(part_k, part_v)
            first += part_k.shape[0]
    return cache


def empty(problem: DecodeCase, formats: str, device: torch.device, rotate_keys: bool | None = None) -> KVCache:
    """An empty cache in the problem's layout, wrapped around its memory as an engine would; rotation as `KVCache` has it."""
    shape, table = problem.shape, None
    rows = (shape.batch, shape.kv_heads, shape.context)
    if problem.layout == "pages":
        pages = shape.batch * -(-shape.context // PAGE)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        table = order.int().view(shape.batch, -1).to(device)
        rows = (pages, shape.kv_heads, PAGE)
    k_format, v_format = parse_formats(formats)
    planes = [
        new_kv_buffer(f, (*rows, dim), (shape.batch, shape.kv_heads, f.token_block or 0, dim), torch.bfloat16, device)
        for f, dim in zip((k_format, v_format), problem.dims, strict=True)
    ]
    if problem.layout == "tokens first":
        planes = [_each(plane, _tokens_first) for plane in planes]
    lengths = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    rotate_keys = rotated(rotate_keys, k_format, problem.dims[0])
    return KVCache.from_buffers(planes[0], planes[1], lengths, page_table=table, rotate_keys=rotate_keys)


def sequences(cache: KVCache, start: int, stop: int) -> KVCache:
    """Some sequences of a cache as a cache over the same memory."""
    table = None if cache.page_table is None else cache.page_table[start:stop]
    planes = (cache.keys, cache.values)
    if table is None:
        planes = (_each(cache.keys, lambda t: t[start:stop]), _each(cache.values, lambda t: t[start:stop]))
    return KVCache.from_buffers(*planes, cache.lengths[start:stop], page_table=table, rotate_keys=cache.rotate_keys)


def _each(plane: KVBuffer, change: Callable[[torch.Tensor], torch.Tensor]) -> KVBuffer:
    """A KV buffer with `change` applied to every tensor that has sequences; what is per tensor is shared."""

    def changed(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.ndim == 1 else change(t)

    codes = change(plane.codes)
    return replace(plane, codes=codes, scales=changed(plane.scales), offsets=changed(plane.offsets), tail=changed(plane.tail))


def _tokens_first(t: torch.Tensor) -> torch.Tensor:
    """The same [B, H, T, ...] over memory in the order [B, T, H, ...]."""
    return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim > 2 else t


def clone(plane: KVBuffer) -> KVBuffer:
    """A copy with the same strides."""
    parts: dict[str, Any] = {name: t.clone() for name, t in parts_of(plane).items()}
    return replace(plane, **parts)


def parts_of(plane: KVBuffer) -> dict[str, torch.Tensor]:
    """The tensors of a KV buffer by name."""
    return {name: t for name, t in vars(plane).items() if isinstance(t, torch.Tensor)}


class Rotation:
    """`copies` caches with the same content: `cache` itself and copies of it. A page table is shared: it is the same for all."""

    def __init__(self, cache: KVCache, inputs: Inputs, copies: int) -> None:
        batch = cache.batch
        self._full = torch.zeros(-(-batch // _LENGTHS_APART) * _LENGTHS_APART, dtype=torch.int32, device=cache.device)
        self._full[:batch] = cache.lengths
        # Made here, so that putting lengths back is one copy and allocates nothing.
        self._short = (self._full - 1).clamp_min(0)
        self._decoy, self._tail = inputs.decoy(), inputs.tail(cache.keys)
        self._lengths = self._full.repeat(copies, 1)
        planes = [(cache.keys, cache.values), *((clone(cache.keys), clone(cache.values)) for _ in range(copies - 1))]
        self.caches = [
            KVCache.from_buffers(*pair, row[:batch], page_table=cache.page_table, rotate_keys=cache.rotate_keys)
            for pair, row in zip(planes, self._lengths, strict=True)
        ]

    def restore_full(self) -> None:
        """Every cache holds all its tokens."""
        self._lengths.copy_(self._full)

    def restore_short(self) -> None:
        """Every cache lacks its newest token, and has the tail of before it: a block that it completed left none."""
        self._lengths.copy_(self._short)
        for cache in self.caches:
            if cache.keys.tail is not None and self._tail is not None:
                cache.keys.tail.copy_(self._tail)

    def plant_decoys(self) -> None:
        """The place of every newest token holds the decoy."""
        self.restore_short()
        for cache in self.caches:
            cache.append(*self._decoy)
        self.restore_short()


class Promise:
    """The accuracy promise for one case: float64 and eager results of all sequences, computed now, before a cache can change.

    `held` gives keys and values as they are stored; `slopes` [Hq]: ALiBi's.
    """

    def __init__(self, q: torch.Tensor, held: Held, slopes: torch.Tensor | None = None) -> None:
        scale, pairs, first = q.shape[-1] ** -0.5, [], 0
        for k, v in held:
            some = q[first : first + k.shape[0]]
            pairs.append((eager_attention(some, k, v, scale, slopes), float64_attention(some, k, v, scale, slopes)))
            first += k.shape[0]
        assert first == q.shape[0], f"{first} of {q.shape[0]} sequences"
        self._base, self._ref = torch.cat([base for base, _ in pairs]), torch.cat([ref for _, ref in pairs])

    def judge(self, outs: Iterable[torch.Tensor]) -> Accuracy:
        """The worst of several results [B, Hq, 1, D] of the same case."""
        return timed_attention_accuracy(torch.stack(list(outs)), self._base, self._ref)


def held_by(cache: KVCache, latent: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sequences of a full cache, dequantized in float64, without what lies beyond their length; over latents whole keys."""
    first = 0
    for length, alike in groupby(cache.lengths.tolist()):
        end = first + len(list(alike))
        step = _at_once(cache.kv_heads * cache.capacity * cache.head_dim)
        for start in range(first, end, step):
            view = sequences(cache, start, min(start + step, end))
            k, v = (read(plane, view.lengths, view.page_table)[:, :, :length] for plane in (view.keys, view.values))
            k = rotate(k) if cache.rotate_keys else k
            yield torch.cat([v, k], -1) if latent else k, v
        first = end


def given(inputs: Inputs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sequences of the inputs, as 16-bit attention sees them."""
    for k, v in inputs.spans:
        step = _at_once(k[0].numel())
        yield from zip(k.split(step), v.split(step), strict=True)


def _at_once(numel: int) -> int:
    """How many sequences of so many key elements are widened together."""
    return max(1, _WIDE // numel)
