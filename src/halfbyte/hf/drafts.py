"""Drafts of assisted decoding over a packed cache: verified as greedy decoding would read them, and undone exactly.

With a 16-bit tail (the last block of per-channel keys, or recent tokens) a query's result depends on how many tokens the cache
holds. So drafts are appended and verified up to the token that finishes a block, or one by one with recent tokens, as each pushes
another out of the window; else 16 at once. The tail is copied before drafts, so that `take_back` restores it: cropping alone would
leave dequantized keys in it, with scales that include rejected tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from halfbyte.cache import KVCache

#: read(q, k, v): attention of the newest tokens, which the cache holds already.
Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Chunk(NamedTuple):
    """A newest token and drafts behind it in a recorded step, int32 [B]: tokens before them, and how many of them are real."""

    held: torch.Tensor
    counts: torch.Tensor


class _Before(NamedTuple):
    """A cache before its last drafts, and their keys and values [B, H, L, D]."""

    tails: list[torch.Tensor]
    lengths: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Drafts:
    """The state of one layer in a call of `generate()` with drafts."""

    def __init__(self, prompt: int, at_once: int) -> None:
        """`prompt`: tokens that come before the first draft. `at_once`: drafts that one launch may read."""
        self.prompt, self.at_once = prompt, at_once
        self.before: _Before | None = None

    def attend(self, kv: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: Read) -> torch.Tensor:
        """Append k, v [B, H, L, D] and answer q [B, Hq, L, D]: the rest of the prompt as one chunk, then the drafts."""
        count = q.shape[2]
        first = min(self.prompt, count)
        self.prompt -= first
        starts = [*([0] if first else []), *self._starts(kv, first, count)]
        parts = []
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            if start == first:
                self._remember(kv, k[:, :, first:], v[:, :, first:])
            new_q, new_k, new_v = (t[:, :, start:stop] for t in (q, k, v))
            kv.append(new_k, new_v)
            parts.append(read(new_q, new_k, new_v))
        return torch.cat(parts, 2)

    def _starts(self, kv: KVCache, first: int, count: int) -> list[int]:
        """Where the parts begin into which drafts `first` to `count` - 1 are cut."""
        block = kv.keys.format.token_block
        if block is None:
            return list(range(first, count, 1 if _tails(kv) else self.at_once))
        held = int(kv.lengths[0])  # waits for a GPU; drafts come for one sequence only
        starts = [first] if first < count else []
        for i in range(first + 1, count):
            if (held + i + 1) % block == 0 or i - starts[-1] == self.at_once:
                starts.append(i)
        return starts

    def _remember(self, kv: KVCache, k: torch.Tensor, v: torch.Tensor) -> None:
        """One draft is none: it is the token that was chosen, and stays."""
        tails = _tails(kv) if k.shape[2] > 1 else []
        self.before = _Before([t.clone() for t in tails], kv.lengths.clone(), k, v) if tails else None

    def take_back(self, kv: KVCache, count: int) -> bool:
        """Undo the last `count` tokens exactly, if they are drafts of the last forward; returns whether they were."""
        before, self.before = self.before, None
        if before is None or count > before.k.shape[2]:
            return False
        kv.crop(before.lengths)
        for tail, held in zip(_tails(kv), before.tails, strict=True):
            tail.copy_(held)
        kept = before.k.shape[2] - count
        if kept:
            kv.append(before.k[:, :, :kept], before.v[:, :, :kept])
        return True


def _tails(kv: KVCache) -> list[torch.Tensor]:
    return [t for t in (kv.keys.tail, kv.values.tail) if t is not None]
