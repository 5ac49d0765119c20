"""How the work of a product is cut among programs, and the kernels whose cut can be chosen: what the split-K study runs.

`KERNELS` is the one place that knows which kernels can be told. A kernel gives, for a case and a decomposition, a `Form`: calls to
time, and the number of programs that one of them launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from halfbyte.device import Device
from halfbyte.errors import Unsupported
from halfbyte.plans.gemm_mma import mma_plan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.settings import interpreted
from halfbyte.tensors import QuantTensor
from halfbyte_lab.precompile import resident_blocks

Kind = Literal["data-parallel", "split-k", "stream-k"]


@dataclass(frozen=True)
class Decomposition:
    """Data-parallel: a program for each tile of outputs. Split-K: `splits` programs for each. Stream-K: as many programs as the GPU
    holds at a time, each with an equal share of all tiles and their K.
    """

    kind: Kind
    splits: int = 1

    def __str__(self) -> str:
        return f"split-k {self.splits}" if self.kind == "split-k" else self.kind


DATA_PARALLEL = Decomposition("data-parallel")
EVERY = (DATA_PARALLEL, *(Decomposition("split-k", n) for n in (2, 4, 8, 16)), Decomposition("stream-k"))


@dataclass(frozen=True)
class Form:
    """One kernel on one case, cut in one way.

    calls     the rotation: the same work on different copies of the weight
    programs  thread blocks of a call
    resident  thread blocks that a multiprocessor holds at a time
    """

    calls: Sequence[Callable[[], torch.Tensor]]
    programs: int
    resident: int

    def waves(self, device: Device) -> float:
        """Rounds in which the multiprocessors work through the programs, the last one in part."""
        return self.programs / ((device.sm_count or 1) * self.resident)


class Kernel(Protocol):
    """A kernel that can be told how to cut its work."""

    def store(self, weights: Sequence[QuantTensor]) -> Sequence[Any]:
        """The rotation of a weight, symmetric int4 in groups of 128, as this kernel reads it."""

    def form(self, x: torch.Tensor, stored: Sequence[Any], cut: Decomposition, device: Device) -> Form:
        """x [M, K], bf16, times each of the rotation. Raises `Unsupported` for a cut that the kernel does not have."""


class Published:
    """The published Triton kernel, which has no stream-K; in fp16."""

    def store(self, weights: Sequence[QuantTensor]) -> Sequence[Any]:
        """In GPTQ's layout."""
        from halfbyte_lab.cases.published_split_k import GptqWeight

        return [GptqWeight.of(weight) for weight in weights]

    def form(self, x: torch.Tensor, stored: Sequence[Any], cut: Decomposition, device: Device) -> Form:
        """Data-parallel tiles, or splits that add to the output by fp16 atomics."""
        from halfbyte_lab.cases import published_split_k as kernel

        if cut.kind == "stream-k":
            raise Unsupported("the published kernel has no stream-K form; its authors name it as the next step")
        if device.kind != "cuda" and not interpreted():
            raise Unsupported("the published kernel runs on an NVIDIA GPU, or in Triton's interpreter")
        half = x.half()
        binary = kernel.run(half, stored[0], cut.splits)[1]
        calls = [partial(kernel.published, half, weight, cut.splits) for weight in stored]
        return Form(calls, kernel.programs(x.shape[0], stored[0].scales.shape[1], cut.splits), resident(binary, device))


def resident(made: Any, device: Device) -> int:
    """Thread blocks of a compiled Triton kernel that a multiprocessor holds at a time; 1 in the interpreter."""
    if device.capability is None:
        return 1
    resources = {"threads": 32 * made.metadata.num_warps, "registers": int(made.n_regs), "shared_bytes": int(made.metadata.shared)}
    return resident_blocks(device.capability, **resources)


class Halfbyte:
    """The tuned kernel of `halfbyte.linear`, whose decomposition is its number of programs."""

    def store(self, weights: Sequence[QuantTensor]) -> Sequence[Any]:
        """As they are."""
        return weights

    def form(self, x: torch.Tensor, stored: Sequence[Any], cut: Decomposition, device: Device) -> Form:
        """The plan of this product with another number of programs."""
        if device.kind != "cuda":
            raise Unsupported("the tuned kernel runs on an NVIDIA GPU")
        from halfbyte.kernels.linear.mma import launches
        from halfbyte.kernels.linear.ring import weights_of

        n, k = stored[0].shape
        problem = GemmProblem(((stored[0].format, n),), x.shape[0], k, "bf16")
        plan = mma_plan(problem, device.gpu, use_pdl=False)  # as the others: alone
        if isinstance(plan, str):
            raise Unsupported(plan)
        slots = device.gpu.num_sms * plan.programs_per_sm
        count = {"data-parallel": plan.tiles, "split-k": plan.tiles * cut.splits, "stream-k": slots}[cut.kind]
        if count > plan.tiles * plan.steps:
            raise Unsupported(f"{count} programs for {plan.tiles} tiles of {plan.steps} steps")
        plan = replace(plan, programs=count, split_tiles=plan.tiles % count)
        partials = torch.empty(plan.floats, device=x.device)
        semaphores = torch.zeros(plan.counters, dtype=torch.int32, device=x.device)

        def call(weight: QuantTensor) -> torch.Tensor:
            out = x.new_empty(x.shape[0], n)
            launches(x, weights_of([weight], [None], [out]), plan, partials, semaphores)[0]()
            return out

        return Form([partial(call, weight) for weight in stored], count, plan.programs_per_sm)


#: By name.
KERNELS: dict[str, Kernel] = {"halfbyte": Halfbyte(), "published": Published()}
