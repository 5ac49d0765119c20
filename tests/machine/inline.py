"""Device functions called as Python: their inline PTX is run by all threads of a block, one piece after the other.

A copy is there at once. Shared memory is full of noise at first, and keeps it where nothing is written.
"""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton import JITFunction

from machine.arithmetic import RAW, Array
from machine.block import RUNNING, Block, Code, Launch, Order
from machine.memory import Memory
from machine.program import Program, parse_inline

#: Bits of an operand by its constraint.
BITS = {"r": 32, "l": 64}


@functools.cache
def _code(text: str, constraints: str, threads: int) -> Code:
    kinds = [one.strip("=&") for one in constraints.split(",") if not one.startswith("~")]
    return Code(parse_inline(text, {i: BITS[kind] for i, kind in enumerate(kinds)}, threads))


class Threads(Block):
    """The threads of a block, numbered as in a row-major tensor of `shape`, one element each.

    ran: the programs, in order. met: number and count of each barrier (bar.sync), for all threads that came to it at once.
    """

    def __init__(self, shape: tuple[int, ...], shared: int = 0, memory: torch.Tensor | None = None) -> None:
        threads = int(np.prod(shape))
        nothing, launch = Code(Program("nothing", (), threads, {}, {}, ())), Launch((1, 1, 1), [], shared)
        super().__init__(nothing, Memory([] if memory is None else [memory]), launch, (0, 0, 0), Order(together=True, early=True))
        self.shape = shape
        self.shared.bytes[:shared] = np.random.default_rng(0).integers(0, 256, shared, np.uint8)
        self.ran: list[Program] = []
        self.met: list[tuple[Array, Array]] = []

    def elementwise(
        self, text: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What gl.inline_asm_elementwise does; `pack` 16-bit elements are in each register."""
        self.code = _code(text, constraints, self.threads)
        program, outs = self.code.program, constraints.count("=")
        self.ran.append(program)
        self.registers = {name: np.zeros(self.threads, RAW[bits]) for name, bits in program.registers.items()}
        for i, arg in enumerate(args, outs):
            whole = torch.as_tensor(arg)
            value = np.broadcast_to((whole.view(torch.int32) if pack == 2 else whole).numpy(), self.shape).reshape(-1)
            name = f"%operand{i}"
            self.registers[name] = value.astype(np.int64).astype(RAW[program.registers[name]])
        self.at[:], self.state[:] = 0, RUNNING
        self.run()
        if pack == 1:
            return torch.tensor(0)  # nobody looks at these
        return tuple(torch.from_numpy(self.registers[f"%operand{i}"].view(np.int32)).view(dtype[i]) for i in range(outs))

    def meet(self, lanes: Array, number: Array, count: Array) -> None:
        self.met.append((number, count))
        super().meet(lanes, number, count)

    def meet_all(self) -> None:
        """A barrier of the whole block: all know what the others did."""
        self.shared.meet(np.arange(self.threads // 32))


def _where(which: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(torch.as_tensor(which), a, b)


def on_block(block: Threads, modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch) -> None:
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
