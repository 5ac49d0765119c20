"""Launching the tuned kernels of decode attention: few query rows decode/mma.py, many decode/wgmma.py."""

from __future__ import annotations

from typing import Any

from halfbyte.kernels.decode import mma, wgmma
from halfbyte.kernels.decode.arguments import Results, arguments, fixed_of, structs
from halfbyte.kv_buffer import DecodeCall
from halfbyte.plans.decode_attention import DecodePlan
from halfbyte.plans.decode_spec import DecodeWgmmaSpec


def launch(call: DecodeCall, plan: DecodePlan, results: Results) -> Any:
    """Launch on the current stream, compiling if need be; returns what was compiled."""
    spec = plan.spec
    kernel = wgmma.decode if isinstance(spec, DecodeWgmmaSpec) else mma.decode
    return kernel[(plan.programs,)](
        *structs(*arguments(call.tensors(), results, call.options, fixed_of(call, spec))),
        num_warps=spec.warps,
        launch_pdl=spec.use_pdl,
        maxnreg=255,  # without it the assembler spills for the sake of a third program, which shared memory has no room for
    )
