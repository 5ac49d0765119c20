"""GEMMs with M from 33, and prompts of mixtures, on Hopper: what the kernel is compiled for, and how the work is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from halfbyte.device import GPU, sm_shared_memory, supports_wgmma
from halfbyte.plans.gemm_mma import BLOCK_BYTES, one_weight_spec
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_spec import Epilogue, WgmmaSpec
from halfbyte.plans.weight_spec import CODEBOOK_BYTES, WeightSpec, multiple

#: The fewest rows, and up to how many only short tiles are faster than by `gemm_wgmma`: these have no launch ahead that permutes x,
#: but twice its instructions a code.
FEWEST_ROWS, _ROWS_OF_SHORT_TILES, _SHORT_STEPS = 33, 64, {True: 8, False: 20}
#: us of a step of a tile by its batch rows, for codes that are looked up and others, and of each part of a tile that is split.
#: Measured on an H200.
_STEP_COST = {True: {64: 0.96, 128: 1.05, 256: 1.3}, False: {64: 0.72, 128: 0.84, 256: 1.25}}
_PART_COST = {64: 1.35, 128: 1.35, 256: 1.95}
#: The same of steps with x in INT8, of twice the K; with 128 batch rows they are half as fast. And slots of the ring of codes from
#: the M on that follows: fewer are 1 to 5 % faster there, and slower below.
_INT8_STEP_COST, _INT8_CODE_STAGES, _INT8_LONG = {256: 1.6}, 4, 1024
#: The fewest steps of a part of a tile; slots of the ring of codes, which come from far: with 8 of 64 k no room is left for the
#: mbarriers. The K from which on slots of 64 k are faster than of 128 for 4-bit integers, as measured on an H200.
_FEWEST_STEPS, _CODE_STAGES, _LONG = 4, 7, 8192
#: Pairs of each expert up to which a block of 32, 64 and 128 of them is fastest, with codebooks and without; measured on an H200.
#: Up to 64 pairs a tile has 256 rows.
_PAIRS = {True: {32: 28, 64: 56, 128: 96}, False: {32: 28, 64: 56, 128: 192}}
#: Kernels compute with positions of tiles in fp32.
_MOST_TILES = 2**23


@dataclass(frozen=True)
class LargeSpec(WgmmaSpec):
    """Everything the kernel for large M (kernels/linear/wgmma_large.py) is compiled for.

    Tiles have 128 rows of the weight, 64 for each of two warp groups, and 64, 128 or 256 batch rows (`block_m`); or 256 rows and 32
    or 64 pairs of an expert. `chunk` is copied at once, a step or half of one; `stages` are slots of the ring of codes.
    """

    x_stages: int = 0  # slots of the ring of x
    aligned: bool = False  # K is whole steps: scales of a step are loaded at once
    band: ClassVar[int] = 8  # blocks of batch rows whose tiles are computed side by side, so that they share x and weights in L2
    table_parts: ClassVar[int] = 8
    kernel: ClassVar[str] = "wgmma_large"
    launches: ClassVar[str] = "wgmma; one launch, of warps that copy x and warps that unpack and multiply"
    stream_k: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """K of 128 bytes of a batch row, which MMAs take together."""
        return 1024 // self.x_bits

    @property
    def step(self) -> int:
        return 2 * self.width

    @property
    def k_blocks(self) -> int:
        return self.chunk // self.width

    @property
    def x_bytes(self) -> int:
        return self.x_bits // 8 * self.chunk * self.block_m

    @property
    def registers(self) -> int:
        """Of a thread at the start; the warp that copies x keeps fewer, the others take what it leaves."""
        return 168 if self.warps == 8 else 96

    @property
    def copy_registers(self) -> int:
        return 40 if self.warps == 8 else 32

    @property
    def sums(self) -> int:
        """Batch rows of a tile that are written at once."""
        return 64 if self.block_m == 256 else 32

    @property
    def pieces(self) -> int:
        """MMAs that 64 k take. With 256 batch rows, or 16 warps, registers hold no words of the next codes."""
        return 1 if 256 in (self.block_m, self.tile) or self.x_bits == 8 else 4

    @property
    def ahead(self) -> int:
        """How many times 64 k copies of codes are ahead: words that are loaded ahead leave their slot."""
        return self.stages - (2 if self.pieces == 1 else 1)

    @property
    def barriers_at(self) -> int:
        """Where the mbarriers of x lie, 8 bytes each: for each slot one that says that it was read, then those that x is there."""
        return self.stages * self.weights[0].slot_bytes(self)

    @property
    def x_at(self) -> int:
        """Where x begins in shared memory, a multiple of its slots: behind codes, mbarriers and the codebook."""
        weight = self.weights[0]
        table_end = weight.codebook_at(self) + CODEBOOK_BYTES if weight.codebook else 0
        return multiple(max(table_end, self.barriers_at + 16 * self.x_stages), self.x_bytes)

    @property
    def ring_bytes(self) -> int:
        return self.x_at + self.x_stages * self.x_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the rings, a part of a tile of y, and what the compiler needs for warps that part."""
        return self.ring_bytes + 2 * self.tile * self.sums + 256

    @property
    def unit(self) -> float:
        """The scale of the sums of the MMA."""
        weight = self.weights[0]
        if self.x_bits == 8:
            return 1.0
        if weight.kind == "table":
            return weight.unit(self.dtype)
        return 2.0**-6 if weight.kind == "unsigned" and self.dtype == "bf16" else 1.0


