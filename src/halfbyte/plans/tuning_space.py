"""What is free in a plan of a tuned kernel: any legal choice computes the same, only not as fast. Pure functions.

A plan made by rules is *analytic*. Its choice is a handful of numbers; others make another plan of the same problem, if they pass
the checks that the rules keep by themselves: shapes that the kernel has, a ring that shared memory holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from halfbyte.device import block_shared_memory
from halfbyte.plans.decode_attention import DecodePlan, programs, reduce_fanin_of, with_reduce_smem
from halfbyte.plans.linear import copy_width, even_programs, fewest_programs, staged
from halfbyte.plans.linear_spec import LinearPlan, LinearSpec, LinearWgmmaSpec
from halfbyte.plans.linear_wgmma import wgmma_staged


@dataclass(frozen=True)
class LinearChoice:
    """Of a product: rows of the weight in a tile, K of a chunk, stages of the ring, programs of a multiprocessor, programs."""

    tile: int
    chunk: int
    stages: int
    blocks: int
    programs: int


@dataclass(frozen=True)
class DecodeChoice:
    """Of decode attention: tokens of a warp in one tile, stages of the ring, programs."""

    tokens: int
    stages: int
    programs: int


Choice = LinearChoice | DecodeChoice
Plan = LinearPlan | DecodePlan

#: Tiles by the warps that share one, and chunks: shapes of the kernel for up to 16 rows. (Chunks of 512 were no faster and take the
#: compiler half a minute.) And chunks of wgmma.
_TILES, _CHUNKS, _WARP_GROUP_CHUNKS = {1: (32, 64), 2: (64, 128)}, (128, 256), (256, 512)
_TOKENS, _STAGES = (16, 32, 64), (4, 3, 2)
#: Programs for each multiprocessor beyond which more of them only cost.
_MOST_PROGRAMS = 4
#: How many choices of a problem are looked at.
MOST_CHOICES = 24


# ------------------------------------------------------------------------------------------------------------------- products


def linear_choice(plan: LinearPlan) -> LinearChoice:
    """The choice that a plan made."""
    spec = plan.spec
    return LinearChoice(spec.tile, spec.chunk, spec.stages, plan.programs_per_sm, plan.programs)


def with_linear_choice(
    plan: LinearPlan, c: LinearChoice, features: Sequence[int], width: int, num_sms: int, capability: tuple[int, int]
) -> LinearPlan | str:
    """The plan of x [rows, width] times weights of so many out features with another choice; in words, why that cannot be."""
    spec = _few_rows(plan.spec, c, width, capability) if isinstance(plan.spec, LinearSpec) else _warp_groups(plan.spec, c, width)
    if isinstance(spec, str):
        return spec
    blocks, steps = plan.tiles // _tiles(features, plan.spec.tile), -(-width // spec.step)
    tiles = blocks * _tiles(features, spec.tile)
    most = _MOST_PROGRAMS * num_sms
    if isinstance(spec, LinearSpec):  # whose programs may each compute one whole tile, however many there are
        most = max(tiles, most)
    if not 1 <= c.programs <= min(tiles * steps, most):
        return f"{c.programs} programs for {tiles} tiles of {steps} steps on {num_sms} multiprocessors"
    split = tiles % c.programs
    if isinstance(spec, LinearWgmmaSpec) and split:
        split = tiles
    return LinearPlan(spec, c.programs, tiles, steps, split, c.blocks)


def _tiles(features: Sequence[int], tile: int) -> int:
    """Tiles over all weights; a plan has as many for each block of batch rows."""
    return sum(-(-n // tile) for n in features)


def _few_rows(spec: LinearSpec, c: LinearChoice, width: int, capability: tuple[int, int]) -> LinearSpec | str:
    if c.tile not in _TILES[spec.warps_m] or c.chunk not in _CHUNKS or c.stages not in _STAGES or c.blocks not in (1, 2):
        return f"{c} is no shape of this kernel"
    shape = replace(spec, tile=c.tile, chunk=c.chunk, stages=1, pad_slots=0)
    weight = shape.weights[0]
    if weight.group:
        scales, zeros = copy_width(shape, width, weight.scale_bytes), copy_width(shape, width, 1)
        if not scales or (weight.zero and not zeros):
            return f"the scales of {shape.step} k cannot be copied in pieces of 4 bytes or more"
        shape = replace(shape, scales_per_copy=scales, zeros_per_copy=zeros)
    return staged(shape, c.blocks, capability, (c.stages,)) or f"{c.stages} stages do not fit shared memory {c.blocks} times"


def _warp_groups(spec: LinearWgmmaSpec, c: LinearChoice, width: int) -> LinearWgmmaSpec | str:
    if c.tile != spec.tile or c.chunk not in _WARP_GROUP_CHUNKS or c.blocks != 1:
        return f"{c} is no shape of this kernel"
    most = wgmma_staged(replace(spec, chunk=c.chunk, stages=1, scales_per_copy=1), width)
    if most is None or not 3 <= c.stages <= most.stages:
        return f"{c.stages} stages of {c.chunk} k; shared memory has room for 3 to {most.stages if most else 0}"
    return replace(most, stages=c.stages)


def linear_choices(
    plan: LinearPlan, features: Sequence[int], width: int, num_sms: int, capability: tuple[int, int]
) -> list[LinearChoice]:
    """Choices worth measuring, that of the plan first: its shape and its neighbours', each cut in several ways."""
    first = linear_choice(plan)
    shapes = list(_linear_shapes(plan, first, features, width, num_sms, capability))
    found = [first]
    for shape in (first, *shapes):
        made = with_linear_choice(plan, replace(shape, programs=1), features, width, num_sms, capability)
        assert isinstance(made, LinearPlan), made
        slots = num_sms * shape.blocks
        counts = [fewest_programs(made.tiles, made.steps, num_sms, shape.blocks), slots]
        counts.append(even_programs(made.tiles, made.steps, slots))
        if made.tiles <= 2 * slots:  # one tile each, or as many equal parts of each as fill the GPU once or twice
            parts = [made.tiles * n for n in range(1, 9)]
            counts += [n for n in parts if 0.5 * slots <= n <= 2 * slots][: None if shape is first else 2]
        for count in counts:
            choice = replace(shape, programs=count)
            if isinstance(with_linear_choice(plan, choice, features, width, num_sms, capability), LinearPlan):
                found.append(choice)
    return list(dict.fromkeys(found))[:MOST_CHOICES]


