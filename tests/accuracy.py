"""The accuracy promise for tests: the library's own, for whole results of attention (with lse) and of linear layers."""

from __future__ import annotations

import torch

from halfbyte.reference.linear import factors
from halfbyte.tensors import QuantTensor
from halfbyte_lab.measure.checks import attention_accuracy, eager_attention, float64_attention, linear_accuracy

__all__ = [
    "attention_accuracy",
    "attention_errors",
    "check_product",
    "eager_attention",
    "float64_attention",
    "linear_accuracy",
    "lse_bound",
    "products",
]

Attention = tuple[torch.Tensor, torch.Tensor]


def attention_errors(
    out: torch.Tensor,
    lse: torch.Tensor,
    truth: Attention,
    base: Attention,
    lse_roundings: int = 0,
    rotation: tuple[float, float] = (0.0, 0.0),
) -> str:
    """What of a result breaks the promise, in words; "" when nothing does. truth, base: (out, lse) in float64, and by eager torch.

    lse: 1e-5 plus twice eager PyTorch's error, and so many roundings in fp32 of a score of that size. Both: and what rounding a
    rotated query costs, of which eager PyTorch knows nothing.
    """
    (ref, ref_lse), (base_out, base_lse) = truth, base
    if out.shape != ref.shape or lse.shape != ref_lse.shape or lse.dtype is not torch.float32:
        return f"shapes {list(out.shape)} {list(lse.shape)} {lse.dtype}, expected {list(ref.shape)}"
    if not out.numel():
        return ""
    if out.isnan().any() or lse.isnan().any():
        return f"NaN in {int(out.isnan().any(-1).sum())} rows of out, {int(lse.isnan().sum())} of lse"
    empty = ref_lse == -torch.inf
    if not torch.equal(lse == -torch.inf, empty) or out[empty].any():
        return "rows that see no key: out is not 0 or lse not -inf there, or only there"
    promise = attention_accuracy(out, base_out, ref)
    most = promise.allowed + rotation[0]
    lse, ref_lse, base_lse = (t.masked_fill(empty, 0).double() for t in (lse, ref_lse, base_lse))
    roundings = lse_roundings * torch.finfo(torch.float32).eps * ref_lse.abs().max().item()
    allowed = 1e-5 + 2 * (base_lse - ref_lse).abs().max().item() + roundings + rotation[1]
    error = (lse - ref_lse).abs().max().item()
    found = [] if promise.error <= most else [f"out is off by {promise.error:.3g}, allowed {most:.3g}"]
    return "; ".join(found + [f"lse is off by {error:.3g}, allowed {allowed:.3g}"] * (not error <= allowed))


def lse_bound(q: torch.Tensor, k: torch.Tensor, rotated: float = 0) -> torch.Tensor:
    """What `decode_attention` says of lse's error, [B, Hq, L]: q [B, Hq, L, D] and k [B, H, T, D] as they are multiplied, float64.

    rotated: the unit roundoff that a kernel rounds a rotated query with.
    """
    keys = k.abs().repeat_interleave(q.shape[1] // k.shape[1], 1)
    size: torch.Tensor = 1 + (q.abs() @ keys.mT).amax(-1)
    return ((q.shape[-1] + 8) * 2**-24 + rotated) * size


def products(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x times a weight, dequantized or both rounded: in float64, and as torch rounds it with both in x's dtype."""
    rounded, full = factors(x, weight)
    truth = rounded @ full.mT + (0 if bias is None else bias.double())
    base = torch.nn.functional.linear(rounded.to(x.dtype), full.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return truth, base


#: Of fewer numbers than this an L2 error is luck, eager's too: of one number it may be 0.
FEW = 64


def check_product(out: torch.Tensor, x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None = None) -> None:
    """Raise unless `out` keeps the promise for linear layers; of few numbers, unless each is within its own roundings."""
    truth, base = products(x, weight, bias)
    assert out.dtype is x.dtype
    assert out.shape == truth.shape
    what = f"{weight.format} {list(weight.shape)} {list(x.shape)} {x.stride()}"
    if out.numel() >= FEW:
        linear_accuracy(out, base, truth).require(what)
    else:
        assert ((out.double() - truth).abs() <= roundings(x, weight, bias, truth)).all(), what


def roundings(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, truth: torch.Tensor) -> torch.Tensor:
    """Most that a result can be off by, [M, N]: a weight is rounded twice (its scale, and the product), the result once, to x's
    dtype; a sum of K terms is rounded K times in fp32.
    """
    terms = x.double().abs() @ weight.dequantize(torch.float64).abs().mT + (0 if bias is None else bias.double().abs())
    unit = torch.finfo(x.dtype).eps / 2
    return unit * (2 * terms + truth.abs()) + (weight.shape[1] + 2) * 2**-24 * terms
