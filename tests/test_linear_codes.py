"""Stored words as operands of the kernel for small M, without a GPU: its inline PTX is run on every word (machine/inline.py)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.common import layouts
from halfbyte.kernels.linear import unpack
from halfbyte.plans.weight_spec import WeightSpec, weight_spec
from machine.inline import Threads, on_block

WORDS = 1 << 16


def of(name: str, dtype: str) -> WeightSpec:
    weight = weight_spec(WEIGHT_FORMATS[name], dtype)
    assert isinstance(weight, WeightSpec), weight
    return weight


def codes(per_word: int) -> torch.Tensor:
    """[codes of a word, words]: the codes of every word, the lowest bits first."""
    bits = 16 // per_word
    return torch.arange(WORDS) >> bits * torch.arange(per_word)[:, None] & (1 << bits) - 1


def every_word(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    on_block(Threads((WORDS // 2,)), (layouts, unpack), monkeypatch)
    return torch.arange(WORDS, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bias", [None, 0, 1, 7])
def test_codes_less_their_bias(bias: int | None, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: the format's own."""
    weight = of("int4_sym_g128", dtype)
    if bias is not None:
        weight = replace(weight, bias=bias)
    assert bias is not None or weight.bias == 8
    words = every_word(monkeypatch)
    unpacked = unpack.unpack_exact(words, (), weight, SimpleNamespace(dtype=dtype))
    assert torch.equal(torch.stack(unpacked).double(), (codes(4) - weight.bias) * weight.unit(dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["int4_sym_g128", "int4_g128"])
def test_codes_and_what_they_have_too_much(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shift, which products of the sums of x take off, is the bias and what the masked bits are beside the code."""
    weight = of(name, dtype)
    words = every_word(monkeypatch)
    unpacked = unpack.unpack_nibbles(words, SimpleNamespace(dtype=dtype))
    wanted = (codes(4) - weight.bias) * weight.unit(dtype) + weight.shift(dtype)
    assert torch.equal(torch.stack(unpacked).double(), wanted)


def test_bytes_are_numbers_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    words = every_word(monkeypatch)
    unpacked = unpack.unpack_int8(words, SimpleNamespace(dtype="bf16"))
    assert torch.equal(torch.stack(unpacked).double(), codes(2).to(torch.int8).double())
