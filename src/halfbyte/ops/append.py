"""`append`: quantise new keys and values and write them into a cache, in place."""

from __future__ import annotations

import torch

from halfbyte.arguments import as_int32, check_tensor
from halfbyte.errors import check
from halfbyte.formats import key_format, value_format
from halfbyte.ops._library import define, level
from halfbyte.planes import Plane
from halfbyte.reference import append as reference

_SCHEMA = (
    "append_(Tensor k, Tensor v, Tensor? counts, "
    "Tensor(a!) k_codes, Tensor(b!)? k_scales, Tensor(c!)? k_offsets, Tensor(d!)? k_tail, Tensor(e!)? k_saturated, "
    "Tensor(f!) v_codes, Tensor(g!)? v_scales, Tensor(h!)? v_offsets, Tensor(i!)? v_saturated, "
    "Tensor lengths, Tensor? page_table, str key_format, str value_format, bool rotate_keys) -> ()"
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
    check_new(k, v, keys, values, lengths, counts)
    level("append", "auto", lengths.device)
    counts = None if counts is None else as_int32(counts)
    k_parts, v_parts = (*keys.tensors(), keys.saturated), (*values.tensors()[:3], values.saturated)
    _op(k, v, counts, *k_parts, *v_parts, lengths, page_table, keys.format.name, values.format.name, rotate_keys)
    # Here and not in the op: Inductor may compute what it needs of the old lengths (positions) after an op that changes them.
    lengths.add_(k.shape[2] if counts is None else counts)


def check_new(
    k: torch.Tensor, v: torch.Tensor, keys: Plane, values: Plane, lengths: torch.Tensor, counts: torch.Tensor | None
) -> None:
    """Shapes, dtypes and devices of what is to be appended. What the numbers are is looked at when they are read."""
    batch = lengths.shape[0]
    check_tensor("k", k, (batch, keys.heads, "L", keys.dim), device=keys.codes.device)
    check_tensor("v", v, (batch, values.heads, "L", values.dim), device=keys.codes.device)
    check(k.shape[2] == v.shape[2], f"k has {k.shape[2]} tokens and v {v.shape[2]}; they must have the same number")
    if counts is not None:
        check_tensor("counts", counts, (batch,), "integer", lengths.device)
