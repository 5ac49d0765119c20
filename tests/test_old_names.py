"""Names of 0.1 that a user may hold: they still work, and say what they are called now."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import halfbyte
from halfbyte import kv_buffer
from halfbyte.formats import WEIGHT_FORMATS, Scale


@pytest.mark.parametrize("old", ["Plane", "new_plane", "AttentionOptions"])
def test_planes_are_kv_buffers(old: str) -> None:
    from halfbyte import planes

    new = {"Plane": "KVBuffer", "new_plane": "new_kv_buffer"}.get(old, old)
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(planes, old) is getattr(kv_buffer, new)
    with pytest.raises(AttributeError, match="lasting"):
        _ = planes.lasting


def test_levels_of_a_code_are_its_codebook() -> None:
    code = WEIGHT_FORMATS["nf4"].code
    with pytest.warns(DeprecationWarning, match="codebook"):
        assert torch.equal(code.levels(), code.codebook())


def test_a_scale_for_each_column_is_one_for_each_out_channel() -> None:
    now = WEIGHT_FORMATS["int8_col"].scale
    assert now is not None
    with pytest.warns(DeprecationWarning, match="out_channel"):
        assert Scale("f16", "column") == now  # type: ignore[arg-type]


def test_a_tensor_that_was_pickled_with_the_old_name_is_read() -> None:
    """The pickle has what `Scale` held then: the name of the granularity."""
    made = halfbyte.quantize(torch.randn(4, 32), "int4_col")
    raw = pickle.dumps(made)
    assert raw.count(b"\x8c\x0bout_channel") == 1  # a short string and its length
    old = raw.replace(b"\x8c\x0bout_channel", b"\x8c\x06column")
    frame = int.from_bytes(old[3:11], "little") - (len(raw) - len(old))
    with pytest.warns(DeprecationWarning, match="out_channel"):
        read = pickle.loads(old[:3] + frame.to_bytes(8, "little") + old[11:])
    assert read.format == WEIGHT_FORMATS["int4_col"]
    assert torch.equal(read.dequantize(), made.dequantize())


def test_the_names_of_today_warn_of_nothing() -> None:
    made = halfbyte.quantize(torch.randn(4, 32), "int4_col")
    assert copy.deepcopy(made).format == pickle.loads(pickle.dumps(made)).format == WEIGHT_FORMATS["int4_col"]
