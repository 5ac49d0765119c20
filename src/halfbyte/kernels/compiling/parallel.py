"""Variants compiled by many processes at once. What comes of them lies in Triton's cache, where a launch finds it.

Threads do not help: most of a compilation is Python. To fork the caller would copy its threads and its state of CUDA; to spawn
would run the caller's script again, and import torch once a worker. So one process of its own imports all that is needed, while the
caller still finds out what to compile, and forks the workers. Which variants are there is written down in that cache as well, so
that a later process starts none.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte.kernels.compiling import Configuration, Target, compiled, specialised

#: More processes than this wait for each other's memory.
_MOST = 16


class Job(NamedTuple):
    """A variant as it travels, and the file that says that it has been compiled."""

    variant: bytes
    stamp: Path


class Compilers:
    """A process that compiles what it is sent, by as many workers as there are cores."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-P", "-m", __name__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def send(self, jobs: list[Job], capability: int) -> None:
        """What to compile, once."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pickle.dump((capability, _assembler(capability), jobs), pipe)

    def results(self) -> Iterator[None]:
        """One item for each variant that is done. What fails to compile fails again at its launch."""
        assert self.process.stdout is not None
        while self.process.stdout.read(1):
            yield

    def close(self) -> None:
        """End it, whether or not it is done."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class Ahead:
    """Variants to compile, collected one by one; the process starts as soon as it is worth its start."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = 10 * capability[0] + capability[1]
        self.jobs: list[Job] = []
        self.compilers: Compilers | None = None
        self._known: set[Path] = set()

    def add(self, configuration: Configuration) -> None:
        job = _job(configuration, self.capability)
        if job.stamp in self._known:
            return
        self._known.add(job.stamp)
        self.jobs += [] if job.stamp.exists() else [job]
        if self.compilers is None and len(self.jobs) > 1 and _cores() > 1:  # one is compiled as fast by its launch
            with suppress(OSError):  # no process may be started: launches compile
                self.compilers = Compilers()

    def close(self) -> None:
        """Compile nothing."""
        if self.compilers is not None:
            self.compilers.close()

    def begin(self) -> None:
        """Compile what no earlier process has, in the background."""
        if self.compilers is not None:
            self.compilers.send(self.jobs, self.capability)

    def results(self) -> Iterator[None]:
        """One item for each variant that is done, since `begin`."""
        if self.compilers is not None:
            with closing(self.compilers):
                yield from self.compilers.results()


#: What is being compiled in the background.
_begun: list[Ahead] = []


@contextmanager
def compile_only(wait: bool) -> Iterator[None]:
    """What this thread launches in this block is not run, and compiled by other processes where the block ends.

    wait: until they are done, and those of earlier blocks that were not waited for; then the kernels are loaded.
    """
    import torch
    from triton.runtime.jit import JITFunction

    if wait:
        _finish()
    run, owner = JITFunction.run, threading.get_ident()
    ahead = Ahead(torch.cuda.get_device_capability())
    variants: dict[Any, Callable[[], Any]] = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:  # another thread's launch runs
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        fixed = [x if p.is_constexpr else None for x, p in zip(args, kernel.params, strict=False)]
        key = kernel, _facts(args), str(fixed), str(sorted(kwargs.items()))
        if key not in variants:
            variants[key] = partial(run, kernel, *args, grid=grid, **{**kwargs, "warmup": True})
            ahead.add(specialised(kernel.__name__, kernel, args, kwargs, {}))
        return None

    type.__setattr__(JITFunction, "run", record)
    try:
        yield
    except BaseException:
        ahead.close()
        raise
    finally:
        type.__setattr__(JITFunction, "run", run)
    ahead.begin()
    _begun.append(ahead)
    if wait:
        _finish()
        for load in variants.values():
            load()


def _finish() -> None:
    while _begun:
        for _ in _begun.pop().results():
            pass


def _facts(x: Any) -> Any:
    """What the JIT may compile an argument for, and more."""
    if hasattr(x, "data_ptr"):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, tuple):
        return tuple(map(_facts, x))
    if isinstance(x, int) and not isinstance(x, bool):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    return type(x) if isinstance(x, float) else str(x)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def folder() -> Path:
    """Where Triton keeps compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _assembler(capability: int) -> str:
    """What Triton's key says of the assembler: its version, as this process saw it first. Later settings do not change that."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return str(make_backend(GPUTarget("cuda", capability, 32)).hash())


def _job(c: Configuration, capability: int) -> Job:
    import triton

    buffer = io.BytesIO()
    _Pickler(buffer).dump(c)
    facts = (triton.__version__, _assembler(capability), c.kernel.cache_key, str(sorted(c.constexprs.items(), key=str)))
    digest = hashlib.sha256(buffer.getvalue() + repr(facts).encode()).hexdigest()
    return Job(buffer.getvalue(), folder() / "halfbyte" / digest)


class _Pickler(pickle.Pickler):
    """Kernels travel by name."""

    def persistent_id(self, x: Any) -> tuple[str, str] | None:
        function = getattr(x, "fn", None)
        return (x.__module__, function.__qualname__) if hasattr(x, "cache_key") and function is not None else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: tuple[str, str]) -> Any:
        return getattr(import_module(name[0]), name[1])


# ------------------------------------------------------------------------------------------------ in the process of its own


def _work() -> None:
    """Compile what comes over the standard input, and write a byte for each variant that is done."""
    import triton.compiler
    import triton.experimental.gluon  # noqa: F401

    import halfbyte.kernels.decode.launch
    import halfbyte.kernels.linear  # noqa: F401

    capability, assembler, jobs = pickle.load(sys.stdin.buffer)
    if _assembler(capability) != assembler:
        _take_own_assembler()
    processes = min(_MOST, _cores(), len(jobs))
    with suppress(BrokenProcessPool), ProcessPoolExecutor(processes, get_context("fork")) as pool:
        for done in as_completed([pool.submit(_compile, Job(*job), capability) for job in jobs]):
            if (error := done.exception()) is not None:
                print(f"halfbyte: a kernel cannot be compiled ahead: {error}", file=sys.stderr)
            sys.stdout.buffer.write(b".")
            sys.stdout.buffer.flush()


def _take_own_assembler() -> None:
    """Take the assembler of Triton's wheel: the caller compiled with it before something, such as vLLM, named another one."""
    from triton.backends.nvidia import compiler

    os.environ.pop("TRITON_PTXAS_PATH", None)
    for function in vars(compiler).values():
        getattr(function, "cache_clear", bool)()  # the version as it was seen


def _compile(job: Job, capability: int) -> None:
    """In a worker."""
    compiled(_Unpickler(io.BytesIO(job.variant)).load(), Target(capability))
    job.stamp.parent.mkdir(parents=True, exist_ok=True)
    job.stamp.touch()


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        _work()
