"""What the tuned GEMMs are compiled for, dense or of experts: the shape of a block, its table of pairs, its epilogue.

Specs are compile-time constants: kernels read their fields. plans/gemm_mma.py, gemm_wgmma.py and gemm_large.py choose them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.plans.weight_spec import CODEBOOK_BYTES, WeightSpec, multiple
from halfbyte.reference.experts import Activation


@dataclass(frozen=True)
class Epilogue:
    """What becomes of sums besides scales and bias, on their way to y (kernels/linear/results.py).

    parts       sums of squares of each row that x was made from, which scale its results; 0: none
    eps         added to the mean of those squares
    activation  of gate and up, whose rows alternate in a tile; None: none
    adds        results are added to a residual, times `multiplier`
    norm        the kind of the norm behind that sum; "": none
    order       the block of the projection that takes the results as its x, in whose order they are written; None: none
    """

    parts: int = 0
    eps: float = 0.0
    activation: Activation | None = None
    adds: bool = False
    multiplier: float = 1.0
    norm: str = ""
    order: WgmmaSpec | None = None

    @property
    def padded_parts(self) -> int:
        """A power of two."""
        return 1 << max(0, self.parts - 1).bit_length()

    @property
    def halves(self) -> int:
        """Rows of a tile that become one number."""
        return 1 if self.activation is None else 2


#: y as it is.
PLAIN = Epilogue()


@dataclass(frozen=True)
class PairTable:
    """The table of pairs of a token and an expert that every program of the kernel for small M sorts for itself.

    top_k, shared, ids_early    see `Routing`; with `ids_early` weights are requested ahead of the wait for the kernel before
    size                        room for so many pairs: 32, 128 or 512
    """

    top_k: int
    shared: bool
    size: int
    ids_early: bool

    @property
    def nbytes(self) -> int:
        """Three numbers for each pair, and two more."""
        return multiple(4 * (3 * self.size + 2), 128)


#: What a program reads in the time that splitting a tile takes.
_SPLIT_BYTES = 48 << 10


@dataclass(frozen=True)
class MmaSpec(CompiledFor):
    """Everything the kernel for small M (kernels/linear/mma.py) is compiled for; x_rows: of an expert's pairs, with a `table`."""

    weights: tuple[WeightSpec, ...]
    dtype: str  # of x and y: "bf16" or "fp16"
    block_m: int  # M of the MMAs of a block, a power of two, at least 8
    tile: int  # rows of the weight
    k_slices: int  # warps, or groups of `warps_m` of them, that take a chunk of K each
    warps_m: int  # warps that divide the rows of a tile
    chunk: int  # K of a chunk: 128, 256, ...
    stages: int
    scale_slots: int  # steps whose scales are kept, at least `stages`; with twice as many K slices run independently
    scales_per_copy: int
    zeros_per_copy: int  # zero points, the same
    odd_scales: bool  # rows of scales are 2 bytes longer than a multiple of 4: copies of odd rows begin 2 bytes ahead of them
    odd_zeros: bool
    use_pdl: bool
    x_rows: int  # rows of the batch that are loaded: 1, 2, 4 or `block_m`
    separate_reduce_smem: bool  # the warps' sums have shared memory of their own; else they reuse a slot of the ring
    x_cached: bool  # x comes through the L1 cache: the blocks of an SM read the same
    pad_slots: int  # unused slots of the ring: without them one more block would fit on an SM, and blocks would spread unevenly
    epilogue: Epilogue = field(default=PLAIN, kw_only=True)
    table: PairTable | None = field(default=None, kw_only=True)  # of the pairs of a stack of experts; None: dense weights
    equal_parts: bool = field(default=False, kw_only=True)  # shared memory is seen as equal parts of the whole pool, or not at all
    whole_tiles: bool = field(default=False, kw_only=True)  # no tile reaches beyond the rows of its weight
    owner_reduces: bool = field(default=False, kw_only=True)  # of a split tile: the program that begins it; else the last to arrive
    launches: ClassVar[str] = "one launch"
    kernel: ClassVar[str] = "mma"  # its module in kernels/linear/
    stream_k: ClassVar[bool] = True  # tiles that are left are cut into equal shares of all; else each into equal parts

    @property
    def sources(self) -> int:
        """Weights whose rows alternate in a tile."""
        return 1 if self.table else self.epilogue.halves

    @property
    def x_low(self) -> int:
        """The lowest axis of x in shared memory: two rows are neighbours, to avoid bank conflicts."""
        return min(2, self.x_rows)

    @property
    def x_high(self) -> int:
        return self.x_rows // self.x_low

    @property
    def sums(self) -> int:
        """Columns of a tile's sums once the groups that share an MMA are added."""
        return self.block_m if self.weights[0].groups_per_mma(self) == 1 else self.x_rows

    @property
    def partial_floats(self) -> int:
        """fp32 numbers of one partial result."""
        return self.tile * self.sums

    @property
    def step(self) -> int:
        """K of one step, a chunk for every K slice."""
        return self.k_slices * self.chunk

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.k_slices * self.warps_m

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the rings of codes (the codebook behind them), x, scales and zero points, and sums."""
        sums = 4 * self.k_slices * self.partial_floats if self.separate_reduce_smem else 0
        return self.ring_bytes + sums + 4 * self.warps * self.sums  # the last: of squares, which an epilogue may need

    @property
    def x_bytes(self) -> int:
        """Shared memory of x of one stage."""
        return 2 * self.step * self.x_rows

    @property
    def x_at(self) -> int:
        """Where x lies in shared memory: behind the codes. It and those behind it begin at a multiple of their slots."""
        return self.weights[0].slots(self) * self.weights[0].slot_bytes(self)

    @property
    def scales_at(self) -> int:
        return multiple(self.x_at + self.stages * self.x_bytes, self._scale_bytes)

    @property
    def _scale_bytes(self) -> int:
        """Of one slot, where that is seen as a matrix; else 1."""
        return 1 if self.odd_scales else max(1, self.tile * self.scale_stride(False))

    @property
    def zeros_at(self) -> int:
        return self.scales_at + self.scale_slots * self.tile * self.scale_stride(False)

    @property
    def barriers_at(self) -> int:
        """Where the mbarriers lie, 8 bytes each: a "full" one for each slot of scales, then the "empty" ones."""
        return self.zeros_at + self.weights[0].zero * self.scale_slots * self.tile * self.scale_stride(True)

    @property
    def has_empty_barrier(self) -> bool:
        """K slices signal when they have read a slot of scales, before it is overwritten.

        With slots for twice the stages they need not. A slice in step s has received the scales of step s - 1. So every slice has
        requested those, `stages` - 1 steps ahead: it is in step s - `stages` or later. What step s overwrites, the scales of step
        s - `stages` - 1, every slice has read. (That a thread's reads precede its later requests is the order of the machine: PTX
        promises it for the arrival alone.)
        """
        return self.weights[0].groups > 0 and self.scale_slots < 2 * self.stages

    @property
    def order_at(self) -> int:
        """Where the table of pairs lies: first the sorted pairs."""
        return self.barriers_at + (multiple(16 * self.scale_slots, 128) if self.weights[0].groups else 0)

    @property
    def rows_at(self) -> int:
        return self.order_at + (4 * self.table.size if self.table else 0)

    @property
    def blocks_at(self) -> int:
        return self.rows_at + (4 * self.table.size if self.table else 0)

    @property
    def unsorted(self) -> bool:
        """Few pairs, each a block of its own."""
        return self.x_rows == 1 and self.table is not None and self.table.size == 32

    @property
    def steps_of_a_split(self) -> int:
        """Steps that take a program about as long as its part of a split tile: partial results, a fence and a semaphore."""
        return max(1, _SPLIT_BYTES // self.weights[0].slot_bytes(self))

    @property
    def used_bytes(self) -> int:
        """Codes, x, scales and zero points of all stages, barriers, and the table of pairs."""
        return self.order_at + (self.table.nbytes if self.table else 0)

    @property
    def ring_bytes(self) -> int:
        """Of their allocation."""
        codes = self.weights[0].slot_bytes(self) // self.code_parts
        return multiple(self.used_bytes, max(codes, self.x_bytes, self._scale_bytes)) if self.equal_parts else self.used_bytes

    @property
    def code_parts(self) -> int:
        """Parts of a slot's codes, by columns, that lie one after the other: equal parts that are small leave little at the end."""
        return 2 if self.equal_parts and self.weights[0].slot_bytes(self) > 16 << 10 else 1

    @property
    def table_parts(self) -> int:
        """Parts that a codebook is written in: none is larger than one of codes."""
        return max(1, CODEBOOK_BYTES * self.code_parts // self.weights[0].slot_bytes(self)) if self.equal_parts else 1

    def scale_stride(self, zeros: bool) -> int:
        """Bytes from row to row of the scales (or zero points) of a step."""
        size, odd = (1, self.odd_zeros) if zeros else (self.weights[0].scale_bytes, self.odd_scales)
        return self.columns(self.weights[0]) * size + 4 * odd

    def columns(self, weight: WeightSpec) -> int:
        """Scales of a row in one step."""
        return self.step // 128 * weight.groups


@dataclass(frozen=True)
class WgmmaSpec(CompiledFor):
    """Everything the kernel for larger M on Hopper (kernels/linear/wgmma.py) is compiled for."""

    weights: tuple[WeightSpec, ...]
    dtype: str  # of x and y: "bf16" or "fp16"
    block_m: int  # batch rows in a block: 32 or 64
    chunk: int  # K of a step
    stages: int
    scales_per_load: int  # of a row that one load takes, and zero points
    use_pdl: bool
    tile: int = 128  # rows of the weight: 128 or 256
    whole: bool = False  # each program computes one tile
    whole_tiles: bool = False  # no tile reaches beyond the rows of its weight
    epilogue: Epilogue = PLAIN
    x_bits: int = 16  # of a number of x in shared memory: 8 where x and weights are rounded to INT8
    k_slices: ClassVar[int] = 1  # groups of warps that take a chunk of K each: here all share one
    pad_slots: ClassVar[int] = 0  # unused slots of the ring: none is needed, as an SM has no room for a second block
    code_parts: ClassVar[int] = 1
    table_parts: ClassVar[int] = 2  # of half its size: whole, more shared memory would be rounded off than a stage takes
    sources: ClassVar[int] = 1
    launches: ClassVar[str] = "wgmma; two launches, the first permutes x"
    kernel: ClassVar[str] = "wgmma"
    stream_k: ClassVar[bool] = True

    @property
    def warps(self) -> int:
        """They divide the rows of a tile: a warp group takes 64."""
        return self.tile // 16

    @property
    def warps_m(self) -> int:
        return self.warps

    @property
    def step(self) -> int:
        return self.chunk

    @property
    def k_blocks(self) -> int:
        """Blocks of 64 k in a step: 128 bytes of x."""
        return self.chunk // 64

    @property
    def halved(self) -> bool:
        """Groups of 32: sums of each 32 k have a scale of their own."""
        return self.weights[0].group == 32

    @property
    def fold(self) -> bool:
        """Scales multiply the codes, in 16 bits: where that is exact, as scaling the sums of so few codes would take long."""
        weight = self.weights[0]
        return weight.group == 16 or (weight.group == 32 and weight.scale == "e8m0" and self.dtype == "bf16")

    @property
    def direct(self) -> bool:
        """All MMAs of a tile accumulate into one sum: no scale multiplies the sums of a group."""
        return not self.weights[0].group or self.fold

    @property
    def carried(self) -> bool:
        """A step's last MMAs run on into the next step. Not where codebook look-ups leave no registers for their sums, nor where
        the assembler would make them wait (codebook codes in groups of 32).
        """
        low = self.block_m < 64 and not self.halved
        return self.direct or low or (self.weights[0].kind != "table" and self.tile == 128)

    @property
    def ahead(self) -> int:
        """Steps that copies are ahead: MMAs that run on into the next step read the slot of the step before."""
        return self.stages - (2 if self.carried else 1)

    @property
    def sums(self) -> int:
        return self.block_m

    @property
    def partial_floats(self) -> int:
        return self.tile * self.block_m

    def columns(self, weight: WeightSpec) -> int:
        """Numbers of a row that hold the scales of one step: of groups of 16 each holds two."""
        return self.chunk // weight.scale_k if weight.group else 0

    @property
    def scale_bytes(self) -> int:
        """Of those numbers."""
        return self.weights[0].scale_bytes * (2 if self.weights[0].group == 16 else 1)

    @property
    def x_bytes(self) -> int:
        """x of one stage."""
        return 2 * self.chunk * self.block_m

    @property
    def x_at(self) -> int:
        """Where x begins in the pool: behind codes and codebook."""
        return self.weights[0].slots(self) * self.weights[0].slot_bytes(self)

    @property
    def ring_bytes(self) -> int:
        """Codes (the codebook behind them) and x of all stages: equal parts of each size that the pool is seen as."""
        weight = self.weights[0]
        part = max(weight.slot_bytes(self), CODEBOOK_BYTES // self.table_parts if weight.codebook else 0)
        return multiple(self.x_at + self.stages * self.x_bytes, part)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the pool, and a tile of y."""
        return self.ring_bytes + 2 * self.tile * self.block_m
