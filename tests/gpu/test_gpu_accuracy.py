"""The accuracy promise over thousands of drawn calls, against float64 over the same codes, with NaN in everything unused.

HALFBYTE_GPU_CASES sets how many calls (2,000), HALFBYTE_GPU_VARIANTS over how many compiled variants (150). A fifth more calls,
of a sixth as many variants, are of narrow heads in the order [B, T, H, D], and as many have sink and recent tokens.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpu_cases import (
    DIMS,
    GROUPS,
    KEYS,
    LAYOUTS,
    OPTIONS,
    PAGES,
    QUERIES,
    VALUES,
    Case,
    Variant,
    build,
    draw,
    exact_variants,
    latent_variants,
    narrow_variants,
    variants,
)
from gpu_place import PLACE, TALLY
from gpu_warm import in_parallel

import halfbyte as hb
from accuracy import attention_accuracy
from halfbyte.errors import InvalidArgument, Unsupported

CALLS = int(os.environ.get("HALFBYTE_GPU_CASES", PLACE.size(2000, 40)))
VARIANTS = int(os.environ.get("HALFBYTE_GPU_VARIANTS", PLACE.size(150, 40)))
SIZES = {"longest": PLACE.size(8192, 512), "elements": PLACE.size(2**25, 2**17)}
CASES = [
    *draw(CALLS, variants(VARIANTS), **SIZES),
    *draw(CALLS // 5, narrow_variants(VARIANTS // 6), **SIZES, seed=3),
    *draw(CALLS // 5, exact_variants(VARIANTS // 6), **SIZES, seed=4),
    *draw(CALLS // 10, latent_variants(VARIANTS // 12), **SIZES, seed=5),
]
Outcome = tuple[str, str, str]


def judged(cases: list[Case]) -> list[Outcome]:
    """(implementation, "ran" or "refused", what is wrong or why it was refused) of each call; the cases share a variant."""
    found = []
    for case in cases:
        call = build(case, PLACE.device)
        for impl in PLACE.impls:
            try:
                why = call.wrong(*call.run(impl))
                found.append((impl, "ran", f"{impl}: {why}: {case}" if why else ""))
            except (Unsupported, InvalidArgument) as error:
                found.append((impl, "refused", str(error)))
            except Exception as error:  # of the compiler, say: a failure, and the others are still to be judged
                found.append((impl, "ran", f"{impl}: {type(error).__name__}: {str(error)[-300:]}: {case}"))
    return found


@pytest.mark.timeout(600)
def test_the_accuracy_promise() -> None:
    """Each variant in a process of its own, of as many as there are cores: compiling takes longer than computing."""
    by_variant: dict[Variant, list[Case]] = {}
    for case in CASES:
        by_variant.setdefault(case.variant, []).append(case)
    outcomes = [outcome for found in in_parallel(judged, list(by_variant.values())) for outcome in found]
    for impl, what, why in outcomes:
        if what == "ran":
            TALLY.ran[impl] += 1
        else:
            TALLY.refused[impl, why] += 1
    TALLY.lines.append(f"accuracy: {len(CASES)} calls of {len(by_variant)} variants")
    failures = [why for _, what, why in outcomes if what == "ran" and why]
    assert not failures, f"{len(failures)} of {len(outcomes)} calls, the first:\n" + "\n".join(failures[:20])
    for impl in PLACE.impls:  # an implementation that refuses nearly everything would pass
        refused = sum(count for (who, _), count in TALLY.refused.items() if who == impl)
        assert TALLY.ran[impl] > refused, f"{impl} ran {TALLY.ran[impl]} calls and refused {refused}"
    assert not any(impl == "auto" for impl, _ in TALLY.refused), TALLY.refused


def test_the_calls_cover_what_they_should() -> None:
    seen = [case.variant for case in CASES if not case.variant.latent]
    assert {v.keys for v in seen} == set(KEYS)
    assert {v.values for v in seen} == set(VALUES)
    assert {v.dim for v in seen} == set(DIMS)
    assert {v.group for v in seen} == set(GROUPS)
    assert {0, 1} <= {n for case in CASES for n in case.lengths}
    assert {v.layout for v in seen} == set(LAYOUTS)
    assert {v.page for v in seen} == set(PAGES)
    assert {v.queries for v in seen} == set(QUERIES)
    assert {option for v in seen for option in v.options} == set(OPTIONS)


@pytest.mark.compile_first
@pytest.mark.parametrize("keys", KEYS)
def test_prefill_reads_the_past_and_its_own_chunk(keys: str, impl: str) -> None:
    """The past as it is stored, the chunk exactly, in fp16; against float64 within twice eager PyTorch's error."""
    values = "int4" if hb.KV_FORMATS[keys].token_block else keys
    for past, count in ((0, 17), (31, 40), (33, 100)):
        rng = torch.Generator(PLACE.device).manual_seed(past)
        k, v = torch.randn(2, 2, 2, past + count, 64, generator=rng, device=PLACE.device).half()
        q = torch.randn(2, 8, count, 64, generator=rng, device=PLACE.device).half()
        cache = hb.KVCache(2, 2, 64, 160, keys=keys, values=values, device=PLACE.device, dtype=torch.float16)
        cache.append(k[:, :, :past], v[:, :, :past])
        cache.append(k[:, :, past:], v[:, :, past:])
        exact = [torch.cat([old[:, :, :past], new[:, :, past:]], 2) for old, new in zip(cache.dequantized(), (k, v), strict=True)]
        out = hb.prefill_attention(q, k[:, :, past:], v[:, :, past:], cache, impl=impl)
        assert isinstance(out, torch.Tensor)
        truth, base = (causal(q.to(t), *(x.to(t) for x in exact), past) for t in (torch.float64, q.dtype))
        attention_accuracy(out, base, truth).require(f"{count} tokens behind {past}")


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int) -> torch.Tensor:
    """Attention of queries that begin at position `past`, in one dtype."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(past + 1)
    return (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.compile_first
def test_parts_of_a_sequence_merge_into_the_whole(impl: str) -> None:
    """What several devices, or a shared prefix, make of one sequence."""
    rng = torch.Generator(PLACE.device).manual_seed(0)
    k, v = torch.randn(2, 2, 2, 300, 128, generator=rng, device=PLACE.device).bfloat16()
    q = torch.randn(2, 8, 1, 128, generator=rng, device=PLACE.device).bfloat16()
    sinks = torch.randn(8, generator=rng, device=PLACE.device)

    def attend(first: int, last: int, **options: Any) -> Any:
        cache = hb.KVCache(2, 2, 128, 300, keys="int8", values="int4_g32", device=PLACE.device)
        cache.append(k[:, :, first:last], v[:, :, first:last])
        return hb.decode_attention(q, cache, return_lse=True, impl=impl, **options)

    whole, lse = attend(0, 300, sinks=sinks)
    parts = [attend(0, 130), attend(130, 131), attend(131, 300)]
    merged, merged_lse = hb.merge_states([out for out, _ in parts], [part for _, part in parts], sinks)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(merged, whole, rtol=0.02, atol=2 * torch.finfo(torch.bfloat16).eps * float(whole.abs().max()))
