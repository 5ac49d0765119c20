"""The GPU levels of `linear` and `projections`: from tensors to a plan, to a launch; and the plans of `experts_linear`.

Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from halfbyte.device import gpu
from halfbyte.errors import Unsupported
from halfbyte.ops import launch_cache
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Signature
from halfbyte.ops.self_check import refusal
from halfbyte.ops.small_calls import linear_error
from halfbyte.ops.workspace import at_hand, counters, floats
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_portable import GATHERED_ROWS, PortableTiles, portable_tiles
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_slabs import expanded, slab_rows, slab_shares
from halfbyte.plans.gemm_spec import Epilogue, MmaSpec
from halfbyte.plans.tuning_cache import plan_by_table, table_of
from halfbyte.reference.linear import LinearCall
from halfbyte.settings import pair_launches
from halfbyte.tensors import QuantTensor

#: The op; compiled code calls it by `linear.linear_of_parts`.
LINEAR = Op("linear", LinearCall)
#: Types of x that kernels take, as plans name them.
HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def run(call: LinearCall, signature: Signature | None = None, compiled: bool = False) -> list[torch.Tensor]:
    """[..., N] in x's dtype for each weight by the level `call.impl`: packed, or for large M by slabs, if no tuned kernel takes it.

    signature: what to store the launch by. compiled: called from compiled code, which must not see memory that is kept.
    """
    x, _, biases, level, row_invariant = call
    if x.dtype not in HALVES:
        raise Unsupported(f"x is {x.dtype}; the {level} kernel takes float16 and bfloat16; use impl='auto'")
    outs = call.new_results()
    if not x.numel():  # nothing to add up
        for out, bias in zip(outs, biases, strict=True):
            out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    elif any(out.numel() for out in outs):
        call = call._replace(x=x.reshape(-1, x.shape[-1]))
        with torch.cuda.device_of(x):
            plan = plan_of(call)
            if isinstance(plan, GemmPlan):
                _run_plan(call, plan, outs, signature, compiled)
            elif level == "auto" and not row_invariant and expands(call):
                _by_slabs(call, outs)
            elif level == "gluon":
                raise Unsupported(
                    f"impl='gluon' cannot run this GEMM: {plan}; use impl='auto', which takes the portable kernel here"
                )
            else:
                _run_portable(call, outs, compiled)
    return outs


# ------------------------------------------------------------------------------------------------------------------- plans


def plan_of(call: LinearCall, alternating: bool = False) -> GemmPlan | str:
    """The plan of a tuned kernel for x [M, K], or why there is none. alternating: rows of gate and up alternate in a tile."""
    x, weights, _, level, row_invariant = call
    if level == "triton":
        return "the portable kernel was requested"
    if row_invariant:
        return "row_invariant: the tuned kernel cuts the work by the number of rows"
    if any(w.perm is not None for w in weights) and len(weights) > 1:
        return "weights of one launch that each store their columns in an order of their own"
    problem = _problem_of(call)
    if alternating and len({w.format for w in weights}) == 1:
        problem = problem._replace(weights=((weights[0].format, sum(problem.features)),))
    plan = tuned_plan(problem, weights, x.device)
    if isinstance(plan, str) or level != "auto":
        return plan
    return refusal("linear", plan.spec, x.device, lambda: linear_error(call, problem, plan, _run_plan)) or plan


def _problem_of(call: LinearCall) -> GemmProblem:
    rows, width = call.x.shape
    return GemmProblem(tuple([(w.format, w.shape[0]) for w in call.weights]), rows, width, HALVES[call.x.dtype])


def tuned_plan(problem: GemmProblem, weights: Sequence[QuantTensor], device: torch.device) -> GemmPlan | str:
    """The plan of a tuned kernel for these weights, dense or a stack of experts, or why there is none."""
    tensors = [t for w in weights for t in (w.codes, w.scales, w.offsets) if t is not None]
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors):
        return "codes, scales or zero points are not contiguous and aligned to 16 bytes"
    return _plan(problem, device.index, pair_launches())


@functools.lru_cache(maxsize=4096)
def _plan(problem: GemmProblem, device: int, use_pdl: bool) -> GemmPlan | str:
    """The plan of a tuned kernel on GPU number `device`: measured or analytic."""
    here = gpu(device)
    return plan_by_table(problem, here, use_pdl, table_of(here.name, here.num_sms))[0]


def rows_of_plans(problem: GemmProblem, most: int, device: torch.device) -> list[int]:
    """The fewest M up to `most` of each variant for these weights. `problem` has any M."""
    fewest: dict[object, int] = {}
    numbers = [*range(1, 18), 33, *range(65, most + 1, 64)]  # from 17 on blocks have at least 32 batch rows, from 65 on 64
    if problem.routing is not None:  # plans go by the rows of an expert
        numbers = [*range(1, 513), *range(513, most + 1, 16)]
    for rows in numbers:
        plan = _plan(problem._replace(rows=rows), device.index, pair_launches())
        variant = plan.spec if isinstance(plan, GemmPlan) else tiles_of(problem._replace(rows=rows), device)
        fewest.setdefault(variant, rows)
    return [rows for rows in fewest.values() if rows <= most]


def tiles_of(problem: GemmProblem, device: torch.device, row_invariant: bool = False) -> PortableTiles:
    """The tiles of the portable kernel on a GPU, or in the interpreter."""
    return _tiles(problem, -1 if device.type == "cpu" else device.index, row_invariant)


@functools.lru_cache(maxsize=4096)
def _tiles(problem: GemmProblem, device: int, row_invariant: bool) -> PortableTiles:
    return portable_tiles(problem, gpu(device), row_invariant)


def expands(call: LinearCall) -> bool:
    """Whether a large M runs over dequantized slabs, for which torch's deterministic mode may refuse cuBLAS."""
    return expanded(_problem_of(call)) and not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------------------------------------------------- tuned kernels


