"""A figure only for a right result: the accuracy promise, applied before anything is timed.

Attention: max|out - ref| <= 2 max|base - ref| + 2 max|(ref + 0.3 - 0.3) - ref|, where ref is float64 attention over the same
dequantized numbers and base is eager torch in the output's dtype over them.
Linear: relative L2 error against float64 on the dequantized weights at most twice that of a 16-bit product on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.errors import HalfbyteError


class BenchmarkRefused(HalfbyteError):
    """A result that fails its accuracy promise gets no time."""


@dataclass(frozen=True)
class Accuracy:
    """An error against float64 and the most that is allowed; `kind` says what is measured."""

    error: float
    allowed: float
    kind: str

    @property
    def ok(self) -> bool:
        """False for NaN too: a comparison with NaN never holds."""
        return self.error <= self.allowed

    def require(self, what: str) -> None:
        """Raise `BenchmarkRefused` unless the error is within what is allowed."""
        if not self.ok:
            raise BenchmarkRefused(
                f"{what}: {self.kind} error {self.error:.3g} against float64 exceeds the allowed {self.allowed:.3g}"
            )


def attention_accuracy(out: torch.Tensor, base: torch.Tensor, ref: torch.Tensor) -> Accuracy:
    """Promise for attention; `out` and `base` [B, Hq, L, D] in the output dtype, `ref` the same in float64."""
    rounded = ref.to(out.dtype)
    noise = ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    allowed = 2 * _largest(base, ref) + 2 * noise
    return Accuracy(_largest(out, ref), allowed, "max abs")


def linear_accuracy(out: torch.Tensor, base: torch.Tensor, ref: torch.Tensor) -> Accuracy:
    """Promise for linear layers; `out` and `base` [M, N] in the output dtype, `ref` the same in float64."""
    return Accuracy(_relative(out, ref), 2 * _relative(base, ref), "relative L2")


def float64_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, slopes: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of q [B, Hq, 1, D] over all of k, v [B, H, T, D], in float64: [B, Hq, 1, D]. `slopes` [Hq]: ALiBi's."""
    return _grouped_attention(q.double(), k.double(), v.double(), sm_scale, slopes)


def eager_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, slopes: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in q's dtype throughout, as eager torch rounds it: the yardstick of the promise."""
    return _grouped_attention(q, k.to(q.dtype), v.to(q.dtype), sm_scale, slopes)


def _grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, slopes: torch.Tensor | None
) -> torch.Tensor:
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # query heads of one KV head side by side: [B, H, Hq/H, D]
    scores = grouped @ k.mT * sm_scale
    if slopes is not None:
        back = torch.arange(1 - k.shape[2], 1, device=q.device)  # the query stands at the last key
        scores = scores + slopes.to(scores.dtype).view(k.shape[1], -1, 1) * back
    out = torch.softmax(scores, -1) @ v
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _largest(out: torch.Tensor, ref: torch.Tensor) -> float:
    return (out.double() - ref).abs().max().item()


def _relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())
