"""`append_slots`, interpreted: every byte is the reference's, and only the slots that are named are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from append_levels import PAIRS, poisoned, tokens
from halfbyte import engine
from halfbyte.formats import key_format, value_format
from halfbyte.kv_buffer import KVBuffer, new_kv_buffer
from halfbyte.reference.rope import rope_tables

#: Of 9 tokens into 6 pages of 16: out of order, the first and the last slot, skipped ones.
SLOTS = [95, 0, -1, 17, 16, 40, -7, 33, 1]


def buffers(keys: str, values: str, dim: int, how: str) -> list[KVBuffer]:
    made = []
    for fmt in (key_format(keys), value_format(values)):
        new = new_kv_buffer(
            fmt, (6, 3, 16, dim), (6, 3, 0, dim), torch.bfloat16, "cpu", 0.25 if fmt.granularity == "tensor" else None
        )
        made.append(KVBuffer(fmt, *(poisoned(t, how) for t in new.tensors()[:3]), None, new.saturated))  # type: ignore[arg-type]
    return made


def assert_same(a: list[KVBuffer], b: list[KVBuffer]) -> None:
    for p, q in zip(a, b, strict=True):
        for s, t in zip((*p.tensors()[:3], p.saturated), (*q.tensors()[:3], q.saturated), strict=True):
            if s is not None and t is not None:
                assert torch.equal(s.contiguous().view(torch.uint8), t.contiguous().view(torch.uint8))


def new_tokens(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = (x.squeeze(2) for x in tokens((len(SLOTS), 3, 1, dim), dtype=dtype))
    slots = torch.tensor(SLOTS)
    k[slots < 0] = v[slots < 0] = torch.nan  # of what is skipped nothing is looked at
    return k, v, slots


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(("keys", "values"), [pair for pair in PAIRS if not key_format(pair[0]).token_block])
def test_every_format_is_the_reference_bit_for_bit(keys: str, values: str) -> None:
    i = PAIRS.index((keys, values))
    dtype, how = (torch.float16, torch.bfloat16, torch.float32)[i % 3], ("whole", "turned")[i % 2]
    k, v, slots = new_tokens(64, dtype)
    made: dict[str, list[KVBuffer]] = {}
    for impl in ("reference", "triton"):
        made[impl] = buffers(keys, values, 64, how)
        engine.append_slots(k, v, *made[impl], slots if i % 2 else slots.int(), rotate_keys=i % 4 == 1, impl=impl)
    assert_same(made["reference"], made["triton"])


@pytest.mark.parametrize("dim", [64, 80])
def test_rotary_embedding_and_queries_in_the_same_launch(dim: int) -> None:
    k, v, slots = new_tokens(dim, torch.bfloat16)
    q = torch.randn(len(SLOTS), 7, 2 * dim).bfloat16()[..., :dim]
    rope = rope_tables(torch.arange(len(SLOTS)) * 5, dim)
    made: dict[str, list[KVBuffer]] = {}
    rotated: dict[str, Any] = {}
    for impl in ("reference", "triton"):
        made[impl] = buffers("int8", "int4", dim, "whole")
        rotated[impl] = engine.append_slots(k, v, *made[impl], slots, rope=rope, q=q, impl=impl)
    assert_same(made["reference"], made["triton"])
    assert rotated["triton"].shape == q.shape
    assert torch.equal(rotated["reference"], rotated["triton"])


def test_pages_of_bytes_and_slots_beyond_them() -> None:
    """A kernel writes no byte for a slot that is not there."""
    layout = engine.PageLayout("int8", "int4_g32", 64)
    memory = torch.full((6, 3, 16, layout.token_head_bytes), 0xFF, dtype=torch.uint8)
    k, v, slots = new_tokens(64, torch.bfloat16)
    engine.append_slots(k, v, *layout.buffers(memory[:5]), slots, impl="triton")  # 95 lies in the sixth page
    assert bool((memory[5] == 0xFF).all())
    expected = torch.full_like(memory, 0xFF)
    there = slots < 80
    engine.append_slots(k[there], v[there], *layout.buffers(expected), slots[there], impl="reference")
    assert torch.equal(memory, expected)
