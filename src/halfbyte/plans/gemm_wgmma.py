"""GEMMs with 17 <= M <= 64 (191 where `gemm_large` refuses), or few pairs of experts, on Hopper: shapes, work divided."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from halfbyte.device import GPU, sm_shared_memory, supports_wgmma
from halfbyte.plans.gemm_mma import BLOCK_BYTES, WHOLE, cheapest, even_programs, one_weight_spec
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_spec import Epilogue, WgmmaSpec
from halfbyte.plans.weight_spec import WeightSpec

#: M that the kernel takes; below, warps that take chunks of K each are faster, from 65 on larger tiles of batch rows.
FEWEST_ROWS, MOST_ROWS = 17, 191
#: Pairs for each expert up to which the kernel is faster than `gemm_large`: by 2 to 12 %, and with codebooks never (measured).
_FEW_PAIRS = 24
#: Time of a step where programs compute equal parts of tiles, over that of stream-K.
_PARTS = 0.85


def wgmma_plan(p: GemmProblem, gpu: GPU, use_pdl: bool) -> GemmPlan | str:
    """How warp-group MMA computes a GEMM; in words, why it cannot."""
    if not supports_wgmma(gpu.capability):
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]}; wgmma needs 9.0"
    if p.routing is not None:
        return _routed(p, p.routing, gpu)
    if not FEWEST_ROWS <= p.rows <= MOST_ROWS:
        return f"M = {p.rows}; wgmma takes {FEWEST_ROWS} to {MOST_ROWS}"
    spec = _block(p, use_pdl)
    if isinstance(spec, str):
        return spec
    blocks = -(-p.rows // spec.block_m)
    if _wide(spec.weights[0]) and gpu.num_sms >= blocks * p.tiles(256) >= 0.8 * gpu.num_sms:
        spec = _of_rows(spec, 256, 256, p) or spec
    tiles, steps = p.tiles(spec.tile) * blocks, -(-p.width // spec.step)
    return divided(spec, _programs(tiles, steps, gpu.num_sms), tiles, steps, blocks)


@dataclass(frozen=True)
class PairsSpec(WgmmaSpec):
    """The same for few pairs of the experts of a stack (kernels/linear/experts_wgmma.py)."""

    kernel: ClassVar[str] = "experts_wgmma"


def _routed(p: GemmProblem, routing: Routing, gpu: GPU) -> GemmPlan | str:
    """The plan for a stack of experts, in blocks of 32 pairs, whose programs take whole tiles."""
    (features,), experts = p.features, routing.experts
    block = _block(p._replace(rows=32), False, PairsSpec)
    if isinstance(block, str):
        return block
    if p.pairs > _FEW_PAIRS * experts or block.weights[0].codebook:
        return f"{p.pairs} pairs of {experts} experts; wgmma takes up to {_FEW_PAIRS} for each, without a codebook"
    spec = replace(block, epilogue=Epilogue(activation=p.activation))
    blocks, steps = p.pairs // spec.block_m + min(experts, p.pairs), -(-p.width // spec.step)
    tiles = blocks * -(-features // spec.tile)
    if tiles * steps >= 2**24 or experts * features >= 2**31:
        return f"{experts} experts of [{features}, {p.width}]; wgmma counts steps of tiles up to 2^24"
    return GemmPlan(spec, min(gpu.num_sms, tiles), tiles, steps, blocks, split_tiles=0, programs_per_sm=1)


def _block(p: GemmProblem, use_pdl: bool, kind: type[WgmmaSpec] = WgmmaSpec) -> WgmmaSpec | str:
    """The shape of a block of 128 rows that computes a GEMM by warp-group MMA; in words, why none can."""
    m, width, weight = p.rows, p.width, one_weight_spec(p, e2m1_codebook=True)  # E2M1's bits would need an x times 2^64
    if isinstance(weight, str):
        return weight
    if width % (8 * weight.codes_per_word):
        return f"{width * 2 // weight.codes_per_word} bytes an output channel are not a multiple of 16"
    shape = kind((weight,) * len(p.weights), p.half, 32 if m <= 32 else 64, 256, 1, 1, use_pdl)
    # 256 bytes of a row at a time are read faster than 128, where shared memory has room for three such steps and x, and registers
    # for their scales.
    spec = _of_rows(shape, 128, 512, p) if m <= 32 else None
    if spec is None or (spec.halved and spec.scales_per_load == 1):
        spec = _of_rows(shape, 128, 256, p)
    return spec or "three stages do not fit in shared memory"


def _of_rows(shape: WgmmaSpec, tile: int, chunk: int, p: GemmProblem) -> WgmmaSpec | None:
    """The same with tiles of so many rows and steps of so many k, staged."""
    return wgmma_staged(replace(shape, tile=tile, chunk=chunk, whole_tiles=all(n % tile == 0 for n in p.features)), p.width)


def divided(spec: WgmmaSpec, programs: int, tiles: int, steps: int, blocks: int) -> GemmPlan:
    """The plan of so many programs."""
    return GemmPlan(replace(spec, whole=programs == tiles), programs, tiles, steps, blocks, tiles if tiles % programs else 0, 1)


def _wide(weight: WeightSpec) -> bool:
    """Whether 16 warps, of 128 registers a thread, can take a tile of 256 rows: x is read half as often."""
    return weight.kind == "unsigned" and weight.group in (0, 128)


def wgmma_staged(shape: WgmmaSpec, width: int) -> WgmmaSpec | None:
    """The same with as many stages as shared memory has room for, at most 8; None with fewer than 3."""
    weight = shape.weights[0]
    if weight.group:
        shape = replace(shape, scales_per_load=math.gcd(shape.columns(weight), width // weight.scale_k, 8))
    fits = [s for n in range(3, 9) if (s := replace(shape, stages=n)).shared_bytes + BLOCK_BYTES <= sm_shared_memory((9, 0))]
    return fits[-1] if fits else None


def _programs(tiles: int, steps: int, slots: int) -> int:
    """How many programs share tiles of so many steps where `slots` run at once, as in `gemm_mma.fewest_programs`: equal parts of
    tiles, or as few as have the same number of steps as if all slots took part."""
    divisions = [(even_programs(tiles, steps, slots), 1.0)]
    if parts := min(slots // tiles, steps):
        divisions.insert(0, (tiles * parts, (WHOLE if parts == 1 else _PARTS) * slots / (tiles * parts)))
    return cheapest(divisions)
