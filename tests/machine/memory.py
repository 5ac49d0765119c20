"""Memory of the GPU and of a block, and copies from one to the other that end as late as a program allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]
#: Where a block's shared memory begins. Nothing lies below.
SHARED = 1 << 10
#: Threads, and the barrier (mbarrier) that each arrives at.
Arrivals = tuple[Array, Array]
NOBODY: Arrivals = np.empty(0, np.int64), np.empty(0, np.int64)


class Memory:
    """The memory of tensors, at their own addresses. What is not a tensor's cannot be reached.

    early: where tensors begin that were read or written by threads that had not waited for the kernel before (griddepcontrol.wait).
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.early: set[int] = set()
        unique = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()}
        self.starts = np.array(sorted(unique), np.uint64)
        self.bytes = [torch.empty(0, dtype=torch.uint8).set_(unique[int(start)]).numpy() for start in self.starts]

    def _parts(self, addresses: Array, size: int, aligned: int) -> Iterator[tuple[Array, Array, Array]]:
        """Of each tensor that addresses are in: which, its bytes, and [n, size] places among them."""
        assert not (addresses % np.uint64(aligned)).any(), "an address that is not aligned"
        which = np.searchsorted(self.starts, addresses, "right") - 1
        assert which.min() >= 0, "an address below all tensors"
        for one in np.unique(which):
            chosen = which == one
            at, found = (addresses[chosen] - self.starts[one]).astype(np.int64), self.bytes[one]
            assert at.max() + size <= found.size, f"{at.max() + size - found.size} bytes behind a tensor of {found.size}"
            yield chosen, found, at[:, None] + np.arange(size)

    def load(self, addresses: Array, size: int, aligned: int = 0) -> Array:
        """[n, size] bytes."""
        values = np.empty((addresses.size, size), np.uint8)
        for chosen, found, at in self._parts(addresses, size, aligned or size):
            values[chosen] = found[at]
        return values

    def reach(self, addresses: Array, waited: Array) -> None:
        """Threads will read or write there; `waited`: those that waited for the kernel before."""
        if not waited.all():
            which = np.searchsorted(self.starts, addresses[~waited], "right") - 1
            self.early.update(self.starts[np.unique(which)].tolist())

    def store(self, addresses: Array, values: Array) -> None:
        size = values.shape[1]
        for chosen, found, at in self._parts(addresses, size, size):
            found[at] = values[chosen]


