"""Kernels check themselves on GPUs that halfbyte was not tested on (`TESTED`).

The first use of each kernel, that is of a name and of what it is compiled for, runs it on a small case and compares the result with
the reference. `impl="auto"` leaves a kernel alone that differs, with one warning; an explicit `impl` runs unchecked. Results are
kept on disk for each GPU, so later processes check nothing. During the capture of a CUDA graph nothing is checked: an eager call
comes first. HALFBYTE_CHECK=0 turns all of it off.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress

import torch

from halfbyte.device import Device, datasheet_name, describe, triton_version
from halfbyte.errors import warn_once
from halfbyte.ops import compiling
from halfbyte.paths import append_line, own_checks
from halfbyte.settings import self_checks

#: GPUs on which the GPU suite ran, by `datasheet_name`.
TESTED = frozenset({"h100", "h200"})
#: A result may be off by a fraction of its root mean square, and of itself: several times the accuracy promise, and a fraction of
#: what a wrong kernel gives.
_OF_ALL, _OF_ITSELF = 0.05, 2**-7
#: Stands for an error that is no number.
_FAILED = 1e9

#: By the name of a GPU: errors over what is allowed, by `_key`.
_results: dict[str, dict[str, float]] = {}


def refusal(kernel: str, spec: object, device: torch.device, error: Callable[[], float]) -> str:
    """Why "auto" must not run a kernel on this device; "" if it may.

    kernel: its name. spec: what it is compiled for. error: runs a small case, and returns `excess`.
    """
    gpu = untested(device)
    if gpu is None or compiling.active() or not self_checks():
        return ""
    name, results, key = gpu.name, _results_of(gpu.name), _key(kernel, spec, gpu.driver)
    if results.get(key, _FAILED) <= 1:
        return ""
    if key not in results:
        if torch.cuda.is_current_stream_capturing():
            return ""
        try:
            results[key] = checked(error)
        except torch.OutOfMemoryError:  # says nothing about the kernel
            return ""
        _store(name, kernel, key, results[key])
        if results[key] <= 1:
            return ""
    warn_once(
        f"{kernel} differs from the reference on {name}, a GPU that halfbyte was not tested on: its portable kernel runs instead, "
        "which is slower; `halfbyte doctor --check` prints a report to send to halfbyte's authors",
        f"{kernel} differs on {name}",
    )
    return f"it differs from the reference on {name}"


@functools.cache
def untested(device: torch.device) -> Device | None:
    """The GPU, if kernels on it check themselves; else None."""
    gpu = describe(device) if device.type == "cuda" else None
    return None if gpu is None or datasheet_name(gpu.name) in TESTED else gpu


def checked(error: Callable[[], float]) -> float:
    """`error()`, at most `_FAILED`, which stands for NaN and for a case that raises, too."""
    try:
        with torch.no_grad():
            value = error()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the compiler or the driver of an unknown GPU says
        return _FAILED
    return value if value < _FAILED else _FAILED


def excess(result: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error of a result over what is allowed; NaN where it has NaN."""
    result, truth = result.double(), truth.double()
    limit = _OF_ALL * truth.square().mean().sqrt() + _OF_ITSELF * truth.abs()
    return float(((result - truth).abs() / limit).max())


# ------------------------------------------------------------------------------------------------------------------- on disk


@functools.lru_cache(4096)
def _key(kernel: str, spec: object, driver: str) -> str:
    """Changes with anything that may change a result: the text of a spec has a digest of its code."""
    import halfbyte

    versions = halfbyte.__version__, torch.__version__, triton_version(), driver
    return hashlib.sha256(f"{kernel} {spec} {versions}".encode()).hexdigest()[:24]


def _results_of(gpu: str) -> dict[str, float]:
    """Errors by their key, those of earlier processes among them; damaged lines are left out."""
    if gpu in _results:
        return _results[gpu]
    results = _results[gpu] = {}
    with suppress(OSError):
        for line in own_checks(gpu).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                one = json.loads(line)
                results[str(one["key"])] = float(one["error"])
    return results


def _store(gpu: str, kernel: str, key: str, error: float) -> None:
    """Keep an error for later processes, where the disk lets us."""
    file = own_checks(gpu)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        append_line(file, json.dumps({"kernel": kernel, "key": key, "error": error}))