def run_plan(x: torch.Tensor, weights: Sequence[QuantTensor], plan: GemmPlan) -> list[torch.Tensor]:
    """x [M, K] times weights without act-order, with an explicit plan, for `python -m halfbyte_lab tune`."""
    call = LinearCall(x, weights, [None] * len(weights))
    outs = call.new_results()
    with torch.cuda.device_of(x):
        _run_plan(call, plan, outs)
    return outs


def run_with(epilogue: Epilogue, call: LinearCall, plan: GemmPlan, outs: Sequence[torch.Tensor], **around: torch.Tensor) -> None:
    """x [..., K] times weights into `outs` by the kernel for small M, with an epilogue and its tensors (`results.Around`)."""
    from halfbyte.kernels.linear.results import Around

    assert isinstance(plan.spec, MmaSpec)
    call = call._replace(x=call.x.reshape(-1, call.x.shape[-1]))
    with torch.cuda.device_of(call.x):
        _run_plan(call, replace(plan, spec=replace(plan.spec, epilogue=epilogue)), outs, around=Around(**around))


def _run_plan(
    call: LinearCall,
    plan: GemmPlan,
    outs: Sequence[torch.Tensor],
    signature: Signature | None = None,
    compiled: bool = False,
    around: Any = None,
) -> None:
    """x [M, K] times weights, by a tuned kernel into `outs`. around: tensors of its epilogue."""
    from halfbyte.kernels.linear import kernel_of
    from halfbyte.kernels.linear.ring import weights_of

    x, perm = call.x, call.weights[0].perm
    if perm is not None:
        x = x.index_select(1, perm.clamp(0, x.shape[1] - 1))
    elif x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16 or not (x.is_contiguous() or _within_reach(x)):
        x = x.clone(memory_format=torch.contiguous_format)
    if isinstance(plan.spec, MmaSpec) and plan.owner_reduces and not at_hand(x.device, plan.counters, compiled):
        plan = replace(plan, spec=replace(plan.spec, owner_reduces=False))
    call = call._replace(x=x, biases=_alike(call.biases, call.weights))

    def launches(c: LinearCall, plan: GemmPlan, outs: Sequence[torch.Tensor], workspace: Sequence[torch.Tensor]) -> list[Any]:
        launches: list[Any] = kernel_of(plan).launches(c.x, weights_of(c.weights, c.biases, outs), plan, *workspace, around)
        return launches

    others = (*call.biases, *[w.tensor_scale for w in call.weights], *(around or ()))
    types = tuple((t.dtype, t.data_ptr() % 16) for t in others if t is not None)
    key = plan, x.device, x.shape[1], tuple(w.shape[0] for w in call.weights), types
    launch_cache.launch(LINEAR, call, plan, launches, outs, signature=signature, own=compiled, key=key)


