"""The shipped model on the GPU, in bf16 with quantised keys and values: eagerly, and as generate() compiles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_place import DRY, PLACE

import halfbyte.hf as hf
from halfbyte.paths import shipped_model

transformers = pytest.importorskip("transformers")

PROMPT = list(b"The kernels of this library read low-bit keys and values as they are stored and never expand them in memory. ")


def model(weights: str | None = None) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.bfloat16).to(PLACE.device)
    return hf.quantize(found, weights, keys="int8", values="int4_g32")


def text(found: Any, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT], device=PLACE.device)
    return found.generate(ids, max_new_tokens=PLACE.size(48, 4), do_sample=False, **options)[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def test_generation_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = model()
    ours = text(found, disable_compile=True)
    monkeypatch.setenv("HALFBYTE_IMPL", "reference")
    assert text(found, disable_compile=True)[:8] == ours[:8]


@pytest.mark.filterwarnings("ignore:halfbyte")  # linear layers say that they have no kernel yet
@pytest.mark.skipif(DRY, reason="on a CPU generate() does not compile by itself")
@pytest.mark.parametrize("weights", [None, "nf4"])
def test_generate_records_decoding_in_a_graph(weights: str | None) -> None:
    found = model(weights)
    assert text(found) == text(found, disable_compile=True)
