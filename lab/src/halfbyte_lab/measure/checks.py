"""A figure only for a right result: the accuracy promise, applied before anything is timed.

Attention: max|out - ref| <= 2 max|base - ref| + 2 max|(ref + 0.3 - 0.3) - ref|, where ref is float64 attention over the same
dequantized numbers and base is eager torch in the output's dtype over them. Eager torch rounds scores, so this allows several
percent; before a time is taken, no head of any sequence may have a relative L2 error above `HEAD_ERROR` either.
Linear: relative L2 error against float64 on the dequantized weights at most twice that of a 16-bit product on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.errors import HalfbyteError

#: Ten times what 16-bit products with fp32 sums round to; a factor of 1.03, or another head's result, exceeds it.
HEAD_ERROR = 0.02


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
    nearest = ref.to(out.dtype)
    noise = ((nearest + 0.3 - 0.3) - nearest).abs().max().item()
    bound = 2 * _largest(base, ref) + 2 * noise
    return Accuracy(_largest(out, ref), bound, "max abs")


def timed_attention_accuracy(out: torch.Tensor, base: torch.Tensor, ref: torch.Tensor) -> Accuracy:
    """The promise, then the worst head's relative L2 error; `out` [..., L, D], one head of one sequence along the last two dims."""
    promise = attention_accuracy(out, base, ref)
    error = torch.linalg.vector_norm(out.double() - ref, dim=(-2, -1))
    worst = (error / torch.linalg.vector_norm(ref, dim=(-2, -1)).clamp_min(torch.finfo(ref.dtype).tiny)).max().item()
    heads = Accuracy(worst, HEAD_ERROR, "a head's relative L2")
    return promise if heads.ok or not promise.ok else heads


def linear_accuracy(out: torch.Tensor, base: torch.Tensor, ref: torch.Tensor) -> Accuracy:
    """Promise for linear layers; `out` and `base` [M, N] in the output dtype, `ref` the same in float64."""
    return Accuracy(_relative(out, ref), 2 * _relative(base, ref), "relative L2")


def float64_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, slopes: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of the newest tokens' q [B, Hq, L, D] over k, v [B, H, T, D], in float64. `slopes` [Hq]: ALiBi's."""
    return _grouped_attention(q.double(), k.double(), v.double(), sm_scale, slopes)


def eager_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, slopes: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in q's dtype throughout, as eager torch rounds it: the yardstick of the promise."""
    return _grouped_attention(q, k.to(q.dtype), v.to(q.dtype), sm_scale, slopes)


def _grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, slopes: torch.Tensor | None
) -> torch.Tensor:
    new, tokens = q.shape[2], k.shape[2]
    queries = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # query heads of one KV head side by side: [B, H, Hq/H * L, D]
    scores = (queries @ k.mT * sm_scale).unflatten(2, (-1, new))
    at = torch.arange(tokens, device=q.device)
    ahead = at - at[tokens - new :, None]  # how far a key lies beyond a query: [L, T]
    if slopes is not None:
        scores = scores + slopes.to(scores.dtype).view(k.shape[1], -1, 1, 1) * ahead
    if new > 1:
        scores = scores.masked_fill(ahead > 0, -torch.inf)
    out = torch.softmax(scores, -1).flatten(2, 3) @ v
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _largest(out: torch.Tensor, ref: torch.Tensor) -> float:
    return (out.double() - ref).abs().max().item()


def _relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())
