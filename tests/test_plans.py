"""Plans of decode attention: pure functions, so every GPU can be asked about here."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte import plans
from halfbyte.device import GPU, H200, block_shared_memory
from halfbyte.errors import InvalidArgument
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS, Format, kv_format
from halfbyte.plans import decode_shapes, toolchain
from halfbyte.plans.decode_attention import gluon_plan, plans_of, queries_of_a_block, ragged_blocks
from halfbyte.plans.decode_portable import portable_plan, triton_tiles
from halfbyte.plans.decode_problem import DecodeProblem
from halfbyte.plans.decode_shapes import programs, reduce_fanin_of, with_reduce_smem
from halfbyte.plans.decode_spec import DecodePlan, DecodeWgmmaSpec
from halfbyte.plans.explain import explanation, linear_explanation
from halfbyte.plans.gemm_mma import mma_plan
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_portable import EXACT_ROWS, PortableTiles, folds_exactly, portable_tiles
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.kv_codec import KVSpec, kv_spec, padded

LAYER = DecodeProblem(
    *("bf16", 8, 8, 4, 1, 128, 128, 8192, "int8", "int4_g32", 0, True, False, False, False), deterministic_batch=False
)
LATENT = {"heads": 1, "group": 16, "dim": 64, "value_dim": 512, "keys": "int8", "values": "int8", "latent": True}


def tuned(p: DecodeProblem, num_sms: int = 132, capability: tuple[int, int] = (9, 0)) -> DecodePlan:
    found = gluon_plan(p, num_sms, capability, True)
    assert isinstance(found, DecodePlan), found
    return found


def why_not(p: DecodeProblem, capability: tuple[int, int] = (9, 0)) -> str:
    found = gluon_plan(p, 132, capability, True)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    ("most", "capability", "queries"), [(1, (9, 0), 1), (4, (9, 0), 4), (512, (9, 0), 32), (512, (8, 0), 8), (512, (10, 0), 8)]
)
def test_ragged_queries_become_blocks(most: int, capability: tuple[int, int], queries: int) -> None:
    """64 decodes and a prompt of 512 tokens, or fewer where no sequence has so many. Padding is one sequence more."""
    mixed = replace(LAYER, batch=65, queries=576, page=16, ragged=True)
    assert "takes blocks of them" in why_not(mixed, capability)
    blocks = ragged_blocks(mixed, most, capability)
    assert (blocks.queries, blocks.batch) == (queries, 576 // queries + 66)
    tuned(blocks, capability=capability)
    even = replace(mixed, queries=65 * most)  # as the host is told
    assert ragged_blocks(even, most, capability).batch == 65 * -(-most // queries)


def test_very_many_blocks_are_launched_one_after_the_other() -> None:
    """Each launch has the kernel of up to 64 blocks or that of more, and so many as it counts."""
    prompts = replace(LAYER, batch=3, queries=50_000)

    def launches(p: DecodeProblem) -> list[tuple[int, int, int]]:
        plans = [plan for plan in plans_of(p, "auto", 0, H200, True) if isinstance(plan, DecodePlan)]
        return [(plan.first_block, plan.blocks, plan.spec.batch) for plan in plans]

    assert launches(prompts) == [(0, 4096, 4096), (4096, 593, 4096)]
    assert 4096 + 593 == 3 * -(-50_000 // 32)
    assert launches(replace(prompts, batch=1, queries=100)) == [(0, 4, 64)]
    assert launches(replace(prompts, queries=1)) == [(0, 0, 4)]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("name", [n for n, f in KV_FORMATS.items() if not f.token_block])
def test_a_plan_fits_into_shared_memory(name: str, capability: tuple[int, int]) -> None:
    limit = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) << 10
    for dim in (64, 128, 256):
        for group in (1, 4, 8, 16, 32):
            p = replace(
                LAYER, keys=name, values=name, dim=dim, value_dim=dim, group=group, dtype="fp16" if name == "fp16" else "bf16"
            )
            found = gluon_plan(p, 132, capability, True)
            if isinstance(found, DecodePlan):
                assert found.spec.shared_bytes <= limit
                assert found.spec.use_pdl == (capability >= (9, 0))
                assert found.spec.padded_rows >= max(8, group)
            else:
                assert any(limit in found for limit in ("registers", "shared memory", f"head dim {dim}")), found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"keys": "int8_channel", "k_scale_stride": 0}, "do not have the stride of a head"),
        ({"deterministic_batch": True, "dim": 80}, "the capacity decides whether heads of 80 bytes are aligned"),
        ({"deterministic_batch": True, "group": 33}, "33 query rows of 128 per KV head exceed the registers of the tuned"),
        ({"aligned": False}, "not aligned to 16 bytes"),
        ({"keys": "fp16"}, "bf16 queries over fp16"),
        ({"page": 24}, "pages of 24 tokens"),
        ({"latent": True}, "latents (MLA) of 8 KV heads"),
        ({**LATENT, "deterministic_batch": True, "page": 16}, "deterministic_batch=True"),
        ({**LATENT, "recent_tokens": 16}, "16 exact tokens"),
        ({**LATENT, "values": "int4_g32"}, "takes no groups, channels or 16-bit latents"),
        ({**LATENT, "queries": 33}, "latents (MLA) with 33 new tokens"),
        ({**LATENT, "value_dim": 1024}, "head dim 1024 in int8 is outside"),
        ({"dim": 96, "keys": "int8_g32"}, "3 groups a head is not a power of two"),
        ({"group": 64, "queries": 3}, "192 query rows per KV head; tuned kernels take up to 128"),
        ({"group": 17, "dim": 256, "value_dim": 256}, "17 query rows per KV head exceed the registers of the tuned kernels"),
        ({"group": 17, "dim": 64, "value_dim": 128, "queries": 2}, "values of another size than keys"),
        ({"group": 40, "values": "bf16"}, "with 16-bit tokens"),
        ({"dim": 40, "keys": "int4"}, "heads of 20 bytes"),
        ({"batch": 5000}, "5000 sequences"),
        ({"batch": 4000, "capacity": 2**20}, "exceed the limit of"),
    ],
)
def test_what_the_tuned_kernel_leaves_to_the_portable_one(change: dict[str, object], why: str) -> None:
    tuned(LAYER)
    assert why in why_not(replace(LAYER, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("name", [n for n, f in KV_FORMATS.items() if f.is_quantized and not f.token_block])
def test_many_rows_take_warp_group_products(name: str, dim: int) -> None:
    for group, queries, rows in ((33, 1, 64), (8, 8, 64), (13, 5, 128), (8, 16, 128)):
        p = replace(LAYER, keys=name, values=name, dim=dim, value_dim=dim, group=group, queries=queries)
        found = gluon_plan(p, 132, (9, 0), True)
        if isinstance(found, str):  # what the kernel for few rows cannot read either
            assert found == why_not(replace(p, group=1, queries=1)), found
        elif padded(group * queries) * dim > 4096:
            assert isinstance(found.spec, DecodeWgmmaSpec), found.why
            assert found.spec.padded_rows == rows
            per_sm = 2 if rows == 64 else 1
            assert per_sm * (found.spec.shared_bytes + 1024) <= 227 << 10
            assert found.programs <= per_sm * 132


@pytest.mark.parametrize(
    ("change", "capability", "tokens"),
    [
        ({"queries": 512}, (9, 0), 32),
        ({"queries": 512}, (8, 0), 8),
        ({"queries": 512}, (10, 0), 8),
        ({"queries": 512, "group": 5}, (9, 0), 25),
        ({"queries": 32}, (9, 0), 0),  # 128 rows in one go
        ({"queries": 33}, (9, 0), 32),
        ({"queries": 9, "keys": "bf16", "values": "bf16"}, (9, 0), 8),  # 16 bits have no wgmma
        ({"queries": 9, "dim": 256, "value_dim": 256}, (9, 0), 4),
        ({"queries": 2, "group": 100}, (9, 0), 1),
        ({"queries": 2, "group": 129}, (9, 0), 0),  # not even one token fits
        ({"queries": 2, "group": 33}, (8, 0), 0),
        ({"queries": 512, "keys": "int8_channel"}, (9, 0), 8),  # nor have scales of channels
        ({"queries": 512, "deterministic_batch": True}, (9, 0), 8),  # nor splits of fixed size
        ({"queries": 512, "deterministic_batch": True, "batch": 5000}, (9, 0), 8),
        ({"deterministic_batch": True, "batch": 5000}, (9, 0), 1),  # in several launches
        ({"deterministic_batch": True, "batch": 4000, "capacity": 2**20}, (9, 0), 1),
        ({"deterministic_batch": True, "batch": 5000, "group": 33}, (9, 0), 0),
        ({"queries": 512, "sink_tokens": 4, "recent_tokens": 64}, (9, 0), 8),  # nor has what is stored in 16 bits
        ({"queries": 512, "recent_tokens": 1}, (8, 0), 8),
        ({"queries": 2, "group": 33, "recent_tokens": 1}, (9, 0), 0),
    ],
)
def test_prompts_are_cut_into_blocks_that_a_tuned_kernel_holds(
    change: dict[str, Any], capability: tuple[int, int], tokens: int
) -> None:
    p = replace(LAYER, **change)
    assert queries_of_a_block(p, capability) == tokens
    if tokens:
        tuned(replace(p, queries=tokens, batch=min(p.batch, 8)), capability=capability)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_no_fact_of_a_batch_decides_on_bits_that_must_not_depend_on_it(name: str, capability: tuple[int, int]) -> None:
    """Whether the tuned kernel runs, what its warps own and where splits lie, for decodes and the blocks of a prompt alike."""
    values = KV_FORMATS[name].code.name if KV_FORMATS[name].token_block else name
    for dim, group in product((64, 96, 128, 256), (1, 3, 4, 8, 16, 32)):
        sizes = {"dim": dim, "value_dim": dim, "group": group, "dtype": "fp16" if name == "fp16" else "bf16"}
        p = replace(LAYER, keys=name, values=values, deterministic_batch=True, **sizes)
        decode = tuple(
            replace(p, batch=batch, capacity=capacity, page=page, window=window)
            for batch, capacity, page, window in ((1, 77, 16, False), (64, 8192, 64, True), (2048, 40000, 256, False))
        )
        blocks = ragged_blocks(replace(p, ragged=True, queries=700, page=16), 700, capability)
        assert blocks.queries == max(1, 8 // group)
        found = [gluon_plan(q, num_sms, capability, True) for q in (*decode, blocks) for num_sms in (20, 132)]
        if isinstance(found[0], str):
            assert set(found) == {found[0]}
            continue
        owned = set()
        for plan in found:
            assert isinstance(plan, DecodePlan)
            s = plan.spec
            assert not s.reuses_ring
            assert s.split % s.tile == 0
            assert s.shared_bytes <= block_shared_memory(capability)
            owned.add((s.keys, s.values, s.warps, s.tokens, s.padded_rows, s.heads, s.split, s.reduce_fanin))
        assert len(owned) == 1


def test_explain_tells_of_blocks() -> None:
    facts = explanation(2, 32, 8, 128, 8192, 100, "int8", "int4_g32", 0, "bf16", False, H200)
    assert facts["blocks"].startswith("4 a sequence, of 32 new tokens, 128 query rows")
    assert "many query rows" in facts["kernel"]
    assert "blocks" not in explanation(2, 32, 8, 128, 8192, 32, "int8", "int4_g32", 0, "bf16", False, H200)


def test_explain_tells_of_sinks_and_recent_tokens() -> None:
    facts = explanation(128, 8, 1, 128, 8192, 1, "int4", "int4", 0, "bf16", False, H200, window=(64, 256))
    assert facts["kernel"].startswith("gluon")
    assert facts["window"] == "64 sink tokens and 256 recent ones in 16 bits, 21.0 MB"
    assert facts["tail"].startswith("5 chunks of 64 tokens in 16 bits")
    facts = explanation(128, 8, 1, 128, 8192, 5, "int4", "int4", 0, "bf16", False, H200, window=(64, 256))
    assert facts["blocks"].startswith("2 a sequence, of 4 new tokens, 32 query rows")
    assert facts["kernel"].startswith("gluon")
    facts = explanation(128, 33, 1, 128, 8192, 1, "int4", "int4", 0, "bf16", False, H200, window=(64, 256))
    assert "the tuned kernel reads them for 32 query rows" in facts["not gluon"]


@pytest.mark.parametrize(("keys", "values", "eighths"), [("int4", "int4", 8), ("int8", "int8", 8), ("int2", "int2", 14)])
def test_a_chunk_of_a_tail_costs_what_its_bytes_do(keys: str, values: str, eighths: int) -> None:
    spec = tuned(replace(LAYER, keys=keys, values=values, sink_tokens=4, recent_tokens=100)).spec
    per_chunk, per_tile = 2 * 2 * 128 * spec.chunk, spec.ring_bytes / spec.stages
    assert spec.chunks * spec.chunk >= 104 > (spec.chunks - 1) * spec.chunk
    assert abs(spec.chunk_cost / 8 - per_chunk / per_tile) < 1 / 8
    assert spec.chunk_cost == eighths


def test_many_rows_without_warp_group_products_are_left_to_the_portable_kernel() -> None:
    for capability in ((8, 0), (10, 0)):
        assert "33 query rows of 128" in why_not(replace(LAYER, group=33), capability)


@pytest.mark.parametrize("name", ["int4", "int4_g32", "int8", "fp8", "int8_tensor", "bf16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_as_many_programs_run_on_a_multiprocessor_as_are_meant_to(name: str, dim: int) -> None:
    """Shared memory has no room for one more, whatever registers the compiler finds; 1 KB of each program's is the driver's."""
    found = tuned(replace(LAYER, keys=name, values=name, dim=dim, value_dim=dim))
    together = round(found.programs / 132)
    needed = found.spec.shared_bytes + 1024
    assert together * needed <= 227 << 10 < (together + 1) * needed


@pytest.mark.parametrize(("keys", "values"), [("int4", "int4"), ("int8", "int8"), ("fp8", "fp8"), ("int8", "int4")])
@pytest.mark.parametrize("dim", [96, 128])
def test_a_unit_a_multiprocessor_is_one_programs_alone(keys: str, values: str, dim: int) -> None:
    """Nothing is added up, and its ring leaves no room for the next call's programs."""
    one = replace(LAYER, batch=128, heads=1, group=8, keys=keys, values=values, dim=dim, value_dim=dim)
    found = tuned(one)
    assert found.programs == found.work_items == 128
    assert found.spec.shared_bytes + 1024 <= 227 << 10 < 2 * (found.spec.shared_bytes + 1024)
    for other in (
        replace(one, batch=64),
        replace(one, batch=512),
        replace(one, group=16),
        replace(one, window=True),
        replace(one, queries=2),
    ):
        assert tuned(other).programs == 256


