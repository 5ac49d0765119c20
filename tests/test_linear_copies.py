"""Which pieces the threads of a stream copy into shared memory, without a GPU: each once, to where it is read from."""

from __future__ import annotations

import itertools

import pytest

from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels import linear_copies
from halfbyte.plans.linear import Spec, gluon_linear

NAMES = (
    *("int4_sym_g128", "int4_g128", "int4_g32", "int4_sym_g32_fp32", "int4_sym_col"),
    *("int8_col", "int8_g128", "nf4", "mxfp4", "nvfp4"),
)


def planned(name: str, rows: int, n: int = 8192) -> Spec:
    found = gluon_linear(
        [(WEIGHT_FORMATS[name], n)], rows=rows, width=8192, half="bf16", processors=132, capability=(9, 0), pair=True
    )
    assert not isinstance(found, str), found
    assert isinstance(found.spec, Spec)
    return found.spec


SPECS = pytest.mark.parametrize(
    "spec", [planned(name, rows, n) for name in NAMES for rows in (1, 2, 4, 8, 16) for n in (4096, 28672)]
)


@SPECS
def test_codes_come_to_where_a_swizzled_ring_has_them(spec: Spec) -> None:
    weight = spec.weights[0]
    pieces = weight.words(spec) // 8
    phase = max(1, 8 // pieces)
    copied = {}
    for t, (row, byte, xor, at) in itertools.product(range(32 * spec.across), linear_copies._code_pieces(weight, spec)):
        first, column = divmod(t, pieces)
        into = (first * pieces + (column ^ first // phase % min(8, pieces))) * 16
        assert byte == 0
        copied[row + first, column] = (into ^ xor) + at
    wanted = itertools.product(range(spec.tile), range(pieces))
    assert copied == {(row, c): (row * pieces + (c ^ row // phase % min(8, pieces))) * 16 for row, c in wanted}


@SPECS
def test_scales_come_to_their_rows(spec: Spec) -> None:
    """Whole rows of a step, of which each warp of the block copies a part."""
    weight = spec.weights[0]
    for size, piece in [(weight.scale_bytes, spec.piece)] * (weight.groups > 0) + [(1, spec.zero_piece)] * weight.zero:
        columns = spec.columns(weight)
        assert 4 <= piece * size <= 16
        lanes = linear_copies._scale_lanes(weight, spec, piece)
        assert lanes == 32 or lanes * spec.warps * piece == spec.tile * columns
        copied = {}
        places = linear_copies._scale_pieces(weight, spec, piece, size)
        for t, (row, byte, xor, at) in itertools.product(range(lanes * spec.warps), places):
            assert byte == xor == 0
            copied[row + t // (columns // piece), t % (columns // piece)] = t * piece * size + at
        wanted = itertools.product(range(spec.tile), range(columns // piece))
        assert copied == {(row, c): (row * columns + c * piece) * size for row, c in wanted}
        assert len(copied) == lanes * spec.warps * len(places)


@SPECS
def test_x_comes_to_its_rows_and_columns(spec: Spec) -> None:
    """[x_high, chunk / 32, x_low, 32] in shared memory, k = 32 part + .. of row x_low high + low."""
    inside = spec.few * spec.chunk // 8
    parts = spec.chunk // 32
    copied = {}
    for thread, (row, byte, xor, at) in itertools.product(range(32 * spec.across), linear_copies._x_pieces(spec)):
        t = thread % inside
        m = t // (4 * spec.x_low * parts) * spec.x_low + t // 4 % spec.x_low
        k = t // (4 * spec.x_low) % parts * 32 + t % 4 * 8
        assert xor == 0
        copied[m + row, 2 * k + byte] = 16 * t + at
    wanted = {}
    for high, part, low, quarter in itertools.product(range(spec.x_high), range(parts), range(spec.x_low), range(4)):
        place = ((high * parts + part) * spec.x_low + low) * 4 + quarter
        wanted[high * spec.x_low + low, 64 * part + 16 * quarter] = 16 * place
    assert copied == wanted


@SPECS
def test_rings_lie_one_behind_the_other(spec: Spec) -> None:
    """In whole pieces of 128 bytes, as the one allocation counts them; the sums of a tile fit the slot that they take."""
    weight = spec.weights[0]
    assert 0 < spec.x_at < spec.scales_at <= spec.zeros_at <= spec.barriers_at <= spec.ring_bytes <= spec.shared_bytes
    assert not any(at % 128 for at in (spec.x_at, spec.scales_at, spec.zeros_at, spec.barriers_at, spec.ring_bytes))
    if not spec.sums_apart:
        assert 4 * spec.streams * spec.part_floats <= weight.slot_bytes(spec)
