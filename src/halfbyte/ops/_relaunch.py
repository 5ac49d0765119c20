"""Launching tuned attention again for a call like an earlier one (`_facts`), which needs neither checks nor a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from halfbyte.formats import Format
from halfbyte.kv_buffer import AttentionOptions, KVBuffer
from halfbyte.ops._facts import Key, Layout, add_facts, keep, layout, plain, where_it_lies
from halfbyte.ops._workspace import shared
from halfbyte.plans.decode_attention import WIDEST, DecodePlan
from halfbyte.plans.decode_spec import Spec
from halfbyte.settings import as_set

#: Every tensor of a call, in the order in which the kernel takes them. So many come before what a launch makes itself.
Tensors = tuple[torch.Tensor | None, ...]
_BEFORE_RESULTS = 8


class Request(NamedTuple):
    """A call that may be like an earlier one. Nothing in it has been checked."""

    key: Key
    tensors: Tensors
    addresses: list[int | None]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a launch found out.

    launch     the compiled kernel, called with a stream and all arguments
    out, lse   shapes and strides of the results
    sizes      the numbers behind those of the options
    formats    of keys and values: alive, so that nothing else can get their ids, which are in the key
    """

    launch: Callable[..., None]
    out: Layout
    lse: Layout
    floats: int
    counters: int
    sizes: tuple[int, ...]
    spec: Spec
    formats: tuple[Format, Format]


_known: dict[Key, _Entry] = {}


def tensors_of(
    q: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    page_table: torch.Tensor | None,
    o: AttentionOptions,
) -> Tensors:
    """The tensors of a call."""
    planes = (keys.codes, keys.scales, keys.offsets, keys.tail, values.codes, values.scales, values.offsets)
    return (q, *planes, lengths, query_start, o.starts, o.ends, page_table, o.alibi_slopes, o.sinks)


def request(
    tensors: Tensors, formats: tuple[Format, Format], o: AttentionOptions, impl: str, deterministic_batch: bool
) -> Request | None:
    """A call by what it must share with an earlier one; None where it needs more than a launch, or an argument is of another type.

    Nothing need have been checked: a call that is like a checked one would pass, and no other is found.
    """
    if o.rotate_keys or deterministic_batch or impl not in ("auto", "gluon") or not plain(tensors):
        return None
    facts: list[Any] = [impl, *as_set(), id(formats[0]), id(formats[1]), o.window is None, o.softcap is None]
    addresses = add_facts(facts, tensors)
    return Request(tuple(facts), tensors, addresses)


def again(r: Request, o: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Out and lse of a call like one that was checked and launched before, whose options' numbers must have been checked.

    None: there was none, a graph is being recorded, or the workspace is too small by now.
    """
    e, q = _known.get(r.key), r.tensors[0]
    if e is None or q is None:
        return None
    return where_it_lies(q, _launch, e, q, r.addresses, o)


def _launch(
    e: _Entry, q: torch.Tensor, addresses: list[int | None], o: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor] | None:
    workspace = shared(q.device, e.floats, e.counters)
    if workspace is None:
        return None
    stream, part, count = workspace
    out, lse = q.new_empty_strided(*e.out), q.new_empty_strided(*e.lse, dtype=torch.float32)
    made = (out.data_ptr(), lse.data_ptr(), part.data_ptr(), count.data_ptr())
    if (made[0] | made[1] | made[2] | made[3]) % 16:
        return None  # no allocator of torch does that, and the kernel may have been compiled for it
    numbers = (o.sm_scale, o.softcap or 1.0, min(o.window or 0, WIDEST))
    e.launch(stream, *addresses[:_BEFORE_RESULTS], *made, *addresses[_BEFORE_RESULTS:], *numbers, *e.sizes, e.spec)
    return out, lse


def remember(
    r: Request,
    used: Tensors,
    formats: tuple[Format, Format],
    plan: DecodePlan,
    compiled: Any,
    results: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[int, ...],
) -> None:
    """Keep what a launch of the tuned kernel found out, unless it `used` other tensors than were asked for, or of two devices."""
    from halfbyte.kernels.common.compat import launcher

    as_asked = all(a is b for a, b in zip(r.tensors, used, strict=True))
    if not (as_asked and all(t is None or t.device == results[0].device for t in used)):
        return
    launch = launcher(compiled, (plan.programs, 1, 1))
    out, lse = map(layout, results)
    keep(_known, r.key, _Entry(launch, out, lse, plan.floats, plan.counters, sizes, plan.spec, formats))
