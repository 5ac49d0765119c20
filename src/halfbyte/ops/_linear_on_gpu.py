"""The GPU levels of `linear` and `projections`: from tensors to a plan, to a launch. Nothing here waits for the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from halfbyte.device import describe
from halfbyte.errors import Unsupported, warn_once
from halfbyte.formats import Format
from halfbyte.ops._relaunch_linear import Request, remember
from halfbyte.ops._workspace import counters, floats
from halfbyte.plans.linear_portable import GATHERED_ROWS, LinearTiles, expanded, linear_tiles, slab_rows
from halfbyte.plans.linear_spec import LinearPlan, LinearSpec
from halfbyte.plans.toolchain import EQUAL_PARTS
from halfbyte.plans.tuning_cache import linear_plan, table_of
from halfbyte.settings import pair_launches
from halfbyte.tensors import QuantTensor

#: What the JIT made of a call, by everything that it is specialised on: asking it again takes longer than the kernel.
_compiled: dict[tuple[object, ...], object] = {}
_HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def run(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    level: str,
    row_invariant: bool,
    compiled: bool = False,
    request: Request | None = None,
) -> list[torch.Tensor]:
    """[..., N] in x's dtype for each weight, by the level asked for, in one launch (for very many rows: by parts of the weights).

    `compiled`: called from compiled code, behind whose back nothing may be kept. `request`: what to remember this call as.
    """
    if x.dtype not in _HALVES:
        raise Unsupported(f"x is {x.dtype}; the {level} kernel takes float16 and bfloat16; use impl='auto'")
    outs = [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]
    if not x.numel():  # nothing to add up
        for out, bias in zip(outs, biases, strict=True):
            out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    elif any(out.numel() for out in outs):
        with torch.cuda.device_of(x):
            rows = x.reshape(-1, x.shape[-1])
            plan = _tuned_plan(rows, weights, level, row_invariant)
            if isinstance(plan, LinearPlan):
                _launch_gluon(rows, weights, biases, outs, plan, compiled, request)
            elif level == "auto" and not row_invariant and expands(rows.shape[0], weights):
                _by_slabs(rows, weights, biases, outs)
            elif level == "gluon":
                raise Unsupported(
                    f"impl='gluon' cannot run this product: {plan}; use impl='auto', which takes the portable kernel here"
                )
            else:
                _launch_triton(rows, weights, biases, outs, row_invariant, compiled)
    return outs


def expands(rows: int, weights: Sequence[QuantTensor]) -> bool:
    """Whether a product of so many rows, which no tuned kernel takes, is computed from dequantised parts of the weights.

    Not with `torch.use_deterministic_algorithms`: there torch refuses cuBLAS unless an environment variable allows it.
    """
    return expanded([w.format for w in weights], rows, weights[0].shape[1]) and not torch.are_deterministic_algorithms_enabled()


def _by_slabs(
    x: torch.Tensor, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor]
) -> None:
    """For very many rows: some rows of a weight at a time are dequantised, and multiplied by cuBLAS."""
    from halfbyte.kernels.dequantize import launch

    width = x.shape[1]
    step = slab_rows(width)
    for weight, bias, out in zip(weights, biases, outs, strict=True):
        w = QuantTensor(weight.format, weight.shape, **{name: part.contiguous() for name, part in weight.parts().items()})
        y = out.view(x.shape[0], w.shape[0])
        buffer = x.new_empty(min(step, w.shape[0]), width)
        for first in range(0, w.shape[0], step):
            slab = buffer[: w.shape[0] - first]
            launch([w], slab, first)
            here = y[:, first : first + slab.shape[0]]
            if bias is None:
                torch.mm(x, slab.mT, out=here)
            else:
                torch.addmm(bias[first : first + slab.shape[0]].to(x.dtype), x, slab.mT, out=here)


def _tuned_plan(x: torch.Tensor, weights: Sequence[QuantTensor], level: str, row_invariant: bool) -> LinearPlan | str:
    """How the tuned kernel runs a call; in words, why it does not."""
    if level == "triton":
        return "asked for the portable kernel"
    if row_invariant:
        return "row_invariant: the tuned kernel cuts the work by the number of rows"
    if any(w.perm is not None for w in weights) and len(weights) > 1:
        return "weights of one launch that each store their columns in an order of their own"
    if not all(_whole_pieces(t) for w in weights for t in (w.codes, w.scales, w.offsets)):
        return "codes, scales or zero points are not contiguous and aligned to 16 bytes"
    facts = tuple((w.format, w.shape[0]) for w in weights)
    return _gluon(facts, x.shape[0], x.shape[1], _HALVES[x.dtype], x.device.index, pair_launches())


def _whole_pieces(t: torch.Tensor | None) -> bool:
    return t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)


@functools.lru_cache(maxsize=4096)
def _gluon(weights: tuple[tuple[Format, int], ...], rows: int, width: int, half: str, device: int, pair: bool) -> LinearPlan | str:
    """The plan of a tuned kernel on GPU number `device`: as measured there, or by its rules."""
    facts = describe(f"cuda:{device}")
    num_sms, capability = facts.sm_count or 1, facts.capability or (0, 0)
    table = table_of(facts.name, num_sms)
    problem: dict[str, Any] = {"m": rows, "width": width, "dtype": half, "use_pdl": pair}
    plan = linear_plan(weights, **problem, num_sms=num_sms, capability=capability, table=table)[0]
    if plan == EQUAL_PARTS:
        warn_once(EQUAL_PARTS)
    return plan


def run_plan(x: torch.Tensor, weights: Sequence[QuantTensor], plan: LinearPlan) -> list[torch.Tensor]:
    """x [M, K] times weights without act-order, by a plan that is given: what `halfbyte tune` times."""
    outs = [x.new_empty(x.shape[0], w.shape[0]) for w in weights]
    with torch.cuda.device_of(x):
        _launch_gluon(x, weights, [None] * len(weights), outs, plan, False)
    return outs


def _launch_gluon(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    plan: LinearPlan,
    own: bool,
    request: Request | None = None,
) -> None:
    from halfbyte.kernels.linear import mma, wgmma

    perm = weights[0].perm
    if perm is not None:
        x = x.index_select(1, perm.clamp(0, x.shape[1] - 1))
    elif x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16 or x.stride(0) * x.shape[0] >= 2**31:
        x = x.clone(memory_format=torch.contiguous_format)
    biases = _alike(biases, outs)
    part = floats(x.device, plan.floats, own)
    count = counters(x.device, plan.counters, own)
    small = [t for w, b in zip(weights, biases, strict=True) for t in (b, w.tensor_scale) if t is not None]
    seen = tuple((t.dtype, t.data_ptr() % 16) for t in small)
    key = (plan, x.device, x.shape[1], tuple(w.shape[0] for w in weights), seen)
    kernel: Any = mma if isinstance(plan.spec, LinearSpec) else wgmma
    known = None if own else _compiled.get(key)
    compiled = kernel.launch(x, weights, biases, outs, plan.spec, plan.programs, part, count, known)
    if not own:
        _compiled[key] = compiled
    if request is not None:
        again = functools.partial(kernel.again, compiled, x, weights, plan.spec, plan.programs)
        remember(request, x, biases, outs, plan, again)


def _alike(biases: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Biases of one type: none, or all; zeros where one is missing, in fp32 where types differ."""
    types = {b.dtype for b in biases if b is not None}
    if not types:
        return list(biases)
    dtype = types.pop() if len(types) == 1 else torch.float32
    made = [o.new_zeros(o.shape[-1], dtype=dtype) if b is None else b for b, o in zip(biases, outs, strict=True)]
    return [b.to(dtype).contiguous() for b in made]


