"""The threads of a block: which of them go on, in what order, and what the others wait for.

Threads at the same instruction go on together. Those furthest behind come first, so that threads that parted meet again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from machine import arithmetic, tiles, transfers, warpgroups, warps
from machine.arithmetic import RAW, Array, Lanes, Step, raw
from machine.memory import SHARED, Arrivals, Copies, Memory, Shared
from machine.program import Instruction, Program

#: What threads are doing.
RUNNING, AT_BARRIER, AWAITING_COPIES, ENDED = range(4)


class Hung(AssertionError):
    """Threads wait for what nobody will do."""


@dataclass(frozen=True)
class Launch:
    """What all blocks of a launch are given."""

    grid: tuple[int, ...]
    arguments: list[int]
    shared_bytes: int
    described: tuple[Any, ...] = ()  # tensors that TMA copies; an argument is the number of one


class Block:
    """One block of a launch. See `Order` for how its warps take turns."""

    def __init__(self, code: Code, memory: Memory, launch: Launch, number: tuple[int, ...], order: Order) -> None:
        program = code.program
        self.code, self.memory, self.order, self.threads = code, memory, order, program.threads
        self.shared = Shared(launch.shared_bytes, program.threads)
        self.copies = Copies(self.threads, memory, self.shared, order.early)
        self.tiles, self.described = tiles.Tiles(self, order.early), launch.described
        self.waited = np.zeros(self.threads, bool)  # for the kernel before
        self.products = warpgroups.Products(self.threads // 32)
        # A register that nobody has written holds what is no number.
        self.registers: dict[str, Array] = {}
        for bits, dtype in RAW.items():
            names = [name for name, width in program.registers.items() if width == bits]
            self.registers |= zip(names, np.full((len(names), self.threads), dtype.type(-1 % (1 << bits))), strict=True)
        self.parameters = np.array([value % (1 << 64) for value in launch.arguments], np.uint64)
        self.number = number
        self.at, self.state = np.zeros(self.threads, np.int64), np.zeros(self.threads, np.int8)
        self.meeting = np.full(self.threads, -1)  # the barrier that a thread is at
        self.awaited = np.zeros((self.threads, 2), np.int64)  # the mbarrier and parity that it waits for
        self.barriers: dict[int, Barrier] = {}
        self.all = np.arange(self.threads)
        specials: dict[str, Array] = {
            "%tid.x": self.all,
            "%laneid": self.all % 32,
            "%warpid": self.all // 32,
            **{f"%ctaid.{axis}": np.asarray(i) for axis, i in zip("xyz", number, strict=True)},
            **{f"%nctaid.{axis}": np.asarray(n) for axis, n in zip("xyz", launch.grid, strict=True)},
            "%tid.y": np.asarray(0),
            "%tid.z": np.asarray(0),
            "global_smem": np.asarray(SHARED),
            "%ntid.x": np.asarray(self.threads),
        }
        #: Registers that are read only, and the symbol of shared memory: of each thread.
        specials |= {name: np.asarray(i) for i, (name, _) in enumerate(program.parameters)}  # an address is its number
        self.specials = {name: np.broadcast_to(one, self.threads) for name, one in specials.items()}

    def run(self) -> None:
        """All threads to their end."""
        while self.goes_on(1 << 20):
            pass

    def goes_on(self, turns: int = 500) -> bool:
        """So many turns further; whether threads are left. A warp that waits for another block stops nobody for longer."""
        self.order.forget()
        with np.errstate(all="ignore"):
            for _ in range(turns):
                if (self.state == ENDED).all():
                    return False
                ready = np.flatnonzero(self.state == RUNNING)
                if not ready.size:
                    self._when_all_wait()
                    continue
                ready = self.order.choose(ready)
                at = int(self.at[ready].min())
                lanes = ready[self.at[ready] == at]
                self._advance(at, lanes)
        return True

    def _advance(self, at: int, threads: Array) -> None:
        """These threads go on up to a place where others may join them, or where they may part or wait."""
        first, end = int(threads[0]), int(threads[-1]) + 1
        lanes: Lanes = slice(first, end) if threads.size == end - first else threads
        code = self.code
        while (stop := code.ends[at]) is None:
            try:
                code.steps[at](self, lanes)
            except AssertionError as error:
                error.add_note(f"block {self.number}, threads {threads[0]} ..: {code.program.instructions[at].text}")
                raise
            at += 1
            if code.joins[at]:
                self.at[threads] = at
                return
        self.at[threads] = at + 1
        stop(self, threads)

    def _when_all_wait(self) -> None:
        arrivals = self.copies.end_some()
        if arrivals is None:
            if self.tiles.end_some():
                return
            raise Hung(f"block {self.number}: threads at {sorted(set(self.at[self.state != ENDED].tolist()))} wait for each other")
        self.arrive(arrivals)

    def meet(self, lanes: Array, number: Array, count: Array) -> None:
        """bar.sync: threads wait until `count` are at barrier `number`."""
        self.state[lanes], self.meeting[lanes] = AT_BARRIER, number
        for one in np.unique(number):
            there = (self.state == AT_BARRIER) & (self.meeting == one)
            if there.sum() == count[0]:
                self.state[there], self.meeting[there] = RUNNING, -1
                self.shared.meet(np.unique(np.flatnonzero(there) // 32))

    def arrive(self, arrivals: Arrivals) -> None:
        """Threads arrive at mbarriers, whose phase ends with the last."""
        threads, barriers = arrivals
        for thread, one in zip(threads.tolist(), barriers.tolist(), strict=True):
            assert one in self.barriers, "an mbarrier that nobody has made"
            barrier = self.barriers[one]
            barrier.told = np.maximum(barrier.told, self.shared.known[thread // 32])
            barrier.missing -= 1
            self._end_phase(one)
        self.shared.tell(np.unique(threads // 32))

    def filled(self, one: int, size: int, thread: int) -> None:
        """So many bytes that a thread asked for are there, and an mbarrier counts them."""
        barrier = self.barriers[one]
        barrier.told = np.maximum(barrier.told, self.shared.known[thread // 32])
        barrier.bytes -= size
        self._end_phase(one)
        self.shared.tell(np.array([thread // 32]))

    def _end_phase(self, one: int) -> None:
        """The phase of an mbarrier ends if nobody is missing, and no byte."""
        barrier = self.barriers[one]
        if not barrier.missing and not barrier.bytes:
            barrier.missing, barrier.phases, barrier.known = barrier.count, barrier.phases + 1, barrier.told
            woken = (self.state == AWAITING_COPIES) & (self.awaited[:, 0] == one)
            self.state[woken] = RUNNING

    def make_barrier(self, at: int, count: int) -> None:
        assert at not in self.barriers, "an mbarrier is made twice"
        nothing = np.zeros(self.threads // 32, np.int64)
        self.barriers[at] = Barrier(count, count, nothing, nothing)

    def passed(self, lanes: Array, barriers: Array, parity: Array) -> Array:
        """Whether the phase of this parity has ended. The others wait, and ask again when one ends."""
        found = np.array([self.barriers[int(b)].phases % 2 != int(p) for b, p in zip(barriers, parity, strict=True)])
        for thread, barrier in zip(lanes[found] // 32, barriers[found], strict=True):
            self.shared.known[thread] = np.maximum(self.shared.known[thread], self.barriers[int(barrier)].known)
        self.awaited[lanes] = np.stack([barriers, parity], 1)
        self.state[lanes[~found]] = AWAITING_COPIES
        return found


@dataclass
class Barrier:
    """An mbarrier. told: what those know who have arrived by now; known: those of the last phase that ended, of `phases`."""

    count: int
    missing: int
    told: Array
    known: Array
    phases: int = 0
    bytes: int = 0  # that are expected and not there


class Order:
    """How warps take turns, and when copies end.

    together: all go on side by side. Otherwise one warp goes on for as long as it can, then another, drawn at random.
    early: copies are there at once. Otherwise only when they are waited for.
    """

    def __init__(self, together: bool, early: bool, seed: int = 0) -> None:
        self.together, self.early = together, early
        self._random = np.random.default_rng(seed)
        self._warp = -1

    def forget(self) -> None:
        """Any warp may be next."""
        self._warp = -1

    def choose(self, ready: Array) -> Array:
        """Of threads that can go on those of the warps whose turn it is."""
        if self.together:
            return ready
        mine = ready[ready // 32 == self._warp]
        if not mine.size:
            self._warp = int(self._random.choice(np.unique(ready // 32)))
            mine = ready[ready // 32 == self._warp]
        return mine


End = Callable[[Block, Array], None]


class Code:
    """A program that can be run. ends: instructions behind which threads may part or wait; steps: all others; joins: labels."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ends = [_end(one, program) for one in program.instructions]
        self.steps = [
            _step(one, program) if end is None else _ended for one, end in zip(program.instructions, self.ends, strict=True)
        ]
        self.joins = [False] * (len(self.steps) + 1)
        for at in program.labels.values():
            self.joins[at] = True


