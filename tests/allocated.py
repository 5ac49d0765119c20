"""How much memory torch's operators take on a CPU: exact, whatever an allocator keeps, and without the process's own.

Tensors of the meta device take none."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocated(TorchDispatchMode):
    """`most`: the largest number of bytes that live tensors made inside have had at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs or {})) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for t in tree_iter(made):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self._hold(t.untyped_storage())
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known and storage.device.type != "meta":
            self._known.add(storage)
            size = storage.nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.now -= size
