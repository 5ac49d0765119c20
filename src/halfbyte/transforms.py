"""Gradients and torch.func's transforms, which no operation here has: each is refused, none is silently missing.

Reverse mode raises when the gradient is requested. Forward mode and torch.func are refused at the call: the tangents of inputs
would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from halfbyte.errors import Unsupported


def refuse_transforms(name: str, given: Sequence[Any]) -> None:
    """Raise where a call is differentiated in forward mode, or runs inside of torch.func.grad, jvp, vmap or the like."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        refuse_transform(name)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in _tensors(given)):
        raise Unsupported(
            f"{name} has no gradient, and an input has a tangent (forward mode): halfbyte is for inference; "
            f"pass the primal, torch.autograd.forward_ad.unpack_dual(x).primal"
        )


def refuse_transform(name: str, *given: Any) -> Any:
    """What a call inside of torch.func does, whatever it is given."""
    raise Unsupported(
        f"{name} cannot be called inside of torch.func.grad, vjp, jvp, vmap or what is made of them: it has no gradient and no "
        f"batching rule; call it outside, with every sequence or row in one batch"
    )


def no_memory() -> Unsupported:
    """For a tensor without an address: torch.func's are like others, down to their type, until it is read."""
    return Unsupported(
        "a tensor has no memory of its own, as inside of torch.func.vmap and grad: halfbyte has no batching rule and no gradient; "
        "call it outside, with every sequence or row in one batch"
    )


class RefusingLibrary:
    """A torch.library.Library whose autograd kernels refuse transforms first: what `torch.library.register_autograd` writes to."""

    def __init__(self, library: torch.library.Library, name: str) -> None:
        self.library, self.name = library, name

    def impl(self, op: str, kernel: Callable[..., Any], key: str, **options: Any) -> None:
        def refusing(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_transforms(self.name, args)
            return kernel(keyset, *args, **kwargs)

        self.library.impl(op, refusing, key, **options)


def _tensors(given: Sequence[Any]) -> Iterator[torch.Tensor]:
    for t in given:
        if isinstance(t, torch.Tensor):
            yield t
        elif isinstance(t, list | tuple):
            yield from _tensors(t)
