"""PagedKVCache: the same cache in pages from a shared pool, so that memory follows the true lengths.

Pages are handed out on the host. Sequences that share a prefix (beams) share its pages, and a page that several sequences hold is
copied before one of them writes into it.
"""

from __future__ import annotations

from typing import Unpack

import torch

from halfbyte.cache import KEYS, CacheOptions, KVCache, check_sizes
from halfbyte.errors import CapacityError, Unsupported, check
from halfbyte.formats import key_format
from halfbyte.ops.append import check_new


class PagedKVCache(KVCache):
    """Like `KVCache`, with codes in a pool [pages, H, page_size, ...] and a page table int32 [batch, pages of a sequence].

    capacity   most tokens of one sequence, rounded up to whole pages
    page_size  tokens in a page: 16, 32, 64, 128 or 256; a multiple of 32 for per-channel keys
    pages      pages in the pool; None: enough for every sequence at full capacity
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
        fmt = key_format(options.get("keys", KEYS))
        block = fmt.token_block or 1
        check(page_size % block == 0, f"page_size={page_size}; {fmt} quantises blocks of {block} tokens and needs a multiple of it")
        per_sequence = -(-capacity // page_size)
        pages = batch * per_sequence if pages is None else pages
        check(isinstance(pages, int) and pages >= 0, f"pages={pages!r}; expected an integer of at least 0")
        self._allocate(batch, (pages, kv_heads, page_size), head_dim, options)
        self.page_table = torch.full((batch, per_sequence), -1, dtype=torch.int32, device=self.lengths.device)
        self._held: list[list[int]] = [[] for _ in range(batch)]  # pages of each sequence, in order
        self._tokens = [0] * batch  # lengths, as the host knows them
        self._holders = [0] * pages  # how many sequences hold each page
        self._free = list(range(pages - 1, -1, -1))

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.keys.codes.shape[2]

    @property
    def free_pages(self) -> int:
        """Pages of the pool that no sequence holds."""
        return len(self._free)

    def append(self, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """As `KVCache.append`, after taking the pages it needs. `CapacityError` when the pool has too few; then nothing changes."""
        check_new(k, v, self.keys, self.values, self.lengths, counts)
        new = [k.shape[2]] * self.batch if counts is None else [int(n) for n in counts.tolist()]
        before = ([list(held) for held in self._held], list(self._holders), list(self._free))
        try:
            for sequence, count in enumerate(new):
                self._make_room(sequence, count)
            self._write_table()
            super().append(k, v, counts)
        except BaseException:
            self._held, self._holders, self._free = before
            self._write_table()
            raise
        self._tokens = [old + count for old, count in zip(self._tokens, new, strict=True)]

    def reset(self) -> None:
        """Forget every token and give every page back."""
        super().reset()
        self._keep([0] * self.batch)

    def crop(self, length: int | torch.Tensor) -> None:
        """As `KVCache.crop`; gives back the pages that hold nothing any more."""
        super().crop(length)
        self._keep(self.lengths.tolist())

    def reorder(self, index: torch.Tensor) -> None:
        """As `KVCache.reorder`, without copying pages: sequences that become the same share them."""
        index = self._index(index)
        check(index.shape[0] == self.batch, f"index has {index.shape[0]} entries; reorder needs {self.batch}")
        chosen = index.tolist()
        self._held = [list(self._held[i]) for i in chosen]
        self._tokens = [self._tokens[i] for i in chosen]
        self._recount()
        for t in (self.keys.tail, self.lengths):
            if t is not None:
                t.copy_(t[index])

    def select(self, index: torch.Tensor) -> KVCache:
        """Not offered: a paged cache has one pool; use `reorder`."""
        raise Unsupported("select and repeat_interleave make a new cache, and pages live in one pool; use reorder, or a KVCache")

    # --------------------------------------------------------------------------------------------------------- pages

    def _make_room(self, sequence: int, count: int) -> None:
        """Give a sequence the pages for `count` more tokens, its last page copied if others hold it too."""
        held, used, total = self._held[sequence], self._tokens[sequence], self._tokens[sequence] + count
        if total > self.capacity:
            return  # the append itself refuses, with the numbers
        if count and used % self.page_size and self._holders[held[-1]] > 1:
            shared, held[-1] = held[-1], self._take(sequence)
            self._holders[shared] -= 1
            self._copy_page(shared, held[-1])
        while len(held) * self.page_size < total:
            held.append(self._take(sequence))

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
        for plane in (self.keys, self.values):
            for t in plane.tensors()[:3]:
                if t is not None and t.ndim > 1:
                    t[target] = t[source]

    def _keep(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._held = [held[: -(-n // self.page_size)] for held, n in zip(self._held, tokens, strict=True)]
        self._recount()

    def _recount(self) -> None:
        """Count holders anew and free what nobody holds."""
        self._holders = [0] * len(self._holders)
        for page in (page for held in self._held for page in held):
            self._holders[page] += 1
        self._free = [page for page in reversed(range(len(self._holders))) if not self._holders[page]]
        self._write_table()

    def _write_table(self) -> None:
        width = self.page_table.shape[1]
        rows = [held + [-1] * (width - len(held)) for held in self._held]
        self.page_table.copy_(torch.tensor(rows, dtype=torch.int32).reshape(self.page_table.shape))
