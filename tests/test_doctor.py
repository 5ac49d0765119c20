"""The doctor: says what is there, and survives everything being broken."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import halfbyte
from command_line import diagnosis
from halfbyte import device, doctor


def test_it_finds_what_is_here() -> None:
    found = diagnosis()
    assert found.versions["torch"].startswith("2.")
    assert found.versions["halfbyte"] == halfbyte.__version__
    assert "threads" in found.machine["cpu"]
    for op in ("append", "decode_attention", "linear", "qkv_projection"):
        assert found.ops[op].startswith("on cpu: ")
    assert all("auto: right, " in found.ops[op] for op in ("append", "decode_attention", "linear", "experts_linear"))
    assert found.problems == []
    json.dumps(found.to_dict())


def test_a_wrong_kernel_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    right = halfbyte.linear
    monkeypatch.setattr(halfbyte, "linear", lambda x, w, impl: right(x, w, impl=impl) + (impl == "auto"))
    monkeypatch.setattr("halfbyte.formats.WEIGHT_FORMATS", {"nf4": halfbyte.WEIGHT_FORMATS["nf4"]})
    found = doctor.diagnose()
    assert "auto: WRONG, " in found.ops["linear"]
    assert any("linear failed" in problem for problem in found.problems)


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "transformers":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "halfbyte_lab", None)
    monkeypatch.setattr(doctor, "_ops", dict)  # which no extra is about
    notes = doctor.diagnose().notes
    assert any(re.search(r"transformers is not installed; .*: pip install 'transformers<[\d.]+,>=[\d.]+'$", n) for n in notes)
    assert any(re.search(r"the laboratory is not installed; .*: pip install \./lab$", n) for n in notes)


@pytest.mark.parametrize("error", [RuntimeError("driver too old"), OSError("no"), SystemExit(3), MemoryError()])
def test_every_probe_may_fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> object:
        raise error

    for target in ("describe", "gpu_count"):
        monkeypatch.setattr(device, target, fail)
    monkeypatch.setattr(halfbyte, "KVCache", fail)
    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setenv("HALFBYTE_IMPL", "nonsense")
    found = doctor.diagnose()
    assert found.machine["cpu"].startswith(f"failed: {type(error).__name__}")
    assert found.versions["torch"].startswith("failed")
    assert "HALFBYTE_IMPL" in found.settings["HALFBYTE_IMPL"]
    assert len(found.problems) >= 5


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = device.Device("cuda", "NVIDIA H200", 141 * 2**30, 60 * 2**20, 8, 8, 0, (9, 0), 132, "580.1")
    cpu = device.describe("cpu")
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(device, "describe", lambda which: cpu if which == "cpu" else fake)
    monkeypatch.setattr(doctor, "_calls", lambda device: ())  # their results are looked at above
    found = doctor.diagnose()
    assert found.machine["gpu 0"] == "NVIDIA H200, sm_90, 132 SMs, 141 GiB memory, 60 MiB L2, driver 580.1"
    assert "on cuda: " in found.ops["decode_attention"]


def test_every_level_here_is_compared_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right as they are. A level that is wrong, or raises, is named with the call; one that refuses a call is not at fault."""
    results = list(doctor.checks())
    assert {one.call.split(",")[0] for one in results} == {"append", "decode_attention", "linear", "experts_linear"}
    for names in (halfbyte.KV_FORMATS, halfbyte.WEIGHT_FORMATS):
        assert all(any(name in one.call for one in results) for name in names)
    assert {one.level for one in results} == {"cpu"}
    assert not any(one.failed or one.error is None for one in results)

    def wrong(x: Any, weight: Any, impl: str) -> Any:
        if impl == "cpu" and len(x) == 16:
            raise ZeroDivisionError("a bug")
        if impl == "cpu" and len(x) == 64:
            raise halfbyte.errors.Unsupported("too few rows")
        return right(x, weight, impl=impl) * (1.2 if impl == "cpu" and len(x) == 1 else 1)

    right = halfbyte.linear
    monkeypatch.setattr("halfbyte.formats.WEIGHT_FORMATS", {"nf4": halfbyte.WEIGHT_FORMATS["nf4"]})
    monkeypatch.setattr("halfbyte.formats.KV_FORMATS", {})
    monkeypatch.setattr(halfbyte, "linear", wrong)
    texts = [str(one) for one in doctor.checks() if one.call.startswith("linear")]
    assert texts[0].startswith("linear, nf4, M = 1, cpu: WRONG, ")
    assert texts[1] == "linear, nf4, M = 16, cpu: failed: ZeroDivisionError: a bug"
    assert texts[2] == "linear, nf4, M = 64, cpu: does not run here: too few rows"
    assert texts[3].startswith("linear, nf4, M = 300, cpu: right, ")
    assert [one.failed for one in doctor.checks()][:4] == [True, True, False, False]


def test_kernels_of_checks_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level of every call, ahead of the first check; what fails there is left to its check."""
    calls, blocks = [], []

    @contextmanager
    def compiling_only() -> Iterator[None]:
        yield
        blocks.append(len(calls))
        raise RuntimeError("a kernel that does not compile")

    def run(impl: str) -> list[torch.Tensor]:
        calls.append(impl)
        if impl == "gluon":
            raise halfbyte.errors.Unsupported("too few rows")
        return []

    monkeypatch.setattr("halfbyte.ops.compiling.compiling_only", compiling_only)
    doctor._compile([("a", "gluon", run), ("a", "triton", run), ("b", "triton", run)])
    assert blocks == [3]
    assert calls == ["gluon", "triton", "triton"]