class Shared:
    """A block's memory, and which threads know of each other's accesses to it. At first it holds what is no number of any type.

    Warps count the times that they told others what they did (vector clocks); of each 4 bytes the last writer is known, and when
    each warp read them last. To read what one does not know to be written, or to write what others may still read, is an error,
    whatever was there this time. Within a warp a write is known behind the next barrier.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.size = size
        self.bytes = np.full(size + 15 & -16, 0xFF, np.uint8)
        self._as = {width: self.bytes.view(f"V{width}") for width in (1, 2, 4, 8, 16)}  # items of so many bytes
        warps = threads // 32
        self.known = np.eye(warps, dtype=np.int64)  # of each warp: up to when it knows what others did
        self.epoch = np.zeros(warps, np.int64)  # barriers that a warp has passed
        self._writer = np.full(size // 4 + 1, -1, np.int64)
        self._clock, self._epoch = np.zeros((2, size // 4 + 1), np.int64)  # when: by the warp's clock, in its epoch; 0: never
        self._read = np.zeros((size // 4 + 1, warps), np.int64)

    def _at(self, addresses: Array, size: int) -> tuple[Array, Array]:
        """[n] items of so many bytes, and [n, size / 4] words."""
        at = addresses.astype(np.int64) - SHARED
        items = at // size
        assert (items * size == at).all(), "a place in shared memory that is not aligned"
        assert at.min() >= 0, "below shared memory"
        assert at.max() + size <= self.size, f"{at.max() + size - self.size} bytes behind shared memory"
        words = at[:, None] // 4
        return items, words + np.arange(size // 4) if size > 4 else words

    def load(self, addresses: Array, size: int, threads: Array) -> Array:
        """[n, size] bytes. threads: [n], or [n, size / 4] where several take a part each."""
        at, words = self._at(addresses, size)
        writer, mine = self._writer[words], threads.reshape(threads.shape[0], -1)
        warp = mine // 32
        own = writer // 32 == warp
        unknown = ~own & (self._clock[words] > self.known[warp, writer // 32])
        beside = own & (writer != mine) & (self._epoch[words] == self.epoch[warp])
        assert not (unknown | beside).any(), f"threads read what others may not have written: {mine[0]} ..."
        self._read[words, warp] = self.known[warp, warp]
        return self._as[size][at].view(np.uint8).reshape(-1, size)

    def may_write(self, addresses: Array, size: int, threads: Array) -> None:
        """Raise where others may still read what is there."""
        self._no_reader(self._at(addresses, size)[1], threads)

    def _no_reader(self, words: Array, threads: Array) -> None:
        mine = threads.reshape(threads.shape[0], -1)
        unknown = (self._read[words] > self.known[mine // 32]).any(-1)
        assert not unknown.any(), f"threads write what others may still read: {mine[unknown.any(1)][0]} ..."

    def store(self, addresses: Array, values: Array, threads: Array) -> None:
        size, values = values.shape[1], np.ascontiguousarray(values)
        at, words = self._at(addresses, size)
        self._no_reader(words, threads)
        items, writer, mine = self._as[size], self._writer[words], threads.reshape(threads.shape[0], -1)
        warp = mine // 32
        unknown = (writer // 32 != warp) & (self._clock[words] > self.known[warp, writer // 32])
        if unknown.any():
            changed = (items[at].view(np.uint8).reshape(-1, size) != values).reshape(*words.shape, -1).any(-1)
            assert not (unknown & changed).any(), f"threads write different values to one place: {mine[0]} ..."
        items[at] = values.view(items.dtype)[:, 0]
        assert items[at].tobytes() == values.tobytes(), "threads write different values to one place at once"
        self._writer[words] = mine
        self._clock[words], self._epoch[words] = self.known[warp, warp], self.epoch[warp]

    def meet(self, warps: Array) -> None:
        """Of these warps each knows all that the others did."""
        self.known[warps] = self.known[warps].max(0)
        self.tell(warps)

    def tell(self, warps: Array) -> None:
        """What these warps do from now on nobody else knows. Clocks are above 0 from their first."""
        self.known[warps, warps] += 1
        self.epoch[warps] += 1


@dataclass
class Copy:
    """What threads asked for at once. lanes: threads. group: of each, how often it had committed before. read: bytes of each, the
    rest is zeros. size 0: no copy, but the arrival at a barrier that follows the thread's copies.
    """

    lanes: Array
    group: Array
    to: Array
    start: Array
    read: Array
    size: int
    open: Array


class Copies:
    """Asynchronous copies (cp.async) of a block, which end when somebody waits for them; `early`: at once.

    Both are allowed, as is all between: a program that is right under both does not read what it did not wait for, and does not ask
    for what others still read.
    """

    def __init__(self, threads: int, memory: Memory, shared: Shared, early: bool) -> None:
        self.memory, self.shared, self.early = memory, shared, early
        self.committed = np.zeros(threads, np.int64)
        self.pending: list[Copy] = []
        self.asked = 0  # bytes, those that two threads copy counted twice

    def ask(self, lanes: Array, to: Array, start: Array, read: Array, size: int) -> Arrivals:
        """Returns the threads that arrive at barriers by it."""
        assert not (start % np.uint64(size)).any(), "an address that is not aligned"
        self.shared.may_write(to, size, lanes)
        self.asked += size * lanes.size
        self.pending.append(Copy(lanes, self.committed[lanes], to, start, read, size, np.ones(lanes.size, bool)))
        return self.end(lanes, 0, True) if self.early else NOBODY

    def arrive(self, lanes: Array, barriers: Array) -> Arrivals:
        """Threads will arrive when all copies that they asked for are there."""
        nothing = np.zeros(lanes.size, np.uint64)
        self.pending.append(Copy(lanes, self.committed[lanes], barriers, nothing, nothing, 0, np.ones(lanes.size, bool)))
        return self.end(lanes, 0, True) if self.early else self._arrivals()

    def end(self, lanes: Array, keep: int, uncommitted: bool = False) -> Arrivals:
        """End all but the last `keep` groups of these threads' copies. Returns the threads that arrive at barriers."""
        limit = np.full(self.committed.size, -1, np.int64)
        limit[lanes] = self.committed[lanes] - keep + uncommitted
        for copy in self.pending:
            if copy.size:
                chosen = copy.open & (copy.group < limit[copy.lanes])
                if chosen.any():
                    self._perform(copy, chosen)
                    copy.open &= ~chosen
        return self._arrivals()

    def end_some(self) -> Arrivals | None:
        """Nobody can go on: the oldest copies end. None if there are none."""
        for copy in self.pending:
            if copy.size and copy.open.any():
                self._perform(copy, copy.open.copy())
                copy.open[:] = False
                return self._arrivals()
        return None

    def _perform(self, copy: Copy, chosen: Array) -> None:
        read = copy.read[chosen]
        values = np.zeros((read.size, copy.size), np.uint8)
        for some in np.unique(read[read > 0]):
            values[read == some, :some] = self.memory.load(copy.start[chosen][read == some], int(some), copy.size)
        self.shared.store(copy.to[chosen], values, copy.lanes[chosen])

    def _arrivals(self) -> Arrivals:
        """Those whose earlier copies have all ended."""
        busy, found = np.zeros(self.committed.size, bool), [NOBODY]
        for copy in self.pending:
            if copy.size:
                busy[copy.lanes[copy.open]] = True
            else:
                chosen = copy.open & ~busy[copy.lanes]
                found.append((copy.lanes[chosen], copy.to[chosen]))
                copy.open &= ~chosen
        self.pending = [copy for copy in self.pending if copy.open.any()]
        return np.concatenate([threads for threads, _ in found]), np.concatenate([barriers for _, barriers in found])
