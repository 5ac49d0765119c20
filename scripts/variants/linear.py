"""What `make compile-check` compiles of the linear kernels, and what a plan would compile."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from halfbyte.device import GPU, H200, Capability
from halfbyte.formats import WEIGHT_FORMATS, weight_format
from halfbyte.kernels.compiling import (
    CAPABILITIES,
    Configuration,
    empty,
    empty_weight,
    gemm_launches,
    of_capability,
    operands,
    recorded,
)
from halfbyte.kernels.linear import mma, portable
from halfbyte.kernels.linear.results import Around
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_large import LargeSpec
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_portable import PortableTiles, portable_tiles
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import Epilogue, WgmmaSpec
from halfbyte.reference.experts import Activation

#: (format, M, N of each, K, options) for M up to 16: every kind of code and scale, every shape of tile, one weight to four.
_SMALL_M = (
    ("int4_sym_g128", 1, (4096,), 4096, ""),
    ("int4_sym_g128", 8, (16384,), 8192, "bias"),
    ("int4_sym_g128", 16, (16384,), 8192, ""),
    ("int4_sym_g128", 16, (4096,), 4096, "fp16"),
    ("int4_sym_g128", 4, (4096, 1024, 1024), 4096, "bias"),
    ("int4_g128", 1, (4096, 1024, 1024), 4096, ""),
    ("int4_g128", 1, (8192, 4096, 32, 32), 4096, ""),
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
    ("mxfp4", 1, (2880,), 2880, ""),
    ("int4_g32", 8, (2880,), 2880, "fp16"),
    ("nvfp4", 1, (4096, 1024, 1024), 4096, "bias"),
    ("nvfp4", 4, (28672,), 4096, ""),
    ("nvfp4", 8, (28672,), 4096, "fp16"),
    ("nvfp4", 16, (4096,), 4096, ""),
)
#: The same for warp-group MMA.
_WGMMA = (
    ("int4_g64", 33, (14336,), 4096, "fp16"),
    ("int4_sym_col", 24, (28672,), 4096, ""),
    ("int4_g128", 64, (28672,), 4096, ""),
    ("int4_sym_g128", 32, (8192,), 8192, ""),
    ("int4_g128", 17, (4096, 1024, 1024), 4096, "bias"),
    ("int4_g32", 32, (4096,), 4096, "fp16"),
    ("int4_sym_g32", 64, (8192,), 8192, ""),
    ("int4_sym_g128", 64, (8192,), 8192, ""),
    ("int4_g128", 64, (8192,), 8192, "fp16"),
    ("int4_sym_g128", 63, (8192, 1024, 1024), 8192, "bias"),
    ("int8_col", 64, (8192,), 8192, ""),
    ("int8_g128", 32, (4096,), 4096, "fp16"),
    ("nf4", 64, (8192,), 8192, ""),
    ("fp4_bnb", 32, (4096,), 4096, "fp16"),
    ("mxfp4", 64, (8192,), 8192, ""),
    ("mxfp4", 32, (4096,), 4096, "fp16"),
    ("nvfp4", 64, (8192, 1024, 1024), 8192, "bias"),
    ("mxfp4", 190, (8192,), 8192, "fp16"),
    ("nvfp4", 32, (4096,), 4096, "fp16"),
)
#: The same for large M: all shapes of tile, whole tiles and parts, steps whose scales are loaded at once and one by one.
_LARGE_M = (
    ("int4_sym_g128", 512, (8192,), 8192, ""),
    ("int4_sym_g128", 192, (4096,), 4096, "fp16"),
    ("int4_g128", 512, (4096,), 14336, ""),
    ("int4_g128", 1024, (4096, 1024, 1024), 4096, "bias"),
    ("int4_g64", 512, (28672,), 4096, "fp16"),
    ("int4_g32", 8192, (28672,), 4096, ""),
    ("int4_g32", 512, (2880,), 2880, "fp16"),
    ("int4_g32_fp32", 512, (4096,), 4096, ""),
    ("int4_sym_col", 512, (8192,), 8192, ""),
    ("int8_col", 512, (8192,), 8192, "fp16"),
    ("int8_g128", 512, (8192,), 8192, ""),
    ("nf4", 512, (8192,), 8192, ""),
    ("fp4_bnb", 512, (28672,), 4096, "fp16"),
    ("mxfp4", 512, (28672,), 4096, ""),
    ("mxfp4", 512, (2880,), 2880, "bias"),
    ("nvfp4", 512, (28672,), 4096, ""),
    ("nvfp4", 1024, (4096, 1024, 1024), 4096, "fp16 bias"),
    *((name, m, (4096,), 4096, "") for name in ("int4_g128", "nvfp4") for m in (65, 256)),
    ("int4_g32", 48, (1024,), 4096, ""),
    ("mxfp4", 128, (28672,), 4096, ""),
    ("nf4", 128, (2304,), 768, "bias"),
    ("int8_col", 64, (4096,), 4096, "fp16"),
    ("int8_g128", 128, (28672,), 4096, ""),
    ("int4_g128_a8", 2048, (8192,), 8192, ""),  # x in INT8 from here on
    ("int4_g64_a8", 512, (4096,), 4096, "fp16"),
    ("int4_sym_g128_a8", 1024, (4096, 1024, 1024), 4096, "bias"),
    ("int4_g32_a8", 512, (2880,), 2880, ""),
)
#: (format, M, N of each, K, options, epilogue) in a decoder block; the largest of each shape of tile.
_EPILOGUES = (
    ("int4_g128", 1, (4096,), 4096, "", Epilogue(adds=True, norm="rounded")),
    ("int4_g128", 8, (4096,), 14336, "bias", Epilogue(adds=True, multiplier=0.22, norm="offset")),
    ("nf4", 16, (4096,), 14336, "fp16", Epilogue(adds=True)),
    ("int4_g128", 1, (4096, 1024, 1024), 4096, "", Epilogue(parts=128, eps=1e-5)),
    ("nvfp4", 16, (4096, 1024, 1024), 4096, "bias", Epilogue(parts=64, eps=1e-5)),
    ("int4_g128", 1, (14336, 14336), 4096, "", Epilogue(parts=128, eps=1e-5, activation=Activation("silu"))),
    ("int4_g128", 8, (14336, 14336), 4096, "", Epilogue(parts=128, eps=1e-5, activation=Activation("silu"))),
    ("int4_g32", 4, (14336, 14336), 4096, "fp16 bias", Epilogue(activation=Activation("gelu_tanh"))),
    ("int8_col", 8, (14336, 14336), 4096, "", Epilogue(parts=128, eps=1e-5, activation=Activation("silu"))),
    ("mxfp4", 16, (14336, 14336), 4096, "", Epilogue(parts=64, eps=1e-5, activation=Activation("gelu_tanh"))),
)
#: (formats, M, N, K, options) for the portable kernel: every format and kind of tile is in it, most with both kinds of x.
_PORTABLE = (
    *((name, m, 4096, 4096, "") for name in WEIGHT_FORMATS for m in (16, 1024)),
    ("int4_g128", 1, 4096, 4096, "fp16"),
    ("int4_g128", 64, 4096, 4096, "fp16 bias"),
    ("int4_g128", 100, 4096, 4096, "fp16"),
    ("int4_g64", 4096, 8192, 8192, "fp16"),
    ("nf4", 1024, 4096, 4096, "fp16"),
    ("mxfp4", 1024, 4096, 4096, "fp16"),
    ("int4_sym_g32", 64, 4096, 4096, "invariant"),
    ("int4_g128", 8, 4001, 4224, "perm bias strided"),
    ("nf4", 16, 4001, 4160, "perm fp16"),
    ("int4_g128 int4_g128 int4_g128", 1, 2048, 4096, ""),
    ("int4_g64 nf4 nvfp4", 1024, 2048, 4096, "bias"),
)


def configurations() -> Iterator[Configuration]:
    """The samples' GEMMs, as a GPU of each capability would run them."""
    for sample in _SMALL_M:
        for capability in CAPABILITIES:
            yield from _tuned(*sample, capability)
    for sample in (*_WGMMA, *_LARGE_M):
        yield from _tuned(*sample, (9, 0))
    for case in _EPILOGUES:
        yield from _with_epilogue(*case)
    for call in _PORTABLE:
        yield from _portable(*call)


