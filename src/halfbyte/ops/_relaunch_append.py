"""The signature of an append, and how one is launched again (`_launch_cache`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.kv_buffer import KVBuffer, Rope
from halfbyte.ops._launch_cache import Signature, layout, signature, store
from halfbyte.ops._workspace import stream_of

#: Where q is in the order in which the kernel takes tensors. Behind it comes q rotated, which is no part of a signature.
_Q = 8


def signature_of(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    counts: torch.Tensor | None,
    page_table: torch.Tensor | None,
    rotate_keys: bool,
    rope: Rope | None,
    q: torch.Tensor | None,
) -> Signature | None:
    """The signature of an append; None where it needs more than one launch. Nothing need have been checked."""
    if torch.compiler.is_compiling() or not lengths.is_cuda or keys.tail is not None or not isinstance(rope, tuple | None):
        return None
    cos, sin = (None, None) if rope is None or len(rope) != 2 else rope
    if (rope is None) != (cos is None) or (torch.is_grad_enabled() and getattr(q, "requires_grad", False)):
        return None
    # None: no scale is measured.
    tensors = [k, v, counts, lengths, page_table, cos, sin, None, q, keys.codes, keys.scales, keys.offsets, keys.saturated]
    tensors += [values.codes, values.scales, values.offsets, values.saturated]
    return signature("append", (rotate_keys,), (keys.format, values.format), tensors)


def remember(s: Signature, compiled: Any, programs: int, given: Sequence[Any], q_out: torch.Tensor | None) -> None:
    """Store a launch of `compiled` by so many programs, `given` these arguments, unless it used other tensors than the call's."""
    from halfbyte.kernels.common.compat import launcher

    tensors, others = given[: len(s.tensors) + 1], given[len(s.tensors) + 1 :]
    if not s.covers((*tensors[: _Q + 1], *tensors[_Q + 2 :])):
        return
    launch = launcher(compiled, (programs, 1, 1))
    like = None if q_out is None else layout(q_out)

    def again(s: Signature) -> tuple[torch.Tensor | None] | None:
        """q rotated, or None in its place."""
        made, address = None, None
        if like is not None:
            made = s.tensors[_Q].new_empty_strided(*like)
            address = made.data_ptr()
            if address % 16:
                return None  # no allocator of torch does that, and the kernel may have been compiled for it
        before, behind = s.addresses[: _Q + 1], s.addresses[_Q + 1 :]
        launch(stream_of(s.tensors[0].device), *before, address, *behind, *others)
        return (made,)

    store(s, again)
