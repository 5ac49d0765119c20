"""What every test shares: how hypothesis draws, and memory that is never clean by luck."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

if os.environ.get("HALFBYTE_GPU_TESTS") != "1":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # this suite is the CPU's, also on a machine with a GPU; tests/gpu is not
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as the command line sets it: tests run next to each other

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

#: What draws without a seed of its own draws alike in every run: a change decides, not luck. `make versions` sets other seeds.
SEED = int(os.environ.get("HALFBYTE_SEED", "0"))
settings.register_profile(
    "halfbyte",
    derandomize=SEED == 0,
    deadline=None,
    max_examples=25,
    print_blob=True,  # a failure prints what repeats it
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# For tests that are meant to fail: found is enough, no search for the smallest example, and the same every time.
settings.register_profile(
    "mutants", settings.get_profile("halfbyte"), derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("halfbyte")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow(sample=n)`: n cases of a test's many, spread evenly, are not slow. HALFBYTE_ORDER shuffles files and their tests."""
    matrices = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("slow")) and "sample" in mark.kwargs:
            matrices[item.nodeid.partition("[")[0], mark.kwargs["sample"]].append(item)
    for (_, sample), cases in matrices.items():
        for i in range(sample):
            case = cases[i * len(cases) // sample]
            case.own_markers[:] = [mark for mark in case.own_markers if mark.name != "slow"]
    if order := os.environ.get("HALFBYTE_ORDER"):
        files = defaultdict(list)
        for item in items:
            files[item.path].append(item)
        rng, shuffled = random.Random(order), list(files.values())
        for tests in (shuffled, *shuffled):
            rng.shuffle(tests)
        items[:] = [item for tests in shuffled for item in tests]


def pytest_collection_finish() -> None:
    """What was imported and collected stays: `gc.collect`, which benches call between cases, would walk through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def pinned() -> None:
    torch.manual_seed(SEED)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--quick` with next to no repeats, of two copies of what is read: what is measured does not matter here."""
    from halfbyte_lab.measure import session, timing

    monkeypatch.setattr(timing, "copies_beyond_l2", lambda nbytes, l2_bytes, at_most: 2)
    monkeypatch.setattr(session, "QUICK", timing.Effort(seconds=0.0, repeats=2, block_seconds=1e-5, settle_seconds=0.0))


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model: the first layers of the shipped one, for what takes as long for each layer and each format."""
    import transformers

    from halfbyte.paths import shipped_model

    folder = tmp_path_factory.mktemp("shipped") / "two-layers"
    transformers.AutoModelForCausalLM.from_pretrained(shipped_model(), num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the shipped model with a chat template."""
    from halfbyte.paths import shipped_model

    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(shipped_model(), folder)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    end = "{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(turns + end, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def gptq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the shipped model with drawn layers of GPTQ."""
    import transformers

    from halfbyte.paths import shipped_model
    from saved_folders import blocks, write

    folder = tmp_path_factory.mktemp("models") / "gptq"
    write(transformers.AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32), folder, blocks("gptq v1"))
    for file in shipped_model().glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN (integers: the largest), so that an output that was not fully written is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
