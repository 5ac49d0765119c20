"""The tuning space of the tuned GEMM: any legal choice computes the same, at another speed. Pure functions.

A plan made by rules is *analytic*. Its choice is a few numbers; others make another plan of the same problem, if they pass the
checks that the rules satisfy by design: shapes that the kernel supports, a ring that fits into shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfbyte.device import GPU, Capability
from halfbyte.plans.gemm_mma import planned, staged, with_copies
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import MmaSpec, WgmmaSpec
from halfbyte.plans.gemm_wgmma import divided, wgmma_staged


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


def with_linear_choice(plan: GemmPlan, c: LinearChoice, p: GemmProblem, gpu: GPU) -> GemmPlan | str:
    """The plan of a problem with another choice, or the reason why that is not possible."""
    if not plan.spec.stream_k:
        return f"M = {p.rows}; the kernel for large M leaves no choice"
    if isinstance(plan.spec, MmaSpec):
        spec: MmaSpec | WgmmaSpec | str = _few_rows(plan.spec, c, p.width, gpu.capability)
    else:
        spec = _warp_groups(plan.spec, c, p.width)
    if isinstance(spec, str):
        return spec
    tiles, steps = plan.blocks * p.tiles(spec.tile), -(-p.width // spec.step)
    most = _MOST_PROGRAMS * gpu.num_sms
    if isinstance(spec, MmaSpec):  # each program may compute one whole tile, for any number of tiles
        most = max(tiles, most)
    if not 1 <= c.programs <= min(tiles * steps, most):
        return f"{c.programs} programs for {tiles} tiles of {steps} steps on {gpu.num_sms} multiprocessors"
    if isinstance(spec, MmaSpec):
        return planned(spec, c.programs, tiles, steps, c.blocks)
    return divided(spec, c.programs, tiles, steps, plan.blocks)


def _few_rows(spec: MmaSpec, c: LinearChoice, width: int, capability: Capability) -> MmaSpec | str:
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


def _warp_groups(spec: WgmmaSpec, c: LinearChoice, width: int) -> WgmmaSpec | str:
    if c.tile != spec.tile or c.chunk not in WGMMA_CHUNKS or c.blocks != 1:
        return f"{c} is no shape of this kernel"
    most = wgmma_staged(replace(spec, chunk=c.chunk, stages=1), width)
    if most is None or not 3 <= c.stages <= most.stages:
        return f"{c.stages} stages of {c.chunk} k; shared memory has room for 3 to {most.stages if most else 0}"
    return replace(most, stages=c.stages)
