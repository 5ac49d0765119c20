"""`linear`, `qkv_projection`, `projections`: GEMMs with quantized weights; only large M dequantizes them, slab by slab."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from halfbyte.cpu import linear as cpu
from halfbyte.errors import InvalidArgument, check, warn_once
from halfbyte.ops import _linear_on_gpu as gpu
from halfbyte.ops._library import can_bypass_dispatcher, define, level
from halfbyte.ops._linear_call import LinearCall, flattened, unflattened
from halfbyte.ops.launch_cache import replay
from halfbyte.reference import linear as reference
from halfbyte.tensors import QuantTensor

_Level = Callable[[torch.Tensor, QuantTensor, torch.Tensor | None], torch.Tensor]
_LEVELS: dict[str, _Level] = {"cpu": cpu.linear, "reference": reference.linear}
#: Of weights and biases, for messages.
_NAMES = ("the first ", "the second ", "the third ")


def _run(*flat: Any) -> list[torch.Tensor]:
    """[..., N] for each weight. `flat`: arguments of the op `projections`."""
    call = unflattened(*flat)
    if call.impl not in _LEVELS:
        return gpu.run(call, compiled=True)
    run = _LEVELS[call.impl]
    if call.row_invariant and call.x.numel():
        run = functools.partial(_row_by_row, run)
    return [run(call.x, *each) for each in zip(call.weights, call.biases, strict=True)]


def _row_by_row(run: _Level, x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One row at a time: torch's order of summation depends on M."""
    rows = [run(row, weight, bias) for row in x.reshape(-1, 1, x.shape[-1])]
    return torch.cat(rows).view(*x.shape[:-1], weight.shape[0])


def _fake(*flat: Any) -> list[torch.Tensor]:
    call = unflattened(*flat)
    call.check(_NAMES if len(call.weights) > 1 else ("",))
    return call.new_outs()


def _run_linear(x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    return _run(x, parts, [len(parts)], [bias], *options)[0]


def _fake_linear(x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    return _fake(x, parts, [len(parts)], [bias], *options)[0]


_linear_op = define(
    "linear(Tensor x, Tensor[] weight, Tensor? bias, str weight_format, str level, bool row_invariant=False) -> Tensor",
    _run_linear,
    _fake_linear,
)
_projections_op = define(
    "projections(Tensor x, Tensor[] weights, int[] counts, Tensor?[] biases, str weight_formats, str level, "
    "bool row_invariant=False) -> Tensor[]",
    _run,
    _fake,
)


def linear(
    x: torch.Tensor,
    weight: QuantTensor,
    bias: torch.Tensor | None = None,
    *,
    row_invariant: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """x [..., K] times a quantized weight [N, K], plus bias [N]: [..., N] in x's dtype.

    x              fp16, bf16, fp32 or float64, any strides; float64 is computed in float64, all else in fp32. fp32 and float64 have
                   no kernel: on a GPU they run blocked torch code, which dequantizes the whole weight in each call
    row_invariant  each of the M rows has the same bits alone and in any batch. On a GPU this takes a fixed split of K; `cpu` and
                   `reference` compute row by row
    impl           "auto"; the GPU's kernels for fp16 and bf16, "gluon" (tuned: M up to 16, on Hopper 256) and "triton" (portable);
                   "cpu"; "reference" (float64, the specification)

    Raises `InvalidArgument` naming the argument at fault.
    """
    call = LinearCall(x, (weight,), (bias,), impl, row_invariant)
    signature = call.signature() if can_bypass_dispatcher(x, bias) else None
    if signature is not None:
        outs: list[torch.Tensor] | None = replay(signature)
        if outs is not None:
            return outs[0]
    call.check(("",))
    chosen = _level("linear", impl, x)
    if chosen not in _LEVELS and can_bypass_dispatcher(x, bias):
        return gpu.run(call._replace(impl=chosen), signature)[0]
    y: torch.Tensor = _linear_op(x, list(weight.parts().values()), bias, weight.format.name, chosen, row_invariant)
    return y


def qkv_projection(
    x: torch.Tensor,
    weights: tuple[QuantTensor, QuantTensor, QuantTensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    *,
    row_invariant: bool = False,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v from one pass over x [..., K]: three weights [Nq, K], [Nk, K], [Nv, K], each with its own scales and format.

    Returns three tensors [..., N] in x's dtype; options as in `linear`. On a GPU it is one launch; on Hopper another one permutes x
    for M of 17 to 256; large M dequantizes slab by slab. Each weight keeps its own scales: sharing the largest of three tensor
    scales would corrupt two of them. Raises `InvalidArgument` naming the argument at fault.
    """
    good = isinstance(weights, tuple | list) and isinstance(biases, tuple | list) and len(weights) == len(biases) == 3
    check(good, "weights and biases must be three each: those of q, k and v")
    q_out, k_out, v_out = projections(
        x, weights, biases, row_invariant=row_invariant, impl=impl, names=("the q ", "the k ", "the v ")
    )
    return q_out, k_out, v_out


def projections(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    *,
    row_invariant: bool = False,
    impl: str = "auto",
    names: Sequence[str] = _NAMES,
) -> list[torch.Tensor]:
    """`qkv_projection` of one to three weights, such as those of an MLP's gate and up: [..., N] of each. `names`: for messages."""
    if not len(weights) == len(biases) in (1, 2, 3):
        given = f"{len(weights)} weights and {len(biases)} biases"
        raise InvalidArgument(f"{given} were given; pass one to three weights, and a bias or None for each")
    call = LinearCall(x, weights, biases, impl, row_invariant)
    signature = call.signature() if can_bypass_dispatcher(x, *biases) else None
    if signature is not None:
        outs: list[torch.Tensor] | None = replay(signature)
        if outs is not None:
            return outs
    call.check(names)
    chosen = _level("qkv_projection", impl, x)
    if chosen not in _LEVELS and can_bypass_dispatcher(x, *biases):
        return gpu.run(call._replace(impl=chosen), signature)
    parts, formats = [list(w.parts().values()) for w in weights], [w.format.name for w in weights]
    made: list[torch.Tensor] = _projections_op(*flattened(x, parts, biases, formats), chosen, row_invariant)
    return made


def linear_of_parts(x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, fmt: str) -> torch.Tensor:
    """`linear` as compiled code calls it: with the tensors of a weight, `[*QuantTensor.parts().values()]`, and its format's name.

    x [..., K] times the weight [N, K] plus bias [N] gives [..., N]. Every traced object or property becomes a guard that is
    re-evaluated on each call, so there are none, and nothing is checked: `linear` does that.
    """
    y: torch.Tensor = _linear_op(x, parts, bias, fmt, _level("linear", "auto", x))
    return y


def projections_of_parts(
    x: torch.Tensor, parts: Sequence[list[torch.Tensor]], biases: Sequence[torch.Tensor | None], formats: Sequence[str]
) -> list[torch.Tensor]:
    """`projections` as compiled code calls it, see `linear_of_parts`."""
    outs: list[torch.Tensor] = _projections_op(*flattened(x, parts, biases, formats), _level("qkv_projection", "auto", x), False)
    return outs


def _level(op: str, impl: str, x: torch.Tensor) -> str:
    """The level that runs; on a GPU, torch code for an x of 32 and 64 bits, which has no kernel."""
    if x.device.type != "cpu" and impl == "auto" and x.element_size() > 2:
        warn_once(f"{op} has kernels for float16 and bfloat16; blocked torch code runs for an x of {x.dtype}")
        impl = "cpu"
    chosen = level(op, impl, x.device)
    return "auto" if impl == "auto" and chosen == "gluon" else chosen
