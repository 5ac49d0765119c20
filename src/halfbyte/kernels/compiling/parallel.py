"""Variants compiled by many processes at once. What comes of them lies in Triton's cache, where a launch finds it.

Threads do not help: most of a compilation is Python. To fork the caller would copy its threads and its state of CUDA; to spawn
would run the caller's script again, and import torch once a worker. So one process of its own imports all that is needed, while the
caller still finds out what to compile, and forks the workers. Which variants are there is written down in that cache as well, so
that a later process starts none. It ends with its caller, however that ends: then its standard input does.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from halfbyte.kernels.compiling import Configuration, Target, compiled, specialised

#: More processes than this wait for each other's memory.
_MOST = 16
#: Seconds without a message after which none is expected.
_PATIENCE = 300


class Job(NamedTuple):
    """A variant as it travels, and the file that says that it has been compiled."""

    variant: bytes
    stamp: Path


class Message(NamedTuple):
    """What to compile: for which GPU, and with which assembler. stamp: a file that says that these and all before are compiled."""

    capability: int
    assembler: str
    jobs: list[Job]
    stamp: Path | None
    is_last: bool


class Compilers:
    """A process that compiles what it is sent, by as many workers as there are cores.

    It has a session of its own, so that Ctrl-C ends a call of the caller and not the compilation.
    """

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-P", "-m", __name__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        #: Ends it, whether or not it is done; called at the end of this process at the latest.
        self.close = weakref.finalize(self, _end, self.process, os.getpid())
        self.done = 0
        self._lock = threading.Lock()
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        threading.Thread(target=_deliver, args=(self.process, self._messages), daemon=True).start()

    def send(self, message: Message) -> None:
        """What to compile next. Does not wait until it is read."""
        self._messages.put(message)
        if message.is_last:
            self._messages.put(None)

    def wait(self, count: int) -> None:
        """Until the first `count` variants are done. What fails to compile fails again at its launch."""
        assert self.process.stdout is not None
        with self._lock:
            while self.done < count and self.process.stdout.read(1):
                self.done += 1


def _deliver(process: subprocess.Popen[bytes], messages: SimpleQueue[Message | None]) -> None:
    """Write messages, and leave the pipe open, whose end says that this process has ended; then wait for the other's end."""
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # it was ended meanwhile
        while (message := messages.get()) is not None:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
    process.wait()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process of compilers with its workers; not in a fork of its owner."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError, ValueError):
                pipe.close()


class Ahead:
    """Variants to compile, collected one by one; the process starts as soon as it is worth its start.

    stamp: the file that says that an earlier process compiled all of them.
    """

    def __init__(self, capability: tuple[int, int], stamp: Path | None = None) -> None:
        self.capability = 10 * capability[0] + capability[1]
        self.stamp = stamp
        self.jobs: list[Job] = []
        self.compilers: Compilers | None = None
        self._known: set[Path] = set()
        self._sent = 0

    def add(self, configuration: Configuration) -> None:
        job = _job(configuration, self.capability)
        if job.stamp in self._known:
            return
        self._known.add(job.stamp)
        self.jobs += [] if job.stamp.exists() else [job]
        if len(self.jobs) > 1:  # one is compiled as fast by its launch
            self._start()

    def _start(self) -> None:
        if self.compilers is None and cores() > 1:
            with suppress(OSError):  # no process may be started: launches compile
                self.compilers = Compilers()

    def close(self) -> None:
        """Compile nothing, or nothing more."""
        if self.compilers is not None:
            self.compilers.close()

    def begin(self, is_last: bool = True) -> None:
        """Compile what no earlier process has, in the background, in the order in which it was added."""
        if is_last and self.stamp is not None:
            if self.jobs:
                self._start()
            else:
                _touch(self.stamp)
        if self.compilers is not None:
            jobs, self._sent = self.jobs[self._sent :], len(self.jobs)
            stamp = self.stamp if is_last else None
            self.compilers.send(Message(self.capability, _assembler(self.capability), jobs, stamp, is_last))

    def wait(self, count: int) -> None:
        """Until the first `count` of `jobs` are done; the stamp is one more. None is done where no process was started."""
        if self.compilers is not None:
            self.compilers.wait(count)

    def finish(self) -> None:
        """Until all are done, in this process if no other was started."""
        if self.compilers is not None:
            self.compilers.wait(len(self.jobs) + 1)
            return
        for job in self.jobs:
            _compile(job, self.capability)
        if self.stamp is not None:
            _touch(self.stamp)

    def results(self) -> Iterator[None]:
        """One item for each variant that is done, since `begin`."""
        if self.compilers is not None:
            with closing(self):
                for number in range(len(self.jobs)):
                    self.wait(number + 1)
                    yield
                self.wait(len(self.jobs) + 1)  # the stamp


#: What is being compiled in the background; and the last of it that further blocks which do not wait add to.
_begun: list[Ahead] = []
_open: list[Ahead] = []
#: Of two threads, one after the other only compiles.
_LOCK = threading.RLock()


