"""What `make compile-check` compiles of the kernel that dequantizes weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.formats import WEIGHT_FORMATS, Format
from halfbyte.kernels.compiling import Configuration, empty, recorded
from halfbyte.kernels.dequantize import launch
from halfbyte.tensors import QuantTensor, expected_parts


def configurations() -> list[Configuration]:
    """Every format alone, and three weights in one launch; the dtypes in turn."""
    names = list(WEIGHT_FORMATS)
    alone = [_configuration((name,), (torch.bfloat16, torch.float16)[i % 2]) for i, name in enumerate(names)]
    groups = [(name,) * 3 for name in ("nf4", "mxfp4", "nvfp4")] + [("int4_g128", "nf4_dq", "int8_col"), ("int4_sym_g32", "nvfp4")]
    ordered = _configuration(("int4_g128",), torch.float16, act_order=True)
    return [c for found in [*alone, *(_configuration(group, torch.bfloat16) for group in groups), ordered] for c in found]


def _configuration(formats: Sequence[str], dtype: torch.dtype, act_order: bool = False) -> list[Configuration]:
    shape = (1024, 4096)
    weights = [_without_memory(WEIGHT_FORMATS[name], shape, act_order) for name in formats]
    out = empty(len(weights) * shape[0], shape[1], dtype=dtype)
    name = f"{'+'.join(formats)}-{str(dtype).removeprefix('torch.')}{'-act-order' * act_order}"
    return recorded(name, lambda: launch(weights, out, 0))


def _without_memory(fmt: Format, shape: tuple[int, int], act_order: bool) -> QuantTensor:
    parts = expected_parts(fmt, shape, act_order=act_order)
    return QuantTensor(fmt, shape, **{name: empty(*s, dtype=d) for name, (s, d) in parts.items()})
