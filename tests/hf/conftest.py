"""Fixtures: models, prompts, and transformers' own cache with the same rounding to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounded_cache import rounded_cache
from tiny_models import VOCAB, base
from transformers.cache_utils import DynamicCache


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Any:
    """Matrices this small only lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def build() -> Callable[[str], Any]:
    """build(family): a tiny random model of that family in float32, its own copy."""
    return lambda family: copy.deepcopy(base(family))


@pytest.fixture
def prompt() -> Callable[..., torch.Tensor]:
    """prompt(batch, tokens): random token ids."""

    def make(batch: int = 2, tokens: int = 21, seed: int = 0) -> torch.Tensor:
        return torch.randint(1, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def rounded() -> Callable[..., DynamicCache]:
    """rounded(model, fmt): a cache of transformers whose contents are rounded as a format does it."""
    return rounded_cache


@pytest.fixture
def greedy() -> Callable[..., Any]:
    """greedy(model, ids, **options): tokens and logits of a greedy continuation."""

    def run(model: Any, ids: torch.Tensor, new: int = 12, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        settings = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True, **options}
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=new, **settings)
        return out.sequences, torch.stack(out.logits, 1)

    return run
