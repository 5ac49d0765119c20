"""Bank conflicts of shared memory. It has 32 banks of 4 bytes; 32 threads access up to 4 bytes each at once, 16 threads 8 bytes, 8
threads 16 bytes (of ldmatrix and stmatrix the rows of one matrix). Each bank gives one word in a pass, to all who want that word.

Copies (cp.async) and the operands of wgmma are not counted: how they reach shared memory is not documented.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from machine.arithmetic import Array


@dataclass
class Accesses:
    """Of each kind of instruction, [groups of threads that access memory at once, passes that they take]."""

    found: dict[str, Array] = field(default_factory=dict)

    def add(self, kind: str, addresses: Array, size: int, threads: Array) -> None:
        """Threads (numbers in the block) access `size` bytes at each address."""
        at_once = 128 // max(size, 4)
        words = addresses.astype(np.int64)[:, None] // 4 + np.arange(max(1, size // 4))
        group = np.broadcast_to(threads[:, None] // at_once, words.shape)
        asked = np.unique(np.stack([group.ravel(), words.ravel()]), axis=1)
        groups, banks = np.unique(asked[0], return_inverse=True)[1], asked[1] % 32
        taken = np.bincount(32 * groups + banks, minlength=32 * (groups.max() + 1)).reshape(-1, 32).max(1)
        self.found[kind] = self.found.get(kind, np.zeros(2, np.int64)) + np.array([taken.size, taken.sum()])

    def passes(self, kind: str) -> float:
        """Passes that one access takes on average; 1 without conflicts."""
        groups, taken = self.found[kind]
        return float(taken / groups)


_counting: list[Accesses] = []


@contextmanager
def counted() -> Iterator[Accesses]:
    """Counts what programs do within."""
    _counting.append(Accesses())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def note(kind: str, addresses: Array, size: int, threads: Array) -> None:
    """An instruction's access, for those who count."""
    for one in _counting:
        one.add(kind, addresses, size, threads)
