"""Packing: each pair is the other's inverse, and the bytes sit where the documentation says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import InvalidArgument
from halfbyte.packing import pack_nibbles, unpack_nibbles

shapes = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))


@given(shape=shapes, seed=st.integers(0, 2**31 - 1))
def test_unpack_undoes_pack(shape: tuple[int, int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*shape[:2], 2 * shape[2]), dtype=torch.uint8, generator=generator)
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape,)
    assert torch.equal(unpack_nibbles(packed), codes)


def test_pack_undoes_unpack_for_every_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)


def test_the_even_element_sits_in_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([0x7, 0x1, 0x0, 0xF], dtype=torch.uint8)).tolist() == [0x17, 0xF0]
    assert unpack_nibbles(torch.tensor([0x17, 0xF0], dtype=torch.uint8)).tolist() == [0x7, 0x1, 0x0, 0xF]


def test_views_pack_like_their_copies() -> None:
    codes = torch.randint(0, 16, (6, 5, 8), dtype=torch.uint8)
    for view in (codes.transpose(0, 1), codes[1:, ::2], codes[..., 2:], codes.flatten()[1:9], codes[:1].expand(4, 5, 8)):
        assert torch.equal(pack_nibbles(view), pack_nibbles(view.contiguous()))
    packed = torch.randint(0, 256, (6, 5, 8), dtype=torch.uint8)
    for view in (packed.transpose(0, 2), packed[::2, 1:], packed[..., 1::3]):
        assert torch.equal(unpack_nibbles(view), unpack_nibbles(view.contiguous()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgument, match=r"codes is torch\."):
        pack_nibbles(torch.zeros(2, dtype=dtype))
    with pytest.raises(InvalidArgument, match=r"packed is torch\."):
        unpack_nibbles(torch.zeros(2, dtype=dtype))


def test_an_odd_axis_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="codes has a last axis of 3"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
