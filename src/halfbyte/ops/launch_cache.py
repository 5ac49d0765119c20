"""The launch cache: a call with the signature of an earlier one is launched without checks and without a plan.

Checks, plans and the compiler depend only on these facts of a tensor: dtype, shape, strides, device, and its address modulo 16. A
call's *signature* is the facts of its tensors, its formats, its options and the environment. Calls of one signature are the same
launch except for addresses and scalar options. An op stores a function that repeats the launch (`store`), and later calls replay it
(`replay`). It keeps no tensor alive: layers and steps share it.
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

#: Types that are described by these facts; another subclass may override the call (__torch_function__).
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
#: Launches that are kept; the cache is cleared when there are more.
_CAPACITY = 1024

#: By signature: the function that repeats the launch, and the formats, kept alive so that no other format gets their ids.
_launches: dict[Key, tuple[Callable[..., Any], tuple[Format, ...]]] = {}


class Signature(NamedTuple):
    """The key of a call, and the addresses of its tensors. Nothing in it has been checked.

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
    """The signature of a call, which need not have been checked; None if an argument is no plain tensor.

    options: for scalar options only whether they are given, unless the kernel is compiled for their value.
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
    """Call the launch stored for this signature with (s, *arguments), on the tensors' GPU.

    None: no launch is stored, or it cannot run now (during capture, or with too small a workspace).
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
    """Keep `launch`, which launches calls of this signature from a signature and the other arguments of `replay`.

    It allocates results, takes the workspace, returns None where it cannot launch, and must hold no tensor. Only for launches that
    used the tensors as they were given (`Signature.covers`).
    """
    if len(_launches) >= _CAPACITY:
        _launches.clear()
    _launches[s.key] = launch, s.formats


def layout(t: torch.Tensor) -> Layout:
    """Shape and strides, to make another like it."""
    return tuple(t.shape), t.stride()


#: Compiled kernels by everything that the JIT specializes on: its own lookup takes longer than a short kernel.
_compiled: dict[Key, Any] = {}


def with_compiled(key: Key, launch: Callable[[Any], Any]) -> Any:
    """launch(compiled kernel of this key; None the first time): bypasses the JIT for calls without a signature."""
    found = _compiled.get(key)
    made = launch(found)
    if found is None:
        if len(_compiled) >= _CAPACITY:
            _compiled.clear()
        _compiled[key] = made
    return made
