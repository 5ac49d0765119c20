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

#: Rotary keys of 64 and latents of 512 dims (MLA).
_LATENTS = (("int8", "int8"), ("bf16", "int4"), ("int8", "int4_g32"))


def configurations() -> list[Configuration]:
    """The sample, each format that is not in it, and latents."""
    known = {name for row in _SAMPLE for name in row[:2]}
    in_pages = [name for name, fmt in KV_FORMATS.items() if fmt.granularity in (None, "head", "group")]
    rest = [(name, name, 128, False, False) for name in in_pages if name not in known]
    latents = [(keys, values, 64, False, False, 512) for keys, values in _LATENTS]
    return [c for row in (*_SAMPLE, *rest, *latents) for c in _configuration(*row)]


def _configuration(keys: str, values: str, dim: int, rotated: bool, new: bool, latent: int = 0) -> list[Configuration]:
    """8 KV heads of 16 sequences, or one of latents, in pages of 16 tokens, into 16-bit rows."""
    dtype, heads = torch.float16 if "fp16" in (keys, values) else torch.bfloat16, 1 if latent else 8
    sides = [
        kv_buffer(KV_FORMATS[name], (4096, heads, 16, size), 16, dtype) for name, size in ((keys, dim), (values, latent or dim))
    ]
    rows = empty(8192, heads, dim + latent, dtype=dtype)
    of_keys, of_values = rows.split([dim, latent], -1) if latent else (rows, rows)
    own = (rows, rows, empty(17)) if new else None
    name = f"unpack-{keys}-{values}-D{dim}{f'-latent{latent}' if latent else ''}{'-rotated' * rotated}{'-new' * new}"
    view = PagedView(*sides, empty(16), empty(16, 256), rotated)
    return recorded(name, lambda: launches(view, empty(17), of_keys, of_values, own)[0]())
