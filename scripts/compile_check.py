"""`make compile-check`: compile every kernel variant that is shipped, for every architecture, on a machine without a GPU.

Fails when a variant does not compile, spills registers without a written reason, adds floating-point numbers atomically (results
would differ from run to run), needs more shared memory than a block has, or compiles to other PTX than the manifest says
(manifest.py). Everything is compiled with the Triton that is installed; with the one that was measured (3.6.0) all of sm_90; else a
sample with each version that is supported, in a folder of its own under build/. There registers are allotted a little differently,
and what spills is shown but fails nothing. What was recorded without problems, and is compiled from the same sources or the same
intermediate code (inputs.py), is held to the same limits without being compiled again; `--all` compiles that too.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pkgutil
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import inputs
import manifest
import typer
import variants
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from triton.runtime.jit import JITFunction

import halfbyte.kernels
from halfbyte.kernels.compiling import TARGETS, Binary, Configuration, Target, build

#: The versions of Triton that are supported, beside the installed one. The newest here is the newest with which all below passes.
VERSIONS = ("3.6.0", "3.8.0", "3.9.0")
#: The version and the architecture that the kernels were measured with: there everything is compiled, and held to the manifest.
MEASURED = ("3.6.0", 90)
#: Variants of each kernel, spread over all of them, that are compiled with each of these.
SAMPLE = 6
BUILD = Path(__file__).parents[1] / "build"


@dataclass(frozen=True)
class Result:
    """One variant on one architecture; `problems` is empty when all is well, `binary` None when it did not compile."""

    module: str
    configuration: str
    target: str
    seconds: float
    binary: Binary | None
    problems: tuple[str, ...]
    entry: manifest.Entry | None = None


@dataclass(frozen=True)
class Job:
    """What a worker is told. Kernels do not travel between processes, so it finds the variant again by its name."""

    module: str
    configuration: str
    target: Target
    tuned: bool


def kernel_modules() -> list[str]:
    """The modules that list variants of kernels."""
    return [name for name, module in _modules(variants).items() if hasattr(module, "configurations")]


def _modules(package: ModuleType) -> dict[str, ModuleType]:
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return {name: importlib.import_module(name) for name in names}


def unlisted() -> list[str]:
    """Kernels that no module lists variants of, which would never be checked."""
    listed = {c.kernel for name in kernel_modules() for c in configurations(name).values()}
    every = kernels(_modules(halfbyte.kernels).values())
    return [f"{kernel.fn.__module__}.{kernel.__name__}" for kernel in every if kernel not in listed]


def kernels(modules: Iterable[ModuleType]) -> list[JITFunction[Any]]:
    """The kernels that these modules launch: what the JIT compiles and no other device code calls."""
    found = [f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)]
    called = {id(f.fn.__globals__.get(name)) for f in found for name in f.fn.__code__.co_names}
    return list(dict.fromkeys(f for f in found if id(f) not in called))


@functools.cache
def configurations(module: str) -> dict[str, Configuration]:
    """The variants of a module by their names, which must differ."""
    found: list[Configuration] = list(importlib.import_module(module).configurations())
    by_name = {configuration.name: configuration for configuration in found}
    if len(by_name) != len(found):
        raise SystemExit(f"{module}: {len(found) - len(by_name)} configurations share a name with another")
    return by_name


def problems(binary: Binary, configuration: Configuration, target: Target, tuned: bool = True) -> Iterator[str]:
    """What is wrong with a variant that compiled, in words. `tuned`: tiles were chosen for this Triton, so nothing may spill."""
    if tuned and binary.spill_bytes and not configuration.may_spill:
        yield f"{binary.spill_bytes} bytes of registers spilled to memory"
    if tuned and binary.serialised and configuration.kernel.is_gluon():
        yield f"asynchronous products wait for each other: {'; '.join(binary.serialised)}"
    if binary.float_atomics:
        yield f"floating-point atomics: {', '.join(binary.float_atomics)}"
    if binary.shared_bytes > target.shared_limit:
        yield f"{binary.shared_bytes} bytes of shared memory; a block has {target.shared_limit}"


def check(job: Job, old: manifest.Entry | None = None) -> Result:
    """Compile one variant in a worker, unless its intermediate code is that of `old`; a failure to compile is a result too."""
    began = time.perf_counter()
    binary, entry, faults = None, None, tuple[str, ...]()
    try:
        configuration = configurations(job.module)[job.configuration]
        sources, code = inputs.digest(configuration, job.target), inputs.code(configuration, job.target)
        if old is not None and old.code == code:
            return as_recorded(job, replace(old, inputs=sources))
        binary = build(configuration, job.target)
        faults = tuple(problems(binary, configuration, job.target, job.tuned))
        entry = entry_of(job, binary, *(("", "") if faults else (sources, code)))
    except Exception as error:
        faults = (explained(error),)
    return Result(job.module, job.configuration, job.target.name, time.perf_counter() - began, binary, faults, entry)


def unchanged(job: Job, old: manifest.Entry | None) -> Result | None:
    """The result of a variant that is compiled from the sources of `old`."""
    if old is None or not old.inputs or old.inputs != inputs.digest(configurations(job.module)[job.configuration], job.target):
        return None
    return as_recorded(job, old)


def as_recorded(job: Job, entry: manifest.Entry) -> Result:
    """The result of a variant that need not be compiled: it is held to today's limits."""
    binary = Binary(entry.registers, entry.spill, entry.shared, (), (), b"", "")
    faults = tuple(problems(binary, configurations(job.module)[job.configuration], job.target, job.tuned))
    return Result(job.module, job.configuration, job.target.name, 0.0, binary, faults, entry)


