"""Stored words as operands of the tuned kernels, without a GPU: inline PTX is run on every word (machine/inline.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS
from halfbyte.kernels.common import layouts
from halfbyte.kernels.decode import wgmma_operands
from halfbyte.kernels.linear import unpack
from halfbyte.plans.kv_codec import KVSpec, kv_spec
from halfbyte.plans.weight_spec import WeightSpec, weight_spec
from machine.inline import Threads, on_block

#: Every word as a number, and as a kernel loads it.
NUMBERS = torch.arange(1 << 16)
WORDS = NUMBERS.to(torch.int16)


@pytest.fixture(autouse=True)
def _every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    on_block(Threads((len(WORDS) // 2,)), (layouts, wgmma_operands, unpack), monkeypatch)


def codes(per_word: int) -> torch.Tensor:
    """[codes of a word, words], the lowest bits first."""
    bits = 16 // per_word
    return NUMBERS >> bits * torch.arange(per_word)[:, None] & (1 << bits) - 1


def numbers(unpacked: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack(unpacked).double()


# ----------------------------------------------------------------------------------------------------------------- attention


@pytest.fixture(params=[name for name, fmt in KV_FORMATS.items() if fmt.code.per_byte > 1 and fmt.granularity == "head"])
def spec(request: pytest.FixtureRequest) -> KVSpec:
    found = kv_spec(KV_FORMATS[request.param], 128)
    assert isinstance(found, KVSpec), found
    return found


def test_keys_are_masked_in_place(spec: KVSpec) -> None:
    factors = torch.tensor([2.0 ** (spec.bits * (j % spec.per_byte)) for j in range(spec.codes_per_word)]).double()
    assert torch.equal(numbers(layouts.unpack(WORDS, spec)) * spec.step, codes(spec.codes_per_word) * factors[:, None])


def test_the_last_code_of_values_is_the_second_byte(spec: KVSpec) -> None:
    keys, values = numbers(layouts.unpack(WORDS, spec)), numbers(layouts.unpack_values(WORDS, spec))
    assert torch.equal(values[:-1], keys[:-1])
    assert torch.equal(values[-1] * spec.step, (NUMBERS >> 8).double())
    assert torch.equal(values[-1] - values[spec.per_byte : -1].sum(0), keys[-1])
    scaled = [keys[j] * layouts.post_scale_of(spec, j) for j in range(spec.codes_per_word)]
    assert torch.equal(torch.stack(scaled), codes(spec.codes_per_word).double())


def test_many_rows_take_codes_of_two_sizes(spec: KVSpec) -> None:
    sizes = torch.tensor([2.0**-spec.bits, 1.0]).double().repeat(spec.codes_per_word // 2)
    unpacked = numbers(wgmma_operands._codes(WORDS, spec))
    assert torch.equal(unpacked * wgmma_operands.code_step_of(spec), codes(spec.codes_per_word) * sizes[:, None])


# ------------------------------------------------------------------------------------------------------------------- products


def of(name: str, dtype: str) -> WeightSpec:
    weight = weight_spec(WEIGHT_FORMATS[name], dtype)
    assert isinstance(weight, WeightSpec), weight
    return weight


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bias", [None, 0, 1, 7])
def test_codes_less_their_bias(bias: int | None, dtype: str) -> None:
    """None: the format's own."""
    weight = of("int4_sym_g128", dtype)
    if bias is not None:
        weight = replace(weight, bias=bias)
    assert bias is not None or weight.bias == 8
    unpacked = unpack.unpack_exact(WORDS, (), weight, SimpleNamespace(dtype=dtype))
    assert torch.equal(numbers(unpacked), (codes(4) - weight.bias) * weight.unit(dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["int4_sym_g128", "int4_g128"])
def test_codes_and_what_they_have_too_much(name: str, dtype: str) -> None:
    """The shift, which products of the sums of x take off, is the bias and what the masked bits are beside the code."""
    weight = of(name, dtype)
    unpacked = unpack.unpack_nibbles(WORDS, SimpleNamespace(dtype=dtype))
    wanted = (codes(4) - weight.bias) * weight.unit(dtype) + weight.shift(dtype)
    assert torch.equal(numbers(unpacked), wanted)


def test_bytes_are_numbers_in_bf16() -> None:
    unpacked = unpack.unpack_int8(WORDS, SimpleNamespace(dtype="bf16"))
    assert torch.equal(numbers(unpacked), codes(2).to(torch.int8).double())
