"""`linear`, `qkv_projection`, `projections`: products with quantised weights, of which at most parts are ever dequantised."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from halfbyte.arguments import check_tensor
from halfbyte.cpu import linear as cpu
from halfbyte.errors import InvalidArgument, check, warn_once
from halfbyte.formats import weight_format
from halfbyte.ops import _linear_on_gpu as gpu
from halfbyte.ops import _relaunch_linear as relaunch
from halfbyte.ops._library import can_bypass_dispatcher, define, level
from halfbyte.reference import linear as reference
from halfbyte.tensors import QuantTensor, weight_of

_Level = Callable[[torch.Tensor, QuantTensor, torch.Tensor | None], torch.Tensor]
_LEVELS: dict[str, _Level] = {"cpu": cpu.linear, "reference": reference.linear}


def _flat(weight: QuantTensor) -> list[torch.Tensor]:
    return list(weight.parts().values())


def _run_linear(
    x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, fmt: str, level: str, row_invariant: bool = False
) -> torch.Tensor:
    return _run(x, [weight_of(weight_format(fmt), parts)], [bias], level, row_invariant)[0]


def _run(
    x: torch.Tensor, weights: list[QuantTensor], biases: Sequence[torch.Tensor | None], level: str, row_invariant: bool
) -> list[torch.Tensor]:
    """[..., N] for each weight."""
    if level not in _LEVELS:
        return gpu.run(x, weights, biases, level, row_invariant, compiled=True)
    run = _LEVELS[level]
    if row_invariant and x.numel():
        run = functools.partial(_row_by_row, run)
    return [run(x, *each) for each in zip(weights, biases, strict=True)]


def _row_by_row(run: _Level, x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One by one: torch adds up in another order for another number of rows."""
    rows = [run(row, weight, bias) for row in x.reshape(-1, 1, x.shape[-1])]
    return torch.cat(rows).view(*x.shape[:-1], weight.shape[0])


def _fake_linear(x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, fmt: str, *options: object) -> torch.Tensor:
    weight = weight_of(weight_format(fmt), parts)
    _check(x, weight, bias, "weight", "bias")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _run_projections(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    counts: list[int],
    biases: list[torch.Tensor | None],
    formats: str,
    level: str,
    row_invariant: bool = False,
) -> list[torch.Tensor]:
    return _run(x, _weights(parts, counts, formats), biases, level, row_invariant)


