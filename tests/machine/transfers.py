"""Reading and writing memory: loads, stores, counters, asynchronous copies and the barriers that count them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from machine import banks
from machine.arithmetic import TYPES, Array, Lanes, Step, raw, to_bits, writer
from machine.program import Instruction
from machine.warps import address

if TYPE_CHECKING:
    from machine.block import Block
    from machine.memory import Memory


def step(one: Instruction, registers: dict[str, int]) -> Step | None:
    """What an instruction does to memory; None if it is none of these."""
    parts = one.name.split(".")
    if parts[:2] == ["ld", "param"]:
        return _parameter(one, registers, parts[-1])
    if parts[0] in ("ld", "st"):
        return _transfer(one, registers, parts)
    if one.name.startswith("atom.global") and parts[-2:] == ["add", "u32"]:
        return _add(one, registers)
    if one.name.startswith(("cp.async.cg.", "cp.async.ca.")):
        return _copy(one, registers)
    made = {
        "prefetch.global.L2": _prefetch,
        "cp.async.commit_group": _commit,
        "cp.async.wait_group": _wait,
        "cp.async.mbarrier.arrive.noinc.shared.b64": _arrive_behind_copies,
        "mbarrier.init.shared.b64": _init,
        "mbarrier.arrive.shared.b64": _arrive,
    }.get(one.name)
    return made(one, registers) if made else None


def _threads(block: Block, lanes: Lanes) -> Array:
    return block.all[lanes]


def _for_each(read: Callable[[Block, Lanes], Array], block: Block, lanes: Lanes) -> Array:
    """A value for each thread, also where all have the same."""
    found, threads = read(block, lanes), _threads(block, lanes)
    return found if found.shape == threads.shape else np.broadcast_to(found, threads.shape)


def _global(block: Block, lanes: Lanes, addresses: Array) -> Memory:
    """The GPU's memory, which these threads read or write."""
    block.memory.reach(addresses, block.waited[lanes])
    return block.memory


def _parameter(one: Instruction, registers: dict[str, int], kind: str) -> Step:
    into, where = one.operands
    write, read = writer(str(into), registers, kind), raw(str(where).strip("[]"), registers, 64)

    def run(block: Block, lanes: Lanes) -> None:
        write(block, lanes, block.parameters[read(block, lanes)].astype(f"u{TYPES[kind].itemsize}"))

    return run


def _transfer(one: Instruction, registers: dict[str, int], parts: list[str]) -> Step:
    """ld and st, of one register or several."""
    loads, kind = parts[0] == "ld", parts[-1]
    names, where = one.operands if loads else one.operands[::-1]
    names = names if isinstance(names, tuple) else (names,)
    at, size = address(str(where), registers), TYPES[kind].itemsize
    whole = size * len(names)
    shared = "shared" in parts
    assert shared or "global" in parts, one.text
    if loads:
        writes = [writer(name, registers, kind) for name in names]

        def load(block: Block, lanes: Lanes) -> None:
            where, threads = _for_each(at, block, lanes), _threads(block, lanes)
            if shared:
                banks.note("ld.shared", where, whole, threads)
            found = (block.shared.load(where, whole, threads) if shared else _global(block, lanes, where).load(where, whole)).view(
                TYPES[kind]
            )
            for i, write in enumerate(writes):
                write(block, lanes, found[:, i])

        return load
    reads = [raw(name, registers, 8 * max(2, size)) for name in names]

    def store(block: Block, lanes: Lanes) -> None:
        values = np.stack([_for_each(read, block, lanes) for read in reads], 1).astype(TYPES[kind])
        where, written = _for_each(at, block, lanes), np.ascontiguousarray(values).view(np.uint8)
        if shared:
            banks.note("st.shared", where, whole, _threads(block, lanes))
            block.shared.store(where, written, _threads(block, lanes))
        else:
            _global(block, lanes, where).store(where, written)

    return store


def _prefetch(one: Instruction, registers: dict[str, int]) -> Step:
    """Nothing is read, also where the kernel before may still write; but the place is a tensor's."""
    at = address(str(one.operands[0]), registers)

    def run(block: Block, lanes: Lanes) -> None:
        block.memory.load(_for_each(at, block, lanes), 1)

    return run


def _add(one: Instruction, registers: dict[str, int]) -> Step:
    """atom.add: threads one after the other."""
    into, where, value = map(str, one.operands)
    at, more, write = address(where, registers), raw(value, registers, 32), writer(into, registers, "u32")

    def run(block: Block, lanes: Lanes) -> None:
        before, places = [], _for_each(at, block, lanes)
        memory = _global(block, lanes, places)
        for place, amount in zip(places, _for_each(more, block, lanes), strict=True):
            before.append(memory.load(place[None], 4).view(np.uint32)[0, 0])
            memory.store(place[None], to_bits(np.asarray([before[-1] + amount]), "u32")[:, None].view(np.uint8))
        write(block, lanes, np.array(before, np.uint32))

    return run


def _copy(one: Instruction, registers: dict[str, int]) -> Step:
    """cp.async: 16 bytes, or 4 or 8 by way of the L1 cache; with a fourth operand so many are read and the others are zeros."""
    to, start, size = map(str, one.operands[:3])
    count = int(size, 0)
    assert count == 16 or (count in (4, 8) and ".ca." in one.name), one.text
    into, source = address(to, registers), address(start, registers)
    reads = raw(str(one.operands[3]) if len(one.operands) > 3 else size, registers, 32)

    def run(block: Block, lanes: Lanes) -> None:
        threads = _threads(block, lanes)
        place, start, read = (
            _for_each(one, block, lanes).copy() for one in (into, source, reads)
        )  # registers change before it ends
        block.memory.reach(start[read > 0], block.waited[threads][read > 0])
        block.arrive(block.copies.ask(threads, place, start, read, count))

    return run


def _commit(one: Instruction, registers: dict[str, int]) -> Step:
    def run(block: Block, lanes: Lanes) -> None:
        block.copies.committed[lanes] += 1

    return run


def _wait(one: Instruction, registers: dict[str, int]) -> Step:
    keep = int(str(one.operands[0]), 0)

    def run(block: Block, lanes: Lanes) -> None:
        block.arrive(block.copies.end(_threads(block, lanes), keep))

    return run


def _arrive_behind_copies(one: Instruction, registers: dict[str, int]) -> Step:
    at = address(str(one.operands[0]), registers)

    def run(block: Block, lanes: Lanes) -> None:
        block.arrive(block.copies.arrive(_threads(block, lanes), _for_each(at, block, lanes).astype(np.int64)))

    return run


def _init(one: Instruction, registers: dict[str, int]) -> Step:
    at, count = address(str(one.operands[0]), registers), raw(str(one.operands[1]), registers, 32)

    def run(block: Block, lanes: Lanes) -> None:
        for barrier, threads in zip(_for_each(at, block, lanes), _for_each(count, block, lanes), strict=True):
            block.make_barrier(int(barrier), int(threads))

    return run


def _arrive(one: Instruction, registers: dict[str, int]) -> Step:
    at = address(str(one.operands[1]), registers)

    def run(block: Block, lanes: Lanes) -> None:
        block.arrive((_threads(block, lanes), _for_each(at, block, lanes).astype(np.int64)))

    return run
