"""How the tuned linear kernels read a weight: the space of its words in a ring, and how codes become operands of tensor cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from halfbyte.formats import Format
from halfbyte.plans.codebooks import pattern, unit_of_codebook
from halfbyte.plans.weight_codec import WeightCodec, weight_codec

#: Bytes of shared memory of a codebook: both values of every byte, for each of 32 banks.
CODEBOOK_BYTES = 256 * 32 * 4
_SCALES = {"f16": 2, "f32": 4, "e8m0": 1, "e4m3": 1}


class Ring(Protocol):
    """What determines the layout of a ring of packed words in shared memory."""

    @property
    def k_slices(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def pad_slots(self) -> int: ...


class Block(Ring, Protocol):
    """The ring and the GEMM of a block of the kernel for small M."""

    @property
    def block_m(self) -> int: ...
    @property
    def x_rows(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class WeightSpec(WeightCodec):
    """How a weight is stored, and its codebook in 16 bits, if its codes are read through one.

    codebook       16-bit patterns of `values` over `codebook_unit`
    codebook_unit  what values are divided by: see `unit_of_codebook`
    """

    codebook: tuple[int, ...]
    codebook_unit: float

    def words(self, spec: Ring) -> int:
        """16-bit words of a chunk of a row."""
        return spec.chunk // self.codes_per_word

    @property
    def groups(self) -> int:
        """Scales of a row per 128 of K."""
        return 128 // self.group if self.group else 0

    def groups_per_mma(self, spec: Block) -> int:
        """Groups whose sums share one MMA: with M below 8 it has columns to spare."""
        free = spec.block_m // spec.x_rows
        return free if self.codes_per_word == 4 and 0 < self.group <= 32 <= free * self.group <= spec.chunk else 1

    def operands(self, spec: Block) -> int:
        """MMA operands, 16 k each, whose sums are scaled together."""
        return self.groups_per_mma(spec) * self.group // 16

    def halved(self, spec: Block) -> bool:
        """Only 8 words are scaled together, half the depth of an MMA: two codes of a word share an operand."""
        return self.operands(spec) == 2

    def operands_scaled(self, spec: Block) -> bool:
        """Groups of 16: the scale multiplies the codes, in 16 bits."""
        return self.group == 16 and self.groups_per_mma(spec) == 1

    @property
    def scale_k(self) -> int:
        """K that a number has the scales of where groups of 16 are read in pairs (warp-group MMA)."""
        return max(32, self.group)

    @property
    def scale_bytes(self) -> int:
        return _SCALES[self.scale]

    def slot_bytes(self, spec: Ring) -> int:
        """Bytes of shared memory of the codes of one stage."""
        return spec.k_slices * spec.tile * self.words(spec) * 2

    def codebook_at(self, spec: Ring) -> int:
        """Byte offset of the codebook in shared memory, a multiple of its size: after the stages."""
        return multiple(spec.stages * self.slot_bytes(spec), CODEBOOK_BYTES)

    def slots(self, spec: Ring) -> int:
        """Slots of the ring: the stages, the codebook after them, and empty ones."""
        behind = -(-(self.codebook_at(spec) + CODEBOOK_BYTES) // self.slot_bytes(spec)) if self.codebook else spec.stages
        return behind + spec.pad_slots

    def unit(self, dtype: str) -> float:
        """The scale of sums of the MMA: that of the operands, and for E2M1 in bf16 that of x (`x_factor`) as well."""
        if self.kind == "e2m1":
            return 2.0**-62 if dtype == "bf16" else 2.0**-14
        return 1.0 / self.codebook_unit if self.codebook else 1.0 if dtype == "bf16" else 2.0**-24

    def x_factor(self, spec: Block) -> float:
        """What x is multiplied by: E2M1's bits in a bf16 are the number times 2^-126, too small for fp32 sums."""
        return 1.0 if self.kind != "e2m1" or spec.dtype == "fp16" else 2.0**57 if self.operands_scaled(spec) else 2.0**64

    def scale_factor(self, spec: Block) -> float:
        """What scales that multiply operands are multiplied by: a bf16 holds code times scale exactly from 2^-133 on."""
        return 2.0**7 if self.kind == "e2m1" and spec.dtype == "bf16" else 1.0

    def bias_in_unpack(self, spec: Block) -> bool:
        """Unpacking subtracts bias and zero points of 4-bit codes: at M = 16, an MMA with ones costs more, if groups are small."""
        return self.kind == "unsigned" and spec.x_rows == 16 and not (self.zero and self.group > 32)

    def shift(self, dtype: str) -> float:
        """By how much operands exceed their codes' values, ignoring zero points."""
        extra = {("unsigned", "bf16"): 128, ("signed", "fp16"): 128}.get((self.kind, dtype), 0)
        return (self.bias + extra) * self.unit(dtype)


def weight_spec(fmt: Format, dtype: str, e2m1_codebook: bool = False) -> WeightSpec | str:
    """How a tuned kernel reads a weight of `fmt`, or the reason why it cannot. `e2m1_codebook`: E2M1 through a codebook."""
    codec = weight_codec(fmt)
    if codec.group not in (0, 16, 32, 64, 128) or codec.nested:
        return f"{fmt.name} is read by the portable kernel only"
    if codec.zero and not codec.group:
        return "per-channel zero points are read by the portable kernel only"
    if e2m1_codebook and codec.kind == "e2m1":
        codec = replace(codec, kind="table")
    codebook, unit = tuple[int, ...](), 1.0
    if codec.kind == "table":
        unit = unit_of_codebook(fmt.code, dtype)
        codebook = tuple(pattern(value / unit, dtype) for value in codec.values)
    return WeightSpec(**vars(codec), codebook=codebook, codebook_unit=unit)


def multiple(n: int, of: int) -> int:
    """The smallest multiple of `of` that is >= n."""
    return -(-n // of) * of
