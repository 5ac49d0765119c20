"""Error feedback: round the columns of a weight one after the other, each with the errors of those before it taken into account.

A layer gets inputs x, and H is the sum of x x^T over them, so an error E of its weight costs E H E^T. When a column is rounded, the
columns that are not rounded yet move to where they make up for its error best: by -e U[c, c + 1:] / U[c, c], with e that error and
U^T U the inverse of H, U upper triangular (the method is known as GPTQ). The column with the largest inputs goes first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfbyte.errors import InvalidArgument, check

#: What is added to the diagonal of H, by its median: directions without an input in the calibration have a cost, too. The mean may
#: be that of a single token: the first of a text has activations thousands of times as large as others'.
DAMPING = 0.01
#: And at least this by its largest number, as sums in float32 are rounded.
ROUNDING = 1e-6
#: Columns whose errors reach the columns behind them in one product.
_TOGETHER = 128


def check_hessian(hessian: torch.Tensor, columns: int) -> None:
    """Raise unless `hessian` is a finite matrix [columns, columns] of floats."""
    shape = list(hessian.shape)
    check(shape == [columns, columns], f"hessian has shape {shape}; expected [{columns}, {columns}], as the weight has columns")
    check(hessian.is_floating_point(), f"hessian is {hessian.dtype}; expected float32 or float64")
    check(bool(hessian.isfinite().all()), "hessian holds NaN or infinity; an input of the layer does, too")


def error_feedback(w: torch.Tensor, hessian: torch.Tensor, nearest: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """The weight, float32 [N, K], to round in place of `w`: each column is where it was when it was rounded.

    hessian   [K, K], H of the inputs
    nearest   (a column [N], its number) -> what it is rounded to, by scales that do not depend on the weight
    """
    order = hessian.diagonal().argsort(descending=True)
    factor = _factor(hessian[order][:, order]).to(w.dtype)
    columns = w[:, order].T.contiguous()  # one row of memory for each column
    numbers = order.tolist()
    for first in range(0, len(numbers), _TOGETHER):
        part, inside = slice(first, first + _TOGETHER), factor[first : first + _TOGETHER, first : first + _TOGETHER]
        errors = _round_part(columns[part], inside, numbers[part], nearest)
        columns[first + _TOGETHER :].addmm_(factor[part, first + _TOGETHER :].T, errors, alpha=-1)
    result = torch.empty_like(w)
    result[:, order] = columns.T
    return result


def _round_part(
    columns: torch.Tensor,
    factor: torch.Tensor,
    numbers: list[int],
    nearest: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Move the columns [n, N] of one part, in place; their errors by U[c, c], [n, N]."""
    errors = torch.empty_like(columns)
    scales = factor.diagonal()
    for i, number in enumerate(numbers):
        torch.div(columns[i] - nearest(columns[i], number), scales[i], out=errors[i])
        columns[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return errors


def _factor(hessian: torch.Tensor) -> torch.Tensor:
    """U, upper triangular, float64, with U^T U the inverse of the damped H."""
    matrix = hessian.double()
    diagonal = matrix.diagonal()
    damping = torch.maximum(DAMPING * diagonal.median(), ROUNDING * diagonal.max())
    diagonal += damping.clamp_min(torch.finfo(torch.float32).tiny)
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise InvalidArgument("hessian is not positive semidefinite; expected the sum of x x^T over a layer's inputs x")
    factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor
