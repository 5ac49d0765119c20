"""What a step needs once a layer: made of an object's tensors once, and again where their memory is another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
_address = torch.Tensor.data_ptr


class Derived(Generic[T]):
    """Calls `make` for an object, and returns what it gave the last time for the same tensors, unless they were written to.

    It keeps the tensors' memory as long as the object lives, so that no other tensor can have the same addresses.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make
        self._known: dict[int, tuple[Any, list[int], T]] = {}

    def __call__(self, owner: Any, tensors: Sequence[torch.Tensor], copies: bool) -> T:
        """copies: whether what is made may hold copies, so that writes to the tensors matter."""
        key = [*map(_address, tensors)]
        if copies:
            if any(t.is_inference() for t in tensors):  # such tensors do not count writes
                return self.make(owner)
            key += [getattr(t, "_version") for t in tensors]  # noqa: B009 (a name of torch)
        number = id(owner)
        entry = self._known.get(number)
        if entry is None or entry[1] != key or entry[0]() is not owner:
            reference = weakref.ref(owner, lambda _: self._known.pop(number, None))
            entry = self._known[number] = reference, key, self.make(owner)
        return entry[2]