def _ended(block: Block, lanes: Lanes) -> None:
    raise NotImplementedError


def _guard(one: Instruction, program: Program) -> Callable[[Block, Lanes], Array] | None:
    if not one.guard:
        return None
    read = raw(one.guard, program.registers, 1)
    return (lambda block, lanes: ~read(block, lanes)) if one.unless else read


def _end(one: Instruction, program: Program) -> End | None:
    """Branches, barriers, and waiting for an mbarrier."""
    guard, name = _guard(one, program), one.name
    if name in ("bra", "bra.uni"):
        target = program.labels[str(one.operands[0])]

        def branch(block: Block, lanes: Array) -> None:
            block.at[lanes if guard is None else lanes[guard(block, lanes)]] = target

        return branch
    if name == "brx.idx":
        index, table = raw(str(one.operands[0]), program.registers, 32), program.tables[str(one.operands[1])]
        targets = np.array([program.labels[label] for label in table])

        def choose(block: Block, lanes: Array) -> None:
            block.at[lanes] = targets[index(block, lanes)]

        return choose
    if name in ("ret", "trap"):

        def end(block: Block, lanes: Array) -> None:
            lanes = lanes if guard is None else lanes[guard(block, lanes)]
            assert name == "ret" or not lanes.size, f"trap: {one.text}"
            block.state[lanes] = ENDED

        return end
    if name in ("bar.sync", "barrier.sync"):
        number = raw(str(one.operands[0]), program.registers, 32)
        count = raw(str(one.operands[1]), program.registers, 32) if len(one.operands) > 1 else None

        def meet(block: Block, lanes: Array) -> None:
            wanted = np.full(1, block.threads) if count is None else count(block, lanes)
            block.meet(lanes, np.broadcast_to(number(block, lanes), lanes.shape), np.broadcast_to(wanted, lanes.shape))

        assert guard is None
        return meet
    if name == "mbarrier.test_wait.parity.shared.b64":
        return _test(one, program)
    return None


