"""Products of warp groups (wgmma): asynchronous, with the right operand in shared memory, and the left one there or in registers.

Each of four warps multiplies 16 rows of its own. What they read, registers and shared memory, they read here when they are waited
for: a program that changes it before that gets another result, or is told so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from machine.arithmetic import Array, Lanes, Step, raw
from machine.program import Instruction
from machine.warps import left_operand, numbers, numbers_of, registers_of, sums_of

if TYPE_CHECKING:
    from machine.block import Block


class Products:
    """Of a block: those that each warp asked for and did not wait for, by the groups that it made of them."""

    def __init__(self, warps: int) -> None:
        self.groups: list[list[list[Callable[[], None]]]] = [[[]] for _ in range(warps)]

    def ask(self, warp: int, product: Callable[[], None]) -> None:
        self.groups[warp][-1].append(product)

    def commit(self, warp: int) -> None:
        self.groups[warp].append([])

    def wait(self, warp: int, keep: int) -> None:
        """For all but the last `keep` groups."""
        *closed, being_made = self.groups[warp]
        first = len(closed) - keep if keep < len(closed) else 0
        for product in (product for group in closed[:first] for product in group):
            product()
        self.groups[warp] = [*closed[first:], being_made]


def step(one: Instruction, registers: dict[str, int]) -> Step | None:
    """wgmma.fence, mma_async, commit_group and wait_group."""
    action = one.name.split(".")[1]
    if action == "fence":
        return lambda block, lanes: None
    if action == "mma_async":
        return _product(one, registers)
    keep = int(str(one.operands[0]), 0) if action == "wait_group" else 0

    def run(block: Block, lanes: Lanes) -> None:
        for warp in np.unique(numbers(lanes, block) // 32):
            block.products.commit(warp) if action == "commit_group" else block.products.wait(warp, keep)

    return run


def _product(one: Instruction, registers: dict[str, int]) -> Step:
    shape = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(16\.f32|32\.s32)\.(bf16|f16|s8)\.(bf16|f16|s8)", one.name)
    assert shape, one.text
    columns, kind = int(shape[1]), shape[3]
    into, left, descriptor, keeps_sums, *signs = one.operands
    assert isinstance(into, tuple), one.text
    *others, turned = signs if kind != "s8" else ["1", "1", "0"]
    assert others == (["1", "1"] if isinstance(left, tuple) else ["1", "1", "0"]), (
        one.text
    )  # none is negated, the left one not turned
    a = [raw(name, registers, 32) for name in left] if isinstance(left, tuple) else raw(str(left), registers, 64)
    where = raw(str(descriptor), registers, 64)
    adds = raw(str(keeps_sums), registers, 1)

    def run(block: Block, lanes: Lanes) -> None:
        for warp in np.unique(numbers(lanes, block) // 32):
            mine = np.arange(32 * warp, 32 * warp + 32)
            right = _described(where, block, lanes, int(warp))
            left = 0 if isinstance(a, list) else _described(a, block, lanes, int(warp))
            kept = bool(np.all(adds(block, lanes)))

            def multiply(mine: Array = mine, left: int = left, right: int = right, kept: bool = kept) -> None:
                k_by_n = _in_memory(block, right, np.arange(columns), turned == "1", kind, mine)
                if isinstance(a, list):
                    rows = left_operand([read(block, mine).reshape(1, 32) for read in a], kind)
                else:
                    rows = _in_memory(block, left, mine[0] // 32 % 4 * 16 + np.arange(16), False, kind, mine).T[None]
                made = rows @ k_by_n
                for j in range(columns // 8):
                    names = into[4 * j : 4 * j + 4]
                    before = sums_of([block.registers[name][mine].reshape(1, 32) for name in names], kind) if kept else 0
                    for name, value in zip(names, registers_of(before + made[:, :, 8 * j : 8 * j + 8], kind), strict=True):
                        block.registers[name][mine] = value

            block.products.ask(warp, multiply)

    return run


def _described(descriptor: Callable[..., Array], block: Block, lanes: Lanes, warp: int) -> int:
    """A descriptor, the same in all threads of a warp."""
    threads = numbers(lanes, block)
    found = np.unique(np.broadcast_to(descriptor(block, lanes), threads.shape)[threads // 32 == warp])
    assert found.size == 1, "a descriptor of its own in each thread"
    return int(found[0])


def _in_memory(block: Block, described: int, n: Array, turned: bool, kind: str, threads: Array) -> Array:
    """[16, n], of bytes [32, n]: an operand in shared memory, where it lies as its way to swizzle says; `turned`: neighbours in n
    side by side.

    Eight rows lie together, each `width` bytes, and of those every 16 have a place that depends on the row.
    """
    start, lead, stride = (described & 0x3FFF) << 4, (described >> 16 & 0x3FFF) << 4, (described >> 32 & 0x3FFF) << 4
    width = {1: 128, 2: 64, 3: 32}[described >> 62]
    size = 1 if kind == "s8" else 2
    k = np.arange(32 // size)[:, None]
    if turned:
        at = start + n * 2 // width * lead + n * 2 % width + k % 8 * width + k // 8 * stride
    else:
        at = start + n // 8 * stride + n % 8 * width + k * size
    at ^= at >> 3 & (width - 16)
    pieces, place = np.unique(at // 16 * 16, return_inverse=True)
    words = block.shared.load(pieces, 16, np.repeat(threads[:1], pieces.size)).view(np.uint32)
    found = numbers_of(words, kind).reshape(-1, 16 // size)
    return found[place.reshape(at.shape), at % 16 // size]
