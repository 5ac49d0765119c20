"""The launch cache: a call with the signature of an earlier one is launched without checks and without a plan.

All that checks, plans and the compiler look at in a tensor are its facts: dtype, shape, strides, device, and its address modulo
16. A call's *signature* is the facts of its tensors, its formats, its options and the environment. Calls of one signature are the
same launch but for addresses and the options' numbers. An op stores a function that makes the launch again (`store`), and later
calls replay it (`replay`). It keeps no tensor alive: layers and steps share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from halfbyte.formats import Format
from halfbyte.settings import as_set
from halfbyte.transforms import no_memory

Key = tuple[Any, ...]
#: Shape and strides of a result.
Layout = tuple[tuple[int, ...], tuple[int, ...]]

#: Types whose facts are all there is to them: another subclass may want to see the call.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
#: Launches that are kept. A server that sees more kinds of calls than this begins anew.
_CAPACITY = 1024

#: By signature: what launches again, and the formats, which stay alive so that no other format gets their ids.
_launches: dict[Key, tuple[Callable[..., Any], tuple[Format, ...]]] = {}


class Signature(NamedTuple):
    """What a call shares with earlier ones, and where its tensors are. Nothing in it has been checked.

    tensors    of the call, in the order in which its kernel takes them; the first is a tensor, on the device that launches
    addresses  of the tensors; None where there is none
    """

    key: Key
    tensors: Sequence[Any]
    addresses: tuple[int | None, ...]
    formats: tuple[Format, ...]

    @property
    def known(self) -> bool:
        """Whether a launch is stored, so that this call would pass every check of shapes, types and devices."""
        return self.key in _launches

    def covers(self, used: Iterable[torch.Tensor | None]) -> bool:
        """Whether a launch `used` the memory of these tensors, none of them converted on the way, and all on one device.

        Compared one by one: two may be the same tensor now, and not in the next call.
        """
        device = self.tensors[0].device
        return all(
            address is None if t is None else address == t.data_ptr() and t.device == device
            for address, t in zip(self.addresses, used, strict=True)
        )


def signature(
    op: str, options: tuple[Any, ...], formats: tuple[Format, ...], tensors: Sequence[torch.Tensor | None]
) -> Signature | None:
    """The signature of a call; None where an argument is of another type than its facts tell.

    Nothing need have been checked: a call that is like a checked one would pass, and no other is found. `options`: of those that
    are numbers, only whether they are given, unless the kernel is compiled for their value.
    """
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    facts: list[Any] = [op, *options, *as_set(), *map(id, formats)]
    addresses: list[int | None] = []
    try:
        for t in tensors:
            if t is None:
                addresses.append(None)
                facts += (None,)
            else:
                address = t.data_ptr()
                addresses.append(address)
                facts += (t.dtype, t.shape, t.stride(), t.get_device(), address % 16)
    except RuntimeError as error:
        raise no_memory() from error
    return Signature(tuple(facts), tensors, tuple(addresses), formats)


def replay(s: Signature, *arguments: Any) -> Any:
    """What the launch stored for this signature returns for (s, *arguments), with the tensors' GPU as the current one.

    None: no launch is stored, or it cannot be made now (a graph is recorded, or the workspace is too small by now).
    """
    found = _launches.get(s.key)
    if found is None:
        return None
    first = s.tensors[0]
    if first.get_device() == torch.cuda.current_device():
        return found[0](s, *arguments)
    with torch.cuda.device_of(first):
        return found[0](s, *arguments)


def store(s: Signature, launch: Callable[..., Any]) -> None:
    """Keep what launches calls of this signature: `launch` gets a signature and what else `replay` is given.

    It makes the results, takes the workspace, and returns None where it cannot launch. It must hold no tensor. Only for a launch
    that used the tensors as they were given (`Signature.covers`).
    """
    if len(_launches) >= _CAPACITY:
        _launches.clear()
    _launches[s.key] = launch, s.formats


def layout(t: torch.Tensor) -> Layout:
    """Shape and strides, to make another like it."""
    return tuple(t.shape), t.stride()


#: Compiled kernels by everything that the JIT specialises on: looking one up there takes longer than a short kernel.
_compiled: dict[Key, Any] = {}


def with_compiled(key: Key, launch: Callable[[Any], Any]) -> Any:
    """launch(what it returned for this key before, None the first time), which bypasses the JIT where no signature is found."""
    found = _compiled.get(key)
    made = launch(found)
    if found is None:
        if len(_compiled) >= _CAPACITY:
            _compiled.clear()
        _compiled[key] = made
    return made
