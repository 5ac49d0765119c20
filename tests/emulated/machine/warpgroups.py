"""Products of warp groups (wgmma): asynchronous, with the right operand in shared memory.

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
from machine.warps import halves_of, left_operand, numbers, registers_of, sums_of

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
    shape = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)", one.name)
    assert shape, one.text
    columns, kind = int(shape[1]), shape[2]
    into, left, descriptor, keeps_sums, *signs = one.operands
    assert isinstance(into, tuple), one.text
    assert isinstance(left, tuple), one.text
    assert signs == ["1", "1", "0"], one.text  # neither is negated, and the right one is not transposed
    a = [raw(name, registers, 32) for name in left]
    where = raw(str(descriptor), registers, 64)
    adds = raw(str(keeps_sums), registers, 1)

    def run(block: Block, lanes: Lanes) -> None:
        for warp in np.unique(numbers(lanes, block) // 32):
            mine = np.arange(32 * warp, 32 * warp + 32)
            described = np.unique(np.broadcast_to(where(block, lanes), numbers(lanes, block).shape))
            kept = bool(np.all(adds(block, lanes)))

            def multiply(mine: Array = mine, described: Array = described, kept: bool = kept) -> None:
                k_by_n = _right_operand(block, int(described[0]), columns, kind, mine)
                made = left_operand([read(block, mine).reshape(1, 32) for read in a], kind) @ k_by_n
                for j in range(columns // 8):
                    names = into[4 * j : 4 * j + 4]
                    before = sums_of([block.registers[name][mine].reshape(1, 32) for name in names]) if kept else 0
                    for name, value in zip(names, registers_of(before + made[:, :, 8 * j : 8 * j + 8]), strict=True):
                        block.registers[name][mine] = value

            assert described.size == 1, one.text
            block.products.ask(warp, multiply)

    return run


def _right_operand(block: Block, described: int, columns: int, kind: str, threads: Array) -> Array:
    """[16, columns]: rows of 16 k in shared memory, 8 of them 128 bytes apart in pieces that lie as "128B swizzling" says."""
    start, stride, swizzle = (described & 0x3FFF) << 4, (described >> 32 & 0x3FFF) << 4, described >> 62
    assert swizzle == 1, "another way to lie in shared memory"
    n = np.arange(columns)
    at = start + n[:, None] // 8 * stride + n[:, None] % 8 * 128 + np.array([0, 16])
    at ^= at >> 3 & 0x70
    found = block.shared.load(at.reshape(-1), 16, np.repeat(threads[:1], at.size))
    return halves_of(found.view(np.uint32), kind).reshape(columns, 16).T
