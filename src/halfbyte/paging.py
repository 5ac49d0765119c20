"""PagedKVCache: the same cache in pages from a shared pool, so that memory follows the actual lengths.
WindowKVCache: a ring of pages for each sequence, so that memory follows the window of attention.

Pages of a pool are allocated on the host. Sequences that share a prefix (beams) share its pages; a shared page is copied before
one of them writes to it (copy on write). On a GPU only `append` with `counts`, `crop` and `reorder` synchronize. CUDA graphs and
compiled code cannot allocate pages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Unpack

import torch

from halfbyte.arguments import check_sizes, integer
from halfbyte.cache import KVCache
from halfbyte.cache_options import DEFAULTS, CacheOptions, shows_options
from halfbyte.cache_pickle import restorable
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported, check
from halfbyte.formats import key_format
from halfbyte.kv_buffer import AppendCall, KVBuffer, new_kv_buffer, outside_inference_mode
from halfbyte.ops.launch_cache import Signature


@restorable
@shows_options
class PagedKVCache(KVCache):
    """Like `KVCache`, with codes in a pool [pages, H, page_size, ...] and a page table int32 [batch, pages of a sequence].

    capacity   most tokens of one sequence, rounded up to whole pages
    page_size  tokens in a page: 16, 32, 64, 128 or 256; a multiple of 32 for per-channel keys
    pages      pages in the pool; None: enough for every sequence at full capacity

    An append that raises changes no sequence.
    """

    page_table: torch.Tensor

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        page_size: int = 64,
        pages: int | None = None,
        **options: Unpack[CacheOptions],
    ) -> None:
        check_sizes(batch=batch, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity)
        check(page_size in (16, 32, 64, 128, 256), f"page_size={page_size}; choose 16, 32, 64, 128 or 256")
        fmt = key_format((DEFAULTS | options)["keys"])
        block = fmt.token_block or 1
        check(page_size % block == 0, f"page_size={page_size}; {fmt} quantizes blocks of {block} tokens and needs a multiple of it")
        per_sequence = -(-capacity // page_size)
        pages = batch * per_sequence if pages is None else pages
        integer("pages", pages, 0, 2**31 - 1, "an integer of at least 0")
        self._allocate(batch, (pages, kv_heads, page_size), head_dim, capacity, options)
        with outside_inference_mode():
            self._table = torch.full(
                (batch, per_sequence), -1, dtype=torch.int32, device="cpu"
            )  # the page table as the host writes it
            self.page_table = self._table.to(self.lengths.device, copy=True)
        self._held: list[list[int]] = [[] for _ in range(batch)]  # pages of each sequence, in order
        self._tokens = [0] * batch  # lengths, as the host knows them
        self._holders = [0] * pages  # how many sequences hold each page
        self._free = list(range(pages - 1, -1, -1))
        self._spare = 0  # tokens that every sequence can take without a new page or a copy of one

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys.codes.shape[2]

    @property
    def free_pages(self) -> int:
        """Pages of the pool that no sequence holds."""
        return len(self._free)

    def _append(self, call: AppendCall, signature: Signature | None) -> torch.Tensor | None:
        """Allocate pages, then append. `CapacityError` when the pool has too few; then nothing changes."""
        if self._capturing():
            raise Unsupported("append: pages are handed out on the host, which a CUDA graph does not replay; use KVCache in graphs")
        tokens = call.k.shape[2]
        counts = [tokens] * self.batch if call.counts is None else [int(n) for n in call.counts.tolist()]
        if counts and not 0 <= min(counts) <= max(counts) <= tokens:
            raise InvalidArgument(f"counts runs from {min(counts)} to {max(counts)}; expected 0 to {tokens}, the tokens given")
        after = [old + count for old, count in zip(self._tokens, counts, strict=True)]
        rotated = self._append_with_pages(counts, call, signature) if tokens > self._spare else super()._append(call, signature)
        self._tokens, self._spare = after, self._spare - tokens
        return rotated

    def _append_with_pages(self, counts: list[int], call: AppendCall, signature: Signature | None) -> torch.Tensor | None:
        """Allocate pages for `counts` more tokens, then append. Sets `_spare` for the lengths before the append."""
        before = {b: list(self._held[b]) for b, count in enumerate(counts) if self._lacks_room(b, count)}
        try:
            for sequence in before:
                self._make_room(sequence, counts[sequence])
            self._write_table(before)
            rotated = super()._append(call, signature)
        except BaseException:
            for sequence, pages in before.items():
                self._held[sequence] = pages
            self._recount()
            raise
        is_shared = any(pages and self._holders[pages[-1]] > 1 for pages in self._held)
        recent = self.keys.recent_tokens
        room = (len(pages) * self.page_size + recent - n for pages, n in zip(self._held, self._tokens, strict=True))
        self._spare = 0 if is_shared else min(room, default=0)
        return rotated

    def reset(self) -> None:
        """Remove all tokens and free all pages."""
        with self._changing():
            super().reset()
            self._keep([0] * self.batch)

    def crop(self, length: int | torch.Tensor) -> None:
        """As `KVCache.crop`; frees pages that are no longer used."""
        with self._changing():
            super().crop(length)
            self._keep(self.lengths.tolist())

    def reorder(self, index: torch.Tensor) -> None:
        """As `KVCache.reorder`, without copying pages: equal sequences share them."""
        index = self._index(index)
        check(index.shape[0] == self.batch, f"index has {index.shape[0]} entries; reorder needs {self.batch}")
        sources = index.tolist()
        with self._changing():
            self._held = [list(self._held[i]) for i in sources]
            self._tokens = [self._tokens[i] for i in sources]
            self._recount()
            for t in (self.keys.tail, self.values.tail, self.lengths):
                if t is not None:
                    t.copy_(t[index])

    def select(self, index: torch.Tensor) -> KVCache:
        """Not offered: a paged cache has one pool; use `reorder`."""
        raise Unsupported("select and repeat_interleave make a new cache, and pages live in one pool; use reorder, or a KVCache")

    def grown(self, capacity: int) -> KVCache:
        """Not offered: a paged cache grows by pages, up to its capacity."""
        raise Unsupported("a paged cache cannot grow beyond its capacity; make one with more pages, or use a KVCache")

    # --------------------------------------------------------------------------------------------------------- pages

    def _in_pages(self, tokens: int) -> int:
        """How many of a sequence's tokens are in pages: all but the recent ones, which are in 16 bits."""
        return max(tokens - self.keys.recent_tokens, 0)

    def _lacks_room(self, sequence: int, count: int) -> bool:
        """Whether `count` more tokens of a sequence need a new page, or a copy of a shared page."""
        pages, total = self._held[sequence], self._tokens[sequence] + count
        return self._in_pages(total) > len(pages) * self.page_size or bool(pages and self._holders[pages[-1]] > 1)

    def _make_room(self, sequence: int, count: int) -> None:
        """Allocate pages for `count` more tokens of a sequence; its last page is copied if it is shared."""
        pages, tokens, total = self._held[sequence], self._tokens[sequence], self._tokens[sequence] + count
        if total > self.capacity:
            return  # the append itself refuses, with the numbers
        if count and self._in_pages(tokens) % self.page_size and self._holders[pages[-1]] > 1:
            source, pages[-1] = pages[-1], self._take(sequence)
            self._holders[source] -= 1
            self._copy_page(source, pages[-1])
        while len(pages) * self.page_size < self._in_pages(total):
            pages.append(self._take(sequence))

    def _take(self, sequence: int) -> int:
        if not self._free:
            raise CapacityError(
                f"sequence {sequence} needs a page and all {len(self._holders)} of the pool are held; nothing was appended; "
                f"reset or crop sequences, or make the pool larger"
            )
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _copy_page(self, source: int, target: int) -> None:
        for buffer in (self.keys, self.values):
            for t in buffer.tensors()[:3]:
                if t is not None and t.ndim > 1:
                    t[target] = t[source]

    def _keep(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._held = [pages[: -(-self._in_pages(n) // self.page_size)] for pages, n in zip(self._held, tokens, strict=True)]
        self._recount()

    def _recount(self) -> None:
        """Count the holders of each page again, and free pages without one."""
        self._holders = [0] * len(self._holders)
        for page in (page for pages in self._held for page in pages):
            self._holders[page] += 1
        self._free = [page for page in reversed(range(len(self._holders))) if not self._holders[page]]
        self._spare = 0
        self._write_table()

    def _write_table(self, sequences: Iterable[int] | None = None) -> None:
        """Update these rows of the page table (None: all)."""
        for b in range(self.batch) if sequences is None else sequences:
            self._table[b] = -1
            self._table[b, : len(self._held[b])] = torch.tensor(self._held[b], dtype=torch.int32, device="cpu")
        table = self._table.pin_memory() if self.page_table.is_cuda else self._table  # pinned, so that the copy is asynchronous
        self.page_table.copy_(table, non_blocking=True)


#: Tokens of a page of a ring, and tokens beyond the window that a ring holds: as many can be appended, or cropped, at once.
RING_PAGE = SPARE = 64
#: Tokens that a recorded step may have written beyond the lengths.
_DRAFTS = 16


def ring_tokens(window: int) -> int:
    """Tokens that a `WindowKVCache` holds of a sequence at most."""
    return -(-(window + SPARE) // RING_PAGE) * RING_PAGE


@restorable
class WindowKVCache(KVCache):
    """A `KVCache` for attention with a window: it holds the last `ring_tokens(window)` tokens of each sequence.

    Page p of a sequence is page p % R of its ring of R pages, so a token takes the place of one that no query sees any more.
    Attention must pass a window of at most `window`. A longer append is cut into parts of a ring each, and replaces what its own
    first queries see: `prefill_attention` reads a copy from before (`select`).
    """

    page_table: torch.Tensor

    def __init__(
        self, batch: int, kv_heads: int, head_dim: int, capacity: int, *, window: int, **options: Unpack[CacheOptions]
    ) -> None:
        check_sizes(batch=batch, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity, window=window)
        self.window, pages = window, -(-capacity // RING_PAGE)
        self.ring = min(pages, ring_tokens(window) // RING_PAGE)
        self._allocate(batch, (batch * self.ring, kv_heads, RING_PAGE), head_dim, capacity, options)
        self._set_table(batch, pages)
        #: The most tokens that a sequence held when it was cropped.
        self._highest = torch.zeros_like(self.lengths)

    def _set_table(self, batch: int, pages: int) -> None:
        with outside_inference_mode():
            number = torch.arange(pages, dtype=torch.int32, device=self.lengths.device) % self.ring
            first = torch.arange(batch, dtype=torch.int32, device=self.lengths.device) * self.ring
            self.page_table = first[:, None] + number

    def _append(self, call: AppendCall, signature: Signature | None) -> torch.Tensor | None:
        """Append, a ring at a time. An error in a later part undoes the earlier ones."""
        tokens, most = call.k.shape[2], self.ring * RING_PAGE
        if tokens <= most:
            return super()._append(call, signature)
        before, rotated = [t.clone() for t in self.tensors()], []
        try:
            for start in range(0, tokens, most):
                rotated.append(super()._append(_part(call, start, min(start + most, tokens)), None))
        except BaseException:
            for t, old in zip(self.tensors(), before, strict=True):
                t.copy_(old)
            raise
        return None if call.q is None else torch.cat([q for q in rotated if q is not None], 2)

    def reset(self) -> None:
        """As `KVCache.reset`."""
        super().reset()
        self._highest.zero_()

    def check_crop(self, length: int | torch.Tensor) -> None:
        """Raise `Unsupported` where tokens that the newest queries would see then are gone."""
        left = self.lengths.clamp_max(length) if isinstance(length, int) else torch.minimum(self.lengths, length)
        gone = (left < self.lengths) & (left > 0) & (self._oldest() > (left - self.window + 1).clamp_min(0))
        if bool(gone.any()):
            raise Unsupported(
                f"crop: a layer with a window of {self.window} tokens holds the last {self.ring * RING_PAGE} that it has seen, and "
                f"attention after {int(left[gone].min())} tokens needs others; reset the cache and read the text again"
            )

    def crop(self, length: int | torch.Tensor) -> None:
        """As `KVCache.crop`, up to about `SPARE` tokens back once the ring is full."""
        self.check_crop(length)
        highest = torch.maximum(self._highest, self.lengths)
        super().crop(length)
        self._highest.copy_(highest)

    def reorder(self, index: torch.Tensor) -> None:
        """As `KVCache.reorder`."""
        check(len(index) == self.batch, f"index has {len(index)} entries; reorder needs {self.batch}; see select")
        other = self.select(index)
        with self._changing():
            for t, new in zip(self.tensors(), other.tensors(), strict=True):
                t.copy_(new)
            self._highest.copy_(other._highest)

    def select(self, index: torch.Tensor) -> WindowKVCache:
        """As `KVCache.select`."""
        index = self._index(index)
        cache = copy.copy(self)
        with outside_inference_mode():
            cache.keys, cache.values = (self._selected(buffer, index) for buffer in (self.keys, self.values))
            cache.lengths, cache._highest = self.lengths[index], self._highest[index]
        cache._set_table(len(index), self.page_table.shape[1])
        return cache

    def grown(self, capacity: int) -> WindowKVCache:
        """As `KVCache.grown`."""
        pages = -(-max(capacity, self.capacity) // RING_PAGE)
        ring = min(pages, ring_tokens(self.window) // RING_PAGE)
        cache = copy.copy(self)
        cache.ring, cache._version = ring, self._version
        if ring != self.ring:  # then the ring has not gone round yet
            with outside_inference_mode():
                cache.keys, cache.values = (self._widened(buffer, ring) for buffer in (self.keys, self.values))
        cache._set_table(self.batch, pages)
        return cache

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `KVCache.dequantized`, 0 where tokens are gone."""
        keys, values = super().dequantized()
        gone = torch.arange(keys.shape[2], device=keys.device)[:, None] < self._oldest()[:, None, None, None]
        return keys.masked_fill(gone, 0), values.masked_fill(gone, 0)

    def _oldest(self) -> torch.Tensor:
        """The oldest token of each sequence that is sure to be held, [B]; recorded drafts that were rejected took some places."""
        highest = torch.maximum(self._highest, self.lengths)
        return (highest + _DRAFTS * (self.page_table.shape[1] > self.ring) - self.ring * RING_PAGE).clamp_min(0)

    def _selected(self, buffer: KVBuffer, index: torch.Tensor) -> KVBuffer:
        """A copy of the rings and tails of these sequences."""
        pages = (index[:, None] * self.ring + torch.arange(self.ring, device=index.device)).flatten()
        tail = None if buffer.tail is None else buffer.tail[index]
        return replace(replace(buffer, tail=None).select(pages), tail=tail, sink_tokens=buffer.sink_tokens)

    def _widened(self, buffer: KVBuffer, ring: int) -> KVBuffer:
        """The same pages at the front of wider rings."""
        wide = new_kv_buffer(
            buffer.format,
            (self.batch * ring, buffer.heads, RING_PAGE, buffer.dim),
            (0, 0, 0, 0),
            torch.bfloat16,
            self.lengths.device,
        )
        for t, old in zip(wide.tensors()[:3], buffer.tensors()[:3], strict=True):
            if t is not None and old is not None:
                if old.ndim == 1:
                    t.copy_(old)
                else:
                    t.unflatten(0, (self.batch, ring))[:, : self.ring] = old.unflatten(0, (self.batch, self.ring))
        return replace(wide, tail=buffer.tail, saturated=buffer.saturated, sink_tokens=buffer.sink_tokens)


def _part(call: AppendCall, start: int, stop: int) -> AppendCall:
    """The append of tokens `start` to `stop` - 1 of those of a call."""
    own, rope = slice(start, stop), call.rope
    counts = None if call.counts is None else (call.counts - start).clamp(0, stop - start)
    if rope is not None:
        rope = rope._replace(cos=rope.cos[..., own, :], sin=rope.sin[..., own, :])
    q = None if call.q is None else call.q[:, :, own]
    return call._replace(k=call.k[:, :, own], v=call.v[:, :, own], counts=counts, rope=rope, q=q)
