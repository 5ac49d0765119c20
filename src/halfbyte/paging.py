"""PagedKVCache: the same cache in pages from a shared pool, so that memory follows the actual lengths.

Pages are allocated on the host. Sequences that share a prefix (beams) share its pages; a shared page is copied before one of them
writes to it (copy on write). On a GPU only `append` with `counts`, `crop` and `reorder` synchronize. CUDA graphs and compiled code
cannot allocate pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch

from halfbyte.arguments import check_sizes, integer
from halfbyte.cache import KVCache
from halfbyte.cache_options import DEFAULTS, CacheOptions, shows_options
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported, check
from halfbyte.formats import key_format
from halfbyte.kv_buffer import AppendCall, outside_inference_mode
from halfbyte.ops.launch_cache import Signature


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
