"""The variants of the kernel that unpacks pages into dense rows."""

from __future__ import annotations

import torch

from halfbyte.formats import KV_FORMATS
from halfbyte.kernels.compiling import Configuration, empty, kv_buffer, recorded
from halfbyte.kernels.decode.unpack import launches
from halfbyte.kv_buffer import PagedView

#: (keys, values, D, whether keys are rotated, whether the newest tokens come unquantized). Every other format is added with itself.
_SAMPLE = (
    ("int8", "int4_g32", 128, False, False),
    ("int8", "int4_g32", 128, False, True),
    ("int4", "int4", 128, True, False),
    ("int4_g32", "int4_g32", 64, False, False),
    ("fp8", "int8", 96, True, True),
    ("int8", "int8", 256, False, False),
    ("int2_g32", "int2", 128, False, False),
)


def configurations() -> list[Configuration]:
    """The sample, and each format that is not in it."""
    known = {name for row in _SAMPLE for name in row[:2]}
    in_pages = [name for name, fmt in KV_FORMATS.items() if fmt.granularity in (None, "head", "group")]
    rest = [(name, name, 128, False, False) for name in in_pages if name not in known]
    return [c for row in (*_SAMPLE, *rest) for c in _configuration(*row)]


def _configuration(keys: str, values: str, dim: int, rotated: bool, new: bool) -> list[Configuration]:
    """8 KV heads of 16 sequences in pages of 16 tokens, into 16-bit rows."""
    dtype = torch.float16 if "fp16" in (keys, values) else torch.bfloat16
    sides = [kv_buffer(KV_FORMATS[name], (4096, 8, 16, dim), 16, dtype) for name in (keys, values)]
    rows = empty(8192, 8, dim, dtype=dtype)
    own = (rows, rows, empty(17)) if new else None
    name = f"unpack-{keys}-{values}-D{dim}{'-rotated' * rotated}{'-new' * new}"
    view = PagedView(*sides, empty(16), empty(16, 256), rotated)
    return recorded(name, lambda: launches(view, empty(17), rows, rows, own)[0]())