def _tuned(name: str, m: int, features: tuple[int, ...], k: int, options: str, capability: Capability) -> Iterator[Configuration]:
    """What a GEMM by a tuned kernel would compile on a GPU of 132 SMs."""
    problem = _problem(name, m, features, k, options)
    plan = tuned_gemm(problem, GPU("", 132, capability), use_pdl=True)
    if not isinstance(plan, GemmPlan):
        return
    why = "" if capability == (9, 0) else "up to 40 bytes: tiles were chosen for sm_90"
    if isinstance(plan.spec, WgmmaSpec) and plan.spec.tile == 256:
        why = "up to 16 bytes, outside the loop: 16 warps have 128 registers a thread"
    if isinstance(plan.spec, LargeSpec) and plan.spec.block_m == 256 and len(features) > 1:
        why = "up to 72 bytes: sums of 256 batch rows and several weights fill the registers; two reloads in the loop"
    if isinstance(plan.spec, LargeSpec) and plan.spec.x_bits == 8 and not plan.spec.aligned:
        why = "up to 136 bytes: groups of 32 that end inside of a step, beside sums of 256 batch rows; seven reloads in a step"
    full = f"{name}-M{m}-{'x'.join(map(str, features))}-{options}-{of_capability(capability)}"
    for launch in gemm_launches(problem, plan, "bias" in options):
        yield from recorded(full, launch, targets=(10 * capability[0] + capability[1],), may_spill=why)


