"""The variants of the portable decode kernel: the sample's calls, with the tiles that a plan gives them."""

from __future__ import annotations

import math

import torch

from halfbyte.formats import KV_FORMATS
from halfbyte.kernels.compiling import Configuration, empty, kv_buffer, recorded
from halfbyte.kernels.decode.portable import launch, workspace_floats
from halfbyte.kv_buffer import AttentionOptions, DecodeCall
from halfbyte.plans.decode_portable import portable_plan, triton_tiles
from halfbyte.plans.decode_problem import problem_of
from variants.decode_sample import Sample, latents, sample


def configurations() -> list[Configuration]:
    """Those of every call of the sample; of latents; and of ragged queries: a prompt with decodes, and few, which are split."""
    found = [c for one in sample() for c in _configurations(one)]
    formats = ("bf16", "bf16"), ("bf16", "int8"), ("int8", "int4_g32"), ("fp8", "fp8")
    of_latents = [c for keys, values in formats for c in _latents(keys, values)]
    return [*found, *of_latents] + [
        c
        for tokens in (576, 20)
        for keys, values in (("int8", "int4_g32"), ("int4", "int4"))
        for c in _ragged(keys, values, tokens)
    ]


def _ragged(keys: str, values: str, tokens: int) -> list[Configuration]:
    """So many tokens of 16 sequences in pages of 16, as an engine calls it."""
    k, v = (kv_buffer(KV_FORMATS[name], (4096, 8, 16, 128), 16, torch.bfloat16) for name in (keys, values))
    q, table = empty(1, 32, tokens, 128, dtype=torch.bfloat16), empty(16, 256)
    call = DecodeCall(q, k, v, empty(16), None, table, AttentionOptions(0.1), cu_seqlens_q=empty(17))
    tiles = portable_plan(problem_of(call), 132, (8, 0))
    out, lse = call.new_results()
    partial = empty(workspace_floats(lse.numel(), 128, tiles.splits), dtype=torch.float32)
    name = f"{keys}-{values}-ragged{'-split' if tiles.splits > 1 else ''}"
    why = "80 bytes on sm_100: tiles of 32 rows fill the registers, and were chosen for sm_90"
    return recorded(name, lambda: launch(call, tiles, out, lse, partial), may_spill=why)


def _latents(keys: str, values: str) -> list[Configuration]:
    """A step of 16 heads over latents, as in DeepSeek V2 Lite; more heads take more programs."""
    call = latents(keys, values, 16).call._replace(query_start=empty(16))
    tiles = portable_plan(problem_of(call), 132, (8, 0))
    out, lse = call.new_results()
    partial = empty(workspace_floats(lse.numel(), 512, tiles.splits), dtype=torch.float32)
    why = "8 bytes: scales of groups are applied in registers" if "_g" in values else ""
    return recorded(f"{keys}-{values}-latent", lambda: launch(call, tiles, out, lse, partial), may_spill=why)


def _configurations(one: Sample) -> list[Configuration]:
    call = one.call._replace(query_start=one.of_batch)
    k, v, (batch, query_heads, queries, dim) = call.keys, call.values, call.q.shape
    rows = query_heads // k.heads * queries
    tiles = triton_tiles(k.format, v.format, batch=batch, heads=k.heads, rows=rows, capacity=call.capacity, dim=dim, num_sms=132)
    partial = empty(workspace_floats(math.prod(call.q.shape[:3]), dim, tiles.splits), dtype=torch.float32)
    why = ""
    if "tokens-first" in one.name or one.name.endswith("many"):
        why = "up to 16 bytes: the assembler stops at 128 or 168 registers, so that one more program fits"
    if "rotate" in one.name and rows > 32:
        why = "up to 24 bytes on sm_80 and sm_100, none on sm_90, which the tiles were chosen for"
    if "recent" in one.name and 2 in (k.format.code.bits, v.format.code.bits):
        why = "up to 64 bytes: sums over two-bit codes and rows in 16 bits fill the registers; the tuned kernel runs these calls"
    if tiles.num_warps == 2:
        why = "up to 208 bytes: with per-channel scales two warps, which spill, take two thirds of the time of four"
    if dim > 128:
        why = "8 bytes on sm_100: heads of 256 fill the registers, and smaller tiles are slower"
    return recorded(one.name, lambda: launch(call, tiles, one.out, one.lse, partial), may_spill=why)
