"""How a weight format is stored, as device code sees it: shared by the linear kernels and the dequantize kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from halfbyte.formats import E2M1, Format
from halfbyte.plans.compiled_for import CompiledFor


@dataclass(frozen=True)
class WeightCodec(CompiledFor):
    """A weight format as a compile-time constant. A kernel adds only what is its own: strides, 16-bit codebooks, tiles.

    kind     what a code is: "unsigned" (4 bits, minus `bias`), "signed" (8 bits), "e2m1" (a 4-bit floating-point number), or
             "table" (an index of `values`)
    bias     constant that is subtracted from every code, zero points or not
    values   what the codes of "e2m1" and "table" mean
    group    codes of a row that share a scale; 0: the whole row
    scale    type of a stored scale: "f16", "f32", "e8m0", "e4m3"
    nested   scales that share a second scale (double quantization); 0: none
    zero     zero points are stored
    factor   an additional fp32 scale of the whole tensor
    """

    kind: str
    bias: int
    values: tuple[float, ...]
    group: int
    scale: str
    nested: int
    zero: bool
    factor: bool

    @property
    def per_byte(self) -> int:
        """Codes in one byte."""
        return 1 if self.kind == "signed" else 2

    @property
    def codes_per_word(self) -> int:
        """Codes in one 16-bit word."""
        return 2 * self.per_byte

    @property
    def centre(self) -> int:
        """What stands for 0 in integer codes once they are unsigned (signed ones get 128 added), without zero points."""
        return 128 if self.kind == "signed" else self.bias

    @property
    def mirrored(self) -> bool:
        """Bit 3 of a code is its sign: values 8 to 15 are the negatives of 0 to 7."""
        return bool(self.values) and self.values[8] == 0


@functools.cache
def weight_codec(fmt: Format) -> WeightCodec:
    """The codec of a weight format."""
    code, scale = fmt.code, fmt.scale
    assert scale is not None
    values = code.values or ()
    kind = "e2m1" if values == E2M1.values else "table" if values else "signed" if code.bits == 8 else "unsigned"
    group = scale.group or 0 if scale.granularity == "group" else 0
    return WeightCodec(kind, code.bias, values, group, scale.dtype, scale.nested or 0, fmt.offset == "int", fmt.tensor_scale)
