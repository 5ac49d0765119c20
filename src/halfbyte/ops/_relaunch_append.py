"""Launching an append again that is like an earlier one (`_facts`), which needs neither checks nor a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from halfbyte.formats import Format
from halfbyte.kv_buffer import KVBuffer, Rope
from halfbyte.ops._facts import Key, Layout, add_facts, keep, layout, plain, where_it_lies
from halfbyte.ops._workspace import stream_of
from halfbyte.settings import as_set

#: Where in the order in which the kernel takes tensors the sequences' lengths and q are; behind q comes q rotated.
_LENGTHS, _Q = 3, 8


class Request(NamedTuple):
    """An append that may be like an earlier one. Nothing in it has been checked.

    tensors   all but q rotated, in the order in which the kernel takes them
    """

    key: Key
    tensors: Sequence[torch.Tensor | None]
    addresses: list[int | None]
    formats: tuple[Format, Format]

    @property
    def known(self) -> bool:
        """Whether there was one, so that this one would pass every check of shapes, types and devices."""
        return self.key in _known


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a launch found out.

    launch    the compiled kernel, called with a stream and all arguments
    others    the arguments behind the tensors
    formats   of keys and values: alive, so that nothing else can get their ids, which are in the key
    """

    launch: Callable[..., None]
    others: tuple[Any, ...]
    q_out: Layout | None
    formats: tuple[Format, Format]


_known: dict[Key, _Entry] = {}


def request(
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
) -> Request | None:
    """An append by what it shares with an earlier one; None where it needs more than a launch, or an argument is of another type.

    Nothing need have been checked: an append that is like a checked one would pass, and no other is found.
    """
    if torch.compiler.is_compiling() or not lengths.is_cuda or keys.tail is not None or not isinstance(rope, tuple | None):
        return None
    cos, sin = (None, None) if rope is None or len(rope) != 2 else rope
    if (rope is None) != (cos is None) or (torch.is_grad_enabled() and getattr(q, "requires_grad", False)):
        return None
    # None: no scale is measured.
    tensors = [k, v, counts, lengths, page_table, cos, sin, None, q, keys.codes, keys.scales, keys.offsets, keys.saturated]
    tensors += [values.codes, values.scales, values.offsets, values.saturated]
    if not plain(tensors):
        return None
    formats = (keys.format, values.format)
    facts: list[Any] = [*as_set(), rotate_keys, *map(id, formats)]
    addresses = add_facts(facts, tensors)
    return Request(tuple(facts), tensors, addresses, formats)


def again(r: Request) -> tuple[torch.Tensor | None] | None:
    """q rotated, or None in its place, of an append like one that was checked and launched before; None: there was none."""
    e, lengths = _known.get(r.key), r.tensors[_LENGTHS]
    if e is None or lengths is None:
        return None
    return where_it_lies(lengths, _launch, e, r, lengths)


def _launch(e: _Entry, r: Request, lengths: torch.Tensor) -> tuple[torch.Tensor | None] | None:
    q, q_out, address = r.tensors[_Q], None, None
    if q is not None and e.q_out is not None:
        q_out = q.new_empty_strided(*e.q_out)
        address = q_out.data_ptr()
        if address % 16:
            return None  # no allocator of torch does that, and the kernel may have been compiled for it
    e.launch(stream_of(lengths.device), *r.addresses[: _Q + 1], address, *r.addresses[_Q + 1 :], *e.others)
    return (q_out,)


def remember(r: Request, compiled: Any, programs: int, given: Sequence[Any], q_out: torch.Tensor | None) -> None:
    """Keep what a launch found out, unless it was given other tensors than were asked for."""
    from halfbyte.kernels.common.compat import launcher

    # One by one: two may be the same tensor now, and not in the next append.
    tensors = (*r.tensors[: _Q + 1], q_out, *r.tensors[_Q + 1 :])
    if all(a is b for a, b in zip(tensors, given, strict=False)):
        out = None if q_out is None else layout(q_out)
        keep(_known, r.key, _Entry(launcher(compiled, (programs, 1, 1)), tuple(given[len(tensors) :]), out, r.formats))
