"""Engines of a real vLLM, in this process on its CPU platform, in others on a GPU, and what transformers says to the same prompts.

`make engine-test` on a CPU; `make gpu-engine-test PYTHON=...` on a machine with a GPU and vLLM, to which halfbyte is installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(torch.cuda.is_available())),
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions for `collective_rpc`, which are found by their modules' names
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles where it is first used
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",  # Dynamo without Inductor, where a test compiles
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
sys.path.insert(0, str(Path(__file__).parents[1] / "hf"))  # tiny_models

import pytest
from engines import ON_GPU, save
from tiny_models import base
from vllm.triton_utils import dispatcher

_rebind_kernels = dispatcher._rebind_kernels


def _without_numba(overrides: Any) -> None:
    """vLLM 0.32 looks for its kernels in all modules, and fails at objects of numba, which speculation by n-grams imports."""
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("numba", "llvmlite")}
    try:
        _rebind_kernels(overrides)
    finally:
        sys.modules.update(modules)


dispatcher._rebind_kernels = _without_numba


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """tiny(family): the folder of a tiny random model of that family (tests/hf/tiny_models.py)."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        model = base(family)
        if family == "gemma2" and ON_GPU:
            pytest.skip("vLLM refuses it in fp16")
        if family == "gemma2":  # vLLM knows it with tied embeddings only
            model.config.tie_word_embeddings = True
            model.tie_weights()
        if family == "gpt_oss":  # vLLM knows it with YaRN only
            yarn = {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
            model.config.rope_parameters = {"rope_theta": 10000.0, "truncate": False, **yarn}
        return save(model, root / family)

    return folder


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: left out unless HALFBYTE_ENGINES=all")
    config.addinivalue_line("markers", "cpu_platform: left out on a GPU, as it stands in for one or is of that platform")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [] if os.environ.get("HALFBYTE_ENGINES") == "all" else ["nightly"]
    names += ["cpu_platform"] if ON_GPU else []
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in names) or not _has_gpus(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _has_gpus(item: pytest.Item) -> bool:
    """Whether there are as many as the test has ranks."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    ranks = 2 if parameters.get("schedule") == "tensor parallelism" else parameters.get("ranks", 1)
    return not ON_GPU or ranks <= torch.cuda.device_count()