def large_plan(p: GemmProblem, gpu: GPU, use_pdl: bool) -> GemmPlan | str:
    """How the kernel for large M computes a GEMM; in words, why it cannot."""
    if not supports_wgmma(gpu.capability):
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]}; wgmma needs 9.0"
    weight = one_weight_spec(p, e2m1_codebook=True)
    if isinstance(weight, str):
        return weight
    if p.half == "fp16" and weight.scale == "e8m0":
        return "scales in E8M0 exceed fp16, and for large M the kernel multiplies codes by them in 16 bits"
    if p.width % (8 * weight.codes_per_word):
        return f"{p.width * 2 // weight.codes_per_word} bytes an output channel are not a multiple of 16"
    if p.routing is not None:
        return _routed(weight, p, p.routing, gpu)
    if p.tiles(LargeSpec.tile) * p.rows >= 128 * _MOST_TILES:
        return f"M = {p.rows}; the kernel numbers up to {_MOST_TILES} tiles"
    x_bits, sizes = (8, _INT8_STEP_COST) if p.rounds_x else (16, _STEP_COST[False])
    shapes = [_staged((weight,) * len(p.weights), block_m, p, use_pdl, x_bits=x_bits) for block_m in sizes]
    _, plan = min((_divided(shape, p, gpu.num_sms) for shape in shapes), key=lambda candidate: candidate[0])
    longest = _steps(plan.tiles, plan.steps, plan.programs)
    if p.rows <= _ROWS_OF_SHORT_TILES and longest > _SHORT_STEPS[weight.kind == "table"]:
        return f"M = {p.rows}, and programs have {longest} steps; up to {_ROWS_OF_SHORT_TILES} rows the kernel is fast with few"
    return plan


def _routed(weight: WeightSpec, p: GemmProblem, routing: Routing, gpu: GPU) -> GemmPlan | str:
    """The plan for a stack of experts, in blocks of their sorted pairs, whose programs take whole tiles."""
    hit, most = min(p.pairs, routing.experts), _PAIRS[weight.kind == "table"]
    block_m = next((n for n, pairs in most.items() if p.pairs <= pairs * hit), 256)
    shape = _staged((weight,), block_m, p, False, 256 if block_m <= 64 else 128)
    spec = replace(shape, whole=True, epilogue=Epilogue(activation=p.activation))
    blocks, steps = p.pairs // spec.block_m + hit, -(-p.width // spec.step)
    tiles = blocks * p.tiles(spec.tile)
    if tiles >= _MOST_TILES:
        return f"{p.pairs} pairs and {routing.experts} experts; the kernel numbers up to {_MOST_TILES} tiles"
    return GemmPlan(spec, min(gpu.num_sms, tiles), tiles, steps, blocks, split_tiles=0, programs_per_sm=1)


