"""How a KV format is stored, as device code sees it: shared by append, the portable and the tuned kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from halfbyte.formats import Format
from halfbyte.plans.compiled_for import CompiledFor


@dataclass(frozen=True)
class KVCodec(CompiledFor):
    """A KV format as a compile-time constant. A kernel adds only what is its own: tiles, strides, how rows are padded.

    kind        what a code is: "unsigned", "signed" (int8), "e4m3", or the name of a dtype that is not quantized
    bits        of a code; the first one of a byte is in its lowest bits
    lo, hi      range of the stored integers
    reach       what the largest magnitude of a block (with offsets, its span) is mapped to
    spread      what shares a scale: "none", "tensor", "token", "head", "group" or "channel"
    group       consecutive dims that share a scale; 0: not in groups
    block       tokens per block of per-channel scales; 0: not per channel. An unfinished block lies in a 16-bit tail
    offset      x = scale * code + offset
    clip        the fraction of a block's span that codes with offsets cover
    """

    kind: str
    bits: int
    lo: int
    hi: int
    reach: float
    spread: str
    group: int
    block: int
    offset: bool
    clip: float

    @property
    def scaled(self) -> bool:
        """Whether codes have scales: all but the unquantized formats."""
        return self.spread != "none"

    @property
    def floating(self) -> bool:
        """Whether a code is a floating-point number."""
        return self.kind not in ("unsigned", "signed")

    @property
    def scale_per_token(self) -> bool:
        """Whether there is one scale for a token, or a head of it, which is applied outside of the MMA."""
        return self.spread in ("token", "head")

    @property
    def scale_inside(self) -> bool:
        """Whether scales differ along a head, so that the MMA's operands need them applied."""
        return self.spread in ("group", "channel")

    @property
    def per_byte(self) -> int:
        """Codes in one byte."""
        return max(1, 8 // self.bits)

    @property
    def codes_per_word(self) -> int:
        """Codes in one 16-bit word."""
        return max(1, 16 // self.bits)

    @property
    def step(self) -> float:
        """A code divided by the fp16 number that its bits, masked in place, represent: integers are subnormals."""
        return 1.0 if not self.scaled else 2.0**8 if self.floating else 2.0**24

    @property
    def centre(self) -> int:
        """What the portable kernel subtracts from unsigned codes, so that its sums do not cancel."""
        return 2 ** (self.bits - 1) if self.kind == "unsigned" else 0


@functools.cache
def kv_codec(fmt: Format) -> KVCodec:
    """The codec of a KV format, or of a plain format that attention reads."""
    code, group = fmt.code, fmt.scale.group or 0 if fmt.scale is not None else 0
    integer = "signed" if code.dtype.is_signed else "unsigned"
    return KVCodec(
        *(code.name if code.kind == "float" else integer, code.bits, code.lo, code.hi, code.reach, fmt.granularity or "none"),
        *(group if fmt.granularity == "group" else 0, fmt.token_block or 0, fmt.offset == "float", fmt.clip),
    )
