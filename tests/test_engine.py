"""What engines call: packed pages in memory of their own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte import engine
from halfbyte.cache_plan import CachePlan, LayerFormats, ModelSizes
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.formats import KV_FORMATS, key_format
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer, new_kv_buffer
from halfbyte.ops.append import append_
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.ops.linear import linear
from halfbyte.paging import PagedKVCache
from halfbyte.plans.decode_attention import gluon_plan
from halfbyte.plans.decode_problem import problem_of
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.reference import attention as reference
from halfbyte.reference.quantize import dequantize, quantize
from halfbyte.reference.rope import rope_tables

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
            with pytest.raises(Unsupported, match=f"keys='{name}' cannot be stored in pages: .*; choose one of: fp16, bf16, int8,"):
                engine.PageLayout(name, "int8", 64)
    assert set(KV_FORMATS) - set(engine.PAGE_FORMATS) >= {"int8_tensor", "int8_token", "int8_channel", "fp8_tensor", "int4_channel"}


def test_the_pages_of_a_plan(tmp_path: Path) -> None:
    """Formats and rotation of each layer; what does not live in a page is refused by the layer's number."""
    layers = (LayerFormats("int4", "int2_g32", True), LayerFormats("int8", "bf16"))
    plan = CachePlan(ModelSizes("llama", 2, 4, 64, 128, 256), layers, 8.0)
    layouts = engine.PageLayout("int4", "int2_g32", 64, 128), engine.PageLayout("int8", "bf16", 64, 128)
    expected = [engine.LayerPages(layouts[0], True), engine.LayerPages(layouts[1])]
    assert engine.page_layouts(plan) == engine.page_layouts(plan.write(tmp_path / "plan.json")) == expected
    with pytest.raises(Unsupported, match="plan, layer 1: keys='int4_channel' cannot be stored in pages"):
        engine.page_layouts(replace(plan, layers=(layers[0], LayerFormats("int4_channel", "int8"))))
    with pytest.raises(Unsupported, match="sink_tokens=0, recent_tokens=64, which belong to a sequence"):
        engine.page_layouts(replace(plan, recent_tokens=64))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        engine.page_layouts(tmp_path / "none.json")


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
    # the page of an engine says itself whether it is rotated: not by default
    cache = PagedKVCache(2, 2, 64, 48, keys=keys, values=values, value_dim=128, page_size=16, rotate_keys=False)
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
        (lambda c: torch.zeros(2, 2, 16, c + 2, dtype=torch.uint8), "a token and head; int8 keys of 64 and int4 values of 64 take"),
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


# ----------------------------------------------------------------------------------------------------------- append_slots


def pages_of(layout: engine.PageLayout, count: int = 12) -> tuple[KVBuffer, KVBuffer]:
    return layout.buffers(memory_of(layout, pages=count))


@pytest.mark.parametrize(
    ("keys", "values", "rotate_keys"), [("int8", "int4_g32", False), ("int4", "fp8", True), ("bf16", "int8_g64", False)]
)
def test_tokens_go_where_slots_say(keys: str, values: str, rotate_keys: bool) -> None:
    """The bytes of an append by page table, whatever the order of tokens; padding is skipped, and lengths are not there."""
    layout, table = engine.PageLayout(keys, values, 64), torch.tensor([[3, 7, 1], [0, 11, 5]], dtype=torch.int32)
    expected, got = memory_of(layout), memory_of(layout)
    k, v, q = torch.randn(2, 2, 40, 64), torch.randn(2, 2, 40, 64), torch.randn(2, 4, 40, 64)
    rope = rope_tables(torch.arange(40), 64)
    lengths = torch.zeros(2, dtype=torch.int32)
    rotated = append_(k, v, *layout.buffers(expected), lengths, page_table=table, rotate_keys=rotate_keys, rope=rope, q=q)
    assert rotated is not None

    position = torch.arange(40).repeat(2)
    slots = table.repeat_interleave(40, 0)[torch.arange(80), position // 16] * 16 + position % 16
    order = torch.cat([torch.randperm(80), torch.tensor([0, 0])])  # two tokens of padding
    slots = slots[order].masked_fill(torch.arange(82) >= 80, -1)
    flat = [x.transpose(1, 2).flatten(0, 1)[order] for x in (k, v, q)]
    flat[0][80:] = flat[1][80:] = torch.nan
    tables = tuple(t.repeat(2, 1)[order] for t in rope)
    found = engine.append_slots(*flat[:2], *layout.buffers(got), slots, rotate_keys=rotate_keys, rope=tables, q=flat[2])  # type: ignore[arg-type]
    assert torch.equal(got, expected)
    assert found is not None
    assert torch.equal(found[:80], rotated.transpose(1, 2).flatten(0, 1)[order[:80]])


def life_in_slots(keys: str, values: str, rng: random.Random, steps: int) -> None:
    """Appends to slots in any order, some of them again, against a table of what each slot should hold."""
    layout = engine.PageLayout(keys, values, 64)
    memory = memory_of(layout)
    buffers, everything = layout.buffers(memory), (torch.tensor([192], dtype=torch.int32), torch.arange(12).int().view(1, -1))
    untouched = memory.clone()
    expected = [torch.zeros(2, 192, 64) for _ in buffers]
    written = torch.zeros(192, dtype=torch.bool)
    for step in range(steps):
        slots = torch.tensor(rng.sample(range(192), rng.randint(0, 40)) + [-1] * rng.randint(0, 2), dtype=torch.int64)
        rows = torch.randn(2, len(slots), 2, 64, generator=torch.Generator().manual_seed(step))
        engine.append_slots(*rows, *buffers, slots)
        real = slots[slots >= 0]
        written[real] = True
        for known, x, name in zip(expected, rows, (keys, values), strict=True):
            known[:, real] = dequantize(quantize(x[: len(real)].transpose(0, 1), key_format(name)))
    for buffer, known in zip(buffers, expected, strict=True):
        assert torch.equal(reference.read(buffer, *everything)[0][:, written].float(), known[:, written])
    pages, tokens = (~written).view(12, 16).nonzero(as_tuple=True)
    for new, old in zip(buffers, layout.buffers(untouched), strict=True):
        assert torch.equal(bits(new.codes[pages, :, tokens]), bits(old.codes[pages, :, tokens]))


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("keys", "values"), [("int8", "int4_g32"), ("fp8", "int2"), ("int4", "fp16")])
def test_a_life_in_slots(keys: str, values: str) -> None:
    life_in_slots(keys, values, random.Random(0), 8)


