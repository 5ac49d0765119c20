"""`append`: quantise new keys and values and write them into a cache, in place."""

from __future__ import annotations

import torch

from halfbyte.errors import check
from halfbyte.formats import key_format, value_format
from halfbyte.ops._library import define
from halfbyte.planes import Plane
from halfbyte.reference import append as reference

_SCHEMA = (
    "append_(Tensor k, Tensor v, Tensor? counts, "
    "Tensor(a!) k_codes, Tensor(b!)? k_scales, Tensor(c!)? k_offsets, Tensor(d!)? k_tail, Tensor(e!)? k_saturated, "
    "Tensor(f!) v_codes, Tensor(g!)? v_scales, Tensor(h!)? v_offsets, Tensor(i!)? v_saturated, "
    "Tensor(j!) lengths, Tensor? page_table, str key_format, str value_format, bool rotate_keys) -> ()"
)


def _run(
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor | None,
    k_codes: torch.Tensor,
    k_scales: torch.Tensor | None,
    k_offsets: torch.Tensor | None,
    k_tail: torch.Tensor | None,
    k_saturated: torch.Tensor | None,
    v_codes: torch.Tensor,
    v_scales: torch.Tensor | None,
    v_offsets: torch.Tensor | None,
    v_saturated: torch.Tensor | None,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    keys: str,
    values: str,
    rotate_keys: bool,
) -> None:
    key_plane = Plane(key_format(keys), k_codes, k_scales, k_offsets, k_tail, k_saturated)
    value_plane = Plane(value_format(values), v_codes, v_scales, v_offsets, None, v_saturated)
    reference.append_(k, v, counts, key_plane, value_plane, lengths, page_table, rotate_keys)


_op = define(_SCHEMA, _run, lambda *args: None)


def append_(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: Plane,
    values: Plane,
    lengths: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    rotate_keys: bool = False,
) -> None:
    """Quantise k [B, H, L, D] and v [B, H, L, Dv] (any floating dtype) and write them behind each sequence's tokens, in place.

    `counts`, int32 [B] in 0..L: how many of the L tokens of each sequence are real; None: all. `lengths`, int32 [B], advances.
    Raises `CapacityError` past the capacity and `InvalidArgument` for NaN or infinity; then nothing has changed.
    """
    batch = lengths.shape[0]
    for name, x, plane in (("k", k, keys), ("v", v, values)):
        expected = f"[{batch}, {plane.heads}, L, {plane.dim}]"
        check(
            x.ndim == 4 and (x.shape[0], x.shape[1], x.shape[3]) == (batch, plane.heads, plane.dim),
            f"{name} has shape {list(x.shape)}; this cache takes {expected}",
        )
        check(x.is_floating_point(), f"{name} is {x.dtype}; keys and values are floating tensors")
        check(x.device == plane.codes.device, f"{name} is on {x.device} and the cache on {plane.codes.device}; move one of them")
    check(k.shape[2] == v.shape[2], f"k has {k.shape[2]} tokens and v {v.shape[2]}; they must have the same number")
    if counts is not None:
        check(
            tuple(counts.shape) == (batch,) and counts.dtype in (torch.int32, torch.int64) and counts.device == lengths.device,
            f"counts is {counts.dtype} {list(counts.shape)} on {counts.device}; expected int32 [{batch}] on {lengths.device}",
        )
    k_parts, v_parts = (*keys.tensors(), keys.saturated), (*values.tensors()[:3], values.saturated)
    _op(k, v, counts, *k_parts, *v_parts, lengths, page_table, keys.format.name, values.format.name, rotate_keys)
