"""GEMMs with small M, or few pairs of a token and an expert: what the kernel is compiled for, and how work is divided.

With routing the host fixes tiles and as many programs as run at once; the programs divide what the ids need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from halfbyte.device import DRIVER_SHARED_BYTES, GPU, Capability, sm_shared_memory, supports_pdl
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_spec import Epilogue, MmaSpec, PairTable
from halfbyte.plans.toolchain import takes_any_part
from halfbyte.plans.weight_spec import WeightSpec, weight_spec

#: The largest M of the kernel for small M. From 17 on, kernels with larger tiles are faster.
MOST_ROWS = 16
#: The most tokens with routing, and the sizes of the table of pairs, all of which every program sorts.
MOST_TOKENS, _TABLES = 64, (32, 128, 512)
#: Shared memory that a block takes besides its rings: the driver's, and what the compiler needs.
BLOCK_BYTES = DRIVER_SHARED_BYTES + 256
#: Measured time of reading a weight once for blocks of so many rows (docs/internals/log/linear.md), over that for one.
_TIMES = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.18, 16: 1.65}

#: Time of a step over that of stream-K: whole tiles of programs on all slots, or on each SM one; equal parts of tiles.
WHOLE, _WHOLE_ON_SMS, _PARTS = 0.7, 0.875, 2 / 3

#: What a block is compiled for, and how many run at once on an SM.
Shape = tuple[MmaSpec, int]


def mma_plan(p: GemmProblem, gpu: GPU, use_pdl: bool) -> GemmPlan | str:
    """How the kernel for small M computes a GEMM; in words, why it cannot."""
    if p.routing is not None:
        return _routed(p, p.routing, gpu, use_pdl)
    shape = _dense(p, gpu, use_pdl)
    if isinstance(shape, str):
        return shape
    spec, per_sm = shape
    tiles, steps = p.tiles(spec.tile), -(-p.width // spec.step)
    return planned(spec, fewest_programs(tiles, steps, gpu.num_sms, per_sm), tiles, steps, per_sm)


def _dense(p: GemmProblem, gpu: GPU, use_pdl: bool) -> Shape | str:
    """The shape of a block for dense weights; in words, why there is none."""
    weight = one_weight_spec(p)
    if isinstance(weight, str):
        return weight
    shape, per_sm = _shape(weight, p, gpu)
    best = replace(shape, use_pdl=use_pdl and supports_pdl(gpu.capability))
    refusal = _refusal(best, p, gpu.capability)
    if refusal:
        return refusal
    fitting = _first_that_fits(best, _candidates(best, per_sm, p.width), gpu.capability)
    if not isinstance(fitting, str) and any(n % 2 for n in p.features) and (fitting[0].odd_scales or fitting[0].odd_zeros):
        return f"an odd N with {p.width // weight.group} scales an output channel, which are not aligned for 4-byte copies"
    return fitting


def _first_that_fits(best: MmaSpec, candidates: Iterable[Shape], capability: Capability) -> Shape | str:
    """The first of the candidates that shared memory has room for, with its stages."""
    shapes = ((spec, n) for candidate, n in candidates if (spec := staged(candidate, n, capability)))
    nbytes = replace(best, stages=2).shared_bytes
    return next(shapes, f"two stages of its ring take {nbytes} bytes of shared memory, more than this GPU has")


# --------------------------------------------------------------------------------------------------------------- experts


def _routed(p: GemmProblem, routing: Routing, gpu: GPU, use_pdl: bool) -> GemmPlan | str:
    """The plan for a stack of experts, in blocks of their pairs: that of as many dense weights as ids may name."""
    (features,), pairs, experts = p.features, p.pairs, routing.experts
    if p.rows > MOST_TOKENS or pairs > _TABLES[-1]:
        return (
            f"{p.rows} tokens of {routing.top_k} experts; the tuned kernel takes up to {MOST_TOKENS} tokens and {_TABLES[-1]} pairs"
        )
    rows = block_rows(experts, p.rows, routing.top_k)
    dense = p._replace(weights=p.weights * min(pairs, experts), rows=rows, routing=None)
    shape = _dense(dense, gpu, use_pdl)
    if isinstance(shape, str):
        return shape
    finer, most_per_sm = _finer(*shape, dense, gpu.num_sms)
    size = next(n for n in _TABLES if pairs <= n)
    block = replace(
        finer,
        weights=finer.weights[:1],
        pad_slots=0,
        whole_tiles=features % finer.tile == 0,
        table=PairTable(routing.top_k, routing.shared and routing.top_k > 1, size, routing.ids_early),
        epilogue=Epilogue(activation=p.activation),
    )
    shape = _first_that_fits(block, ((block, n) for n in range(most_per_sm, 0, -1)), gpu.capability)
    if isinstance(shape, str):
        return shape
    spec, per_sm = shape
    blocks, columns, steps = min(pairs, experts + pairs // rows), -(-features // spec.tile), -(-p.width // spec.step)
    tiles = blocks * columns
    if tiles * steps >= 2**24 or experts >= 2**19 or experts * features >= 2**31:
        return f"{experts} experts of [{features}, {p.width}]; the tuned kernel counts steps of tiles up to 2^24"
    programs = min(per_sm * gpu.num_sms, tiles * steps)
    results = routing.gated * pairs * features // spec.epilogue.halves
    return GemmPlan(spec, programs, tiles, steps, blocks, split_tiles=programs, programs_per_sm=per_sm, kept=results)


def _finer(spec: MmaSpec, per_sm: int, hit: GemmProblem, num_sms: int) -> Shape:
    """The shape of a block for the experts that are hit.

    One token waits for its ids, then for few bytes: four programs an SM (three with zero points, for their registers) share those
    out more evenly than two, as long as a tile has more than one step. As measured (docs/internals/log/linear.md); with more tokens
    tiles of 64 rows are faster.
    """
    few = spec.x_rows == 1 and spec.tile == 64 and not spec.weights[0].codebook and hit.tiles(64) <= 4 * num_sms
    if few and spec.k_slices == 4 and hit.width > spec.step:
        return replace(spec, tile=32), 3 if spec.weights[0].zero else 4
    return spec, per_sm


def block_rows(experts: int, tokens: int, top_k: int) -> int:
    """Pairs of one expert that are multiplied together: what is fastest if tokens choose at random.

    An expert with more pairs is read again, and a block for more takes longer.
    """
    chance = min(1.0, top_k / experts)
    of = [math.comb(tokens, n) * chance**n * (1 - chance) ** (tokens - n) for n in range(tokens + 1)]  # pairs of an expert

    def time(rows: int) -> float:
        return _TIMES[rows] * sum(-(-n // rows) * p for n, p in enumerate(of))

    return min((rows for rows in _TIMES if rows < 2 * tokens), key=time)


# ------------------------------------------------------------------------------------------------------------ one block


def planned(spec: MmaSpec, programs: int, tiles: int, steps: int, per_sm: int) -> GemmPlan:
    """The plan of `programs` programs. The owner of a split tile reduces if partial results are few and small, as measured: it
    reads them one by one."""
    split = tiles % programs
    owner_reduces = split > 0 and spec.x_rows <= 8 and programs <= 2 * tiles
    return GemmPlan(replace(spec, owner_reduces=owner_reduces), programs, tiles, steps, 1, split, per_sm)


def one_weight_spec(p: GemmProblem, e2m1_codebook: bool = False) -> WeightSpec | str:
    """`weight_spec` of all weights of a launch, or the reason why a tuned kernel cannot read them."""
    if len({fmt for fmt, _ in p.weights}) > 1:
        return "weights of different formats in one launch take the portable kernel"
    return weight_spec(p.weights[0][0], p.half, e2m1_codebook)


def _long(weight: WeightSpec, p: GemmProblem, num_sms: int) -> bool:
    """Whether one program per SM is fastest: small M, large K, and about one tile of 64 rows for each SM.

    For INT4 with group_size 64 or more, as measured (docs/internals/log/linear.md);
    two programs would take tiles of 32 rows and read x twice as often.
    """
    suits = weight.kind == "unsigned" and (weight.group == 0 or weight.group >= 64) and p.rows <= 8
    return suits and p.width >= 20 << 10 and num_sms >= p.tiles(64) >= 0.9 * num_sms


def _refusal(shape: MmaSpec, p: GemmProblem, capability: Capability) -> str:
    """Why the kernel cannot compute a GEMM, its format aside; "" if it can."""
    weight, width = shape.weights[0], p.width
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the tuned kernel needs 8.0"
    if p.rows > MOST_ROWS:
        return f"M = {p.rows}; the tuned kernel takes up to {MOST_ROWS}"
    if width >= 2**30:
        return f"K = {width}; the tuned kernel takes K below 2^30"
    if width % (8 * weight.codes_per_word):
        return f"{width * 2 // weight.codes_per_word} bytes an output channel are not a multiple of 16"
    if with_copies(shape, width) is None:
        return f"the {width // weight.group} scales of an output channel are not aligned for 2-byte copies"
    return ""


def with_copies(shape: MmaSpec, width: int) -> MmaSpec | None:
    """The shape with the copies of a step's scales and zero points; None if they cannot be copied."""
    weight = shape.weights[0]
    if not weight.group:
        return shape
    columns, row = shape.columns(weight), width // weight.group
    scales, odd_scales = _copies(columns, row, weight.scale_bytes)
    zeros, odd_zeros = _copies(columns, row, 1) if weight.zero else (1, False)
    if not scales or not zeros:
        return None
    return replace(shape, scales_per_copy=scales, zeros_per_copy=zeros, odd_scales=odd_scales, odd_zeros=odd_zeros)


