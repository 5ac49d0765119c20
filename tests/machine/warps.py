"""What the 32 threads of a warp do together. Registers of matrices: PTX ISA 8.7, "Matrix multiply-accumulate operations".

A matrix of 8 x 8 halves is one register of each thread: thread t holds row t / 4, columns 2 (t % 4) and the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from machine import banks
from machine.arithmetic import RAW, TYPES, Array, Lanes, Step, bf16, raw
from machine.program import Instruction

if TYPE_CHECKING:
    from machine.block import Block

LANE = np.arange(32)
#: What products are summed in, where it is not fp32.
_SUMS = {"s8": np.int32}


def _warps(values: Array, lanes: Array) -> Array:
    """[warps, 32]."""
    return (values if values.shape == lanes.shape else np.broadcast_to(values, lanes.shape)).reshape(-1, 32)


def numbers(lanes: Lanes, block: Block) -> Array:
    """The threads, which must be whole warps."""
    found = block.all[lanes]
    assert found.size % 32 == 0, "threads of a warp are elsewhere"
    assert (found.reshape(-1, 32) % 32 == LANE).all(), "threads of a warp are elsewhere"
    return found


def elect(one: Instruction, registers: dict[str, int]) -> Step:
    """elect.sync: one thread of each warp."""
    chosen = str(one.operands[0]).split("|")[1]

    def run(block: Block, lanes: Lanes) -> None:
        block.registers[chosen][lanes] = numbers(lanes, block) % 32 == 0

    return run


def shuffle(one: Instruction, registers: dict[str, int]) -> Step:
    """shfl.sync: each thread reads a register of another."""
    mode = one.name.split(".")[2]
    into, *operands = map(str, one.operands)
    assert "|" not in into
    value, by, bounds, mask = (raw(operand, registers, 32) for operand in operands)

    def run(block: Block, lanes: Lanes) -> None:
        assert (mask(block, lanes) == 0xFFFFFFFF).all()
        threads = numbers(lanes, block)
        amount, bound = (_warps(read(block, lanes), threads).astype(np.int64) for read in (by, bounds))
        segment = bound >> 8 & 31
        last = LANE & segment | bound & 31 & ~segment
        source = {
            "bfly": LANE ^ amount,
            "idx": LANE & segment | amount & 31 & ~segment,
            "up": LANE - amount,
            "down": LANE + amount,
        }[mode]
        inside = source >= last if mode == "up" else source <= last
        found = np.take_along_axis(_warps(value(block, lanes), threads), np.where(inside, source, LANE), 1)
        block.registers[into][lanes] = found.reshape(-1)

    return run


def reduce(one: Instruction, registers: dict[str, int]) -> Step:
    """redux.sync: the same for all threads."""
    into, source, mask = map(str, one.operands)
    name, kind = one.name.split(".")[2:]
    value, member = raw(source, registers, 32), raw(mask, registers, 32)
    over = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}[name]

    def run(block: Block, lanes: Lanes) -> None:
        assert (member(block, lanes) == 0xFFFFFFFF).all()
        values = _warps(value(block, lanes), numbers(lanes, block)).view(TYPES[kind])
        found = np.broadcast_to(over.reduce(values, 1, keepdims=True, dtype=values.dtype), values.shape)
        block.registers[into][lanes] = np.ascontiguousarray(found).view(np.uint32).reshape(-1)

    return run


def _rows(matrices: Array, transposed: bool) -> Array:
    """[warps, matrices, 8, 8] halves as registers [warps, matrices, 32]."""
    if transposed:
        matrices = matrices.swapaxes(-1, -2)
    return np.ascontiguousarray(matrices).view(np.uint32).reshape(*matrices.shape[:2], 32)


def _matrices(registers: Array, transposed: bool) -> Array:
    """Registers [warps, matrices, 32] as [warps, matrices, 8, 8] halves."""
    found = np.ascontiguousarray(registers).view(np.uint16).reshape(*registers.shape[:2], 8, 8)
    return found.swapaxes(-1, -2) if transposed else found


def matrix(one: Instruction, registers: dict[str, int]) -> Step:
    """ldmatrix and stmatrix: threads 8 i to 8 i + 7 say where the rows of matrix i are."""
    loads, transposed = one.name.startswith("ldmatrix"), ".trans" in one.name
    count = int(one.name.split(".x")[1][0])
    names, address = one.operands if loads else one.operands[::-1]
    parts = names if isinstance(names, tuple) else (str(names),)
    where = _address(str(address), registers)
    reads = [] if loads else [raw(name, registers, 32) for name in parts]

    def run(block: Block, lanes: Lanes) -> None:
        threads = numbers(lanes, block)
        rows = _warps(where(block, lanes), threads)[:, : 8 * count].reshape(-1)
        banks.note("ldmatrix" if loads else "stmatrix", rows, 16, np.arange(rows.size))
        owners = np.repeat(_warps(threads, threads).reshape(-1, 1, 8, 4), count, 1).reshape(-1, 4)  # of the words of each row
        if loads:
            found = block.shared.load(rows, 16, owners).view(np.uint16).reshape(-1, count, 8, 8)
            for i, name in enumerate(parts):
                block.registers[name][lanes] = _rows(found, transposed)[:, i].reshape(-1)
        else:
            made = np.stack([_warps(read(block, lanes), threads) for read in reads], 1)
            halves = np.ascontiguousarray(_matrices(made, transposed))
            block.shared.store(rows, halves.reshape(-1, 8).view(np.uint8), owners)

    return run


def move_matrix(one: Instruction, registers: dict[str, int]) -> Step:
    """movmatrix.trans."""
    into, source = map(str, one.operands)
    read = raw(source, registers, 32)

    def run(block: Block, lanes: Lanes) -> None:
        threads = numbers(lanes, block)
        turned = _rows(_matrices(_warps(read(block, lanes), threads)[:, None], False), True)
        block.registers[into][lanes] = turned.reshape(-1)

    return run


def numbers_of(words: Array, kind: str) -> Array:
    """The two numbers of each register, or four of bytes, [.., 2 or 4] in float64."""
    if kind == "s8":
        return np.ascontiguousarray(words).view(np.int8).reshape(*words.shape, 4).astype(np.float64)
    both = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return (bf16(both) if kind == "bf16" else both.view(np.float16)).astype(np.float64)


def left_operand(words: list[Array], kind: str) -> Array:
    """[warps, 16, 16 (bytes: 32)] from four registers [warps, 32]: rows 0 and 8, then the same of the second half of columns."""
    parts = [numbers_of(word, kind).reshape(words[0].shape[0], 8, -1) for word in words]
    return np.block([[parts[0], parts[2]], [parts[1], parts[3]]])


def sums_of(words: list[Array], kind: str = "") -> Array:
    """[warps, 16, 8] from four registers [warps, 32] of fp32, or of integers where products are of bytes."""
    values = np.stack([np.ascontiguousarray(word).view(_SUMS.get(kind, np.float32)) for word in words], -1)
    return values.reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8).astype(np.float64)


def registers_of(sums: Array, kind: str = "") -> Array:
    """The reverse: [4, warps * 32] bits."""
    with np.errstate(over="ignore"):
        values = sums.astype(_SUMS.get(kind, np.float32)).reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(values).view(np.uint32).reshape(4, -1)


def product(one: Instruction, registers: dict[str, int]) -> Step:
    """mma.m16n8k16 of halves with sums in fp32."""
    shape = re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(bf16|f16)\.f32", one.name)
    assert shape, one.text
    kind = shape[1]
    into, *operands = (operand if isinstance(operand, tuple) else (operand,) for operand in one.operands)
    a, b, c = ([raw(name, registers, 32) for name in operand] for operand in operands)

    def run(block: Block, lanes: Lanes) -> None:
        threads = numbers(lanes, block)
        left, right, sums = ([_warps(read(block, lanes), threads) for read in reads] for reads in (a, b, c))
        k_by_n = np.concatenate([numbers_of(word, kind).reshape(-1, 8, 8) for word in right], 2).swapaxes(1, 2)
        with np.errstate(invalid="ignore", over="ignore"):
            found = registers_of(sums_of(sums) + left_operand(left, kind) @ k_by_n)
        for name, value in zip(into, found, strict=True):
            block.registers[name][lanes] = value

    return run


def _address(operand: str, registers: dict[str, int]) -> Callable[[Block, Lanes], Array]:
    """[base + offset]."""
    base, _, offset = (part.strip() for part in operand.strip("[] ").partition("+"))
    bits = registers.get(base, 32)
    read, more = raw(base, registers, bits), np.asarray(int(offset or 0) % (1 << bits), np.uint64).astype(RAW[bits])
    return lambda block, lanes: read(block, lanes) + more


address = _address
