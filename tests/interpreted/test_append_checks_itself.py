"""The small appends that the kernel checks itself on, interpreted: formats, layouts and options pass, a wrong kernel does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from append_levels import LAYOUTS, PAIRS, new_cache
from halfbyte.kv_buffer import AppendCall, HeadNorms, Rope
from halfbyte.ops import append as op
from halfbyte.ops.small_calls import append_error

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "counts": {"counts": torch.tensor([1, 2, 0], dtype=torch.int32)},
    "rotated by position": {"rope": Rope(torch.ones(3, 8), torch.zeros(3, 8)), "q": torch.zeros(3, 4, 3, 64)},
    "each sequence its own angles, norms": {
        "rope": Rope(torch.ones(3, 3, 16), torch.zeros(3, 3, 16)),
        "q": torch.zeros(3, 4, 3, 64),
        "norms": HeadNorms(torch.ones(64), torch.ones(64), 1e-6, "plain"),
    },
    "Hadamard": {"rotate_keys": True},
}


def call_of(how: str, keys: str, values: str, **options: Any) -> AppendCall:
    cache = new_cache(how, 2, 64, keys=keys, values=values, dtype=torch.float16)
    k = torch.zeros(3, 2, 3, 64, dtype=torch.float16)
    return AppendCall(k, k, cache.keys, cache.values, cache.lengths, page_table=cache.page_table, **options)


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_every_format_passes(keys: str, values: str, how: str) -> None:
    call = call_of(how, keys, values)
    assert append_error(call, partial(op._launch, advance=True), op._run_reference) == 0


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_passes(name: str) -> None:
    call = call_of("paged", "int8", "int4_g32", **OPTIONS[name])
    assert append_error(call, partial(op._launch, advance=True), op._run_reference) <= 0.5


def test_slots_pass() -> None:
    call = call_of("paged", "int8", "int4")
    one = {"k": call.k[:, :, :1], "v": call.v[:, :, :1], "lengths": torch.tensor([4, 0, 9]), "page_table": None, "by_slot": True}
    assert append_error(call._replace(**one), partial(op._launch, advance=False), op._run_reference) == 0


def test_a_wrong_kernel_is_noticed() -> None:
    def run(call: AppendCall) -> None:
        op._launch(call._replace(v=1.1 * call.v), advance=True)

    assert append_error(call_of("paged", "int8", "int8"), run, op._run_reference) > 1
