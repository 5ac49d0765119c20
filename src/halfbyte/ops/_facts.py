"""Finding a call that is like an earlier one, by the facts of its tensors.

All that checks, plans and the compiler look at in a tensor are its *facts*: dtype, shape, strides, device, and its address modulo
16. Calls that agree in these, in their formats, in which options they have and in the environment are the same launch but for
addresses and the options' numbers. What the first of them found out is kept, and no tensor with it: layers and steps share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from halfbyte.ops._transforms import no_memory

Key = tuple[Any, ...]
#: Shape and strides of a result.
Layout = tuple[tuple[int, ...], tuple[int, ...]]
Entry = TypeVar("Entry")
Done = TypeVar("Done")

#: Types whose facts are all there is to them: another subclass may want to see the call.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
#: Entries that are kept. A server that sees more kinds of calls than this begins anew.
_MOST = 1024


def plain(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether nothing but facts is to be known of these."""
    return _PLAIN.issuperset(map(type, tensors))


def add_facts(facts: list[Any], tensors: Iterable[torch.Tensor | None]) -> list[int | None]:
    """Append the facts of tensors to what else a call is found by; returns their addresses."""
    addresses: list[int | None] = []
    try:
        for t in tensors:
            if t is None:
                addresses.append(None)
                facts.append(None)
            else:
                address = t.data_ptr()
                addresses.append(address)
                facts += (t.dtype, t.shape, t.stride(), t.get_device(), address % 16)
    except RuntimeError as error:
        raise no_memory() from error
    return addresses


def where_it_lies(t: torch.Tensor, launch: Callable[..., Done], *arguments: Any) -> Done:
    """launch(*arguments), with the GPU of `t` as the current one."""
    if t.get_device() == torch.cuda.current_device():
        return launch(*arguments)
    with torch.cuda.device_of(t):
        return launch(*arguments)


def layout(t: torch.Tensor) -> Layout:
    """Shape and strides, to make another like it."""
    return tuple(t.shape), t.stride()


def keep(known: dict[Key, Entry], key: Key, entry: Entry) -> None:
    """Put an entry to the others, of which there are not too many."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = entry
