"""How the tuned kernels divide GEMMs with quantized weights: pure functions of the problem and the device.

This module has small M, and what both kernels share; plans/linear_wgmma.py has larger M on Hopper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from halfbyte.device import DRIVER_SHARED_BYTES, GPU, Capability, sm_shared_memory, supports_pdl
from halfbyte.plans.linear_spec import LinearPlan, LinearProblem, LinearSpec
from halfbyte.plans.toolchain import takes_any_part
from halfbyte.plans.weight_spec import WeightSpec, weight_spec

#: The largest M of the kernel for small M. From 17 on, kernels with larger tiles are faster.
MOST_ROWS = 16
#: Shared memory that a block takes besides its rings: the driver's, and what the compiler needs.
BLOCK_BYTES = DRIVER_SHARED_BYTES + 256


def gluon_linear(p: LinearProblem, gpu: GPU, use_pdl: bool) -> LinearPlan | str:
    """How the kernel for small M computes a GEMM, or the reason why it cannot."""
    weight = one_weight_spec(p)
    if isinstance(weight, str):
        return weight
    per_sm = 1 if _long(weight, p, gpu.num_sms) else 2
    shape = replace(_shape(weight, p, per_sm * gpu.num_sms), use_pdl=use_pdl and supports_pdl(gpu.capability))
    refusal = _refusal(shape, p, gpu.capability)
    if refusal:
        return refusal
    shapes = [(one, n) for smaller in _smaller(shape) if (one := with_copies(smaller, p.width)) for n in range(per_sm, 0, -1)]
    spec, per_sm = next(((spec, n) for one, n in shapes if (spec := staged(one, n, gpu.capability))), (None, 0))
    if spec is None:
        return f"two stages of its ring take {replace(shape, stages=2).shared_bytes} bytes of shared memory, more than this GPU has"
    if any(n % 2 for n in p.features) and (spec.odd_scales or spec.odd_zeros):
        return f"an odd N with {p.width // weight.group} scales an output channel, which are not aligned for 4-byte copies"
    tiles = p.tiles(spec.tile)
    steps = -(-p.width // spec.step)
    programs = fewest_programs(tiles, steps, gpu.num_sms, per_sm)
    return planned(spec, programs, tiles, steps, per_sm)


def planned(spec: LinearSpec, programs: int, tiles: int, steps: int, per_sm: int) -> LinearPlan:
    """The plan of `programs` programs. The owner of a split tile reduces if partial results are few and small, as measured: it
    reads them one by one."""
    split = tiles % programs
    owner_reduces = split > 0 and spec.x_rows <= 8 and programs <= 2 * tiles
    return LinearPlan(replace(spec, owner_reduces=owner_reduces), programs, tiles, steps, split, per_sm)


def one_weight_spec(p: LinearProblem, e2m1_codebook: bool = False) -> WeightSpec | str:
    """`weight_spec` of all weights of a launch, or the reason why a tuned kernel cannot read them."""
    if len({fmt for fmt, _ in p.weights}) > 1:
        return "weights of different formats in one launch take the portable kernel"
    return weight_spec(p.weights[0][0], p.half, e2m1_codebook)


def _long(weight: WeightSpec, p: LinearProblem, num_sms: int) -> bool:
    """Whether one program per SM is fastest: small M, large K, and about one tile of 64 rows for each SM.

    For INT4 with group_size 64 or more, as measured (docs/internals/log/linear.md);
    two programs would take tiles of 32 rows and read x twice as often.
    """
    suits = weight.kind == "unsigned" and (weight.group == 0 or weight.group >= 64) and p.rows <= 8
    return suits and p.width >= 20 << 10 and num_sms >= p.tiles(64) >= 0.9 * num_sms


def _refusal(shape: LinearSpec, p: LinearProblem, capability: Capability) -> str:
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


def with_copies(shape: LinearSpec, width: int) -> LinearSpec | None:
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


def _shape(weight: WeightSpec, p: LinearProblem, slots: int) -> LinearSpec:
    """Tiles, warps and chunks, with one stage; found by measuring (docs/internals/log/linear.md).

    Memory is fastest in runs of 128 bytes of a row. Warps are fastest with 64 rows of the weight, which share the work on x, if
    every program gets a tile; otherwise with 32. Above M = 8, two warps divide a tile. For M of 2 to 4, x comes through the L1
    cache; M = 1 gains too little from it, and at M = 8 it holds too few steps.
    """
    wide = weight.kind == "signed"
    tiles = p.tiles(32)
    x_rows = next((n for n in (1, 2, 4, 8) if p.rows <= n), 16)
    fine = 0 < weight.group < 64 or bool(weight.codebook)  # their work besides the MMA fills the registers
    if p.rows > 8:
        tile, k_slices, warps_m = (64 if tiles <= slots or fine else 128), 2, 2
    else:
        narrow = tiles <= (slots if p.rows <= 4 else 0.7 * slots)
        few_registers = wide or (0 < weight.group < 64 and (x_rows == 8 or weight.kind == "unsigned"))
        tile, k_slices, warps_m = (32 if narrow or few_registers else 64), 4, 1
    return LinearSpec(
        weights=(weight,) * len(p.weights),
        dtype=p.half,
        block_m=max(8, x_rows),
        tile=tile,
        k_slices=k_slices,
        warps_m=warps_m,
        chunk=128 if wide else 256,
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


def _smaller(shape: LinearSpec) -> list[LinearSpec]:
    """The shape, then others for SMs with 100 KB of shared memory: half the rows of a tile, half a chunk of K."""
    tiles = [tile for tile in (shape.tile, shape.tile // 2) if tile == shape.tile or tile >= 32 * shape.warps_m]
    chunks = [chunk for chunk in (shape.chunk, shape.chunk // 2) if chunk >= 128]
    return [replace(shape, tile=tile, chunk=chunk) for chunk in chunks for tile in tiles]


def staged(shape: LinearSpec, per_sm: int, capability: Capability, depths: Sequence[int] = (4, 3, 2)) -> LinearSpec | None:
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
    """How many programs share `tiles` tiles of `steps` steps, `per_sm` at once on each SM.

    Data-parallel if the tiles fill the GPU: partial results cost more than some idle SMs. Few tiles are split into equal parts.
    Otherwise the fewest programs of equal steps; with more than 3 steps for each slot, stream-K over all slots.
    """
    slots = per_sm * num_sms
    if slots >= tiles >= 0.7 * slots:
        return tiles
    parts = num_sms // tiles
    if parts >= 2 or num_sms >= tiles >= 0.875 * num_sms:
        parts = min(parts, steps)
        return tiles * parts * (per_sm if steps // parts >= 8 else 1)
    even = even_programs(tiles, steps, slots)
    return even if tiles % even == 0 or tiles * steps <= 3 * slots else slots


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
