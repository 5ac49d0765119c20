"""Products with quantised weights: the samples that `make compile-check` compiles for the tuned kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from halfbyte.formats import WEIGHT_FORMATS, Format
from halfbyte.kernels.aot.compiling import Configuration, empty, recorded
from halfbyte.plans.linear_spec import LinearPlan
from halfbyte.tensors import QuantTensor, expected_parts

#: (format, rows, N of each, K, options) for up to 16 rows: every kind of code and scale, every shape of tile, one weight and three.
FEW_ROWS = (
    ("int4_sym_g128", 1, (4096,), 4096, ""),
    ("int4_sym_g128", 8, (16384,), 8192, "bias"),
    ("int4_sym_g128", 16, (16384,), 8192, ""),
    ("int4_sym_g128", 16, (4096,), 4096, "fp16"),
    ("int4_sym_g128", 4, (4096, 1024, 1024), 4096, "bias"),
    ("int4_g128", 1, (4096, 1024, 1024), 4096, ""),
    ("int4_g128", 8, (28672,), 4096, ""),
    ("int4_g32", 2, (4096,), 4096, "fp16"),
    ("int4_g32", 4, (28672,), 4096, ""),
    ("int4_g32", 16, (4096,), 4096, ""),
    ("int4_g64", 8, (28672,), 4096, ""),
    ("int4_sym_g32", 8, (4096,), 4096, ""),
    ("int4_sym_col", 1, (28672,), 4096, ""),
    ("int8_col", 1, (4096,), 4096, ""),
    ("int8_g128", 16, (4096,), 4096, "fp16"),
    ("nf4", 1, (8192,), 8192, ""),
    ("nf4", 8, (28672,), 4096, ""),
    ("nf4", 16, (28672,), 4096, "fp16"),
    ("fp4_bnb", 4, (4096,), 4096, ""),
    ("mxfp4", 1, (4096, 1024, 1024), 4096, ""),
    ("mxfp4", 2, (28672,), 4096, ""),
    ("mxfp4", 8, (4096,), 4096, "fp16"),
    ("mxfp4", 16, (28672,), 4096, ""),
    ("nvfp4", 1, (4096, 1024, 1024), 4096, "bias"),
    ("nvfp4", 4, (28672,), 4096, ""),
    ("nvfp4", 8, (28672,), 4096, "fp16"),
    ("nvfp4", 16, (4096,), 4096, ""),
)
#: The same for warp-group products.
WARP_GROUPS = (
    ("int4_g64", 33, (4096, 1024, 1024), 4096, "fp16"),
    ("int4_sym_col", 24, (28672,), 4096, ""),
    ("int4_sym_g128", 32, (8192,), 8192, ""),
    ("int4_g128", 17, (4096, 1024, 1024), 4096, "bias"),
    ("int4_g32", 32, (4096,), 4096, "fp16"),
    ("int4_sym_g32", 64, (4096,), 4096, ""),
    ("int4_sym_g128", 64, (8192,), 8192, ""),
    ("int4_g128", 64, (8192,), 8192, "fp16"),
    ("int4_sym_g128", 200, (4096, 1024, 1024), 4096, "bias"),
    ("int8_col", 64, (4096,), 4096, ""),
    ("int8_g128", 32, (4096,), 4096, "fp16"),
    ("nf4", 64, (8192,), 8192, ""),
    ("fp4_bnb", 32, (4096,), 4096, "fp16"),
    ("mxfp4", 64, (8192,), 8192, ""),
    ("mxfp4", 32, (4096,), 4096, "fp16"),
    ("nvfp4", 64, (4096, 1024, 1024), 4096, "bias"),
    ("nvfp4", 32, (4096,), 4096, "fp16"),
)


def sample_configurations(
    name: str,
    rows: int,
    features: tuple[int, ...],
    width: int,
    options: str,
    *,
    plan: Callable[..., LinearPlan | str],
    launch: Callable[..., object],
    capability: tuple[int, int],
) -> Iterator[Configuration]:
    """What a launch of x [rows, width] times weights of one format would compile on a GPU of 132 multiprocessors."""
    fmt, kind = WEIGHT_FORMATS[name], "fp16" if "fp16" in options else "bf16"
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    weights = [_empty_weight(fmt, (n, width)) for n in features]
    outs = [empty(rows, n, dtype=dtype) for n in features]
    biases = [empty(n, dtype=dtype) if "bias" in options else None for n in features]
    shapes = [(fmt, n) for n in features]
    made = plan(shapes, m=rows, width=width, dtype=kind, num_sms=132, capability=capability, use_pdl=True)
    if isinstance(made, LinearPlan):
        rest = (made.spec, made.programs, empty(1, dtype=torch.float32), empty(1))
        why = "" if capability == (9, 0) else "up to 40 bytes: tiles were chosen for sm_90"
        full = f"{name}-M{rows}-{'x'.join(map(str, features))}-{options}-{capability[0]}x"
        call = functools.partial(launch, empty(rows, width, dtype=dtype), weights, biases, outs, *rest)
        yield from recorded(full, call, targets=(10 * capability[0],), may_spill=why)


def _empty_weight(fmt: Format, shape: tuple[int, int]) -> QuantTensor:
    return QuantTensor(
        fmt, shape, **{name: empty(*size, dtype=dtype) for name, (size, dtype) in expected_parts(fmt, shape).items()}
    )
