"""Launching the tuned kernel again for a call like an earlier one: same cache, same shapes, other addresses.

Whatever the kernel was compiled for is in the key: shapes, strides, types, which options are there, and whether addresses are
multiples of 16. An entry belongs to two planes and goes with them; it holds their memory only as long as they live.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.ops._workspace import counters, floats
from halfbyte.planes import AttentionOptions, Plane
from halfbyte.plans.decode_attention import WIDEST, GluonPlan, Spec

Key = tuple[Any, ...]


@dataclass(frozen=True)
class _Entry:
    """planes: (codes, scales, offsets) of keys and values, codes as words; sizes: all numbers of a launch behind the window."""

    owners: tuple[Any, Any]  # weak references to the planes
    compiled: Any
    grid: tuple[int, int, int]
    planes: tuple[Any, ...]
    sizes: tuple[int, ...]
    spec: Spec
    part: int
    count: int


_known: dict[Key, _Entry] = {}


def key(
    q: torch.Tensor,
    keys: Plane,
    values: Plane,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    page_table: torch.Tensor | None,
    o: AttentionOptions,
    level: str,
    deterministic_batch: bool,
    pair: bool,
) -> Key | None:
    """What a call must share with an earlier one; None for calls that need more than a launch."""
    if o.rotate_keys or level not in ("auto", "gluon") or deterministic_batch:
        return None
    vectors = (lengths, query_start, o.starts, o.ends, o.alibi_slopes, o.sinks)
    seen = tuple(None if t is None else (t.data_ptr() % 16, t.dtype, t.is_contiguous()) for t in vectors)
    table = None if page_table is None else (page_table.dtype, page_table.shape, page_table.stride(), page_table.data_ptr() % 16)
    query = (q.shape, q.stride(), q.dtype, q.data_ptr() % 16)
    where = tuple(None if t is None else t.data_ptr() for p in (keys, values) for t in (p.codes, p.scales, p.offsets))
    return (id(keys), id(values), where, query, seen, table, o.window is None, o.softcap is None, level, pair)


def launch(
    key: Key,
    q: torch.Tensor,
    keys: Plane,
    values: Plane,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    page_table: torch.Tensor | None,
    o: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> bool:
    """Launch as an earlier call did. False when there was none, or it was about planes that are no more."""
    e = _known.get(key)
    if e is None or e.owners[0]() is not keys or e.owners[1]() is not values:
        return False
    part, count = floats(q.device, e.part), counters(q.device, e.count)
    e.compiled[e.grid](
        *(q, *e.planes, out, lse, part, count, lengths, query_start, o.starts, o.ends, page_table, o.alibi_slopes, o.sinks),
        *(o.sm_scale, o.softcap or 1.0, min(o.window or 0, WIDEST), *e.sizes, e.spec),
    )
    return True


def remember(
    key: Key, compiled: Any, plan: GluonPlan, q: torch.Tensor, keys: Plane, values: Plane, page_table: torch.Tensor | None
) -> None:
    """Keep what a launch found out, unless its tensors were not as the kernel reads them."""
    from halfbyte.kernels.decode_gluon import sizes

    vectors = key[4]
    dense = all(found is None or found[2] for found in vectors)
    fp32 = all(found is None or found[1] is torch.float32 for found in vectors[4:])
    if not (dense and fp32) or (page_table is not None and page_table.stride(1) != 1):
        return
    planes = tuple(t for p in (keys, values) for t in (p.codes.view(torch.int16), p.scales, p.offsets))
    owners = tuple(weakref.ref(p, lambda _: _known.pop(key, None)) for p in (keys, values))
    _known[key] = _Entry(
        *((owners[0], owners[1]), compiled, (plan.programs, 1, 1), planes, sizes(q, keys, values, page_table), plan.spec),
        *(plan.floats, plan.counters),
    )
