"""`merge_states`: merge attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.ops._library import can_bypass_dispatcher, level
from halfbyte.reference import attention as reference

#: Dtypes that the kernel reads; it sums in fp32.
_KNOWN = (torch.float16, torch.bfloat16, torch.float32)


def merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys: outs [B, Hq, L, Dv] and lses float [B, Hq, L], one of each per part.

    The building block for shared prefixes and for one sequence over several devices. Parts without a visible key (lse = -inf) add
    nothing; pass `sinks` [Hq] here, once, and not to the parts. Returns (out, lse).
    """
    good = isinstance(outs, list | tuple) and isinstance(lses, list | tuple) and len(outs) == len(lses) > 0
    check(good, "outs and lses must be lists of tensors, as many of one as of the other and at least one")
    check_tensor("outs[0]", outs[0], ("B", "Hq", "L", "Dv"))
    shape, device = outs[0].shape, outs[0].device
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_tensor(f"outs[{i}]", out, shape, device=device)
        check_tensor(f"lses[{i}]", lse, shape[:3], device=device)
    if sinks is not None:
        check_tensor("sinks", sinks, (shape[1],), device=device)
    return merged(outs, lses, sinks)


def merged(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` of checked arguments: by the kernel, or by torch code under compilation, autograd or modes, and in float64."""
    tensors = (*outs, *lses, *([] if sinks is None else [sinks]))
    readable = all(t.dtype in _KNOWN for t in tensors) and len({out.dtype for out in outs}) == 1
    plain = readable and all(map(can_bypass_dispatcher, tensors)) and outs[0].numel() > 0
    if not plain or level("merge_states", "auto", outs[0].device) != "triton":
        return reference.merge_states(outs, lses, sinks)
    from halfbyte.kernels.decode.merge import launch

    out = outs[0].new_empty(outs[0].shape)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        dense = [part if part.stride(3) == 1 else part.contiguous() for part in outs]
        launch(dense, lses, None if sinks is None else sinks.contiguous(), out, lse)
    return out, lse
