"""Registration with torch.library: one namespace, and the warning for ops that have no kernel on a device yet."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from halfbyte.plans import plan
from halfbyte.settings import default_impl

NAMESPACE = "halfbyte"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an op from its schema, its implementation for every device and its shape rule; returns the callable op."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def level(op: str, impl: str, device: torch.device) -> str:
    """The level that runs, chosen by the plan; says once when a device has no kernel of its own."""
    chosen = plan(op, default_impl() if impl == "auto" else impl, device.type)
    if device.type != "cpu" and impl == "auto":
        _say_once(chosen.why)
    return chosen.level


@functools.cache
def _say_once(why: str) -> None:
    warnings.warn(f"halfbyte: {why}", stacklevel=4)
