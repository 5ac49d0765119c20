"""The choices of a plan that are worth measuring: neighbours of the analytic one. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from halfbyte.device import GPU
from halfbyte.plans.linear import even_programs, fewest_programs
from halfbyte.plans.linear_spec import LinearPlan, LinearProblem, LinearSpec
from halfbyte.plans.tuning_space import CHUNKS, STAGES, TILES, WGMMA_CHUNKS, LinearChoice, with_linear_choice

#: How many choices of a problem are measured.
MOST_CHOICES = 24


def linear_choices(plan: LinearPlan, problem: LinearProblem, gpu: GPU) -> list[LinearChoice]:
    """Choices worth measuring, that of the plan first: its shape and its neighbours', each cut in several ways."""
    first = linear_choice(plan)
    shapes = list(_linear_shapes(plan, first, problem, gpu))
    found = [first]
    for shape in (first, *shapes):
        made = with_linear_choice(plan, replace(shape, programs=1), problem, gpu)
        assert isinstance(made, LinearPlan), made
        slots = gpu.num_sms * shape.blocks
        counts = [fewest_programs(made.tiles, made.steps, gpu.num_sms, shape.blocks), slots]
        counts.append(even_programs(made.tiles, made.steps, slots))
        if made.tiles <= 2 * slots:  # one tile each, or as many equal parts of each as fill the GPU once or twice
            parts = [made.tiles * n for n in range(1, 9)]
            counts += [n for n in parts if 0.5 * slots <= n <= 2 * slots][: None if shape is first else 2]
        for count in counts:
            choice = replace(shape, programs=count)
            if isinstance(with_linear_choice(plan, choice, problem, gpu), LinearPlan):
                found.append(choice)
    return list(dict.fromkeys(found))[:MOST_CHOICES]


def _linear_shapes(plan: LinearPlan, first: LinearChoice, problem: LinearProblem, gpu: GPU) -> Iterator[LinearChoice]:
    """Other shapes of tile, chunk and programs at once, each with as many stages as fit."""
    few = isinstance(plan.spec, LinearSpec)
    tiles = TILES[plan.spec.warps_m] if isinstance(plan.spec, LinearSpec) else (first.tile,)
    for blocks, chunk, tile in itertools.product((2, 1) if few else (1,), CHUNKS if few else WGMMA_CHUNKS, tiles):
        if (tile, chunk, blocks) == (first.tile, first.chunk, first.blocks) or (chunk == 128 and first.chunk > 128):
            continue  # pieces of 64 bytes of a row were the slowest of all
        for stages in STAGES if few else range(8, 2, -1):
            shape = LinearChoice(tile, chunk, stages, blocks, 1)
            if isinstance(with_linear_choice(plan, shape, problem, gpu), LinearPlan):
                yield shape
                break


def linear_choice(plan: LinearPlan) -> LinearChoice:
    """The choice that a plan made."""
    spec = plan.spec
    return LinearChoice(spec.tile, spec.chunk, spec.stages, plan.programs_per_sm, plan.programs)