def _fake_projections(
    x: torch.Tensor, parts: list[torch.Tensor], counts: list[int], biases: list[torch.Tensor | None], formats: str, *options: object
) -> list[torch.Tensor]:
    weights = _weights(parts, counts, formats)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        _check(x, weight, bias, f"weight {i}", f"bias {i}")
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _weights(parts: list[torch.Tensor], counts: list[int], formats: str) -> list[QuantTensor]:
    """Weights from the tensors of all of them, of which each has so many."""
    ends = list(itertools.accumulate(counts))
    each = [parts[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return [weight_of(weight_format(fmt), own) for own, fmt in zip(each, formats.split(","), strict=True)]


_linear_op = define(
    "linear(Tensor x, Tensor[] weight, Tensor? bias, str weight_format, str level, bool row_invariant=False) -> Tensor",
    _run_linear,
    _fake_linear,
)
_projections_op = define(
    "projections(Tensor x, Tensor[] weights, int[] counts, Tensor?[] biases, str weight_formats, str level, "
    "bool row_invariant=False) -> Tensor[]",
    _run_projections,
    _fake_projections,
)


def linear(
    x: torch.Tensor,
    weight: QuantTensor,
    bias: torch.Tensor | None = None,
    *,
    row_invariant: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """x [..., K] times a quantised weight [N, K], plus bias [N]: [..., N] in x's dtype.

    x is fp16, bf16, fp32 or float64, any strides. impl: "auto"; a GPU's kernels for fp16 and bf16, "gluon" (tuned, up to 16 rows,
    on Hopper 256) and "triton" (portable); "cpu" (blocks of rows); "reference" (float64). `row_invariant`: a row's result has the
    same bits alone and among others. On a GPU that fixes how the work is cut; the `cpu` and `reference` levels compute one row
    after the other. Raises `InvalidArgument` naming the argument at fault.
    """
    request = _request(x, [weight], [bias], row_invariant, impl)
    done = None if request is None else relaunch.again(request)
    if done is not None:
        return done[0]
    _check(x, weight, bias, "weight", "bias")
    chosen = _level("linear", impl, x)
    if chosen not in _LEVELS and can_bypass_dispatcher(x, bias):
        return gpu.run(x, [weight], [bias], chosen, row_invariant, request=request)[0]
    y: torch.Tensor = _linear_op(x, _flat(weight), bias, weight.format.name, chosen, row_invariant)
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

    Returns three tensors [..., N] in x's dtype; options as in `linear`. On a GPU it is one launch, with one ahead that orders x
    for 17 to 256 rows on Hopper, and many for very many rows. Each shard keeps its own scales: taking the largest of three tensor
    scales would silently corrupt two of them. Raises `InvalidArgument` naming the argument at fault.
    """
    good = isinstance(weights, tuple | list) and isinstance(biases, tuple | list) and len(weights) == len(biases) == 3
    check(good, "weights and biases must be three each: those of q, k and v")
    q_out, k_out, v_out = projections(x, weights, biases, row_invariant=row_invariant, impl=impl, names=("q ", "k ", "v "))
    return q_out, k_out, v_out


def projections(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    *,
    row_invariant: bool = False,
    impl: str = "auto",
    names: Sequence[str] = ("first ", "second ", "third "),
) -> list[torch.Tensor]:
    """`qkv_projection` of one to three weights, such as those of an MLP's gate and up: [..., N] of each. `names`: for messages."""
    if not len(weights) == len(biases) in (1, 2, 3):
        given = f"{len(weights)} weights and {len(biases)} biases"
        raise InvalidArgument(f"{given} were given; pass one to three weights, and a bias or None for each")
    request = _request(x, weights, biases, row_invariant, impl)
    done = None if request is None else relaunch.again(request)
    if done is not None:
        return done
    for name, weight, bias in zip(names, weights, biases, strict=False):
        _check(x, weight, bias, f"the {name}weight", f"the {name}bias")
    chosen = _level("qkv_projection", impl, x)
    if chosen not in _LEVELS and can_bypass_dispatcher(x, *biases):
        return gpu.run(x, weights, biases, chosen, row_invariant, request=request)
    parts, formats = [_flat(w) for w in weights], [w.format.name for w in weights]
    return _call_projections(x, parts, biases, formats, chosen, row_invariant)


def _call_projections(
    x: torch.Tensor,
    parts: Sequence[list[torch.Tensor]],
    biases: Sequence[torch.Tensor | None],
    formats: Sequence[str],
    level: str,
    row_invariant: bool,
) -> list[torch.Tensor]:
    every, counts = [t for own in parts for t in own], [len(own) for own in parts]
    outs: list[torch.Tensor] = _projections_op(x, every, counts, list(biases), ",".join(formats), level, row_invariant)
    return outs


def linear_of_parts(x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, fmt: str) -> torch.Tensor:
    """`linear` as compiled code calls it: with the tensors of a weight in storage order and its format's name.

    Every object and property that is traced is looked at again before every call of the compiled code, so there are none.
    """
    y: torch.Tensor = _linear_op(x, parts, bias, fmt, _level("linear", "auto", x))
    return y


def projections_of_parts(
    x: torch.Tensor, parts: Sequence[list[torch.Tensor]], biases: Sequence[torch.Tensor | None], formats: Sequence[str]
) -> list[torch.Tensor]:
    """`projections` as compiled code calls it, see `linear_of_parts`."""
    return _call_projections(x, parts, biases, formats, _level("qkv_projection", "auto", x), False)


def _level(op: str, impl: str, x: torch.Tensor) -> str:
    """The level that runs; on a GPU, torch code for an x of 32 and 64 bits, which has no kernel."""
    if x.device.type != "cpu" and impl == "auto" and x.element_size() > 2:
        warn_once(f"{op} has kernels for float16 and bfloat16; blocked torch code runs for an x of {x.dtype}")
        impl = "cpu"
    chosen = level(op, impl, x.device)
    return "auto" if impl == "auto" and chosen == "gluon" else chosen


def _request(
    x: torch.Tensor, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None], row_invariant: bool, impl: str
) -> relaunch.Request | None:
    """What to remember a call as; None where it is not to be remembered. Nothing need have been checked."""
    return relaunch.request(x, weights, biases, row_invariant, impl) if can_bypass_dispatcher(x, *biases) else None


def _check(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, weight_name: str, bias_name: str) -> None:
    check(
        isinstance(weight, QuantTensor), f"{weight_name} is {type(weight).__name__}; expected a QuantTensor from halfbyte.quantize"
    )
    check(len(weight.shape) == 2, f"{weight_name} has shape {list(weight.shape)}; expected [N, K]")
    out_features, in_features = weight.shape
    weight_format(weight.format, f"the format of {weight_name}")
    leading = [*map(str, x.shape[:-1])] if isinstance(x, torch.Tensor) else ["..."]
    check_tensor("x" if weight_name == "weight" else f"x (for {weight_name})", x, (*leading, in_features), device=weight.device)
    if bias is not None:
        check_tensor(bias_name, bias, (out_features,), device=x.device)