def _staged(
    weights: tuple[WeightSpec, ...], block_m: int, p: GemmProblem, use_pdl: bool, tile: int = 128, x_bits: int = 16
) -> LargeSpec:
    """The shape of a block with as many slots of x as shared memory has room for, at most 8."""
    kind = weights[0].kind
    short = kind == "table" or (kind == "unsigned" and (p.width < _LONG or tile == 256))
    chunk, stages = 128 if x_bits == 8 or (block_m < 256 and short) else 64, _CODE_STAGES if tile == 128 else 5
    stages = _INT8_CODE_STAGES if x_bits == 8 and p.rows >= _INT8_LONG else stages
    shape = LargeSpec(weights, p.half, block_m, chunk, stages, 1, use_pdl, tile, x_bits=x_bits, x_stages=3)
    shape = replace(shape, whole_tiles=all(n % shape.tile == 0 for n in p.features), aligned=p.width % shape.step == 0)
    fits = [s for n in range(3, 9) if (s := replace(shape, x_stages=n)).shared_bytes + BLOCK_BYTES <= sm_shared_memory((9, 0))]
    return fits[-1]


def _divided(shape: LargeSpec, p: GemmProblem, slots: int) -> tuple[float, GemmPlan]:
    """The fastest division of the work among programs by what it costs, in us, and its plan."""
    blocks, steps = -(-p.rows // shape.block_m), -(-p.width // shape.step)
    tiles = p.tiles(shape.tile) * blocks
    most = min(slots, tiles * max(1, steps // _FEWEST_STEPS))
    few = -(-tiles // -(-tiles // slots))  # as many waves, and the fewest programs that do it

    def fits(n: int) -> bool:
        """Whether every part has steps: a program without one would not arrive at the exchange of its tile's sums."""
        return n <= slots and parts_of(tiles, n) <= max(1, steps // _FEWEST_STEPS)

    candidates = [n for n in {few, *range(tiles, most + 1, tiles), most} if fits(n)]
    candidates = candidates or [next(n for n in range(few, 0, -1) if fits(n))]  # one program leaves no tile to part
    costs = {programs: _cost(shape, tiles, steps, programs) for programs in candidates}
    programs = min(costs, key=lambda n: (costs[n], n))
    split = tiles % programs if parts_of(tiles, programs) > 1 else 0
    return costs[programs], GemmPlan(replace(shape, whole=not split), programs, tiles, steps, blocks, split, 1)


def _cost(shape: LargeSpec, tiles: int, steps: int, programs: int) -> float:
    parts = parts_of(tiles, programs)
    exchange = parts * _PART_COST[shape.block_m] if parts > 1 else 0.0
    return _steps(tiles, steps, programs) * _step_costs(shape)[shape.block_m] + exchange


def _step_costs(shape: LargeSpec) -> dict[int, float]:
    return _INT8_STEP_COST if shape.x_bits == 8 else _STEP_COST[shape.weights[0].kind == "table"]


def _steps(tiles: int, steps: int, programs: int) -> int:
    """Of the program that has most of them."""
    parts = parts_of(tiles, programs)
    return tiles // programs * steps + (-(-steps // parts) if parts else 0)


def parts_of(tiles: int, programs: int) -> int:
    """In how many parts each of the tiles is cut that are left when all programs have as many; 0: none is left."""
    left = tiles % programs
    return programs // left if left else 0