def entry_of(job: Job, binary: Binary, sources: str, code: str) -> manifest.Entry:
    """What the manifest says of a variant."""
    sizes = (manifest.instructions(binary.cubin), binary.registers, binary.shared_bytes, binary.spill_bytes)
    return manifest.Entry(*key_of(job), manifest.digest(binary.ptx), *sizes, sources, code)


def key_of(job: Job) -> tuple[str, str, str]:
    """Where the manifest has a variant."""
    import triton

    return triton.__version__, job.target.name, job.configuration


def explained(error: BaseException) -> str:
    """An error and, where the compiler wrapped it in others, the first cause: the one that says what is wrong."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    cause = "" if first is error else f"\n{type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}{cause}"


def spread(items: list[str], count: int) -> list[str]:
    """`count` of the items, evenly spread, the first and the last among them; 0: all."""
    if not count or len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def complete(targets: list[Target], sample: int) -> list[Target]:
    """The targets of which every variant is compiled. Only these are held to the manifest: samples change with each new variant."""
    import triton

    return [t for t in targets if not sample or (triton.__version__, t.capability) == MEASURED]


def jobs_of(targets: list[Target], sample: int, only: str) -> list[Job]:
    """Everything to compile."""
    jobs = []
    whole = complete(targets, sample)
    for module in kernel_modules():
        found = configurations(module)
        names = [name for name in found if only in f"{module} {name}"]
        sampled = set(spread(names, sample))
        for name, target in ((name, target) for name in names for target in targets):
            if (name in sampled or target in whole) and target.capability in found[name].targets:
                jobs.append(Job(module, name, target, not sample))
    return jobs


def compare(results: list[Result], held: set[str], only: str, console: Console) -> bool:
    """Whether what compiled is what the manifest says, on the targets that are held to it; `only`: variants may be left out."""
    import triton

    recorded = {key: entry for key, entry in manifest.read().items() if key[0] == triton.__version__ and key[1] in held}
    wrong, again = {}, 0
    for entry in (r.entry for r in results if r.entry is not None and r.target in held):
        old = recorded.get(entry.key)
        wrong[entry.key] = manifest.difference(old, entry) if old else "not in the manifest"
        again += not wrong[entry.key] and entry != old
    gone = {} if only else recorded.keys() - wrong.keys()
    wrong |= dict.fromkeys(gone, "in the manifest, but no kernel has it")
    wrong = {key: why for key, why in wrong.items() if why}
    for key, why in sorted(wrong.items()):
        console.print(*key, why, style="red", markup=False)
    if again:
        console.print(f"{again} compile to what was recorded, from other sources: --update lets the next run skip them")
    if wrong:
        console.print("a kernel that was changed on purpose: scripts/compile_check.py --update, in the commit of the change")
    return not wrong


def update(results: list[Result], replaced: set[str], console: Console) -> None:
    """Write the manifest again, and report what changed and by how much machine code did. `replaced`: targets of which nothing that
    was recorded before is kept."""
    import triton

    recorded = manifest.read()
    entries = [result.entry for result in results if result.entry is not None]
    changed = [(recorded[e.key], e) for e in entries if e.key in recorded and manifest.difference(recorded[e.key], e)]
    large = [(old, new) for old, new in changed if not manifest.within(old, new)]
    for old, new in large:
        console.print(*new.key, manifest.difference(old, new), markup=False)
    console.print(f"{len(changed)} of {len(entries)} differ from the manifest, {len(large)} by more than 1 % of their machine code")
    manifest.write(entries, {k: entry for k, entry in recorded.items() if k[0] != triton.__version__ or k[1] not in replaced})


def run(jobs: list[Job], processes: int, everything: bool, console: Console) -> list[Result]:
    """Results in the order of the jobs: what changed since it was recorded, or `everything`, is compiled in parallel processes."""
    recorded = {} if everything else manifest.read()
    known = {job: result for job in jobs if (result := unchanged(job, recorded.get(key_of(job))))}
    results = list(known.values())
    console.print(f"{len(known)} unchanged since they were recorded, {len(jobs) - len(known)} to look at in {processes} processes")
    workers = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    with workers, Progress(console=console) as progress:
        task = progress.add_task("compiling", total=len(jobs) - len(known))
        pending: list[Future[Result]] = [workers.submit(check, job, recorded.get(key_of(job))) for job in jobs if job not in known]
        for done in as_completed(pending):
            results.append(done.result())
            progress.update(task, advance=1, description=results[-1].configuration)
    order = {(job.module, job.configuration, job.target.name): i for i, job in enumerate(jobs)}
    return sorted(results, key=lambda r: order[r.module, r.configuration, r.target])


def table(results: list[Result], targets: list[Target]) -> Table:
    """One row a variant; for each architecture registers a thread, bytes spilled, KB of shared memory a block."""
    made = Table("kernel", "configuration", *(f"{t.name}: reg, spill, KB" for t in targets), "seconds")
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        rows.setdefault((result.module.rsplit(".")[-1], result.configuration), []).append(result)
    for (module, name), row in rows.items():
        cells = {result.target: _cell(result) for result in row}
        made.add_row(module, name, *(cells.get(t.name, "") for t in targets), f"{sum(r.seconds for r in row):.1f}")
    return made


def _cell(result: Result) -> str:
    if result.binary is None:
        return "[red]failed[/]"
    b = result.binary
    text = f"{b.registers:>3} {b.spill_bytes:>3} {b.shared_bytes / 1024:>6.1f}"
    return f"[red]{text}[/]" if result.problems else text


def report(results: list[Result], targets: list[Target], console: Console) -> bool:
    """Print the table, what may spill, then every problem in full. Whether all is well; nothing compiled is not."""
    console.print(table(results, targets))
    for why, names in exempt().items():
        console.print(f"{len(names)} variants may spill, {why}: {names[0]} .. {names[-1]}", markup=False)
    bad = [result for result in results if result.problems]
    for result in bad:
        console.print(f"{result.module} {result.configuration} {result.target}:", *result.problems, style="red", markup=False)
    console.print(f"{len(results)} checked, {len(bad)} with problems")
    return bool(results) and not bad


def exempt() -> dict[str, list[str]]:
    """Why variants may spill, and which."""
    found: dict[str, list[str]] = {}
    for configuration in (c for module in kernel_modules() for c in configurations(module).values()):
        if configuration.may_spill:
            found.setdefault(configuration.may_spill, []).append(configuration.name)
    return found


def installed(version: str) -> Path:
    """A folder with this Triton alone. Compiling needs nothing else of it, so what it depends on stays away."""
    folder = BUILD / f"triton-{version}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(partial), f"triton=={version}"], check=True)
        partial.rename(folder)
    return folder


def check_with(version: str, processes: int, only: str, flags: list[str]) -> bool:
    """Whether a sample compiles with another version of Triton, in a process that sees that one first."""
    path = os.pathsep.join(filter(None, [str(installed(version)), os.environ.get("PYTHONPATH")]))
    arguments = ["--sample", str(SAMPLE), "--processes", str(processes), "--only", only, "--here-only", *flags]
    done = subprocess.run([sys.executable, __file__, *arguments], env={**os.environ, "PYTHONPATH": path}, check=False)
    return done.returncode == 0


def main(
    processes: Annotated[int, typer.Option(help="Processes to compile in.")] = len(os.sched_getaffinity(0)),
    sample: Annotated[int, typer.Option(help="So many variants of each kernel; 0: all.")] = 0,
    only: Annotated[str, typer.Option(help="Variants whose module or name contains this.")] = "",
    target: Annotated[list[int] | None, typer.Option(help="Architectures, such as 90; none: all.")] = None,
    here_only: Annotated[bool, typer.Option("--here-only", help="With the installed Triton and no other.")] = False,
    record: Annotated[bool, typer.Option("--update", help="Record in the manifest what kernels compile to.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Compile even what has not changed since it was recorded.")] = False,
) -> None:
    """Compile all kernels for all architectures and check what comes out."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(BUILD / "triton-cache"))
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # nobody debugs these, and the assembler is quicker without
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what it always was; Triton 3.9 warns that 3.10 turns it off
    import triton

    console = Console(width=None if sys.stdout.isatty() else 160)
    targets = [t for t in TARGETS if not target or t.capability in target]
    if not sample and (found := unlisted()):
        raise SystemExit(f"{', '.join(found)}: in no configurations(); see halfbyte.kernels.compiling.Configuration")
    jobs = jobs_of(targets, sample, only)
    console.print(f"Triton {triton.__version__}: {len(jobs)} to check")
    results = run(jobs, processes, everything, console)
    good = report(results, targets, console)
    if record:
        update(results, set() if only else {t.name for t in targets}, console)
    else:
        good &= compare(results, {t.name for t in complete(targets, sample)}, only, console)
    failed = [] if good else [triton.__version__]
    others = [] if here_only else [v for v in VERSIONS if v != triton.__version__]
    flags = ["--update"] * record + ["--all"] * everything
    failed += [version for version in others if not check_with(version, processes, only, flags)]
    if failed and not here_only:
        console.print(f"Problems with Triton {', '.join(failed)}: see above", style="red")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
