"""What `make compile-check` compiles of the kernel for mixtures of experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.aot.compiling import Configuration, empty, recorded
from halfbyte.kernels.linear.experts import launch
from halfbyte.plans.experts import experts_tiles
from halfbyte.reference.experts import Activation, ExpertsCall
from halfbyte.tensors import QuantTensor, expected_parts

_OAI = Activation("silu", 1.702, 7.0, 1.0)
#: (E, top_k, N, K, activation, what else) of the two projections of Qwen3-30B-A3B and of GPT-OSS-20B.
_QWEN = ((128, 8, 1536, 2048, Activation("silu"), ""), (128, 8, 2048, 768, None, "gates"))
_OSS = ((32, 4, 5760, 2880, _OAI, "bias"), (32, 4, 2880, 2880, None, "bias gates"))
#: (format, tokens, projection): every format for decoding, every kind of work, and prompts.
_CASES = (
    *((name, 1, projection) for name in WEIGHT_FORMATS for projection in _QWEN),
    *(("int4_g128", tokens, projection) for tokens in (16, 1024) for projection in _QWEN),
    *(("mxfp4", tokens, projection) for tokens in (1, 16, 64, 1024) for projection in _OSS),
    ("nvfp4", 1024, (128, 8, 1536, 2048, Activation("gelu"), "fp16")),
    ("nf4", 4096, (128, 8, 2048, 768, None, "gates fp16")),
    ("int4_g32", 16, (8, 2, 4096, 4096, Activation("gelu_tanh"), "fp16 bias")),
)


def configurations() -> Iterator[Configuration]:
    """The cases' launches, which are the same on every GPU of 132 SMs."""
    for name, tokens, (experts, top_k, features, width, activation, options) in _CASES:
        fmt, shape = WEIGHT_FORMATS[name], (experts, features, width)
        dtype = torch.float16 if "fp16" in options else torch.bfloat16
        stack = QuantTensor(fmt, shape, **{part: empty(*size, dtype=d) for part, (size, d) in expected_parts(fmt, shape).items()})
        tiles = experts_tiles(fmt, *shape, tokens=tokens, top_k=top_k, num_sms=132)
        gated = "gates" in options
        call = ExpertsCall(
            empty(tokens * (top_k if gated else 1), width, dtype=dtype),
            stack,
            empty(tokens, top_k, dtype=torch.int64),
            empty(tokens, top_k, dtype=dtype) if gated else None,
            empty(experts, features, dtype=dtype) if "bias" in options else None,
            activation,
        )
        table = (None, None) if tiles.inline else (empty(tokens * top_k), empty(experts + 1))
        given = (call.new_result(), tiles, table, empty(1, dtype=torch.float32), empty(1))
        kind = "" if activation is None else activation.kind
        full = "-".join(["experts", name, f"T{tokens}", "x".join(map(str, shape)), kind, *options.split()])
        why = "up to 32 bytes on sm_80 and sm_100, none on sm_90, which the tiles were chosen for"
        yield from recorded(full, functools.partial(launch, call, *given), may_spill=why)