def _launch_triton(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    row_invariant: bool,
    own: bool,
) -> None:
    from halfbyte.kernels.linear.portable import launch, tile_count, workspace_floats

    features = [w.shape[0] for w in weights]
    facts = tuple((w.format, w.shape[0]) for w in weights)
    tiles = _tiles(facts, x.shape[0], x.shape[1], -1 if x.device.type == "cpu" else x.device.index, row_invariant)
    part = count = None
    if tiles.splits > 1:
        part = floats(x.device, workspace_floats(features, x.shape[0], tiles), own)
        count = counters(x.device, tile_count(features, x.shape[0], tiles), own)
    biases = [None if b is None else b.contiguous() for b in biases]
    gather = tiles.block_m <= GATHERED_ROWS
    xs, weights = zip(*((x, w) if gather else _in_stored_order(x, w) for w in map(_dense_vectors, weights)), strict=True)
    launch(xs, weights, biases, outs, tiles, part, count)


def _in_stored_order(x: torch.Tensor, w: QuantTensor) -> tuple[torch.Tensor, QuantTensor]:
    """x copied so that its columns are neighbours, in the order that the weight stores them.

    The kernel reads them in any order, but numbers of 16 bits one by one cannot be copied asynchronously and fill its registers.
    """
    if w.perm is not None:
        return x.index_select(1, w.perm.clamp(0, x.shape[1] - 1)), replace(w, perm=None)
    return (x if x.stride(1) == 1 else x.contiguous()), w


@functools.lru_cache(maxsize=4096)
def _tiles(weights: tuple[tuple[Format, int], ...], rows: int, width: int, device: int, row_invariant: bool) -> LinearTiles:
    """The plan on GPU number `device` (-1: the interpreter)."""
    facts = None if device < 0 else describe(f"cuda:{device}")
    capability, num_sms = (facts.capability or (8, 0), facts.sm_count or 1) if facts else ((8, 0), 8)
    return linear_tiles(weights, m=rows, width=width, num_sms=num_sms, capability=capability, row_invariant=row_invariant)


def _dense_vectors(w: QuantTensor) -> QuantTensor:
    """The weight with the tensors that have one axis in one piece, as kernels read them."""
    dense = [None if t is None else t.contiguous() for t in (w.nested, w.perm)]
    return w if dense[0] is w.nested and dense[1] is w.perm else replace(w, nested=dense[0], perm=dense[1])
