"""Launching a tuned product again for a call like an earlier one (`_facts`), which needs neither checks nor a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from halfbyte.formats import Format
from halfbyte.ops._facts import Key, Layout, add_facts, keep, layout, plain, where_it_lies
from halfbyte.ops._workspace import shared
from halfbyte.plans.linear_spec import LinearPlan
from halfbyte.settings import as_set
from halfbyte.tensors import QuantTensor

#: Tensors of a weight and its bias, in the order in which kernels take them: codes, scales, zero points, bias, factor.
_KINDS = 5


class Request(NamedTuple):
    """A call that may be like an earlier one. Nothing in it has been checked.

    addresses   of x, then of all weights' codes, of all their scales, and so on
    """

    key: Key
    x: torch.Tensor
    biases: Sequence[torch.Tensor | None]
    formats: tuple[Format, ...]
    addresses: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a launch found out.

    launch    of a kernel's module (`again`): takes the stream, x, and addresses
    formats   of the weights: alive, so that nothing else can get their ids, which are in the key
    """

    launch: Callable[..., None]
    outs: tuple[Layout, ...]
    floats: int
    counters: int
    formats: tuple[Format, ...]


_known: dict[Key, _Entry] = {}


def request(
    x: torch.Tensor, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None], row_invariant: bool, impl: str
) -> Request | None:
    """A call by what it must share with an earlier one; None where it needs more than a launch, or an argument is of another type.

    Nothing need have been checked: a call that is like a checked one would pass, and no other is found.
    """
    if row_invariant or impl not in ("auto", "gluon") or len(weights) != len(biases):
        return None
    for w in weights:
        if not isinstance(w, QuantTensor) or w.perm is not None or w.nested is not None:
            return None
    tensors = [x, *[w.codes for w in weights], *[w.scales for w in weights], *[w.offsets for w in weights]]
    tensors += [*biases, *[w.tensor_scale for w in weights]]
    if not plain(tensors):
        return None
    formats = tuple([w.format for w in weights])
    facts: list[Any] = [impl, *as_set(), *map(id, formats)]
    addresses = tuple(add_facts(facts, tensors))
    return Request(tuple(facts), x, biases, formats, addresses)


def again(r: Request) -> list[torch.Tensor] | None:
    """[..., N] for each weight of a call like one that was checked and launched before.

    None: there was none, a graph is being recorded, or the workspace is too small by now.
    """
    e = _known.get(r.key)
    return None if e is None else where_it_lies(r.x, _launch, e, r)


def _launch(e: _Entry, r: Request) -> list[torch.Tensor] | None:
    x, n = r.x, len(e.outs)
    workspace = shared(x.device, e.floats, e.counters)
    if workspace is None:
        return None
    stream, part, count = workspace
    outs = [x.new_empty_strided(*like) for like in e.outs]
    made, parts, counts = tuple([out.data_ptr() for out in outs]), part.data_ptr(), count.data_ptr()
    low = parts | counts
    for address in made:
        low |= address
    if low % 16:
        return None  # no allocator of torch does that, and the kernel may have been compiled for it
    weights = [r.addresses[first : first + n] for first in range(1, 1 + _KINDS * n, n)]
    e.launch(stream, x, weights, made, parts, counts)
    return outs


def remember(
    r: Request,
    x: torch.Tensor,
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    plan: LinearPlan,
    again: Callable[[], Callable[..., None]],
) -> None:
    """Keep what a launch found out, unless what it took as `x` or `biases` is not the memory that was asked for.

    `again` makes what launches it once more.
    """
    as_asked = x.data_ptr() == r.addresses[0] and all(a is b for a, b in zip(r.biases, biases, strict=True))
    if as_asked:
        keep(_known, r.key, _Entry(again(), tuple(map(layout, outs)), plan.floats, plan.counters, r.formats))
