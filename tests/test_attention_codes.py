"""Cached codes as operands of the tuned attention kernels, without a GPU: inline PTX is run on every word (machine/inline.py)."""

from __future__ import annotations

import pytest
import torch

from halfbyte.formats import KV_FORMATS
from halfbyte.kernels.common import layouts
from halfbyte.kernels.decode import wgmma_operands
from halfbyte.plans.kv_codec import KVSpec, kv_spec
from machine.inline import Threads, on_block

WORDS = torch.arange(1 << 16)


@pytest.fixture(params=[name for name, fmt in KV_FORMATS.items() if fmt.code.per_byte > 1 and fmt.granularity == "head"])
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KVSpec:
    found = kv_spec(KV_FORMATS[request.param], 128)
    assert isinstance(found, KVSpec), found
    on_block(Threads((len(WORDS) // 2,)), (layouts, wgmma_operands), monkeypatch)
    return found


def codes(spec: KVSpec) -> torch.Tensor:
    """[codes of a word, words], the lowest bits first."""
    return WORDS >> spec.bits * torch.arange(spec.codes_per_word)[:, None] & (1 << spec.bits) - 1


def numbers(unpacked: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack(unpacked).double()


def words() -> torch.Tensor:
    return WORDS.to(torch.int16)


def test_keys_are_masked_in_place(spec: KVSpec) -> None:
    factors = torch.tensor([2.0 ** (spec.bits * (j % spec.per_byte)) for j in range(spec.codes_per_word)]).double()
    assert torch.equal(numbers(layouts.unpack(words(), spec)) * spec.step, codes(spec) * factors[:, None])


def test_the_last_code_of_values_is_the_second_byte(spec: KVSpec) -> None:
    keys, values = numbers(layouts.unpack(words(), spec)), numbers(layouts.unpack_values(words(), spec))
    assert torch.equal(values[:-1], keys[:-1])
    assert torch.equal(values[-1] * spec.step, (WORDS >> 8).double())
    assert torch.equal(values[-1] - values[spec.per_byte : -1].sum(0), keys[-1])
    scaled = [keys[j] * layouts.post_scale_of(spec, j) for j in range(spec.codes_per_word)]
    assert torch.equal(torch.stack(scaled), codes(spec).double())


def test_many_rows_take_codes_of_two_sizes(spec: KVSpec) -> None:
    sizes = torch.tensor([2.0**-spec.bits, 1.0]).double().repeat(spec.codes_per_word // 2)
    unpacked = numbers(wgmma_operands._codes(words(), spec))
    assert torch.equal(unpacked * wgmma_operands.code_step_of(spec), codes(spec) * sizes[:, None])