def _copies(columns: int, row: int, size: int) -> tuple[int, bool]:
    """`scale_copy_width`, and whether odd rows are 2 bytes off a multiple of 4: then copies of 4 bytes begin 2 bytes early."""
    width = scale_copy_width(columns, row, size)
    if width or row * size % 4 != 2 or columns * size % 4:
        return width, False
    return 4 // size, True


def scale_copy_width(columns: int, row: int, size: int) -> int:
    """How many scales (or zero points) of `size` bytes are copied at once, of `columns` in a step and `row` in a whole row.

    16 bytes if possible; 0: fewer than 4.
    """
    fits = [n for n in (16, 8, 4, 2, 1) if 4 <= n * size <= 16 and columns % n == 0]
    return next((n for n in fits if row % n == 0), 0)


def _shape(weight: WeightSpec, p: GemmProblem, gpu: GPU) -> Shape:
    """Tiles, warps and chunks, with one stage, and programs an SM; found by measuring (docs/internals/log/linear.md).

    Memory is fastest in runs of 128 bytes of a row. Warps are fastest with 64 rows of the weight, which share the work on x, if
    every program gets a tile; otherwise with 32. Above M = 8, two warps divide a tile, unless tiles are few: then each reads x for
    all 64 rows. For M of 2 to 4, x comes through the L1 cache; M = 1 gains too little from it, and at M = 8 it holds too few steps.
    """
    wide, num_sms = weight.kind == "signed", gpu.num_sms
    per_sm = 1 if _long(weight, p, num_sms) else 2
    tiles, slots, chunk = p.tiles(32), per_sm * num_sms, 128 if wide else 256
    x_rows = next((n for n in (1, 2, 4, 8) if p.rows <= n), 16)
    fine = 0 < weight.group < 64 or bool(weight.codebook)  # their work besides the MMA fills the registers
    few = p.tiles(64) <= num_sms <= 2.1 * p.tiles(64)  # one tile for each SM, or for two
    deep = few and p.width >= 4096 * (num_sms // p.tiles(64))
    room = sm_shared_memory(gpu.capability) > 128 << 10
    if p.rows > 8 and few and room and not wide and (deep or not weight.codebook):
        tile, k_slices, warps_m, chunk = 64, 8 if fine and deep else 4, 1, 256 if deep and not fine else 128
        per_sm = 1 if deep else 2
    elif p.rows > 8:
        tile, k_slices, warps_m = (64 if tiles <= slots or fine else 128), 2, 2
    else:
        narrow = tiles <= (slots if p.rows <= 4 else 0.7 * slots)
        few_registers = wide or (0 < weight.group < 64 and (x_rows == 8 or weight.kind == "unsigned"))
        tile, k_slices, warps_m = (32 if narrow or few_registers else 64), 4, 1
    spec = MmaSpec(
        weights=(weight,) * len(p.weights),
        dtype=p.half,
        block_m=max(8, x_rows),
        tile=tile,
        k_slices=k_slices,
        warps_m=warps_m,
        chunk=chunk,
        stages=1,
        scale_slots=4,
        scales_per_copy=1,
        zeros_per_copy=1,
        odd_scales=False,
        odd_zeros=False,
        use_pdl=False,
        x_rows=x_rows,
        separate_reduce_smem=True,
        x_cached=x_rows in (2, 4),
        pad_slots=0,
        equal_parts=not takes_any_part(),
    )
    return spec, per_sm


def _candidates(shape: MmaSpec, per_sm: int, width: int) -> Iterator[Shape]:
    """The shape, then others for SMs with 100 KB of shared memory: half the rows of a tile, half a chunk of K, each with fewer
    programs on an SM before the next."""
    tiles = [tile for tile in (shape.tile, shape.tile // 2) if tile == shape.tile or tile >= 32 * shape.warps_m]
    chunks = [chunk for chunk in (shape.chunk, shape.chunk // 2) if chunk >= 128]
    for chunk, tile in product(chunks, tiles):
        smaller = with_copies(replace(shape, tile=tile, chunk=chunk), width)
        yield from ((smaller, n) for n in range(per_sm, 0, -1)) if smaller else ()


def staged(shape: MmaSpec, per_sm: int, capability: Capability, depths: Sequence[int] = (4, 3, 2)) -> MmaSpec | None:
    """The same with the first of `depths` stages that lets exactly `per_sm` programs run at once on an SM; or None."""
    everything = sm_shared_memory(capability)
    separate = (True, False) if shape.tile == 32 else (False,)  # measured: 6 % faster; with tiles of 64 rows 7 to 10 % slower
    for stages, separate_reduce_smem, slots in ((n, a, s) for n in depths for a in separate for s in _scale_slots(n)):
        spec = replace(shape, stages=stages, separate_reduce_smem=separate_reduce_smem, scale_slots=slots)
        if per_sm * (spec.shared_bytes + BLOCK_BYTES) <= everything:
            while (per_sm + 1) * (spec.shared_bytes + DRIVER_SHARED_BYTES) <= everything:
                spec = replace(spec, pad_slots=spec.pad_slots + 1)
            return spec
    return None


def _scale_slots(stages: int) -> tuple[int, ...]:
    """How many steps' scales to keep, the best first.

    With twice the stages no K slice waits before it requests scales; with fewer it waits until others have read theirs. A power
    of two takes fewer instructions.
    """
    most = 2 * stages
    return (1 << (most - 1).bit_length(), *range(most, stages - 1, -1))


def fewest_programs(tiles: int, steps: int, num_sms: int, per_sm: int) -> int:
    """How many programs share `tiles` tiles of `steps` steps, `per_sm` at once on each SM: the division of least cost."""
    return cheapest(_divisions(tiles, steps, num_sms, per_sm))


def cheapest(divisions: Iterable[tuple[int, float]]) -> int:
    """The number of programs of least cost, the first of equals."""
    return min(divisions, key=lambda division: division[1])[0]


def _divisions(tiles: int, steps: int, num_sms: int, per_sm: int) -> Iterator[tuple[int, float]]:
    """Numbers of programs, and what each costs over stream-K on all slots: idle slots, times a measured factor.

    Partial results cost more than some idle SMs: one tile a program (data-parallel) may leave 30 % of the slots idle, or 12.5 % of
    the SMs. Few tiles are split into equal parts, as many as there are SMs. Else the fewest programs of as many steps, if they
    compute whole tiles or at most 3 steps.
    """
    slots, parts = per_sm * num_sms, num_sms // tiles
    if tiles <= slots:
        yield tiles, WHOLE * slots / tiles
    if parts:
        count = min(parts, steps)
        programs = tiles * count * (per_sm if steps // count >= 8 else 1)
        yield programs, (_WHOLE_ON_SMS if parts == 1 else _PARTS) * num_sms / (tiles * parts)
    even = even_programs(tiles, steps, slots)
    if tiles % even == 0 or tiles * steps <= 3 * slots:
        yield even, 1.0
    yield slots, 1.0


def even_programs(tiles: int, steps: int, slots: int) -> int:
    """The fewest programs that finish in as many steps as `slots` programs."""
    each = -(-tiles * steps // slots)
    return -(-tiles * steps // each)


def shares(tiles: int, steps: int, programs: int) -> tuple[int, int, int, int]:
    """How programs divide `tiles` tiles of `steps` steps.

    Whole tiles per program; tiles that all programs share, which come first; steps of those per program; how many of the first
    programs take one step more.
    """
    whole, rest = divmod(tiles, programs)
    return whole, rest, *divmod(rest * steps, programs)