def _linear_shapes(
    plan: LinearPlan, first: LinearChoice, features: Sequence[int], width: int, num_sms: int, capability: tuple[int, int]
) -> Iterator[LinearChoice]:
    """Other shapes of tile, chunk and programs at once, each with as many stages as fit."""
    few = isinstance(plan.spec, LinearSpec)
    tiles = _TILES[plan.spec.warps_m] if isinstance(plan.spec, LinearSpec) else (first.tile,)
    for blocks, chunk, tile in itertools.product((2, 1) if few else (1,), _CHUNKS if few else _WARP_GROUP_CHUNKS, tiles):
        if (tile, chunk, blocks) == (first.tile, first.chunk, first.blocks) or (chunk == 128 and first.chunk > 128):
            continue  # pieces of 64 bytes of a row were the slowest of all (docs/linear.md)
        for stages in _STAGES if few else range(8, 2, -1):
            shape = LinearChoice(tile, chunk, stages, blocks, 1)
            if isinstance(with_linear_choice(plan, shape, features, width, num_sms, capability), LinearPlan):
                yield shape
                break


# ------------------------------------------------------------------------------------------------------------------ attention


def decode_choice(plan: DecodePlan) -> DecodeChoice:
    """The choice that a plan made."""
    return DecodeChoice(plan.spec.tokens, plan.spec.stages, plan.programs)


def with_decode_choice(plan: DecodePlan, c: DecodeChoice, num_sms: int, capability: tuple[int, int]) -> DecodePlan | str:
    """The plan with another choice; in words, why that cannot be."""
    if c.tokens not in _TOKENS or c.stages not in (*_STAGES, plan.spec.stages):
        return f"{c} is no shape of this kernel"
    if plan.spec.keys.block and c.tokens > plan.spec.keys.block:
        return f"{c.tokens} tokens of a warp do not share per-channel scales; {plan.spec.keys.block} do"
    own = (c.tokens, c.stages) == (plan.spec.tokens, plan.spec.stages)
    pad_slots = plan.spec.pad_slots if own else 0  # an empty slot suits one ring; another needs its room
    spec = with_reduce_smem(replace(plan.spec, tokens=c.tokens, stages=c.stages, pad_slots=pad_slots))
    limit = block_shared_memory(capability)
    if spec.shared_bytes > limit:
        return f"its ring takes {spec.shared_bytes} bytes of shared memory and this GPU has {limit}"
    if not 1 <= c.programs <= _MOST_PROGRAMS * num_sms:
        return f"{c.programs} programs for {plan.work_items} work items on {num_sms} multiprocessors"
    why = f"{c.programs} programs of {spec.warps} warps, {spec.stages} stages of {spec.tile} tokens; {plan.work_items} work items"
    spec = replace(spec, reduce_fanin=reduce_fanin_of(c.programs, plan.work_items))
    return replace(plan, spec=spec, programs=c.programs, why=why)


def decode_choices(plan: DecodePlan, num_sms: int, capability: tuple[int, int]) -> list[DecodeChoice]:
    """Choices worth measuring, that of the plan first: its tiles and rings one size off, each cut in several ways."""
    first = decode_choice(plan)
    tokens, stages = first.tokens, first.stages
    near = (
        [(tokens, s) for s in (stages, stages + 1, stages - 1)]
        + [(tokens // 2, s) for s in (4, 2)]
        + [(2 * tokens, 3), (2 * tokens, 2)]
    )
    counts = [n for per_sm in (2, 1, 3) for n in (programs(plan.work_items, per_sm * num_sms), per_sm * num_sms)]
    every = [DecodeChoice(t, s, n) for t, s in near for n in (counts if (t, s) == near[0] else counts[0:4:2])]
    legal = [c for c in every if isinstance(with_decode_choice(plan, c, num_sms, capability), DecodePlan)]
    return list(dict.fromkeys([first, *legal]))[:MOST_CHOICES]
