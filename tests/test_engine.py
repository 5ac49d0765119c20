"""What engines call: packed pages in memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfbyte import engine
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from halfbyte.ops._decode_problem import problem_of
from halfbyte.ops.append import append_
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.paging import PagedKVCache
from halfbyte.plans.decode_attention import DecodePlan, gluon_plan

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PAIRS = [(k, v) for k in engine.PAGE_FORMATS for v in engine.PAGE_FORMATS]
#: Strides of [pages, H, N, C] in vLLM's layouts, as orders of the axes in memory: layers (L), blocks (B), heads (H), tokens (N).
ORDERS = {"LBHNC": "lbhnc", "LBNHC": "lbnhc", "BLHNC": "blhnc", "BLNHC": "blnhc"}


def memory_of(layout: engine.PageLayout, order: str = "lbhnc", pages: int = 12, heads: int = 2, tokens: int = 16) -> torch.Tensor:
    """uint8 [pages, H, N, C], the second of three layers, full of NaN."""
    sizes = {"l": 3, "b": pages, "h": heads, "n": tokens, "c": layout.token_head_bytes}
    whole = torch.full([sizes[axis] for axis in order], 0xFF, dtype=torch.uint8)
    return whole.permute(*(order.index(axis) for axis in "lbhnc"))[1]


def test_formats_that_do_not_live_in_a_page_say_why() -> None:
    for name in KV_FORMATS:
        if name not in engine.PAGE_FORMATS:
            with pytest.raises(Unsupported, match=f"keys='{name}' cannot live in a page: .*; choose one of: fp16, bf16, int8,"):
                engine.PageLayout(name, "int8", 64)
    assert set(KV_FORMATS) - set(engine.PAGE_FORMATS) >= {"int8_tensor", "int8_token", "int8_channel", "fp8_tensor", "int4_channel"}


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_every_pair_in_a_page_takes_the_tuned_kernel(keys: str, values: str) -> None:
    """As planned for an H200, in every order of heads and tokens that an engine has."""
    layout = engine.PageLayout(keys, values, 128)
    dtype = torch.float16 if "fp16" in (keys, values) else torch.bfloat16
    if {"fp16", "bf16"} <= {keys, values}:
        return  # queries have one of these types, and the tuned kernel mixes none
    for order in ORDERS.values():
        buffers = layout.buffers(memory_of(layout, order))
        table, lengths = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        call = DecodeCall(torch.empty(3, 8, 1, 128, dtype=dtype), *buffers, lengths, None, table, AttentionOptions(0.1))
        plan = gluon_plan(problem_of(call), 132, (9, 0), True)
        assert isinstance(plan, DecodePlan), f"{order}: {plan}"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("keys", "values"), [("int8", "int4_g32"), ("int4", "fp8"), ("fp16", "int4_g64"), ("int8_g32", "bf16")])
def test_a_page_holds_what_a_cache_holds(keys: str, values: str, order: str) -> None:
    layout = engine.PageLayout(keys, values, 64, 128)
    memory = memory_of(layout, ORDERS[order])
    buffers = layout.buffers(memory)
    table = torch.tensor([[3, 7, 1], [0, 11, 5]], dtype=torch.int32)
    view = engine.PagedView(*buffers, torch.zeros(2, dtype=torch.int32), table)
    cache = PagedKVCache(2, 2, 64, 48, keys=keys, values=values, value_dim=128, page_size=16)
    k, v = torch.randn(2, 2, 40, 64), torch.randn(2, 2, 40, 128)
    cache.append(k, v)
    append_(k, v, *buffers, view.lengths, page_table=table)
    q = torch.randn(2, 4, 1, 64)
    assert torch.equal(decode_attention(q, view), decode_attention(q, cache))  # type: ignore[arg-type]

    def stored(buffer: KVBuffer) -> int:
        return sum(t.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() for t in buffer.tensors() if t is not None)

    assert stored(buffers[0]) + stored(buffers[1]) == sum(t is not None for b in buffers for t in b.tensors())


def test_a_page_is_used_up_and_no_byte_twice() -> None:
    """Each array filled with ones of its own: every byte of a page belongs to exactly one."""
    for keys, values in PAIRS:
        layout = engine.PageLayout(keys, values, 64, 128)
        memory = torch.zeros(2, 3, 32, layout.token_head_bytes, dtype=torch.uint8)
        for buffer in layout.buffers(memory):
            for t in buffer.tensors():
                if t is not None:
                    raw = t.view(torch.uint8) if t.dtype is not torch.uint8 else t
                    raw += 1
                    assert t.data_ptr() % 16 == 0
        assert bool((memory == 1).all()), (keys, values)


def test_bytes_of_a_token() -> None:
    assert engine.PageLayout("int8", "int4_g32", 128).token_head_bytes == 128 + 2 + 64 + 4 * 4
    assert engine.PageLayout("int4", "int4", 64, 128).token_head_bytes == 32 + 4 + 64 + 4
    assert engine.PageLayout("fp16", "bf16", 64).token_head_bytes == 256
    assert engine.PageLayout("int8", "int8", 64) == engine.PageLayout("int8", "int8", 64, 64)
    assert len({engine.PageLayout("int8", "int8", 64), engine.PageLayout("int8", "int8", 64)}) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda c: torch.zeros(2, 2, 16, c + 2, dtype=torch.uint8),
            "a token and head; int8 keys of 64 and int4 values of 64 take",
        ),
        (lambda c: torch.zeros(2, 2, 16, c), "memory is torch.float32 .* expected uint8"),
        (lambda c: torch.zeros(2, 16, c, dtype=torch.uint8), r"memory is torch.uint8 \[2, 16, .* expected uint8"),
        (lambda c: [1], "memory is a list; expected uint8"),
        (lambda c: torch.zeros(2, 2, 8, c, dtype=torch.uint8), "pages of 8 tokens; expected a multiple of 16"),
        (lambda c: torch.zeros(2, 2, 16, 2 * c, dtype=torch.uint8)[..., :c], "a page must be one piece"),
        (lambda c: torch.zeros(1, 2, 16, c, dtype=torch.uint8).expand(4, 2, 16, c), "a page must be one piece"),
        (
            lambda c: torch.zeros(2 * 2 * 16 * c + 16, dtype=torch.uint8)[1:][: 2 * 2 * 16 * c].view(2, 2, 16, c),
            "not aligned to 16",
        ),
    ],
)
def test_memory_that_is_no_page(given: Any, message: str) -> None:
    layout = engine.PageLayout("int8", "int4", 64)
    with pytest.raises(InvalidArgument, match=message):
        layout.buffers(given(layout.token_head_bytes))


def test_heads_that_a_format_cannot_hold() -> None:
    with pytest.raises(InvalidArgument, match=r"values has a last axis of 80, which groups of 32 \(int4_g32\) do not divide"):
        engine.PageLayout("int8", "int4_g32", 80)
    with pytest.raises(InvalidArgument, match="head_dim=0"):
        engine.PageLayout("int8", "int8", 0)
    with pytest.raises(InvalidArgument, match="keys='int3' is not a format"):
        engine.PageLayout("int3", "int8", 64)
