"""`linear` and `qkv_projection`: products with quantised weights, without ever holding the whole dequantised weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.arguments import check_tensor
from halfbyte.cpu import linear as cpu
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.ops._library import define, level
from halfbyte.reference import linear as reference
from halfbyte.tensors import QuantTensor, expected_parts

_LEVELS = {"cpu": cpu.linear, "reference": reference.linear}


def _weight(parts: Sequence[torch.Tensor], name: str) -> QuantTensor:
    """A weight from its flat parts: the tensors of `expected_parts`, in that order; one more than a format stores is `perm`."""
    fmt = weight_format(name)
    shape = (parts[0].shape[0], parts[0].shape[1] * fmt.code.per_byte)
    act_order = len(parts) > len(expected_parts(fmt, shape))
    return QuantTensor(fmt, shape, **dict(zip(expected_parts(fmt, shape, act_order=act_order), parts, strict=True)))


def _flat(weight: QuantTensor) -> list[torch.Tensor]:
    return list(weight.parts().values())


def _run_linear(x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, fmt: str, level: str) -> torch.Tensor:
    y: torch.Tensor = _LEVELS[level](x, _weight(parts, fmt), bias)
    return y


def _fake_linear(x: torch.Tensor, parts: list[torch.Tensor], bias: torch.Tensor | None, fmt: str, level: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], parts[0].shape[0])


def _run_qkv(
    x: torch.Tensor,
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    v_bias: torch.Tensor | None,
    formats: str,
    level: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_fmt, k_fmt, v_fmt = formats.split(",")
    run = _LEVELS[level]
    return run(x, _weight(q, q_fmt), q_bias), run(x, _weight(k, k_fmt), k_bias), run(x, _weight(v, v_fmt), v_bias)


def _fake_qkv(
    x: torch.Tensor, q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor], *args: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lead = x.shape[:-1]
    return x.new_empty(*lead, q[0].shape[0]), x.new_empty(*lead, k[0].shape[0]), x.new_empty(*lead, v[0].shape[0])


_linear_op = define(
    "linear(Tensor x, Tensor[] weight, Tensor? bias, str weight_format, str level) -> Tensor", _run_linear, _fake_linear
)
_qkv_op = define(
    "qkv_projection(Tensor x, Tensor[] q, Tensor[] k, Tensor[] v, Tensor? q_bias, Tensor? k_bias, Tensor? v_bias, "
    "str weight_formats, str level) -> (Tensor, Tensor, Tensor)",
    _run_qkv,
    _fake_qkv,
)


def linear(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None = None, *, impl: str = "auto") -> torch.Tensor:
    """x [..., K] times a quantised weight [N, K], plus bias [N]: [..., N] in x's dtype. Group scales are applied in fp32.

    x is fp16, bf16, fp32 or float64, any strides. impl: "auto", "cpu" (blocks of rows) or "reference" (float64).
    Raises `InvalidArgument` naming the argument at fault.
    """
    _check(x, weight, bias, "weight", "bias")
    y: torch.Tensor = _linear_op(x, _flat(weight), bias, weight.format.name, level("linear", impl, x.device))
    return y


def qkv_projection(
    x: torch.Tensor,
    weights: tuple[QuantTensor, QuantTensor, QuantTensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    *,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v from one pass over x [..., K]: three weights [Nq, K], [Nk, K], [Nv, K], each with its own scales and format.

    Returns three tensors [..., N] in x's dtype. Each shard keeps its own scales: taking the largest of three tensor scales would
    silently corrupt two of them. Raises `InvalidArgument` naming the argument at fault.
    """
    good = isinstance(weights, tuple | list) and isinstance(biases, tuple | list) and len(weights) == len(biases) == 3
    check(good, "weights and biases must be three each: those of q, k and v")
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        _check(x, weight, bias, f"the {name} weight", f"the {name} bias")
    q, k, v = (_flat(w) for w in weights)
    formats = ",".join(w.format.name for w in weights)
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _qkv_op(
        x, q, k, v, *biases, formats, level("qkv_projection", impl, x.device)
    )
    return out


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
