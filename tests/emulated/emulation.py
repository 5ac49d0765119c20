"""Calls of the library that take tuned kernels, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from gpu_cases import Call, poisoned

from experts_cases import both_in_one
from halfbyte.device import GPU
from halfbyte.errors import Unsupported
from halfbyte.kv_buffer import AttentionOptions, DecodeCall
from halfbyte.ops import _experts_prompt, _linear_on_gpu, decode_attention
from halfbyte.ops.experts_linear import _problem_of
from halfbyte.ops.experts_linear import _run_on_gpu as run_experts
from halfbyte.plans.decode_attention import plans_of
from halfbyte.plans.decode_problem import DecodeProblem
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.reference.experts import ExpertsCall
from halfbyte.reference.linear import LinearCall
from halfbyte.tensors import QuantTensor
from machine.block import Order
from machine.launch import emulated

#: Both ends of what is allowed: all warps side by side and copies as late as can be; one warp after the other and copies at once.
ORDERS = (Order(together=True, early=False), Order(together=False, early=True))


#: Storages that a launch of the last call read or wrote before it waited for the kernel before.
EARLY: set[int] = set()
#: The same of each of its launches.
EARLY_OF: list[set[int]] = []


class Refused(Exception):
    """The tuned kernel does not take this call; why, in words."""


@contextmanager
def machine(order: Order, backwards: bool = False, change: Callable[[str], str] = str) -> Iterator[None]:
    """Kernels run emulated, and what they do not write is NaN."""
    with emulated(order, backwards, change) as early, poisoned():
        EARLY.clear()
        yield
        EARLY_OF[:] = early
        EARLY.update(*early)


def attend(
    call: Call, order: Order, num_sms: int = 3, backwards: bool = False, deterministic_batch: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call by the tuned kernel of a Hopper GPU with so many multiprocessors."""
    cache, given = call.cache, dict(call.options)
    start, latent = given.pop("query_start", None), given.pop("latent", False)
    options = AttentionOptions(**{"sm_scale": cache.head_dim**-0.5, "rotate_keys": cache.rotate_keys} | given)
    kv = cache.keys, cache.values, cache.lengths
    whole = DecodeCall(call.q, *kv, start, cache.page_table, options, "gluon", deterministic_batch, latent=latent)
    return run(whole, order, num_sms, backwards)


def run(call: DecodeCall, order: Order, num_sms: int = 3, backwards: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a call that may be ragged."""

    def plans(problem: DecodeProblem, level: str, most: int, *_: Any) -> Any:
        try:
            return plans_of(problem, "gluon", most, GPU("", num_sms, (9, 0)), True)
        except Unsupported as refused:
            raise Refused(str(refused)) from refused

    patched = mock.patch.object(decode_attention, "_plans", plans)
    with patched, machine(order, backwards):
        return decode_attention.run_on_gpu(call, compiled=True)


def multiply(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    order: Order,
    num_sms: int = 3,
    backwards: bool = False,
    change: Callable[[str], str] = str,
    capability: tuple[int, int] = (9, 0),
    kernel: Callable[[GemmProblem, GPU, bool], GemmPlan | str] = tuned_gemm,
) -> list[torch.Tensor]:
    """x times each weight in one launch of a tuned kernel, by the plan of a GPU of that capability."""

    def plan(problem: GemmProblem, *_: Any) -> GemmPlan:
        found = kernel(problem, GPU("", num_sms, capability), True)
        if isinstance(found, str):
            raise Refused(found)
        return found

    with mock.patch.object(_linear_on_gpu, "_plan", plan), machine(order, backwards, change):
        return _linear_on_gpu.run(LinearCall(x, weights, biases, "gluon"), compiled=True)


def mix(call: ExpertsCall, order: Order, num_sms: int = 3, backwards: bool = False, ids_early: bool = False) -> torch.Tensor:
    """A projection of a mixture of experts by the tuned kernel. ids_early: as the second of two."""

    def plan(problem: GemmProblem, *_: Any) -> GemmPlan:
        found = tuned_gemm(problem, GPU("", num_sms, (9, 0)), use_pdl=True)
        if isinstance(found, str):
            raise Refused(found)
        return found

    with mock.patch("halfbyte.ops._linear_on_gpu._plan", plan), _sorted_by_torch(), machine(order, backwards):
        return run_experts(call._replace(impl="gluon"), ids_early)


def mix_both(up: ExpertsCall, down: ExpertsCall, order: Order, num_sms: int = 3, backwards: bool = False) -> torch.Tensor:
    """Both projections of a prompt by the tuned kernel; down's x is left out."""
    first, last = (tuned_gemm(_problem_of(call._replace(x=up.x)), GPU("", num_sms, (9, 0)), use_pdl=True) for call in (up, down))
    if isinstance(first, str) or isinstance(last, str):
        raise Refused(f"{first}; {last}")
    with _sorted_by_torch(), machine(order, backwards):
        out = down.new_result()
        for step in _experts_prompt.both(*both_in_one(up, down).contiguous().projections(), (first, last), out):
            step()
    return out


def _sorted_by_torch() -> AbstractContextManager[Any]:
    """Pairs of prompts are sorted by plain Triton, which the interpreter runs (`tests/interpreted`); here by torch."""

    def pairs(ids: torch.Tensor, experts: int, block: int) -> tuple[_experts_prompt.SortedPairs, list[Any]]:
        flat = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten()
        found, order = flat.sort(stable=True)
        starts = torch.searchsorted(found, torch.arange(experts + 1)).int()
        blocks = -(-starts.diff() // block)
        owners = torch.arange(experts).repeat_interleave(blocks)
        table = torch.full((1 + ids.numel() // block + experts, 4), 12345677, dtype=torch.int32)  # what is no block may be anything
        table[0] = len(owners)
        rows = torch.stack((torch.arange(experts), blocks.cumsum(0) - blocks, starts[:-1], starts[1:]), 1)
        table[1 : 1 + len(owners)] = rows[owners]
        return _experts_prompt.SortedPairs(order.int(), order.argsort().int(), starts, found.int(), table), []

    return mock.patch.object(_experts_prompt, "sorting", pairs)
