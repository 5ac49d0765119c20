"""Measuring vLLM: its own kernels in Triton's interpreter, as the study of engines calls them, and whole engines by their clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engines import SHARED_GPU

ROOT = Path(__file__).parents[2]
_SOURCES = os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.cpu_platform
def test_vllms_kernels_attend_to_what_they_store() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "VLLM_SOURCES": str(Path(spec.origin).parent),
        "PYTHONPATH": _SOURCES,
    }
    done = subprocess.run([sys.executable, __file__], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bf16", "int8", "int4"]


def test_engines_are_measured_in_a_process_each(tmp_path: Path) -> None:
    out = tmp_path / "vllm.jsonl"
    options = {"enforce_eager": True, "gpu_memory_utilization": 0.2, "max_model_len": 256, **SHARED_GPU}
    shapes = ("--decode", "2x200", "--hits", "2x64+8", "--serve", "3x40+4", "--tokens", "2", "14")
    command = [
        sys.executable,
        "-m",
        "halfbyte_lab.serving",
        "--sizes",
        "qwen3-0.6b",
        "--layers",
        "1",
        "--args",
        json.dumps(options),
    ]
    command += [*shapes, "--modes", "int4_g128+int8_col/int8+int4_g32", "--work", str(tmp_path / "work"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"PYTHONPATH": _SOURCES})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["what"], r.get("shape")) for r in rows] == [
        ("engine", None),
        ("decode", "2x200"),
        ("hits", "2x64+8"),
        ("serve", "3x40+4"),
    ]
    assert all(r[name] > 0 for r, name in zip(rows, ("kv_tokens", "step_ms", "first_token_ms", "all_tok_s"), strict=True))
    assert rows[0]["environment"]["command"].startswith("python -m halfbyte_lab.serving --sizes")
    assert "--log" not in rows[0]["environment"]["command"]


def test_an_engine_that_does_not_start_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfbyte_lab.serving", "--sizes", "qwen3-0.6b", "--layers", "1", "--work", str(tmp_path)]
    command += ["--modes", "bf16", "--limit", "1", "--out", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": _SOURCES})
    assert done.returncode == 1
    assert "bf16: not done after 1 s" in done.stderr
    assert not (tmp_path / "rows.jsonl").exists()


def check() -> None:
    """Requests that decode beside a chunk of a prompt. fp16, because Triton's interpreter multiplies no bf16."""
    from halfbyte_lab.baselines.vllm_kernels import MODES, VllmCache
    from halfbyte_lab.cases import engine_step

    engine_step.DTYPE = torch.float16
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # the kernels ask for it when they choose tiles
    step = engine_step.Step.random(engine_step.Requests(1, 20, prompt=4, past=6), 4, 2, 64, torch.device("cpu"))
    for formats in MODES:
        cache = VllmCache(step, formats)
        step.fill(cache)
        k, v = cache.held(0, 20)
        for stored, given in zip((k, v), engine_step.history(0, 20, 2, 64, torch.device("cpu")), strict=True):
            error = (stored[0].transpose(0, 1) - given).norm() / given.double().norm()
            assert error <= {"bf16": 0, "int8": 0.01, "int4": 0.12}[formats], (formats, error)
        _, ref = step.right(cache)
        error = (cache.attend().double() - ref).norm() / ref.norm()
        assert error < 2e-3, (formats, error)
        print(formats)


if __name__ == "__main__":
    check()