def _within_reach(x: torch.Tensor) -> bool:
    """Whether the rows lie one behind the other, and 32 bits number what is between the first and the last."""
    return x.shape[1] <= x.stride(0) and x.stride(0) * x.shape[0] < 2**31


def _alike(biases: Sequence[torch.Tensor | None], weights: Sequence[QuantTensor]) -> list[torch.Tensor | None]:
    """Biases of one type: none, or all; zeros where one is missing, in fp32 where types differ."""
    types = {b.dtype for b in biases if b is not None}
    if not types:
        return list(biases)
    dtype = types.pop() if len(types) == 1 else torch.float32
    every = [w.codes.new_zeros(w.shape[0], dtype=dtype) if b is None else b for b, w in zip(biases, weights, strict=True)]
    return [b.to(dtype).contiguous() for b in every]


# ------------------------------------------------------------------------------------------------------- slabs, and Triton


def _by_slabs(call: LinearCall, outs: Sequence[torch.Tensor]) -> None:
    """For large M: dequantize a slab of the weights, one below the other, at a time, and multiply by cuBLAS."""
    from halfbyte.kernels.dequantize import MOST, launch

    if len(outs) > MOST:
        for some in (slice(MOST), slice(MOST, None)):
            _by_slabs(call._replace(weights=call.weights[some], biases=call.biases[some]), outs[some])
        return
    x, weights = call.x, [contiguous(w) for w in call.weights]
    features, width = [w.shape[0] for w in weights], x.shape[1]
    total = sum(features)
    buffer = x.new_empty(min(slab_rows(width), total), width)
    for first in range(0, total, buffer.shape[0]):
        slab = buffer[: total - first]
        launch(weights, slab, first)
        parts = slab_shares(features, first, slab.shape[0])
        pieces = slab.split([rows for _, rows in parts])
        for w, (start, rows), bias, out, n in zip(pieces, parts, call.biases, outs, features, strict=True):
            here = out.view(x.shape[0], n)[:, start : start + rows]
            if not rows:
                continue
            if bias is None:
                torch.mm(x, w.mT, out=here)
            else:
                torch.addmm(bias[start : start + rows].to(x.dtype), x, w.mT, out=here)


def contiguous(w: QuantTensor, *names: str) -> QuantTensor:
    """The weight with these parts contiguous; with all of them if none is named."""
    parts = w.parts()
    dense = {name: t.contiguous() if not names or name in names else t for name, t in parts.items()}
    return w if all(dense[name] is t for name, t in parts.items()) else QuantTensor(w.format, w.shape, **dense)


def _run_portable(call: LinearCall, outs: Sequence[torch.Tensor], compiled: bool) -> None:
    from halfbyte.kernels.linear.portable import launch

    problem, device = _problem_of(call), call.x.device
    tiles = tiles_of(problem, device, call.row_invariant)
    workspace = portable_workspace(tiles, problem.features, problem.rows, device, compiled)
    biases = [None if b is None else b.contiguous() for b in call.biases]
    gathers = tiles.block_m <= GATHERED_ROWS
    dense = [contiguous(w, "nested", "perm") for w in call.weights]  # vectors, which kernels read without strides
    xs, weights = zip(*((call.x, w) if gathers else _in_stored_order(call.x, w) for w in dense), strict=True)
    launch(xs, weights, biases, outs, tiles, *workspace)


def portable_workspace(
    tiles: PortableTiles, features: Sequence[int], rows: int, device: torch.device, own: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """fp32 results that are added up, and semaphores, of a launch of the portable kernel; None where there are none."""
    size = tiles.floats(features, rows)
    return (floats(device, size, own), counters(device, tiles.count(features, rows), own)) if size else (None, None)


def _in_stored_order(x: torch.Tensor, w: QuantTensor) -> tuple[torch.Tensor, QuantTensor]:
    """x with contiguous columns as the weight stores them: gathered 16-bit elements cannot be copied asynchronously."""
    if w.perm is not None:
        return x.index_select(1, w.perm.clamp(0, x.shape[1] - 1)), replace(w, perm=None)
    return (x if x.stride(1) == 1 else x.contiguous()), w
