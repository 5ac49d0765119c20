"""Packing: each pair is the other's inverse, and the bytes sit where the documentation says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import InvalidArgument
from halfbyte.packing import pack_codes, unpack_codes

shapes = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))


@given(shape=shapes, seed=st.integers(0, 2**31 - 1), bits=st.sampled_from([2, 4]))
def test_unpack_undoes_pack(shape: tuple[int, int, int], seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (*shape[:2], 8 // bits * shape[2]), dtype=torch.uint8, generator=generator)
    packed = pack_codes(codes, bits)
    assert packed.shape == (*shape,)
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("bits", [2, 4])
def test_pack_undoes_unpack_for_every_byte(bits: int) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_codes(unpack_codes(every, bits), bits), every)


def test_the_first_element_sits_in_the_lowest_bits() -> None:
    assert pack_codes(torch.tensor([3, 1, 0, 2, 0, 3, 1, 0], dtype=torch.uint8), 2).tolist() == [0b10000111, 0b00011100]
    assert unpack_codes(torch.tensor([0b10000111], dtype=torch.uint8), 2).tolist() == [3, 1, 0, 2]
    assert pack_codes(torch.tensor([0x7, 0x1, 0x0, 0xF], dtype=torch.uint8), 4).tolist() == [0x17, 0xF0]
    assert unpack_codes(torch.tensor([0x17, 0xF0], dtype=torch.uint8), 4).tolist() == [0x7, 0x1, 0x0, 0xF]


def test_views_pack_like_their_copies() -> None:
    codes = torch.randint(0, 16, (6, 5, 8), dtype=torch.uint8)
    for view in (codes.transpose(0, 1), codes[1:, ::2], codes[..., 2:], codes.flatten()[1:9], codes[:1].expand(4, 5, 8)):
        assert torch.equal(pack_codes(view, 4), pack_codes(view.contiguous(), 4))
    packed = torch.randint(0, 256, (6, 5, 8), dtype=torch.uint8)
    for view in (packed.transpose(0, 2), packed[::2, 1:], packed[..., 1::3]):
        assert torch.equal(unpack_codes(view, 4), unpack_codes(view.contiguous(), 4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgument, match=r"codes is torch\."):
        pack_codes(torch.zeros(2, dtype=dtype), 4)
    with pytest.raises(InvalidArgument, match=r"packed is torch\."):
        unpack_codes(torch.zeros(2, dtype=dtype), 4)


@pytest.mark.parametrize(("bits", "last"), [(4, 3), (2, 6)])
def test_bytes_that_are_not_whole_are_refused(bits: int, last: int) -> None:
    with pytest.raises(InvalidArgument, match=f"codes has a last axis of {last}"):
        pack_codes(torch.zeros(2, last, dtype=torch.uint8), bits)
