"""Sleep and wake-up by vLLM's own code for GPUs; on the CPU platform, which ignores both, over an allocator of this file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ON_GPU, SHIPPED, assert_same, engine, generate, later, metric, quantized, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, BloomConfig
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from halfbyte.vllm.names import backend_name

#: Bytes of memory that was given back: NaN in every float, an illegal code or count elsewhere.
GONE = 0xFF
#: On a CPU vLLM refuses the option.
SLEEPS = {"enable_sleep_mode": True} if ON_GPU else {}


class Pool(TorchDispatchMode):
    """Keeps the memory of each tensor that is made while it is active."""

    def __init__(self, memory: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.untyped_storage().data_ptr() not in given | {0}:
                self.memory[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return made


class Allocator:
    """`CuMemAllocator` in small: memory by tag, kept or gone while it sleeps, always at the same addresses."""

    def __init__(self) -> None:
        self.pools: dict[str, dict[int, torch.UntypedStorage]] = {}
        self.kept: dict[tuple[str, int], torch.UntypedStorage] = {}

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        with Pool(self.pools.setdefault(tag, {})):
            yield

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for tag, pool in self.pools.items():
            for address, storage in pool.items():
                if tag in offload_tags:
                    self.kept[tag, address] = storage.clone()
                storage.fill_(GONE)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for (tag, address), storage in self.kept.items():
            self.pools[tag][address].copy_(storage)
        self.kept.clear()


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator | None:
    """CPU workers sleep as those of GPUs do."""
    if ON_GPU:
        return None
    found = Allocator()

    def load_model(self: Any, **options: Any) -> None:
        """A GPU has copies of what the files hold."""
        Worker.load_model(self, **options)
        with found.use_memory_pool("weights"):
            for parameter in self.get_model().parameters():
                parameter.data = parameter.data.clone()

    monkeypatch.setattr(CPUWorker, "load_model", load_model)
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(CPUWorker, name, getattr(Worker, name))
    monkeypatch.setattr(Worker, "sleep_mode_backend", CuMemBackend())
    monkeypatch.setattr(Worker, "synchronize_device", lambda self: None)
    monkeypatch.setattr(Worker, "_maybe_get_memory_pool_context", lambda self, tag: found.use_memory_pool(tag))
    monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: found)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (0, 0))
    return found


def sleep_and_wake(llm: Any, level: int) -> None:
    llm.sleep(level)
    llm.wake_up()
    if level == 2:
        assert ON_GPU or llm.collective_rpc(intact_bytes) == [0]  # memory that a GPU maps again may hold anything
        llm.collective_rpc("reload_weights")


def intact_bytes(worker: Any) -> int:
    """How many bytes of the model's parameters were not discarded."""
    return sum(int((p.data.contiguous().view(-1).view(torch.uint8) != GONE).sum()) for p in worker.get_model().parameters())


@pytest.mark.parametrize("weights", [later(None), "int4_g64"])
def test_both_levels(weights: str | None, allocator: Allocator | None, tmp_path: Path) -> None:
    """A packed cache, over plain and over packed weights."""
    folder = SHIPPED if weights is None else save(quantized(weights=weights, lm_head="int8_col"), tmp_path / "packed")
    with engine(folder, backend_name("int8", "int4_g32"), **SLEEPS) as llm:
        before = generate(llm)
        assert allocator is None or {"weights", "kv_cache"} <= set(allocator.pools)
        for level in (1, 2):
            sleep_and_wake(llm, level)
            assert_same(generate(llm), before, within=1e-6)
            assert metric(llm, "vllm:prefix_cache_hits") == 0


def test_slopes_of_alibi_survive(tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = BloomConfig(vocab_size=101, hidden_size=64, n_layer=2, n_head=2, initializer_range=0.3)
    folder = save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path / "bloom")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3]
    with engine(folder, backend_name("bf16", "bf16"), block_size=32, **SLEEPS) as llm:
        before = generate(llm, prompts, 12)
        sleep_and_wake(llm, 2)
        assert_same(generate(llm, prompts, 12), before, within=1e-6)


def packed(worker: Any) -> dict[str, torch.Tensor]:
    """Copies of the parts of quantized weights."""
    return {n: p.data.clone() for n, p in worker.get_model().named_parameters() if ".weight0_" in n}


@pytest.mark.nightly
def test_weights_of_another_folder_are_loaded_in_place(tmp_path: Path) -> None:
    """`reload_weights` as trainers use it. Words cannot be compared: plain layers of the CPU platform keep a copy."""
    other = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0))
    second = save(quantized(save(other, tmp_path / "plain"), weights="int4_g64"), tmp_path / "second")
    with engine(save(quantized(weights="int4_g64"), tmp_path / "first")) as llm:
        (before,) = llm.collective_rpc(packed)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        (found,) = llm.collective_rpc(packed)
    with engine(second) as llm:
        (expected,) = llm.collective_rpc(packed)
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(torch.equal(found[name], before[name]) for name in expected)
