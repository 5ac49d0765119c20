"""The variants of the portable decode kernel: the sample's calls, with the tiles that a plan gives them."""

from __future__ import annotations

import math

import torch

from halfbyte.kernels.aot.compiling import Configuration, empty, recorded
from halfbyte.kernels.aot.decode_sample import Sample, sample
from halfbyte.kernels.decode.portable import launch, workspace_floats
from halfbyte.plans.decode_portable import triton_tiles


def configurations() -> list[Configuration]:
    """Those of every call of the sample."""
    return [c for one in sample() for c in _configurations(one)]


def _configurations(one: Sample) -> list[Configuration]:
    call = one.call._replace(query_start=one.of_batch)
    k, v, (batch, query_heads, queries, dim) = call.keys, call.values, call.q.shape
    rows = query_heads // k.heads * queries
    tiles = triton_tiles(k.format, v.format, batch=batch, heads=k.heads, rows=rows, capacity=call.capacity, dim=dim, num_sms=132)
    partial = empty(workspace_floats(math.prod(call.q.shape[:3]), dim, tiles.splits), dtype=torch.float32)
    why = ""
    if "tokens-first" in one.name or one.name.endswith("many"):
        why = "up to 16 bytes: the assembler stops at 128 or 168 registers, so that one more program fits"
    if tiles.num_warps == 2:
        why = "up to 208 bytes: with per-channel scales two warps, which spill, take two thirds of the time of four"
    if dim > 128:
        why = "8 bytes on sm_100: heads of 256 fill the registers, and smaller tiles are slower"
    return recorded(one.name, lambda: launch(call, tiles, one.out, one.lse, partial), may_spill=why)
