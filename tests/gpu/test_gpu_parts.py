"""Units that many programs share: their parts are added in one step or in two, and which it is depends on the lengths.

A sequence of n - 1 tiles gives min(n, programs) parts where it is alone. Up to 32 parts are added in one step (`ONE_STEP`),
and of more parts 8 or 16 neighbours at first.
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import Call, Case, Variant, build, differs, same_bits
from gpu_place import PLACE
from test_gpu_graphs import Captured

import halfbyte as hb
from halfbyte.ops import by_plan, workspace
from halfbyte.plans.decode_spec import DecodePlan, DecodeSpec

pytestmark = pytest.mark.compile_first

FANIN = DecodeSpec.reduce_fanin
VARIANTS = [
    Variant("int4", "int4", group=8, batch=1),
    Variant("int4", "int4", group=32, batch=1),
    Variant("int8", "int4_g32", group=4, batch=1, page=64),
    Variant("fp8", "fp8", dim=256, group=2, batch=1, layout="BTHD", options=frozenset({"sinks"})),
    Variant("int4", "int4", group=8, batch=1, layout="BTHD", options=frozenset({"sinks"})),
    Variant("int8", "int8", dim=64, group=16, batch=1, page=64, layout="BTHD", options=frozenset({"alibi"})),
    Variant("int4", "int8", group=8, queries=8, batch=1),
    Variant("int8", "int4_g32", group=8, queries=16, batch=1, page=32, options=frozenset({"sinks"})),
]
#: Parts of a unit: about one step and two, about whole neighbourhoods, and more than there are programs.
PARTS = (
    [1, 2, 5]
    if PLACE.dry
    else sorted({1, 2, 3, 7, 8, 9, *(n * FANIN + d for n in (2, 3, 4, 5, 8) for d in (-1, 0, 1)), 263, 264, 265, 300})
)
TILE = PLACE.size(256, 8)
#: Tokens of sequences side by side: long ones that share programs, short and empty ones between them, ends inside of a tile.
UNEVEN = [
    (40 * TILE, 3, 37 * TILE + 5),
    (0, 90 * TILE + 1, 90 * TILE - 1, 0),
    (33 * TILE,) * 3,
    (1, 70 * TILE, TILE - 1, 50 * TILE + 7, 60 * TILE),
]


def name_of(v: Variant) -> str:
    return f"{v.keys}-{v.values}-{v.dim}-G{v.group}"


def at(call: Call, *lengths: int) -> Call:
    """The same call with its sequences cut to other lengths."""
    call.cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
    return Call(call.q, call.cache, call.options)


def longest(variant: Variant, slack: int = 0) -> Call:
    """One sequence that all programs share, of one unit: one KV head, or two that are computed together."""
    return build(Case(variant, _unit(variant), (max(PARTS) * TILE,), slack=slack, seed=3), PLACE.device)


def _unit(variant: Variant) -> int:
    """KV heads of a unit where there are enough."""
    return 2 if variant in VARIANTS[4:6] else 1


def _check_unit(call: Call, heads: int) -> DecodePlan:
    """The plan of a call, whose units have so many KV heads."""
    plan = by_plan.planned(call.q, call.cache, "auto")
    assert isinstance(plan, DecodePlan)
    assert plan.spec.heads == heads, plan.why
    return plan


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_any_number_of_parts(variant: Variant) -> None:
    call = longest(variant)
    for parts in PARTS:
        for tokens in ((parts - 1) * TILE, parts * TILE - 3):
            shorter = at(call, tokens)
            assert not shorter.wrong(*shorter.run(PLACE.impls[0])), f"{parts} parts, {tokens} tokens"


def check_repeats(call: Call) -> None:
    """Right, and the same bits each time."""
    out, lse = call.run(PLACE.impls[0])
    assert not call.wrong(out, lse)
    different = torch.zeros((), dtype=torch.bool, device=PLACE.device)
    for _ in range(PLACE.size(300, 2)):
        again = call.run(PLACE.impls[0])
        different |= differs(again[0], out) | differs(again[1], lse)
    assert not different


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("lengths", UNEVEN, ids=str)
@pytest.mark.parametrize("variant", [*VARIANTS[:4:2], *VARIANTS[4:]], ids=name_of)
def test_units_that_share_programs(variant: Variant, lengths: tuple[int, ...], heads: int) -> None:
    """Neighbours in different units count by themselves; repeats, which overlap, give the same bits whoever comes last."""
    call = build(Case(variant, heads * _unit(variant), lengths, slack=7, seed=5), PLACE.device)
    if not PLACE.dry:
        _check_unit(call, _unit(variant))
    check_repeats(call)


ALONE = [
    Variant("int4", "int4", group=8, batch=32),
    Variant("int8", "int8", group=4, batch=32, page=64, options=frozenset({"sinks"})),
    Variant("fp8", "fp8", dim=96, group=2, batch=32, options=frozenset({"starts"})),
    Variant("int8", "int4", group=8, batch=32, layout="BTHD"),
    Variant("int8", "int8", group=4, batch=32, layout="BTHD"),
    Variant("int4", "int4", dim=64, group=4, batch=32, layout="BTHD", options=frozenset({"sinks"})),
    Variant("int8", "fp8", dim=64, group=8, batch=32, layout="BTHD"),
]


@pytest.mark.parametrize("lengths", [(3 * TILE + 1,), (TILE, 0, 5, 2 * TILE + 7, 4 * TILE - 1)], ids=["alike", "uneven"])
@pytest.mark.parametrize("variant", ALONE, ids=name_of)
def test_a_unit_for_each_multiprocessor(variant: Variant, lengths: tuple[int, ...]) -> None:
    """One program with each unit where all are as long; shares that begin and end inside of units where they are not."""
    num_sms = 8 if PLACE.dry else torch.cuda.get_device_properties(0).multi_processor_count
    sequences, heads = num_sms // 4, 2 if variant in ALONE[5:] else 1
    call = build(Case(variant, 4 * heads, (lengths * sequences)[:sequences], slack=5, seed=7), PLACE.device)
    if not PLACE.dry:
        plan = _check_unit(call, heads)
        assert plan.programs == plan.work_items == 4 * sequences, plan.why
    check_repeats(call)


@pytest.mark.parametrize("variant", [*VARIANTS[:2], VARIANTS[4]], ids=name_of)
def test_a_graph_whose_number_of_parts_changes(variant: Variant) -> None:
    """From one part to all programs' and back, in one graph; every counter is zero after it."""
    call = longest(variant, slack=1)
    call.run(PLACE.impls[0])
    graph = Captured(lambda: hb.decode_attention(call.q, call.cache, return_lse=True, impl=PLACE.impls[0], **call.options))
    for parts in (*PARTS, 0, *reversed(PARTS)):
        shorter = at(call, parts * TILE)
        out, lse = (t.clone() for t in graph.replay())
        expected = shorter.run(PLACE.impls[0])
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])
    counters = [*workspace._counters.values(), *(reserve for reserve, _ in workspace._reserves.values())]
    assert not any(bool(t.any()) for t in counters)