def _problem(name: str, m: int, features: tuple[int, ...], k: int, options: str) -> GemmProblem:
    return GemmProblem(tuple((weight_format(name), n) for n in features), m, k, "fp16" if "fp16" in options else "bf16")


def _with_epilogue(
    name: str, m: int, features: tuple[int, ...], k: int, options: str, epilogue: Epilogue
) -> Iterator[Configuration]:
    """A projection with what surrounds it in a decoder block, as an H100 would run it."""
    problem = _problem(name, m, features, k, options)
    planned = _problem(name, m, (sum(features),), k, options) if epilogue.activation else problem
    plan = tuned_gemm(planned, H200, use_pdl=True)
    if not isinstance(plan, GemmPlan):  # not with every Triton
        return
    x, weights = operands(problem, "bias" in options)
    y, dtype = weights.outs[0], x.dtype
    if epilogue.activation:
        weights = weights._replace(outs=(y,))
    squares, weight = empty(1, m, dtype=torch.float32), empty(features[0], dtype=dtype)
    sums = {"residual": y} if epilogue.adds else {}
    sums |= {"weight": weight, "weighted": y, "own_squares": squares} if epilogue.norm else {}
    around = Around(squares=squares if epilogue.parts else None, **sums)
    given = (x, weights, replace(plan, spec=replace(plan.spec, epilogue=epilogue)))
    (launch,) = mma.launches(*given, empty(1, dtype=torch.float32), empty(1), around)
    activation = epilogue.activation.kind if epilogue.activation else ""
    words = "-".join([*(["scaled"] if epilogue.parts else []), activation, "sum" * epilogue.adds, epilogue.norm, options])
    yield from recorded(f"block-{name}-M{m}-{'x'.join(map(str, features))}-{words}", launch, targets=(90,))


def _portable(formats: str, m: int, n: int, k: int, options: str) -> Iterator[Configuration]:
    """The tiles that a plan gives a GEMM: those of Hopper, and those of older GPUs."""
    dtype = torch.float16 if "fp16" in options else torch.bfloat16
    weights = [empty_weight(WEIGHT_FORMATS[name], (n, k), "perm" in options) for name in formats.split()]
    x = empty(m, 2 * k, dtype=dtype)[:, ::2] if "strided" in options else empty(m, k, dtype=dtype)
    biases = [empty(n, dtype=dtype) if "bias" in options else None for _ in weights]
    outs = [empty(m, n, dtype=dtype) for _ in weights]
    problem = GemmProblem(tuple((w.format, n) for w in weights), m, k, "fp16" if "fp16" in options else "bf16")
    seen: dict[PortableTiles, tuple[int, ...]] = {}
    for capability in (8, 9, 10):
        tiles = portable_tiles(problem, GPU("", 132, (capability, 0)), "invariant" in options)
        seen[tiles] = (*seen.get(tiles, ()), 10 * capability)
    for tiles, targets in seen.items():
        name = "-".join([*formats.split(), f"M{m}", f"{tiles.block_n}x{tiles.block_m}x{tiles.block_k}", *options.split()])
        given = ([x] * len(weights), weights, biases, outs, tiles, empty(1, dtype=torch.float32), empty(1))
        yield from recorded(name, functools.partial(portable.launch, *given), targets=targets)
