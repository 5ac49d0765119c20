"""The variants of the tuned decode kernels: the sample's calls, as a GPU of each capability would be given them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from halfbyte.device import GPU
from halfbyte.formats import KV_FORMATS
from halfbyte.kernels.compiling import CAPABILITIES, Configuration, attention_launches, empty, kv_buffer, of_capability, recorded
from halfbyte.kv_buffer import AttentionOptions, DecodeCall
from halfbyte.plans.decode_attention import gluon_plan, plans_of
from halfbyte.plans.decode_problem import problem_of
from halfbyte.plans.decode_spec import DecodePlan, DecodeWgmmaSpec
from variants.decode_sample import Sample, latents, sample

#: Why a variant may spill on an architecture that its tiles were not chosen for.
_SUMS = "up to 72 bytes, where parts of a unit are added: nothing is spilled in the loop over tiles"
_CHANNELS = "up to 152 bytes, where more than 8 query rows take per-channel scales; 8 bytes with 8 rows on sm_80"
_TAIL = "up to 208 bytes, where 16 query rows, or heads of 256, take a tail: none in the loop over tiles but with heads of 256"
_SPLITS = "up to 96 bytes, where queries stay in registers while splits of fixed size are added, of 16 rows or with a tail"
_FULL = "up to 192 bytes: heads of 256, many rows, or masks by row, fill the registers; tiles were chosen for sm_90"
_WIDE = "up to 1,000 bytes, where scales lie along heads of 512: still 1.1 to 3.5 times as fast as the portable kernel"
_LATENTS = "up to 304 bytes: queries of an item and sums of parts; with 32 rows a few words in the loop over tiles, too"

#: Calls of the sample that are compiled with `deterministic_batch`, too.
_INVARIANT = {
    "int4-int4-D128-G8-L1",
    "int8-int8-D128-G8-L1-page64-sinks",
    "int8-int4_g32-D128-G4-L1-page64-rotate-window",
    "int4_g32-int4_g32-D128-G4-L4-alibi",
    "int8_token-int8_token-D96-G5-L2-starts",
    "int4_channel-int8_g32-D64-G8-L1-page64-rotate",
    "bf16-bf16-D128-G4-L1",
    "int2-int2-D128-G8-L1-many",
    "int4-int4-D128-G8-L1-tokens-first",
    "int4-int4-D128-G8-L1-recent",
}
#: Keys, values, query heads, new tokens, page.
_OVER_LATENTS = (
    ("int8", "int8", 16),
    ("int8", "int4", 16, 1, 64),
    ("bf16", "int8", 10),
    ("fp8", "fp8", 32),
    ("int8", "int4", 16, 2),
    ("int8", "int8", 128),
    ("int8", "int4", 128, 1, 16),
)


def configurations() -> list[Configuration]:
    """Those of every call of the sample, and of blocks of queries: of speculation, of short and of long chunks, of prompts."""
    calls = list(sample())
    calls += [
        one._replace(name=f"{one.name}-invariant", call=one.call._replace(deterministic_batch=True))
        for one in calls
        if one.name in _INVARIANT
    ]
    calls += [latents(*of) for of in _OVER_LATENTS]
    blocks = product((("int8", "int4_g32"), ("int4", "int4")), (0, 4, 16, 512))
    return [c for one in calls for c in _configurations(one)] + [c for formats, most in blocks for c in _blocks(*formats, most)]


def _configurations(one: Sample) -> Iterator[Configuration]:
    problem = problem_of(one.call)
    lean = problem.queries == 1 and not problem.alibi and not problem.softcap
    for capability in CAPABILITIES:
        plan = gluon_plan(problem, 132, capability, True)
        if isinstance(plan, DecodePlan):
            spec = plan.spec
            full = capability != (9, 0) and (problem.dim > 128 or problem.group >= 16 or not lean)
            spilling = _FULL if full else _SUMS if isinstance(spec, DecodeWgmmaSpec) else ""
            if spec.latent:
                spilling = _LATENTS
            elif problem.dim > 256:
                spilling = _WIDE if spec.keys.scale_inside or spec.values.scale_inside else _FULL
            elif spec.keys.block and (spec.padded_rows > 8 or capability[0] == 8):
                spilling = _CHANNELS
            if spec.tail_rows and spec.numbers > 1024:
                spilling = _TAIL
            if spec.split and (spec.padded_rows > 8 or spec.tail_rows):
                spilling = _SPLITS
            target = 10 * capability[0] + capability[1]
            (launch,) = attention_launches(one.call, plan)
            for variant in recorded(f"{one.name}-{of_capability(capability)}", launch):
                yield replace(variant, targets=(target,), may_spill=spilling)


def _blocks(keys: str, values: str, most: int) -> Iterator[Configuration]:
    """Ragged queries of 16 sequences in pages of 16, up to `most` of one, as an engine calls it; 0: a prompt of 40 tokens."""
    k, v = (kv_buffer(KV_FORMATS[name], (4096, 8, 16, 128), 16, torch.bfloat16) for name in (keys, values))
    if most:
        q, bounds, name = empty(1, 32, 576, 128, dtype=torch.bfloat16), empty(17), f"ragged{most}"
    else:
        q, bounds, name = empty(16, 32, 40, 128, dtype=torch.bfloat16), None, "prompt"
    call = DecodeCall(q, k, v, empty(16), None, empty(16, 256), AttentionOptions(0.1), cu_seqlens_q=bounds, max_query_len=most)
    for capability in CAPABILITIES:
        plans = plans_of(problem_of(call), "gluon", most, GPU("", 132, capability), True)
        for launch in attention_launches(call, plans[0]):
            for variant in recorded(f"{keys}-{values}-{name}-{of_capability(capability)}", launch):
                yield replace(variant, targets=(10 * capability[0] + capability[1],), may_spill=_FULL)
