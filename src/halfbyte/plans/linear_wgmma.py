"""GEMMs with 17 <= M <= 191 on Hopper, by warp-group MMA: how their work is divided; and which tuned kernel takes a GEMM."""

from __future__ import annotations

import math
from dataclasses import replace

from halfbyte.device import GPU, sm_shared_memory, supports_wgmma
from halfbyte.plans.linear import BLOCK_BYTES, gluon_linear, one_weight_spec
from halfbyte.plans.linear_large import large_linear
from halfbyte.plans.linear_spec import LinearPlan, LinearProblem, LinearWgmmaSpec
from halfbyte.plans.weight_spec import WeightSpec

#: M that the kernel takes; below, warps that take chunks of K each are faster, beyond, larger tiles of batch rows.
FEWEST_ROWS, MOST_ROWS = 17, 191


def tuned_linear(p: LinearProblem, gpu: GPU, use_pdl: bool) -> LinearPlan | str:
    """How a tuned kernel computes a GEMM; in words, why none can."""
    planned = gluon_linear if p.rows < FEWEST_ROWS else wgmma_linear if p.rows <= MOST_ROWS else large_linear
    return planned(p, gpu, use_pdl)


def wgmma_linear(p: LinearProblem, gpu: GPU, use_pdl: bool) -> LinearPlan | str:
    """How warp-group MMA computes a GEMM; in words, why it cannot."""
    m, width = p.rows, p.width
    if not supports_wgmma(gpu.capability):
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]}; wgmma needs 9.0"
    if not FEWEST_ROWS <= m <= MOST_ROWS:
        return f"M = {m}; wgmma takes {FEWEST_ROWS} to {MOST_ROWS}"
    spec = wgmma_shape(p, use_pdl)
    if isinstance(spec, str):
        return spec
    blocks = -(-m // spec.block_m)
    if _wide(spec.weights[0]) and gpu.num_sms >= blocks * p.tiles(256) >= 0.8 * gpu.num_sms:
        spec = _of_rows(spec, 256, 256, p) or spec
    tiles, steps = p.tiles(spec.tile) * blocks, -(-width // spec.step)
    return divided(spec, _programs(tiles, steps, gpu.num_sms), tiles, steps)


def wgmma_shape(p: LinearProblem, use_pdl: bool) -> LinearWgmmaSpec | str:
    """The shape of a block of 128 rows that computes a GEMM by warp-group MMA; in words, why none can."""
    m, width, weight = p.rows, p.width, one_weight_spec(p, e2m1_codebook=True)  # E2M1's bits would need an x times 2^64
    if isinstance(weight, str):
        return weight
    if width % (8 * weight.codes_per_word):
        return f"{width * 2 // weight.codes_per_word} bytes an output channel are not a multiple of 16"
    shape = LinearWgmmaSpec((weight,) * len(p.weights), p.half, 32 if m <= 32 else 64, 256, 1, 1, use_pdl)
    # 256 bytes of a row at a time are read faster than 128, where shared memory has room for three such steps and x, and registers
    # for their scales.
    spec = _of_rows(shape, 128, 512, p) if m <= 32 else None
    if spec is None or (spec.halved and spec.scales_per_load == 1):
        spec = _of_rows(shape, 128, 256, p)
    return spec or "three stages do not fit in shared memory"


def _of_rows(shape: LinearWgmmaSpec, tile: int, chunk: int, p: LinearProblem) -> LinearWgmmaSpec | None:
    """The same with tiles of so many rows and steps of so many k, staged."""
    return wgmma_staged(replace(shape, tile=tile, chunk=chunk, whole_tiles=all(n % tile == 0 for n in p.features)), p.width)


def divided(spec: LinearWgmmaSpec, programs: int, tiles: int, steps: int) -> LinearPlan:
    """The plan of so many programs."""
    return LinearPlan(replace(spec, whole=programs == tiles), programs, tiles, steps, tiles if tiles % programs else 0, 1)


def _wide(weight: WeightSpec) -> bool:
    """Whether 16 warps, of 128 registers a thread, can take a tile of 256 rows: x is read half as often."""
    return weight.kind == "unsigned" and weight.group in (0, 128)


def wgmma_staged(shape: LinearWgmmaSpec, width: int) -> LinearWgmmaSpec | None:
    """The same with as many stages as shared memory has room for, at most 8; None with fewer than 3."""
    weight = shape.weights[0]
    if weight.group:
        shape = replace(shape, scales_per_load=math.gcd(shape.columns(weight), width // weight.scale_k, 8))
    fits = [s for n in range(3, 9) if (s := replace(shape, stages=n)).shared_bytes + BLOCK_BYTES <= sm_shared_memory((9, 0))]
    return fits[-1] if fits else None


def _programs(tiles: int, steps: int, slots: int) -> int:
    """How many programs share tiles of so many steps where `slots` run at once: equal parts of tiles, if that leaves few idle.

    Otherwise as few as have the same number of steps as if all slots took part.
    """
    parts = min(slots // tiles, steps)
    if tiles * parts >= 0.85 * slots or (parts and tiles >= 0.7 * slots):
        return tiles * parts
    each = -(-tiles * steps // slots)
    return -(-tiles * steps // each)
