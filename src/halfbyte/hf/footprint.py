"""A model's memory in one line on stderr, once it is quantized or loaded."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers.utils import logging

from halfbyte.hf.weights import packed_share
from halfbyte.nn import QuantLayer

P = ParamSpec("P")
ModelT = TypeVar("ModelT")

#: Whether a decorated function is running: of nested ones only the outermost reports.
_REPORTING: ContextVar[bool] = ContextVar("_REPORTING", default=False)


def reports_footprint(make: Callable[P, ModelT]) -> Callable[P, ModelT]:
    """Decorator of functions that return a model: print its memory on stderr, if transformers shows progress bars.

    Nothing is printed for a model without quantized weights.
    """

    @functools.wraps(make)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> ModelT:
        if _REPORTING.get():
            return make(*args, **kwargs)
        token = _REPORTING.set(True)
        try:
            model = make(*args, **kwargs)
        finally:
            _REPORTING.reset(token)
        if logging.is_progress_bar_enabled() and (line := footprint(model)):
            print(line, file=sys.stderr, flush=True)
        return model

    return reporting


def footprint(model: Any) -> str:
    """Bytes of a model's parameters and buffers, the share of them that is packed, and the peaks of memory; "" without any packed.

    Peaks are those of the process so far: torch's allocator on each GPU of the model, and resident memory.
    """
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}
    packed = {id(p): p for m in model.modules() if isinstance(m, QuantLayer) for p in m.weight.parts().values()}
    if not packed or all(t.is_meta for t in packed.values()):  # a rehearsal on the meta device takes nothing
        return ""
    total, inside = (sum(t.nbytes for t in tensors.values()) for tensors in ({**held, **packed}, packed))
    return (
        f"halfbyte: {type(model).__name__} takes {_size(total)}, {inside / total:.1%} of it packed ({packed_share(model):.1%} of "
        f"its weights); peak memory of this process: {', '.join(_peaks(model))}"
    )


def _peaks(model: nn.Module) -> list[str]:
    devices = {t.device for t in model.parameters() if t.is_cuda}
    found = [f"{_size(torch.cuda.max_memory_allocated(d))} on {d}" for d in sorted(devices, key=str)]
    return [*found, f"{_size(peak)} on the host" if (peak := resident_peak()) else "unknown on the host"]


def resident_peak() -> int | None:
    """Peak resident memory of this process in bytes; None where the system does not report it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.4g} GB"
