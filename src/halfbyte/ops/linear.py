"""`linear`, `qkv_projection`, `projections`: GEMMs with quantized weights; large M that no tuned kernel takes goes by slabs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from halfbyte.cpu import linear as cpu
from halfbyte.errors import InvalidArgument, check
from halfbyte.ops import _linear_on_gpu as gpu
from halfbyte.ops._library import can_bypass_dispatcher, kernel_level
from halfbyte.ops._linear_on_gpu import LINEAR
from halfbyte.ops.launch_cache import Signature, replay
from halfbyte.reference import linear as reference
from halfbyte.reference.linear import LinearCall
from halfbyte.tensors import QuantTensor

_Level = Callable[[torch.Tensor, QuantTensor, torch.Tensor | None], torch.Tensor]
_LEVELS: dict[str, _Level] = {"cpu": cpu.linear, "reference": reference.linear}
#: Of weights and biases, for messages.
_NAMES = ("the first ", "the second ", "the third ", "the fourth ")
#: Weights of one launch, at most, and all counts of them.
MOST_WEIGHTS = len(_NAMES)
_COUNTS = (*range(1, MOST_WEIGHTS + 1),)


def _run(call: LinearCall, signature: Signature | None = None) -> list[torch.Tensor]:
    if call.impl not in _LEVELS:
        return gpu.run(call, signature, compiled=True)
    run = _LEVELS[call.impl]
    if call.row_invariant and call.x.numel():
        run = functools.partial(_row_by_row, run)
    return [run(call.x, *each) for each in zip(call.weights, call.biases, strict=True)]


def _row_by_row(run: _Level, x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One row at a time: torch's order of summation depends on M."""
    rows = [run(row, weight, bias) for row in x.reshape(-1, 1, x.shape[-1])]
    return torch.cat(rows).view(*x.shape[:-1], weight.shape[0])


def _fake(call: LinearCall) -> list[torch.Tensor]:
    call.check(_NAMES if len(call.weights) > 1 else ("",))
    return call.new_results()


LINEAR.register(_run, _fake, replays=True)


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
    weight         of 4-bit integers in groups named `_a8`, such as "int4_g128_a8": the same bytes, but from 512 rows of a 16-bit x
                   on both are rounded to INT8, by "cpu", "reference" and on Hopper by "gluon", which puts results off by about 1 %
    row_invariant  each of the M rows has the same bits alone and in any batch. On a GPU this takes a fixed split of K; `cpu` and
                   `reference` compute row by row
    impl           "auto"; the GPU's kernels for fp16 and bf16, "gluon" (tuned: M up to 16, on Hopper any) and "triton" (portable);
                   "cpu"; "reference" (float64, the specification)

    Raises `InvalidArgument` naming the argument at fault.
    """
    return _multiply(LinearCall(x, (weight,), (bias,), impl, row_invariant), "linear", ("",))[0]


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
    for M of 17 to 191; what no tuned kernel takes (large M before Hopper) dequantizes slab by slab. Each weight keeps its own
    scales: sharing the largest of three tensor scales would corrupt two of them. Raises `InvalidArgument` naming the argument.
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
) -> Sequence[torch.Tensor]:
    """`qkv_projection` of one to four weights, such as those of an MLP's gate and up: [..., N] of each. `names`: for messages."""
    if not len(weights) == len(biases) in _COUNTS:
        raise InvalidArgument(
            f"{len(weights)} weights and {len(biases)} biases were given; pass one to four weights, and a bias or None for each"
        )
    return _multiply(LinearCall(x, weights, biases, impl, row_invariant), "qkv_projection", names)


def _multiply(call: LinearCall, op: str, names: Sequence[str]) -> Sequence[torch.Tensor]:
    """[..., N] of each weight, from the launch cache if it has them. names: see `LinearCall.check`."""
    signature = LINEAR.signature(call)
    if signature is not None:
        results: Sequence[torch.Tensor] | None = replay(signature)
        if results is not None:
            return results
    call.check(names)
    call = call._replace(impl=kernel_level(op, call.impl, call.x))
    if call.impl not in _LEVELS and can_bypass_dispatcher(call.x, *call.biases):
        return gpu.run(call, signature)
    outs: list[torch.Tensor] = LINEAR(call)
    return outs


def level_of(x: torch.Tensor) -> str:
    """What computes a linear layer of x."""
    return kernel_level("linear", "auto", x)


def linear_of_parts(
    x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, fmt: str, *, level: str | None = None
) -> torch.Tensor:
    """`linear` as compiled code calls it: with the tensors of a weight, `[*QuantTensor.parts().values()]`, and its format's name.

    x [..., K] times the weight [N, K] plus bias [N] gives [..., N]. Every traced object or property becomes a guard that is
    re-evaluated on each call, so there are none, and nothing is checked: `linear` does that. level: `level_of(x)`, where it is
    known, which Dynamo then need not trace.
    """
    return projections_of_parts(x, [parts], [bias], [fmt], level=level)[0]


def projections_of_parts(
    x: torch.Tensor,
    parts: Sequence[list[torch.Tensor]],
    biases: Sequence[torch.Tensor | None],
    formats: Sequence[str],
    *,
    level: str | None = None,
) -> list[torch.Tensor]:
    """`projections` as compiled code calls it, see `linear_of_parts`."""
    weights = {"weights": [t for own in parts for t in own], "weights_counts": [len(own) for own in parts]}
    level = level_of(x) if level is None else level
    outs: list[torch.Tensor] = LINEAR.of_parts(
        {"x": x, **weights, "weights_formats": ",".join(formats), "biases": list(biases), "impl": level}
    )
    return outs
