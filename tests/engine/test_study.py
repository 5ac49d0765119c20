"""vLLM's own kernels, as the study of engines calls them, in Triton's interpreter: of an installed vLLM, by path."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_vllms_kernels_attend_to_what_they_store() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "VLLM_SOURCES": str(Path(spec.origin).parent),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab" / "src")]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bf16", "int8", "int4"]


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