def _test(one: Instruction, program: Program) -> End:
    into, where, parity = map(str, one.operands)
    at, phase = warps.address(where, program.registers), raw(parity, program.registers, 32)

    def test(block: Block, lanes: Array) -> None:
        barriers, wanted = (np.broadcast_to(read(block, lanes), lanes.shape) for read in (at, phase))
        found = block.passed(lanes, barriers.astype(np.int64), wanted)
        block.registers[into][lanes] = True
        block.at[lanes[~found]] -= 1  # asked again when the phase has ended

    return test


def _step(one: Instruction, program: Program) -> Step:
    """Everything that threads do without parting; those whose guard is false do nothing."""
    family = one.name.split(".")[0]
    registers = program.registers
    if one.name == "griddepcontrol.wait":
        return _wait_for_kernel
    if family in ("griddepcontrol", "fence", "setmaxnreg"):
        return lambda block, lanes: None
    if one.name == "bar.warp.sync":
        return _meet_warp
    made = TOGETHER.get(family)
    found = (
        made(one, registers)
        if made
        else next(filter(None, (kind.step(one, registers) for kind in (arithmetic, transfers, tiles))), None)
    )
    if found is None:
        raise NotImplementedError(one.text)
    guard = _guard(one, program)
    if guard is None:
        return found

    def run(block: Block, lanes: Lanes) -> None:
        those = guard(block, lanes)
        if those.all():
            found(block, lanes)
        elif those.any():
            found(block, block.all[lanes][those])

    return run


#: What the threads of a warp do together.
TOGETHER = {"shfl": warps.shuffle, "ldmatrix": warps.matrix, "stmatrix": warps.matrix, "movmatrix": warps.move_matrix}
TOGETHER |= {"elect": warps.elect, "redux": warps.reduce, "mma": warps.product, "wgmma": warpgroups.step}


def _wait_for_kernel(block: Block, lanes: Lanes) -> None:
    block.waited[lanes] = True


def _meet_warp(block: Block, lanes: Lanes) -> None:
    block.shared.epoch[np.unique(warps.numbers(lanes, block) // 32)] += 1
