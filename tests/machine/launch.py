"""A launch of a kernel as Triton would make it, with tensors on the CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from halfbyte.kernels.compiling import Configuration, Target, compiled, specialised
from machine.block import Block, Code, Launch, Order
from machine.memory import Memory
from machine.program import parse

HOPPER = Target(90)


@functools.cache
def _code(ptx: str) -> Code:
    return Code(parse(ptx))


@contextmanager
def emulated(order: Order, backwards: bool = False, change: Callable[[str], str] = str) -> Iterator[list[set[int]]]:
    """Here launches of kernels run on the CPU. backwards: the blocks of a launch in reverse order, unless
    they wait for earlier ones; change: another PTX instead.

    Yields of each launch the addresses of the storages that it read or wrote before it waited for the kernel before.
    """
    early: list[set[int]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        configuration = specialised(kernel.__name__, kernel, args, kwargs, {})
        made = compiled(configuration, HOPPER)
        names = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        given = [names[name] for name in kernel.arg_names]
        described = tuple(one for one in given if isinstance(one, TensorDescriptor))
        tensors, values = _arguments(given, configuration)
        code = _code(change(made.asm["ptx"]))
        values += [0] * (len(code.program.parameters) - len(values))  # scratch memory, which none of these use
        launch = Launch((*grid, 1, 1)[:3], values, made.metadata.shared, described)
        blocks = list(itertools.product(*(range(n) for n in launch.grid[::-1])))
        memory = Memory(tensors)
        ordered = getattr(names.get("C"), "owner_reduces", False)  # a block waits for those that were started before it
        numbers = blocks[::-1] if backwards and not ordered else blocks
        every = (Block(code, memory, launch, number[::-1], order) for number in numbers)
        if "ld.acquire.gpu" in made.asm["ptx"]:  # blocks wait for each other: side by side
            running = list(every)
            while running:
                running = [block for block in running if block.goes_on()]
        for block in every:
            block.run()
        early.append(memory.early)

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(knobs.runtime, "add_stages_inspection_hook", _no_assembler):
        yield early


def _no_assembler(*given: Any) -> tuple[str, str] | None:
    """Triton's hook over its stages: PTX is the last one. Without arguments, what tells such results apart in its cache."""
    if not given:
        return "no assembler", "no assembler"
    given[1]["cubin"] = lambda ptx, metadata: b""
    return None


def _arguments(given: list[Any], configuration: Configuration) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors of a call, and what the kernel is passed: addresses and numbers, but those that it was compiled for."""
    tensors, values = [], []
    for one in _leaves(given, configuration.constexprs):
        if isinstance(one, torch.Tensor):
            tensors.append(one)
            values.append(one.data_ptr())
        elif isinstance(one, TensorDescriptor):
            values += [sum(isinstance(other, TensorDescriptor) for other in given[: given.index(one)]), *one.shape, *one.strides]
            tensors.append(one.base)
        else:
            values.append(int(one) if not isinstance(one, float) else int(np.float32(one).view(np.uint32)))
    return tensors, values


def _leaves(values: Any, constants: Any, path: tuple[int, ...] = ()) -> Iterator[Any]:
    """What is in tuples within tuples, but what the kernel was compiled for."""
    for i, one in enumerate(values):
        if (*path, i) in constants:
            continue
        if isinstance(one, tuple):
            yield from _leaves(one, constants, (*path, i))
        else:
            yield one
