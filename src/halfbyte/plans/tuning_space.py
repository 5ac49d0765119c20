"""The tuning space of the tuned GEMM: any legal choice computes the same, at another speed. Pure functions.

A plan made by rules is *analytic*. Its choice is a few numbers; others make another plan of the same problem, if they pass the
checks that the rules satisfy by design: shapes that the kernel supports, a ring that fits into shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfbyte.device import GPU, Capability
from halfbyte.plans.linear import planned, staged, with_copies
from halfbyte.plans.linear_large import LinearLargeSpec
from halfbyte.plans.linear_spec import LinearPlan, LinearProblem, LinearSpec, LinearWgmmaSpec
from halfbyte.plans.linear_wgmma import divided, wgmma_staged


@dataclass(frozen=True)
class LinearChoice:
    """Rows of the weight in a tile, K of a chunk, stages of the ring, programs per SM, programs."""

    tile: int
    chunk: int
    stages: int
    blocks: int
    programs: int


#: Tiles by the warps that share one, and chunks, of the kernel for M <= 16 (chunks of 512 were no faster and compile for half a
#: minute). And chunks of the wgmma kernel.
TILES, CHUNKS, WGMMA_CHUNKS = {1: (32, 64), 2: (64, 128)}, (128, 256), (256, 512)
STAGES = (4, 3, 2)
#: The most programs per SM: more only cost.
_MOST_PROGRAMS = 4


def with_linear_choice(plan: LinearPlan, c: LinearChoice, p: LinearProblem, gpu: GPU) -> LinearPlan | str:
    """The plan of a problem with another choice, or the reason why that is not possible."""
    if isinstance(plan.spec, LinearLargeSpec):
        return f"M = {p.rows}; the kernel for large M leaves no choice"
    if isinstance(plan.spec, LinearSpec):
        spec: LinearSpec | LinearWgmmaSpec | str = _few_rows(plan.spec, c, p.width, gpu.capability)
    else:
        spec = _warp_groups(plan.spec, c, p.width)
    if isinstance(spec, str):
        return spec
    blocks, steps = plan.tiles // p.tiles(plan.spec.tile), -(-p.width // spec.step)
    tiles = blocks * p.tiles(spec.tile)
    most = _MOST_PROGRAMS * gpu.num_sms
    if isinstance(spec, LinearSpec):  # each program may compute one whole tile, for any number of tiles
        most = max(tiles, most)
    if not 1 <= c.programs <= min(tiles * steps, most):
        return f"{c.programs} programs for {tiles} tiles of {steps} steps on {gpu.num_sms} multiprocessors"
    if isinstance(spec, LinearSpec):
        return planned(spec, c.programs, tiles, steps, c.blocks)
    return divided(spec, c.programs, tiles, steps)


def _few_rows(spec: LinearSpec, c: LinearChoice, width: int, capability: Capability) -> LinearSpec | str:
    if c.tile not in TILES[spec.warps_m] or c.chunk not in CHUNKS or c.stages not in STAGES or c.blocks not in (1, 2):
        return f"{c} is no shape of this kernel"
    shape = replace(spec, tile=c.tile, chunk=c.chunk, stages=1, pad_slots=0)
    shape_with_copies = with_copies(shape, width)
    if shape_with_copies is None:
        return f"the scales of {shape.step} k cannot be copied in pieces of 4 bytes or more"
    return (
        staged(shape_with_copies, c.blocks, capability, (c.stages,))
        or f"{c.stages} stages do not fit shared memory {c.blocks} times"
    )


def _warp_groups(spec: LinearWgmmaSpec, c: LinearChoice, width: int) -> LinearWgmmaSpec | str:
    if c.tile != spec.tile or c.chunk not in WGMMA_CHUNKS or c.blocks != 1:
        return f"{c} is no shape of this kernel"
    most = wgmma_staged(replace(spec, chunk=c.chunk, stages=1), width)
    if most is None or not 3 <= c.stages <= most.stages:
        return f"{c.stages} stages of {c.chunk} k; shared memory has room for 3 to {most.stages if most else 0}"
    return replace(most, stages=c.stages)
