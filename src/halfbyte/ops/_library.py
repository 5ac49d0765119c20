"""Registration with torch.library: one namespace, and the warning for ops that have no kernel on a device yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import forward_ad as _forward

from halfbyte.device import gpu, supports_pdl
from halfbyte.errors import Unsupported, warn_once
from halfbyte.plans import GPU_LEVELS, LEVELS, plan
from halfbyte.settings import default_impl, interpreted, pair_launches, runs_torch_code
from halfbyte.transforms import RefusingLibrary, refuse_transform

NAMESPACE = "halfbyte"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

#: Bound once: attribute lookups dominate a cached call.
_Tensor, _compiler, _is_grad_enabled = torch.Tensor, torch.compiler, torch.is_grad_enabled
_transforms, _has_modes = torch._C._functorch.peek_interpreter_stack, torch._C._len_torch_dispatch_stack


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an op from schema, implementation and shape rule; returns it. One with results refuses gradients."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, torch.no_grad()(_without_autocast(run)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    if not schema.endswith("-> ()"):
        refusing: Any = RefusingLibrary(_LIBRARY, name)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", functools.partial(_refuse_gradient, name), lib=refusing)
    _LIBRARY.impl(name, functools.partial(refuse_transform, name), "FuncTorchBatched")
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` in the types that it chooses: torch code in it would be given others inside of `torch.autocast`."""

    @functools.wraps(run)
    def exactly(*args: Any, **kwargs: Any) -> Any:
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        if not on:
            return run(*args, **kwargs)
        with ExitStack() as stack:
            for device in on:
                stack.enter_context(torch.autocast(device, enabled=False))
            return run(*args, **kwargs)

    return exactly


def level(op: str, impl: str, device: torch.device) -> str:
    """The level that runs, as planned; warns once when a device has no kernel."""
    if impl == "auto" and not _compiler.is_compiling() and runs_torch_code():  # which Dynamo cannot trace
        return plan(op, impl, "cpu").level
    default = default_impl()
    if impl == "auto" and default in LEVELS[op]:
        impl = default
    best = plan(op, impl, device.type, interpreted())
    if device.type != "cpu" and impl == "auto" and best.level not in GPU_LEVELS:
        warn_once(best.why)
    return best.level


def kernel_level(op: str, impl: str, x: torch.Tensor, name: str = "x") -> str:
    """The level that runs, "auto" if its tuned kernel may; on a GPU torch code for `x` of 32 and 64 bits, which has no kernel."""
    if x.device.type != "cpu" and impl == "auto" and x.element_size() > 2:
        warn_once(f"{op} has kernels for float16 and bfloat16; blocked torch code runs for {name} in {x.dtype}")
        impl = "cpu"
    best = level(op, impl, x.device)
    return "auto" if impl == "auto" and best == "gluon" else best


def can_bypass_dispatcher(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether an op may skip the dispatcher: x is a plain GPU tensor, outside of compilation, autograd and forward-mode AD."""
    if _compiler.is_compiling() or type(x) is not _Tensor or not x.is_cuda or _forward._current_level >= 0:
        return False
    return not _is_grad_enabled() or not any(getattr(t, "requires_grad", False) for t in (x, *others))


def can_bypass_on_cpu(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """The same for an op whose level is torch code or a compiled loop, and a plain CPU tensor; nor in torch.func or autocast."""
    if _compiler.is_compiling() or type(x) is not _Tensor or not x.is_cpu or _forward._current_level >= 0:
        return False
    if _transforms() is not None or _has_modes() or torch.is_autocast_enabled("cpu"):
        return False
    return not _is_grad_enabled() or not any(getattr(t, "requires_grad", False) for t in (x, *others))


def pairs_launches(device: torch.device) -> bool:
    """Whether launches on `device` use PDL (programmatic dependent launch): if it supports that, unless HALFBYTE_PDL is 0."""
    return pair_launches() and _supports_pdl(device)


@functools.cache
def _supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and supports_pdl(gpu(device.index).capability)


def refuse_capture(name: str, device: torch.device) -> None:
    """Raise during CUDA graph capture: torch code reads lengths on the host, which cannot be captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"{name} runs torch code here, which cannot be in a CUDA graph as it reads lengths; run it eagerly")


def _refuse_gradient(name: str, ctx: Any, *gradients: Any) -> Any:
    raise Unsupported(f"{name} has no gradient: halfbyte is for inference; wrap the call in torch.no_grad()")