def test_a_refused_append_by_slot_changes_nothing() -> None:
    layout = engine.PageLayout("int8", "int4", 64)
    memory = memory_of(layout)
    before, buffers = memory.clone(), layout.buffers(memory)
    k, v = torch.randn(2, 2, 64), torch.randn(2, 2, 64)
    with pytest.raises(InvalidArgument, match="slot_mapping names slot 192; 12 pages of 16 tokens have 192"):
        engine.append_slots(k, v, *buffers, torch.tensor([5, 192]))
    k[1, 1, 7] = torch.inf
    with pytest.raises(InvalidArgument, match="k holds"):
        engine.append_slots(k, v, *buffers, torch.tensor([5, 6]))
    assert torch.equal(memory, before)
    engine.append_slots(k, v, *buffers, torch.tensor([5, -1]))  # what is skipped may hold anything
    assert not torch.equal(memory, before)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"k": torch.zeros(3, 2, 1, 64)}, InvalidArgument, r"k has shape \[3, 2, 1, 64\]; expected \[T, 2, 64\]"),
        ({"v": torch.zeros(2, 2, 64)}, InvalidArgument, r"v has shape \[2, 2, 64\]; expected \[3, 2, 64\]"),
        ({"slot_mapping": torch.zeros(4).long()}, InvalidArgument, r"slot_mapping has shape \[4\]; expected \[3\]"),
        ({"slot_mapping": torch.zeros(3)}, InvalidArgument, "slot_mapping is torch.float32; expected int32 or int64"),
        ({"rope": (torch.zeros(2, 32),) * 2}, InvalidArgument, r"rope\[0\] \(cos\) has shape \[2, 32\]; expected \[3, R/2\]"),
        ({"q": torch.zeros(3, 4, 64)}, InvalidArgument, "q was given without rope"),
        ({"keys": torch.zeros(3)}, InvalidArgument, "keys is a Tensor; expected a KVBuffer"),
        ({"keys": new_kv_buffer(key_format("int8_channel"), (12, 2, 32, 64), (1, 2, 32, 64), torch.bfloat16, "cpu")}, Unsupported,
         "int8_channel keys keep a tail for each sequence"),
        ({"impl": "gluon"}, InvalidArgument, "impl='gluon' does not exist for append"),
    ],
)  # fmt: skip
def test_appends_by_slot_that_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    keys, values = pages_of(engine.PageLayout("int8", "int4", 64))
    k, v = torch.zeros(2, 3, 2, 64)
    right = {"k": k, "v": v, "keys": keys, "values": values, "slot_mapping": torch.arange(3)}
    with pytest.raises(error, match=message):
        engine.append_slots(**right | given)
    engine.append_slots(**right)


def test_no_token_is_no_append() -> None:
    keys, values = pages_of(engine.PageLayout("int8", "int4", 64))
    empty = torch.zeros(0, 2, 64)
    assert engine.append_slots(empty, empty, keys, values, torch.zeros(0).long()) is None


def test_compiled_code_appends_by_slot() -> None:
    """Into separate tensors: torch's functionalization takes no views of several dtypes of one memory as inputs that change."""
    formats = key_format("int8"), key_format("int4_g32")
    there = [tuple(new_kv_buffer(f, (6, 2, 16, 64), (6, 2, 0, 64), torch.bfloat16, "cpu") for f in formats) for _ in range(2)]

    def step(k: torch.Tensor, v: torch.Tensor, keys: KVBuffer, values: KVBuffer, slots: torch.Tensor) -> torch.Tensor | None:
        return engine.append_slots(k * 2, v, keys, values, slots, rope=rope_tables(slots % 16, 64), q=k)

    k, v, slots = torch.randn(3, 2, 64), torch.randn(3, 2, 64), torch.tensor([7, -1, 80])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [run(k, v, *buffers, slots) for run, buffers in zip((step, compiled), there, strict=True)]
    for expected, got in zip(*there, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(expected.tensors(), got.tensors(), strict=True) if a is not None and b is not None
        )
    assert torch.equal(*results)


@pytest.mark.parametrize("fmt", ["int4_g32", "nf4_dq", "nvfp4"])
def test_compiled_code_multiplies_by_the_parts_of_a_weight(fmt: str) -> None:
    """`linear_of_parts` gives the bits of `linear`, traced as one graph."""
    weight, x, bias = quantize(torch.randn(48, 64), fmt), torch.randn(3, 64), torch.randn(48)
    parts = [*weight.parts().values()]
    compiled = torch.compile(lambda x: engine.linear_of_parts(x, parts, bias, fmt), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x, weight, bias))
