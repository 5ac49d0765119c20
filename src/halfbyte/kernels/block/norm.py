"""RMSNorm with the residual sum in front of it, and RMSNorm of queries and keys.

    hidden = residual + multiplier * after(x)        out = before(hidden)        norm(x) = x / sqrt(mean(x^2) + eps) * weight

A program of `add_norm` takes one row [N]; hidden and out are in its registers, so x and residual are read once. Partial sums x of
tensor-parallel ranks are added up first (all_reduce.py). A program of `norm_rows` takes some rows of one of two tensors, which may
differ in their widths. Sums are in fp32. Whatever a module rounds to 16 bits is rounded here at the same place: `hidden` has the
bits of the modules where there is no `after`, `out` those but for the order in which squares are added.

Weights are read before the previous kernel has ended (programmatic dependent launch).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.block.all_reduce import Exchange, summed
from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.reference.block import Norm

#: Numbers that a program of `norm_rows` holds.
_TILE = 1024


@triton.jit
def _factors(norm, d, width, KIND: tl.constexpr):
    """The weight of a norm in fp32, [1, N]."""
    w = tl.load(norm + d, mask=d < width, other=0.0).to(tl.float32)
    if KIND == "offset":
        w += 1.0
    return w


@triton.jit
def _normalized(x, w, share, eps, like, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """f32 rows x [R, N], 0 beyond their width, normalized; `share`: 1 / width."""
    y = x * tl.rsqrt(tl.sum(x * x, 1) * share + eps)[:, None]
    if KIND == "rounded":
        y = rounded(y, like, INTERPRETED).to(tl.float32)
    return rounded(y * w, like, INTERPRETED)


@triton.jit
def add_norm(
    x, residual, after, before, hidden, out, width, share, multiplier, after_eps, before_eps, exchange: Exchange,
    N: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, RANKS: tl.constexpr, USE_PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One row of each [M, width]; all contiguous."""
    d = tl.arange(0, N)[None, :]
    at, inside = tl.program_id(0).to(tl.int64) * width + d, d < width
    if after is not None:
        first = _factors(after, d, width, AFTER)
    if before is not None:
        second = _factors(before, d, width, BEFORE)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if exchange is None:
        row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    else:
        row = rounded(summed(x, tl.program_id(0), width, exchange, N, RANKS), hidden, INTERPRETED).to(tl.float32)
    whole = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if after is not None:
        row = _normalized(row, first, share, after_eps, hidden, AFTER, INTERPRETED).to(tl.float32)
    row = rounded(row * multiplier, hidden, INTERPRETED).to(tl.float32)
    total = rounded(whole + row, hidden, INTERPRETED)
    tl.store(hidden + at, total, mask=inside)
    if before is not None:
        made = _normalized(total.to(tl.float32), second, share, before_eps, out, BEFORE, INTERPRETED)
        tl.store(out + at, made, mask=inside)


@triton.jit
def _rows(
    x, w, out, tile, rows, width, share, eps, R: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr
):
    d, r = tl.arange(0, N)[None, :], (tile.to(tl.int64) * R + tl.arange(0, R))[:, None]
    at, inside = r * width + d, (r < rows) & (d < width)
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    made = _normalized(y, _factors(w, d, width, KIND), share, eps, out, KIND, INTERPRETED)
    tl.store(out + at, made, mask=inside)


@triton.jit(do_not_specialize=["first", "rows", "other_rows"])
def norm_rows(
    x, weight, out, rows, width, share, other, other_weight, other_out, other_rows, other_width, other_share, first, eps,
    R: tl.constexpr, N: tl.constexpr, OTHER_R: tl.constexpr, OTHER_N: tl.constexpr, KIND: tl.constexpr,
    USE_PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """x [rows, width] by the `first` programs, `other` by the rest."""
    pid = tl.program_id(0)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if other is None:
        _rows(x, weight, out, pid, rows, width, share, eps, R, N, KIND, INTERPRETED)
    else:
        if pid < first:
            _rows(x, weight, out, pid, rows, width, share, eps, R, N, KIND, INTERPRETED)
        else:
            _rows(
                other, other_weight, other_out, pid - first, other_rows, other_width, other_share, eps,
                OTHER_R, OTHER_N, KIND, INTERPRETED,
            )  # fmt: skip


def launch_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    after: Norm | None,
    multiplier: float,
    before: Norm | None,
    hidden: torch.Tensor,
    out: torch.Tensor | None,
    use_pdl: bool,
    exchange: Exchange | None = None,
) -> None:
    """hidden and, with `before`, out [M, N] from x and residual [M, N]; all contiguous, of one 16-bit type, none empty.

    exchange: x is summed over the ranks first; N is even, and M at most what an inbox has room for.
    """
    rows, width = x.shape
    columns = triton.next_power_of_2(width)
    weights, epsilons, kinds = zip(*((None, 0.0, "") if norm is None else norm for norm in (after, before)), strict=True)
    add_norm[(rows,)](
        x, residual, *weights, hidden, out, width, 1 / width, multiplier, *epsilons, exchange,
        N=columns, AFTER=kinds[0], BEFORE=kinds[1], RANKS=1 if exchange is None else len(exchange.inboxes), USE_PDL=use_pdl,
        INTERPRETED=INTERPRETED,
        num_warps=min(16, max(4, columns // 512)), **_options(use_pdl),
    )  # fmt: skip


def launch_norm_rows(xs: Sequence[torch.Tensor], norms: Sequence[Norm], outs: Sequence[torch.Tensor], use_pdl: bool) -> None:
    """Each out [rows, N] from its x by its norm: one or two, of one `eps` and kind. As `launch_add_norm` otherwise."""
    tiles, parts = [], []
    for x, norm, out in zip(xs, norms, outs, strict=True):
        rows, width = x.shape
        columns = triton.next_power_of_2(width)
        each = max(1, _TILE // columns)
        tiles.append((each, columns, triton.cdiv(rows, each)))
        parts.append((x, norm.weight, out, rows, width, 1 / width))
    (each, columns, first), (other_each, other_columns, more) = (*tiles, (1, 1, 0))[:2]
    given = (*parts, (None, None, None, 0, 0, 0.0))[:2]
    norm_rows[(first + more,)](
        *given[0], *given[1], first, norms[0].eps,
        R=each, N=columns, OTHER_R=other_each, OTHER_N=other_columns, KIND=norms[0].kind,
        USE_PDL=use_pdl, INTERPRETED=INTERPRETED,
        num_warps=min(16, max(4, max(columns, other_columns) // 512)), **_options(use_pdl),
    )  # fmt: skip


def _options(use_pdl: bool) -> dict[str, bool]:
    """A multiplication and a sum stay two roundings, as in the modules."""
    return {"enable_fp_fusion": False, **({"launch_pdl": True} if use_pdl else {})}