@pytest.mark.parametrize(
    "change", [{"keys": "int4_g32"}, {"keys": "bf16"}, {"dim": 64, "value_dim": 64}, {"dim": 256, "value_dim": 256}, {"page": 64}]
)
def test_where_two_programs_are_faster_than_one_with_a_unit(change: dict[str, object]) -> None:
    one = replace(LAYER, batch=128, heads=1, group=8, keys="int4", values="int4")
    assert tuned(one).programs == 128
    assert tuned(replace(one, **change)).programs == 256  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [33, 66, 132, 264, 296])
def test_two_steps_of_adding_are_about_equally_long(parts: int) -> None:
    first = reduce_fanin_of(parts, 1)
    assert first / 3 < -(-parts // first) < 3 * first


def test_latents_take_small_tiles_of_the_portable_kernel() -> None:
    latent = replace(LAYER, heads=1, group=128, dim=64, value_dim=512, latent=True)
    for values, tokens in (("int8", 32), ("int4_g32", 16)):
        tiles = portable_plan(replace(latent, values=values), 132, (9, 0))
        assert (tiles.block_rows, tiles.block_tokens, tiles.num_warps) == (16, tokens, 8)


@pytest.mark.parametrize(
    ("group", "queries", "rows", "items"),
    [(16, 1, 16, 1), (20, 1, 32, 1), (128, 1, 32, 4), (16, 3, 32, 2), (20, 4, 32, 4), (2, 9, 32, 1), (5, 7, 16, 5)],
)
def test_heads_over_latents_are_divided_into_work_items(group: int, queries: int, rows: int, items: int) -> None:
    for values in ("int8", "int4", "fp8", "int8_tensor"):
        plan = tuned(replace(LAYER, **LATENT | {"values": values, "group": group, "queries": queries}))  # type: ignore[arg-type]
        assert (plan.spec.padded_rows, plan.work_items) == (rows, items * LAYER.batch), plan.why
        assert "over latents" in plan.describe()["kernel"]


def test_an_old_gpu_is_refused() -> None:
    assert "compute capability 7.5" in why_not(LAYER, (7, 5))


def test_a_triton_that_sees_equal_parts_only_sums_warps_apart_where_three_stages_are_as_large_as_two_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits = replace(tuned(LAYER).spec, separate_reduce_smem=False, stages=8)
    assert fits.reuses_ring
    assert fits.equal_parts
    other = replace(LAYER, group=16, keys="int8", values="int8")
    usual = tuned(other).spec
    assert usual.reuses_ring
    assert not usual.equal_parts
    monkeypatch.setattr(toolchain, "triton_version", lambda: (3, 8))
    assert with_reduce_smem(fits, fits.shared_bytes) == fits
    assert tuned(other).spec == replace(usual, separate_reduce_smem=True)
    wide = replace(LAYER, group=16, keys="int8", values="bf16")
    monkeypatch.setattr(toolchain, "triton_version", lambda: (3, 9))
    most = tuned(wide, capability=(8, 0)).spec
    monkeypatch.setattr(toolchain, "triton_version", lambda: (3, 8))
    assert tuned(wide, capability=(8, 0)).spec == replace(most, separate_reduce_smem=True, stages=most.stages - 1)


@given(st.integers(1, 5000), st.integers(1, 400))
def test_programs_fill_the_slots_without_straddling_where_that_is_cheap(units: int, slots: int) -> None:
    count = programs(units, slots)
    assert 1 <= count <= slots
    assert 8 * count >= 7 * slots or units < slots  # an eighth may idle
    if count != slots:
        assert count % units == 0 or -(-units // count) == -(-units // slots)


@pytest.mark.parametrize(
    ("units", "slots", "expected"), [(512, 132, 128), (32, 132, 128), (8, 132, 128), (1, 132, 132), (100, 132, 132)]
)
def test_programs_by_hand(units: int, slots: int, expected: int) -> None:
    assert programs(units, slots) == expected


def test_a_workspace_has_two_counters_for_every_neighbourhood() -> None:
    for units, neighbourhoods in ((1, 17), (3, 33)):
        found = tuned(replace(LAYER, batch=1, heads=units, alibi=True))
        assert found.programs == 264
        assert (found.work_items, found.counters) == (units, units + 2 * neighbourhoods)
        assert found.floats == 2 * 264 * found.spec.partial_floats


@pytest.mark.parametrize(
    ("change", "programs", "stages"),
    [
        ({"heads": 8}, 128, 3),
        ({"heads": 1}, 132, 3),
        ({"heads": 12}, 264, 2),
        ({"heads": 32, "keys": "int4", "values": "int4"}, 128, 3),
        ({"heads": 34, "keys": "int4", "values": "int4"}, 238, 2),
        ({"heads": 8, "keys": "int4", "values": "int4", "capacity": 16384}, 128, 2),
        ({"heads": 128, "keys": "int8", "values": "int4_g32"}, 128, 3),
        ({"heads": 128, "keys": "int4", "values": "int4_g32"}, 256, 2),
        ({"heads": 8, "alibi": True}, 264, 2),
        ({"heads": 8, "k_token_stride": 8}, 264, 2),
        ({"heads": 8, "keys": "int4_g32", "values": "int4_g32"}, 264, 2),
        ({"heads": 8, "dim": 64, "value_dim": 64}, 264, 2),
    ],
)
def test_few_units_are_shared_by_half_as_many_programs(change: dict[str, Any], programs: int, stages: int) -> None:
    """Their parts have to be added: from 16 of them on, with INT4 from 4, one program of a multiprocessor is faster."""
    found = tuned(replace(LAYER, **({"batch": 1, "keys": "int8", "values": "int8"} | change)))
    assert (found.programs, found.spec.stages) == (programs, stages)


@pytest.mark.parametrize(("change", "tokens"), [({}, 64), ({"k_token_stride": 0}, 32), ({"page": 64}, 32), ({"window": True}, 32)])
def test_tiles_of_many_rows_are_larger_where_addresses_are_simple(change: dict[str, object], tokens: int) -> None:
    rows = replace(LAYER, keys="int4", values="int4", group=16)
    assert tuned(replace(rows, **change)).spec.tokens == tokens  # type: ignore[arg-type]


STRIDES = ("k_token_stride", "v_token_stride", "k_scale_stride", "v_scale_stride")


def tokens_first(**change: Any) -> DecodeProblem:
    """[B, T, H, D] in INT4, codes and scales."""
    p = replace(LAYER, **({"keys": "int4", "values": "int4"} | change))
    return replace(p, **{name: change.get(name, p.heads) for name in STRIDES})


@pytest.mark.parametrize(
    ("change", "heads"),
    [
        ({}, 2),
        ({"heads": 7}, 1),
        ({"heads": 1}, 1),
        ({"keys": "int8", "values": "int8"}, 1),  # 128 bytes a head
        ({"keys": "int8"}, 1),  # only the values are narrow
        ({"keys": "int8", "values": "fp8_tensor", "dim": 64, "value_dim": 64}, 2),
        ({"k_token_stride": 1}, 1),
        ({"v_token_stride": 0}, 1),
        ({"k_scale_stride": 1}, 1),
        ({"v_scale_stride": 0}, 1),
        ({"values": "int4_g32"}, 1),
        ({"dim": 96, "value_dim": 96}, 1),
        ({"page": 64, "window": True, "group": 32}, 2),
    ],
    ids=str,
)
def test_narrow_heads_side_by_side_are_units_of_two(change: dict[str, Any], heads: int) -> None:
    p = tokens_first(**change)
    plan = tuned(p)
    assert plan.spec.heads == heads
    assert plan.work_items == p.batch * p.heads // heads
    assert plan.spec.tile * heads == plan.spec.kv_warps * plan.spec.tokens
    assert plan.spec.partial_floats == heads * plan.spec.head_floats


@pytest.mark.parametrize(
    ("change", "programs"), [({"batch": 32}, 128), ({"batch": 16}, 256), ({"batch": 32, "dim": 64, "value_dim": 64}, 128)], ids=str
)
def test_about_as_many_pairs_of_heads_as_multiprocessors_have_a_program_each(change: dict[str, Any], programs: int) -> None:
    assert tuned(tokens_first(**change)).programs == programs


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("fmt", ["int4", "int8", "fp8", "int4_g32", "bf16"])
def test_no_more_programs_fit_than_are_meant_to(fmt: str, dim: int) -> None:
    """Whatever registers they take. An empty slot of the ring sees to it where the sums of the warps do not."""
    plan = tuned(replace(LAYER, keys=fmt, values=fmt, dim=dim, value_dim=dim, batch=64))
    assert (227 << 10) // (plan.spec.shared_bytes + 1024) <= 2
    if (fmt, dim) == ("int4", 64):
        assert (plan.spec.stages, plan.spec.pad_slots) == (3, 1)
        assert (227 << 10) // (replace(plan.spec, pad_slots=0).shared_bytes + 1024) == 3


def test_a_side_says_how_its_words_are_read() -> None:
    int4 = kv_spec(kv_format("int4_g32"), 128)
    assert isinstance(int4, KVSpec)
    assert (int4.words, int4.codes_per_word, int4.groups, int4.halved, int4.operands, int4.offset) == (32, 4, 4, True, 2, True)
    odd = kv_spec(kv_format("int8"), 80, 1, 0)
    assert isinstance(odd, KVSpec)
    assert (odd.words, odd.padded, odd.staged, odd.scale) == (40, 64, True, "token")
    assert kv_spec(kv_format("int8_tensor"), 64, 1, 0) == replace(odd, words=32, padded=32, spread="tensor", scale_stride=1)


def test_scales_that_lie_apart_are_copied_in_words_of_two() -> None:
    near, apart, far = (kv_spec(kv_format("int4_g32"), 128, 8, n) for n in (1, 8, 0))
    assert isinstance(near, KVSpec)
    assert isinstance(apart, KVSpec)
    assert isinstance(far, KVSpec)
    assert [(s.staged, s.paired, s.scale_columns) for s in (near, apart, far)] == [
        (False, False, 4),
        (False, True, 2),
        (True, False, 4),
    ]
    assert near.tile_bytes(64, 4, 1) == apart.tile_bytes(64, 4, 1) == far.tile_bytes(64, 4, 1)
    one = kv_spec(kv_format("int4"), 128, 8, 8)
    assert isinstance(one, KVSpec)
    assert one.scale_columns == 1
    assert [one.tile_bytes(64, 4, heads) for heads in (1, 2)] == [64 * (64 + 8), 64 * (128 + 8)]  # the neighbour's come along


def test_a_warp_s_tokens_share_their_scales_of_channels() -> None:
    for keys in ("int8_channel", "int4_channel"):
        one = kv_spec(kv_format(keys), 128)
        assert isinstance(one, KVSpec)
        assert (one.scale, one.groups, one.block) == ("channel", 1, 32)
        assert one.tile_bytes(128, 4, 1) == 128 * one.words * 2 + 4 * 256 * (1 + one.offset)
        for group, queries in product((1, 4, 8, 16, 32), (1, 4)):
            found = gluon_plan(replace(LAYER, keys=keys, group=group, queries=queries), 132, (9, 0), True)
            assert isinstance(found, DecodePlan) == (group * queries <= 32), found
            if isinstance(found, DecodePlan):
                assert found.spec.tokens <= 32
                assert found.spec.keys == one


def test_portable_tiles() -> None:
    """Small ones where larger would not fit registers, or the shared memory that a block has on sm_86: for wide heads."""

    def tiles(keys: str, dim: int, rows: int = 8) -> tuple[int, int]:
        found = triton_tiles(
            kv_format(keys), kv_format("int4_g32"), batch=8, heads=8, rows=rows, capacity=8192, dim=dim, num_sms=132
        )
        return found.block_tokens, found.num_warps

    assert [tiles("int4_g32", dim) for dim in (64, 96, 128, 192, 256)] == [(64, 4), (64, 4), (64, 4), (32, 4), (32, 4)]
    assert [tiles("int4_channel", dim) for dim in (64, 128, 192)] == [(32, 2), (32, 2), (32, 4)]
    assert tiles("int4_channel", 128, rows=17) == tiles("int4_g32", 128, rows=17) == (32, 4)


@pytest.mark.parametrize(
    ("page", "tokens", "one"), [(0, 64, False), (16, 64, False), (64, 64, True), (256, 64, True), (32, 16, True)]
)
def test_a_warp_reads_one_page_if_its_tokens_fit_into_one(page: int, tokens: int, one: bool) -> None:
    assert replace(tuned(LAYER).spec, page=page, tokens=tokens).one_page == one


def test_levels_are_named_where_they_are_explained() -> None:
    assert set(plans.GPU_LEVELS) < set(plans.LEVELS["decode_attention"])


def test_an_explanation_says_which_kernel_and_why() -> None:
    sizes = (8, 32, 8, 128, 8192, 1, "int8", "int4_g32", 0, "bf16")
    facts = explanation(*sizes, False, H200)
    assert facts["kernel"].startswith("gluon")
    assert "64 work items" in facts["work"]
    assert "1024 tokens each" in explanation(*sizes, True, H200)["splits"]
    facts = explanation(8, 33, 1, 128, 8192, 1, "int8", "int8", 0, "bf16", True, H200)
    assert facts["kernel"].startswith("triton")
    assert "with deterministic_batch" in facts["not gluon"]
    assert "1024 tokens each" in facts["splits"]
    with pytest.raises(InvalidArgument, match="heads=7/3"):
        explanation(1, 7, 3, 128, 64, 1, "int8", "int8", 0, "bf16", False, H200)
    with pytest.raises(InvalidArgument, match="dim=0"):
        explanation(1, 6, 3, 0, 64, 1, "int8", "int8", 0, "bf16", False, H200)


def explained(features: tuple[int, ...], rows: int, *weights: str, width: int = 4096) -> dict[str, str]:
    return linear_explanation(features, width, weights, rows, "bf16", H200)


def test_an_explanation_names_the_kernel_for_many_rows() -> None:
    facts = explanation(8, 32, 8, 128, 8192, 16, "int8", "int4_g32", 0, "bf16", False, H200)
    assert facts["kernel"].endswith("wgmma for many query rows")
    assert facts["tile"] == "64 tokens: 4 warps of 16 of 64 query rows"


def test_an_explanation_says_who_reduces() -> None:
    """256 programs share 128 tiles of 32 rows with 32 numbers each at M = 1."""
    facts = explained((4096,), 1, "int4_g128", width=14336)
    assert facts["partial sums"] == "0.03 MB; the program that begins a tile reduces, in fixed order"
    facts = explained((4096,), 16, "int4_g128", width=14336)
    assert facts["partial sums"].endswith("MB at most; the last program to arrive reduces, in fixed order")


def test_an_explanation_of_a_product_follows_its_plan() -> None:
    facts = explained((6144,), 1, "int4_g128")
    assert facts["kernel"].startswith("gluon")
    assert facts["partial sums"] == "none"
    assert "data-parallel" in facts["schedule"]
    assert "13.17 MB" in facts["bytes"]  # 6144 * 4096 / 2 of codes, 3 bytes for each 128
    plan = mma_plan(GemmProblem(((WEIGHT_FORMATS["int4_g128"], 6144),), 1, 4096, "bf16"), H200, use_pdl=True)
    assert isinstance(plan, GemmPlan)
    assert facts["programs"].startswith(f"{plan.programs}, ")
    assert f"{plan.spec.shared_bytes / 1024:.0f} KB" in facts["ring"]

    facts = explained((4096, 1024, 1024), 64, "int4_g64", "nf4", "nvfp4")
    assert facts["kernel"].startswith("triton")
    assert "different formats" in facts["not gluon"]
    tiles = portable("int4_g64", 6144, 64)
    assert facts["programs"] == f"{96 * tiles.splits} for 96 tiles"
    assert "nvfp4 [1024, 4096]" in facts["work"]


def test_an_explanation_says_from_where_on_weights_are_dequantized() -> None:
    assert "wgmma; two launches" in explained((8192,), 64, "nf4")["kernel"]
    assert "in 2 blocks" in explained((4096,), 191, "int4_g128")["tile"]
    assert "wgmma; one launch" in explained((4096,), 257, "int4_g128")["kernel"]
    assert explained((4096,), 256, "nf4_dq")["kernel"].startswith("triton")
    assert explained((4096,), 257, "nf4_dq")["kernel"].startswith("cuBLAS")
    assert "wgmma" in explained((4096,), 128, "nvfp4")["kernel"]
    assert "2 of at most 16384 output channels, 4 launches" in explained((28672,), 512, "nf4_dq")["parts"]
    # The second weight lies in the second part, with the end of the first.
    assert explained((20000, 12000), 512, "nf4_dq")["parts"] == "2 of at most 16384 output channels, 5 launches; 134.2 MB of buffer"


@pytest.mark.parametrize(
    ("features", "rows", "weights", "named"),
    [
        ((8, 8, 8, 8), 1, ("nf4",), "4 weights"),
        ((8,), 0, ("nf4",), "rows=0"),
        ((8, 0, 8), 1, ("nf4",), "out features=0"),
        ((8, 8, 8), 1, ("nf4", "nf4"), "weights='nf4,nf4'"),
        ((8,), 1, (), "weights=''"),
        ((8,), 1, ("int8",), "weights='int8'"),
    ],
)
def test_an_explanation_of_no_product_is_refused(
    features: tuple[int, ...], rows: int, weights: tuple[str, ...], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        explained(features, rows, *weights)
    with pytest.raises(InvalidArgument, match="groups of 128"):
        explained((8,), 1, "int4_g128", width=4100)
    with pytest.raises(InvalidArgument, match="sms=0"):
        linear_explanation((8,), 128, ("nf4",), 1, "bf16", H200._replace(num_sms=0))


# ------------------------------------------------------------------------------------------- the portable kernel of `linear`


def portable(
    name: str = "int4_g128",
    n: int = 4096,
    rows: int = 1,
    width: int = 4096,
    num_sms: int = 132,
    capability: tuple[int, int] = (8, 0),
    row_invariant: bool = False,
) -> PortableTiles:
    problem = GemmProblem(((WEIGHT_FORMATS[name], n),), rows, width, "bf16")
    return portable_tiles(problem, GPU("", num_sms, capability), row_invariant)


@given(
    st.lists(st.tuples(st.sampled_from(list(WEIGHT_FORMATS.values())), st.integers(0, 9000)), min_size=1, max_size=3),
    st.integers(1, 5000),
    st.integers(1, 200).map(lambda n: 128 * n),
    st.integers(1, 160),
    st.sampled_from([(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]),
    st.booleans(),
)
def test_the_splits_of_a_product_cover_its_columns(
    weights: list[tuple[Format, int]], rows: int, width: int, num_sms: int, capability: tuple[int, int], invariant: bool
) -> None:
    """All of them, none twice, and no split without any; exact sums never mix groups that have scales of their own."""
    t = portable_tiles(GemmProblem(tuple(weights), rows, width, "bf16"), GPU("", num_sms, capability), invariant)
    steps = -(-width // t.block_k)
    assert (t.splits - 1) * t.share < steps <= t.splits * t.share
    assert t.splits <= 32
    assert t.fold == (rows > EXACT_ROWS and not invariant)
    if not t.fold:
        assert t.block_m >= min(rows, EXACT_ROWS)
        assert all(fmt.group_size(width) % t.block_k == 0 or folds_exactly(fmt) for fmt, _ in weights)
    assert t.why


def test_row_invariant_tiles_do_not_look_at_rows_or_the_device() -> None:
    found = {
        portable(rows=rows, num_sms=p, capability=(c, 0), row_invariant=True)
        for rows in (1, 63, 64, 65, 5000)
        for p in (8, 132)
        for c in (8, 9)
    }
    assert len(found) == 1


def test_few_rows_use_every_multiprocessor() -> None:
    for n, width in ((4096, 4096), (6144, 4096), (512, 16384), (8192, 8192)):
        t = portable(n=n, rows=8, width=width)
        assert -(-n // t.block_n) * t.splits >= 2 * 132 or t.splits == width // 512
    assert portable(n=128 * 1024).splits == 1


def test_many_rows_get_large_tiles_where_registers_hold_them() -> None:
    assert portable(n=8192, rows=4096, width=8192, capability=(9, 0)).block_m == 256
    assert portable(n=8192, rows=4096, width=8192, capability=(8, 0)).block_m == 128
    assert portable(n=8192, rows=4096, width=8192, capability=(12, 0)).block_m == 128
    few = portable(n=1024, rows=65, width=8192, capability=(9, 0))
    assert few.splits > 1
    assert "M = 65" in few.why


@pytest.mark.parametrize("table", ["ONE_EACH", "FEW_ITEMS"])
def test_every_measurement_of_one_program_per_sm_decides_a_plan(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left over: with another cost some call has another plan. Calls of 132 work items, and of few."""
    formats = ("int8-int8", "int4-int4", "int4-int4_g32", "int8_g64-int8", "int8_channel-int8", "bf16-bf16")
    sizes = product((1, 16), (1, 8), (4, 16), (64, 128, 256), (0, 64), (False, True), formats)
    calls = []
    for batch, heads, group, dim, page, window, names in sizes:
        keys, values = names.split("-")
        call = {"batch": batch, "heads": heads, "group": group, "dim": dim, "value_dim": dim, "page": page, "window": window}
        calls.append(replace(LAYER, **call, keys=keys, values=values))
    before, entries = [gluon_plan(p, 132, (9, 0), True) for p in calls], getattr(decode_shapes, table)
    for i, entry in enumerate(entries):
        other = entry._replace(cost=0.5 if entry.cost >= 1 else 2.0)
        monkeypatch.setattr(decode_shapes, table, (*entries[:i], other, *entries[i + 1 :]))
        assert any(gluon_plan(p, 132, (9, 0), True) != plan for p, plan in zip(calls, before, strict=True)), entry.where
