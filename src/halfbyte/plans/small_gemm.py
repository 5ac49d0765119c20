"""A GEMM of a few tiles for the kernel of another GEMM's plan: what a tuned kernel is checked on before its first use."""

from __future__ import annotations

from dataclasses import replace

from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_spec import MmaSpec

#: K is reduced modulo this many columns, and so many scales: copies of scales are as wide as those of the whole K.
_COLUMNS, _SCALES = 2048, 16
#: Tokens and experts with routing.
_TOKENS, _EXPERTS = 64, 4


def small_gemm(plan: GemmPlan, p: GemmProblem) -> tuple[GemmPlan, GemmProblem]:
    """The plan of a smaller problem with the spec of `plan`, and that problem; it splits tiles if `plan` does."""
    spec = plan.spec
    modulus = max(_COLUMNS, _SCALES * spec.weights[0].group)
    width = p.width if p.width <= 2 * modulus else modulus + p.width % modulus
    steps = -(-width // spec.step)
    if p.routing is not None:
        return _routed(plan, p._replace(width=width), p.routing, steps)
    features = 3 * spec.tile - (0 if spec.whole_tiles else spec.tile // 2)
    weights = tuple((fmt, features) for fmt, _ in p.weights)
    small = p._replace(weights=weights, rows=min(p.rows, 2 * spec.block_m), width=width)
    blocks = -(-small.rows // spec.block_m)
    tiles = small.tiles(spec.tile) * blocks
    programs = tiles if plan.programs >= plan.tiles else 1
    if plan.split_tiles:
        programs = next(n for n in range(2, tiles) if tiles % n)
    left = tiles % programs
    split = tiles if left and spec.kernel == "wgmma" else left
    return replace(plan, programs=programs, tiles=tiles, steps=steps, blocks=blocks, split_tiles=split), small


def _routed(plan: GemmPlan, p: GemmProblem, routing: Routing, steps: int) -> tuple[GemmPlan, GemmProblem]:
    """The same for a stack of experts."""
    spec, ((fmt, _),) = plan.spec, p.weights
    features = spec.tile if spec.whole_tiles else spec.tile * 3 // 2
    experts = min(routing.experts, max(routing.top_k, _EXPERTS))
    small = p._replace(weights=((fmt, features),), rows=min(p.rows, _TOKENS), routing=routing._replace(experts=experts))
    columns, pairs = -(-features // spec.tile), small.pairs
    small_plan = replace(plan, steps=steps)
    if isinstance(spec, MmaSpec):
        blocks = min(pairs, experts + pairs // spec.x_rows)
        tiles = blocks * columns
        programs = min(plan.programs, tiles * steps)
        results = routing.gated * pairs * features // spec.epilogue.halves
        return replace(small_plan, programs=programs, tiles=tiles, blocks=blocks, split_tiles=programs, kept=results), small
    blocks = pairs // spec.block_m + min(experts, pairs)
    tiles = blocks * columns
    return replace(small_plan, programs=min(plan.programs, tiles), tiles=tiles, blocks=blocks), small
