"""How a KV format is stored, as device code sees it: shared by append, the portable and the tuned kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from halfbyte.formats import Format
from halfbyte.plans.compiled_for import CompiledFor

#: Dims of a head, or of a latent (MLA), at most.
WIDEST = 512


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


@dataclass(frozen=True)
class KVSpec(KVCodec):
    """How keys (or values) are stored, and where: one compile-time constant of the tuned kernel.

    words   16-bit words of one token and head; `padded`, the same rounded up to a power of two
    groups  scales of one token and head
    token_stride    rows from a token's codes to the next one's: 1, or the heads of a token; 0: known at the launch only
    scale_stride    the same for scales; if 0, they pass through registers instead of cp.async
    """

    words: int
    padded: int
    groups: int
    token_stride: int
    scale_stride: int

    @property
    def scale(self) -> str:
        """How scales are read: "none"; "tensor", once; "token", with every token; "channel", with every block of tokens."""
        return "token" if self.scale_per_token or self.spread == "group" else self.spread

    @property
    def halved(self) -> bool:
        """A section is 8 words, half of an mma's depth: two codes of a word share an operand."""
        return self.padded // self.groups <= 8

    @property
    def sharing(self) -> int:
        """Groups of a section: two where a group is 4 words, else one."""
        return max(1, 8 * self.groups // self.padded)

    @property
    def sections(self) -> int:
        """Parts of a head that operands are made of: its groups, or pairs of them."""
        return self.groups // self.sharing

    @property
    def operands(self) -> int:
        """mma operands of one section."""
        return self.codes_per_word // 2 if self.halved else self.codes_per_word

    @property
    def rows(self) -> int:
        """Rows of one operand: one code of each word of a section; two if `halved`."""
        return 16 if self.halved else self.padded // self.groups

    @property
    def shifted(self) -> bool:
        """Whether P V needs a multiple of the sum of P added: for signed codes, made unsigned, and for offsets."""
        return self.offset or self.kind == "signed"

    @property
    def staged(self) -> bool:
        """Whether scales pass through registers."""
        return self.scale == "token" and self.scale_stride == 0

    @property
    def paired(self) -> bool:
        """Whether scales are copied in pairs, of two groups or two heads: cp.async copies at least 4 bytes."""
        return self.scale == "token" and self.scale_stride > 1

    @property
    def scale_columns(self) -> int:
        """Copies per token: a scale for each group, or a pair for two."""
        return max(1, self.groups // 2) if self.paired else self.groups

    def tile_bytes(self, tokens: int, runs: int, heads: int) -> int:
        """Bytes of shared memory of a tile of tokens in `runs` runs, for adjacent heads. Two heads share a pair of scales."""
        codes = 2 * self.padded * heads * tokens
        if self.scale == "channel":
            return codes + 2 * self.codes_per_word * self.padded * runs * (1 + self.offset)
        scales = (4 if self.paired else 2) * self.scale_columns
        return codes + scales * ((self.scale == "token") + self.offset) * tokens

    @property
    def pairs(self) -> bool:
        """Whether two adjacent heads can be read as one: the heads of a token are adjacent, and so are their scales."""
        whole = self.token_stride > 1 and self.padded == self.words and self.groups == 1
        return whole and self.scale != "channel" and (self.scale != "token" or self.paired)


def kv_spec(fmt: Format, dim: int, token_stride: int = 1, scale_stride: int = 1) -> KVSpec | str:
    """How the tuned kernel reads a buffer of `fmt` with heads of `dim`, or the reason why it cannot."""
    codec = kv_codec(fmt)
    if codec.bits > 16:
        return f"{fmt.name} is read by the portable kernel only"
    words = dim * codec.bits // 16
    groups = dim // (codec.group or dim)
    if dim * codec.bits % 128:
        return f"heads of {dim * codec.bits / 8:g} bytes are not a multiple of 16"
    if groups & (groups - 1) or (groups > 1 and padded(words) != words):
        return f"{groups} groups a head is not a power of two"
    if padded(words) < 16 or dim > WIDEST:
        return f"head dim {dim} in {fmt.name} is outside the range of the tuned kernel"
    if padded(words) < 4 * groups:
        return f"groups of {codec.group} in {fmt.name} have fewer than 8 bytes"
    if codec.block and scale_stride == 0:
        return f"scales of {fmt.name} do not have the stride of a head or a token, or are no whole aligned 16-byte pieces"
    strides = {"token_stride": token_stride, "scale_stride": 1 if codec.spread in ("none", "tensor") else scale_stride}
    return KVSpec(**vars(codec) | {"words": words, "padded": padded(words), "groups": groups} | strides)


def padded(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()