@contextmanager
def compile_only(wait: bool, stamp: Path | None = None) -> Iterator[Ahead]:
    """What this thread launches in this block is not run, and compiled by other processes where the block ends.

    wait: until they are done, and those of earlier blocks that were not waited for; then the kernels are loaded. Blocks that do not
    wait share one process, as an engine has many of them. stamp: as of `Ahead`, for which a process is started.
    """
    import torch
    from triton.runtime.jit import JITFunction

    if wait:
        _finish()
    shares = not wait and stamp is None
    owner = threading.get_ident()
    ahead = _open.pop() if shares and _open else Ahead(torch.cuda.get_device_capability(), stamp)
    variants: dict[Any, Callable[[], Any] | None] = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:  # another thread's launch runs
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        fixed = [x if p.is_constexpr else None for x, p in zip(args, kernel.params, strict=False)]
        key = kernel, _facts(args), str(fixed), str(sorted(kwargs.items()))
        if key not in variants:
            # Which keeps the memory of its arguments.
            variants[key] = partial(run, kernel, *args, grid=grid, **{**kwargs, "warmup": True}) if wait else None
            ahead.add(specialised(kernel.__name__, kernel, args, kwargs, {}))
        return None

    with _LOCK:
        run = JITFunction.run
        type.__setattr__(JITFunction, "run", record)
        try:
            yield ahead
        except BaseException:
            ahead.close()
            raise
        finally:
            type.__setattr__(JITFunction, "run", run)
    ahead.begin(is_last=not shares)
    (_open if shares else _begun).append(ahead)
    if wait:
        _finish()
        for load in variants.values():
            if load is not None:
                load()


def _finish() -> None:
    for ahead in _open:
        ahead.begin()
    _begun.extend(_open)
    _open.clear()
    while _begun:
        for _ in _begun.pop().results():
            pass


def _facts(x: Any) -> Any:
    """What the JIT may compile an argument for, and more."""
    if hasattr(x, "block_shape"):  # of TMA
        return type(x), x.base.dtype, str((x.block_shape, getattr(x, "layout", None)))
    if hasattr(x, "data_ptr"):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, tuple):
        return tuple(map(_facts, x))
    if isinstance(x, int) and not isinstance(x, bool):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    return type(x) if isinstance(x, float) else str(x)


def cores() -> int:
    """Processes that compile at once; 1: none does."""
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


def stamp_of(*facts: object) -> Path:
    """The file that says that all kernels were compiled that these facts stand for, with this library, Triton and environment."""
    import torch
    import triton

    root = Path(__file__).parents[2]
    sources = sorted((str(file.relative_to(root)), file.stat().st_mtime_ns) for file in root.rglob("*.py"))
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    major, minor = capability = device.major, device.minor
    here = triton.__version__, torch.__version__, _assembler(10 * major + minor), capability, device.multi_processor_count
    settings = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith("HALFBYTE_")]
    return folder() / "halfbyte" / hashlib.sha256(repr((facts, here, settings, sources)).encode()).hexdigest()


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

    os.nice(10)  # launches of the caller come first
    message = Message(*pickle.load(sys.stdin.buffer))
    if _assembler(message.capability) != message.assembler:
        _take_own_assembler()
    good = True
    with suppress(BrokenProcessPool, Empty), ProcessPoolExecutor(min(_MOST, cores()), get_context("fork")) as pool:
        futures: SimpleQueue[Future[None] | Message] = SimpleQueue()
        _submit(pool, message, futures)
        threading.Thread(target=_receive, args=(pool, message.is_last, futures), daemon=True).start()
        while isinstance(done := futures.get(timeout=_PATIENCE), Future) or not done.is_last:
            if isinstance(done, Message):
                continue
            if isinstance(error := done.exception(), BrokenProcessPool):
                raise error
            if error is not None:
                print(f"halfbyte: a kernel cannot be compiled ahead: {error}", file=sys.stderr)
            good = good and error is None
            _report()
    if good and done.stamp is not None:
        _touch(done.stamp)
    _report()


def _submit(pool: ProcessPoolExecutor, message: Message, futures: SimpleQueue[Future[None] | Message]) -> None:
    for job in message.jobs:
        futures.put(pool.submit(_compile, Job(*job), message.capability))
    futures.put(message)


def _receive(pool: ProcessPoolExecutor, is_last: bool, futures: SimpleQueue[Future[None] | Message]) -> None:
    """Hand on what else comes, and end this process and its workers when the caller has ended."""
    with suppress(EOFError):
        while not is_last:
            message = Message(*pickle.load(sys.stdin.buffer))
            is_last = message.is_last
            _submit(pool, message, futures)
        os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


def _report() -> None:
    """One more is done, of the variants in their order and, behind them, the stamp."""
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
    _touch(job.stamp)


def _touch(stamp: Path) -> None:
    with suppress(OSError):  # a folder that cannot be written to, in which nothing is found
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        _work()
