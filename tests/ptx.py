"""Kernels' functions called as Python, and their inline PTX run by all threads of a block side by side: no GPU is needed.

Of PTX just what those functions use. Shared memory and the GPU's memory are arrays of bytes; a copy is there at once, and has to
be aligned, to stay inside, and not to meet another's bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton import JITFunction

#: Where shared memory begins, and the GPU's: beyond what 32 bits hold.
SHARED, MEMORY = 1 << 10, 3 << 33
Array = np.ndarray[Any, np.dtype[Any]]


def _signed(a: Array) -> Array:
    return (a + (1 << 31) & 0xFFFFFFFF) - (1 << 31)


def _each_half(dtype: torch.dtype) -> Callable[[Array, Array, Array], Array]:
    """a b + c of both 16-bit numbers in 32 bits, rounded once."""

    def fma(*operands: Array) -> Array:
        words = (one.astype(np.uint32).view(np.int16) for one in np.broadcast_arrays(*operands))
        a, b, c = (torch.from_numpy(one).view(dtype).double() for one in words)
        return (a * b + c).to(dtype).view(torch.int16).numpy().view(np.uint32).astype(np.int64)

    return fma


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    assert (table == 0xEA).all()
    return a & b | c


def _select(a: Array, b: Array, which: Array) -> Array:
    return np.where(which, a, b)


ARITHMETIC: dict[str, Callable[..., Array]] = {
    **dict.fromkeys(("mov.u32", "mov.b32", "mov.b64"), lambda a: a),
    **dict.fromkeys(("add.u32", "add.s64"), lambda a, b: a + b),
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "mul.wide.s32": lambda a, b: _signed(a) * _signed(b),
    "setp.gt.s32": lambda a, b: _signed(a) > _signed(b),
    "setp.ge.s32": lambda a, b: _signed(a) >= _signed(b),
    "setp.eq.u32": lambda a, b: a == b,
    "selp.b32": _select,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _each_half(torch.bfloat16),
    "fma.rn.f16x2": _each_half(torch.float16),
}
WAITS = ("bar.sync", "bar.warp.sync", "cp.async.wait_group", "cp.async.commit_group")
COPIES = ("cp.async.cg.shared.global", "cp.async.ca.shared.global")
ARRIVALS = ("mbarrier.arrive.shared.b64", "cp.async.mbarrier.arrive.noinc.shared.b64")


class Block:
    """The threads of a block, numbered as in a row-major tensor of `shape`, one element each.

    barriers: the count of each mbarrier. arrived: how often threads did. events: waits and arrivals, with each thread's operands.
    copied: bytes, those that two threads copy counted twice.
    """

    def __init__(self, shape: tuple[int, ...], shared: int, memory: Array) -> None:
        self.shape, self.threads = shape, int(np.prod(shape))
        self.shared = np.random.default_rng(0).integers(0, 256, shared, np.uint8)
        self.memory = memory
        self.barriers: dict[int, int] = {}
        self.arrived: Counter[int] = Counter()
        self.copied = 0
        self.events: list[tuple[str, list[Array]]] = []
        self._registers: dict[str, Array] = {}

    def elementwise(
        self, text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What gl.inline_asm_elementwise does; `pack` 16-bit elements are in each register."""
        kinds = [one.strip("=&") for one in constraints.split(",") if not one.startswith("~")]
        outs = constraints.count("=")
        self._registers = {"global_smem": np.asarray(SHARED), "%tid.x": np.arange(self.threads)}
        for i, (arg, kind) in enumerate(zip(args, kinds[outs:], strict=True), outs):
            whole = torch.as_tensor(arg)
            if pack == 2:
                whole = whole.view(torch.int32)
            value = np.broadcast_to(whole.numpy(), self.shape).reshape(-1).astype(np.int64)
            self._registers[f"${i}"] = value & 0xFFFFFFFF if kind == "r" else value
        for line in re.sub(r"//.*|[{}]", "", text).split(";"):
            if line.strip() and not line.strip().startswith(".reg"):
                self._execute(line.strip())
        if pack == 1:
            return torch.tensor(0)  # nobody looks at these
        return tuple(
            torch.from_numpy(self._registers[f"${i}"].astype(np.uint32).view(np.int32)).view(dtype[i]) for i in range(outs)
        )

    def _value(self, operand: str) -> Array:
        """Of each thread, or one of all."""
        name, _, offset = operand.strip("[]").partition("+")
        found = self._registers.get(name)
        if found is None:
            found = np.asarray(int(name, 0))
        return found + int(offset) if offset else found

    def _execute(self, line: str) -> None:
        guard = ""
        if line.startswith("@"):
            guard, line = line.split(maxsplit=1)
        name, _, rest = line.partition(" ")
        operands = [one.strip() for one in rest.split(",")] if rest else []
        if name in ARITHMETIC and not guard:
            result = ARITHMETIC[name](*map(self._value, operands[1:]))
            narrow = name.endswith(("32", "x2")) and not name.startswith(("mul.wide", "setp"))
            self._registers[operands[0]] = result & 0xFFFFFFFF if narrow else result
            return
        first = int(name == ARRIVALS[0])  # what follows is a result, which nobody looks at
        values = [np.broadcast_to(self._value(one), self.threads) for one in operands[first:]]
        if guard:
            values = [one[self._value(guard[1:])] for one in values]
        if name in WAITS + ARRIVALS:
            self.events.append((name, values))
        if name in ARRIVALS:
            self.arrived.update((values[0] - SHARED).tolist())
        elif name == "mbarrier.init.shared.b64":
            ((at, count),) = zip(*values, strict=True)
            assert at - SHARED not in self.barriers
            self.barriers[int(at) - SHARED] = int(count)
        elif name in COPIES:
            self._copy(name, *values)
        elif name not in WAITS:
            raise NotImplementedError(f"{guard} {line}")

    def _copy(self, name: str, to: Array, start: Array, sizes: Array, there: Array | None = None) -> None:
        """`there`: bytes that are read; zeros come for the others."""
        if not sizes.size:
            return
        size = int(sizes[0])
        assert size == 16 or (size in (4, 8) and ".ca." in name)
        assert not (to % size).any(), "a place that is not aligned"
        assert not (start % size).any(), "an address that is not aligned"
        bytes_of = np.arange(size)
        wanted = np.broadcast_to(bytes_of < (sizes if there is None else there)[:, None], (to.size, size))
        into, source = (to - SHARED)[:, None] + bytes_of, np.where(wanted, (start - MEMORY)[:, None] + bytes_of, 0)
        assert into.min() >= 0 <= source.min(), "before the beginning"
        assert into.max() < self.shared.size, "beyond shared memory"
        assert source.max() < self.memory.size, "beyond what there is"
        copied = np.where(wanted, self.memory[source], 0)
        self.shared[into] = copied
        self.copied += copied.size
        assert (self.shared[into] == copied).all(), "two threads copy to one place"


def _where(which: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(torch.as_tensor(which), a, b)


def on_block(block: Block, modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The jitted functions of modules become Python, called with tensors that have an element for each thread, or one for all."""
    gl = SimpleNamespace(
        arange=lambda first, last, layout: torch.arange(first, last, dtype=torch.int32),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        where=_where,
        inline_asm_elementwise=block.elementwise,
        constexpr=lambda value: value,
        static_range=range,
        SliceLayout=lambda dim, parent: None,
        BlockedLayout=lambda *axes: None,
        **{name: getattr(torch, name) for name in ("int32", "int64", "float16", "bfloat16")},
    )
    for module in modules:
        for name, one in list(vars(module).items()):
            if isinstance(one, JITFunction):
                monkeypatch.setattr(module, name, one.fn)
        monkeypatch.setattr(module, "gl", gl)
