"""A mixture of experts' projections, expert by expert: the `cpu` level of `experts_linear`.

The tokens of an expert are gathered and multiplied as in `cpu.linear`; nothing is rounded to x's dtype before the end.
"""

from __future__ import annotations

import torch

from halfbyte.cpu.linear import matrix, product
from halfbyte.reference.experts import ExpertsCall, combined, hit


def experts_linear(call: ExpertsCall) -> torch.Tensor:
    """As `reference.experts.experts_linear`, in fp32 (float64 for a float64 x)."""
    x, weight, ids, _, bias, _ = call[:6]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    y = torch.zeros(*ids.shape, weight.shape[1], dtype=wide, device=x.device)
    for expert in hit(call):
        tokens, places = torch.where(ids == expert)
        rows = (x[tokens] if x.ndim == 2 else x[tokens, places]).to(wide)
        if weight.perm is not None:
            rows = rows.index_select(1, weight.perm[expert])
        y[tokens, places] = product(rows, matrix(weight, wide, expert), None if bias is None else bias[expert]).mT
    return combined(y, call).to(x.dtype)
