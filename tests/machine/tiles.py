"""Tiles of described tensors on their way into shared memory (TMA), which an mbarrier counts by their bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from machine.arithmetic import Array, Lanes, Step, raw
from machine.program import Instruction
from machine.warps import address

if TYPE_CHECKING:
    from machine.block import Block

#: A box of a tensor of two dimensions goes from the GPU's memory to that of a block.
COPY = "cp.async.bulk.tensor.2d.shared.global.mbarrier::complete_tx::bytes"


@dataclass
class Tile:
    """A copy that one thread asked for. described: as Triton passes it; corner: of the box, column and row."""

    thread: int
    described: Any
    corner: tuple[int, int]
    into: int
    barrier: int


class Tiles:
    """A block's copies of tiles, which end when nobody can go on without them; `early`: at once."""

    def __init__(self, block: Block, early: bool) -> None:
        self.block, self.early = block, early
        self.pending: list[Tile] = []

    def ask(self, tile: Tile) -> None:
        places = tile.into + 16 * np.arange(tile.described.block_shape[0] * 8)
        self.block.shared.may_write(places, 16, np.full(places.size, tile.thread))
        self.pending.append(tile)
        if self.early:
            self.end_some()

    def end_some(self) -> bool:
        """The oldest copy ends; whether there was one."""
        if not self.pending:
            return False
        tile = self.pending.pop(0)
        pieces = self._pieces(tile)
        row, piece = np.divmod(np.arange(len(pieces)), 8)
        places = tile.into + row * 128 + (piece ^ row % 8) * 16
        self.block.shared.store(places, pieces, np.full(places.size, tile.thread))
        self.block.filled(tile.barrier, pieces.size, tile.thread)
        return True

    def _pieces(self, tile: Tile) -> Array:
        """[pieces of 16 bytes, 16] of a box whose rows have 128 bytes, row by row; zeros beyond the tensor."""
        described, (column, first) = tile.described, tile.corner
        rows, columns = described.block_shape
        size = described.base.element_size()
        assert (columns * size, described.layout.swizzle_byte_width) == (128, 128)
        assert tile.into % 1024 == 0, "a tile that is not aligned"
        height, width = described.shape
        row, piece = np.divmod(np.arange(rows * 8), 8)
        row, column = row + first, column + 16 // size * piece
        there = (row < height) & (column < width)
        assert not (there & (column + 16 // size > width)).any(), "a row that ends inside of 16 bytes"
        values = np.zeros((rows * 8, 16), np.uint8)
        where = described.base.data_ptr() + size * (row[there] * described.strides[0] + column[there])
        block = self.block
        if there.any():
            block.memory.reach(where.astype(np.uint64), np.full(where.size, block.waited[tile.thread]))
            values[there] = block.memory.load(where.astype(np.uint64), 16)
        return values


def step(one: Instruction, registers: dict[str, int]) -> Step | None:
    """Copies of tiles, and the bytes that a barrier is told to expect."""
    if one.name == COPY:
        return _copy(one, registers)
    if one.name == "mbarrier.arrive.expect_tx.shared.b64":
        return _expect(one, registers)
    return None


def _copy(one: Instruction, registers: dict[str, int]) -> Step:
    into, source, barrier = map(str, one.operands)
    found = re.fullmatch(r"\[(\S+), \{(\S+), (\S+)\}\]", source)
    assert found, one.text
    to, at = address(into, registers), address(barrier, registers)
    which, column, row = (raw(name, registers, bits) for name, bits in zip(found.groups(), (64, 32, 32), strict=True))

    def run(block: Block, lanes: Lanes) -> None:
        for thread in block.all[lanes]:
            mine = np.array([thread])
            number = int(block.parameters[int(which(block, mine)[0])])
            corner = int(column(block, mine).astype(np.int32)[0]), int(row(block, mine).astype(np.int32)[0])
            tile = Tile(int(thread), block.described[number], corner, int(to(block, mine)[0]), int(at(block, mine)[0]))
            block.tiles.ask(tile)

    return run


def _expect(one: Instruction, registers: dict[str, int]) -> Step:
    _, barrier, size = map(str, one.operands)
    at, count = address(barrier, registers), raw(size, registers, 32)

    def run(block: Block, lanes: Lanes) -> None:
        for thread in block.all[lanes]:
            mine = np.array([thread])
            where = np.broadcast_to(at(block, mine), 1).astype(np.int64)
            block.barriers[int(where[0])].bytes += int(np.broadcast_to(count(block, mine), 1)[0])
            block.arrive((mine, where))

    return run
