"""What the tuned kernels of decode attention are compiled for: how keys and values are stored, and the tiles they work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.formats import Format
from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.plans.kv_codec import KVCodec, kv_codec


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
    if padded(words) < 16 or dim > 256:
        return f"head dim {dim} in {fmt.name} is outside the range of the tuned kernel"
    if padded(words) < 4 * groups:
        return f"groups of {codec.group} in {fmt.name} have fewer than 8 bytes"
    if codec.block and scale_stride == 0:
        return f"scales of {fmt.name} do not have the stride of a head or a token, or are no whole aligned 16-byte pieces"
    strides = {"token_stride": token_stride, "scale_stride": 1 if codec.spread in ("none", "tensor") else scale_stride}
    return KVSpec(**vars(codec) | {"words": words, "padded": padded(words), "groups": groups} | strides)


@dataclass(frozen=True)
class DecodeSpec(CompiledFor):
    """Everything the tuned kernel is compiled for."""

    keys: KVSpec
    values: KVSpec
    warps: int
    tokens: int  # of one stream (a warp, or `warps_q` of them) in one tile
    stages: int
    rows: int  # G * L
    padded_rows: int
    queries: int  # L
    batch: int  # sequences, rounded up to a power of two
    page: int  # tokens of a page, 0: contiguous
    window: bool
    alibi: bool
    softcap: bool
    use_pdl: bool  # launched while its predecessor is still finishing (programmatic dependent launch)
    reduce_fanin: int = 16  # partial results that a first reduction step adds, if one step is not enough
    separate_reduce_smem: bool = False  # warps are summed in separate shared memory, not in the ring
    heads: int = 1  # adjacent KV heads of a work item; stream w works on head w % heads of them
    pad_slots: int = 0  # empty slots of the ring, so that no more programs than planned fit on an SM
    rotate: int = 0  # dims of a Hadamard block, if queries are rotated as keys are; 0: they are not
    sink_tokens: int = 0  # tokens that are read in 16 bits: the first ones, and the last
    recent_tokens: int = 0
    split: int = 0  # tokens per partial result, for every batch; 0: those of a program's share

    wgmma: ClassVar[bool] = False  # whether it is the kernel for many query rows

    @property
    def warps_q(self) -> int:
        """Warps that share their tokens and divide the query rows, so that each holds 2048 numbers of its output at most."""
        return max(1, self._output // 2048)

    @property
    def numbers(self) -> int:
        """Numbers of its output (or of its queries, if they are more) that one warp holds."""
        return self._output // self.warps_q

    @property
    def _output(self) -> int:
        numbers = (s.codes_per_word * s.padded for s in (self.keys, self.values))
        return self.padded_rows * max(self.keys.sharing * next(numbers), next(numbers))

    @property
    def kv_warps(self) -> int:
        """Warps, or groups of `warps_q` of them, that work on separate tokens."""
        return self.warps // self.warps_q

    @property
    def runs(self) -> int:
        """Runs of consecutive tokens in a tile, one per stream; the streams of a work item's heads share one."""
        return self.kv_warps // self.heads

    @property
    def one_page(self) -> bool:
        """Whether the tokens of a run lie in one page."""
        return self.page > 0 and self.page % self.tokens == 0

    @property
    def tile(self) -> int:
        """Tokens of one tile."""
        return self.runs * self.tokens

    @property
    def split_tiles(self) -> int:
        """Tiles of a split."""
        return self.split // self.tile

    @property
    def tail_rows(self) -> int:
        """Tokens of a sequence that are read in 16 bits."""
        return self.sink_tokens + self.recent_tokens

    @property
    def chunk(self) -> int:
        """Rows of a tail that are read at a time: 16, what an mma takes, for each run of tokens."""
        return 16 * self.runs

    @property
    def chunks(self) -> int:
        """Chunks of a tail."""
        return -(-self.tail_rows // self.chunk)

    @property
    def chunk_cost(self) -> int:
        """The cost of a chunk in eighths of a tile, by bytes."""
        numbers = sum(s.words * s.codes_per_word for s in (self.keys, self.values))
        return max(1, round(8 * 2 * self.chunk * self.heads * numbers / (self.ring_bytes // self.stages)))

    @property
    def head_floats(self) -> int:
        """fp32 numbers of one head's partial result."""
        return (self.values.sections * self.values.operands * self.values.rows + 2) * self.padded_rows

    @property
    def partial_floats(self) -> int:
        """fp32 numbers of one partial result."""
        return self.heads * self.head_floats

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the ring of tiles."""
        return self.stages * sum(s.tile_bytes(self.tile, self.runs, self.heads) for s in (self.keys, self.values))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block: the ring of tiles, and the sums of warps."""
        return (
            self.ring_bytes // self.stages * (self.stages + self.pad_slots)
            + (0 if self.reuses_ring else self._sum_bytes)
            + 4 * self.kv_warps * self.padded_rows * (2 + self.values.groups)
        )

    @property
    def reuses_ring(self) -> bool:
        """Whether warps are summed in the ring of keys, which must be large enough for that."""
        return not self.separate_reduce_smem and 2 * self.stages * self.kv_warps * self.tokens * self.keys.padded >= self._sum_bytes

    @property
    def equal_parts(self) -> bool:
        """Whether the sums of warps, if they are in the ring of keys, are one of several equal parts of it."""
        ring = 2 * (self.stages + self.pad_slots) * self.tile * self.heads * self.keys.padded
        return not self.reuses_ring or ring % self._sum_bytes == 0

    @property
    def _sum_bytes(self) -> int:
        return 4 * self.kv_warps * self.padded_rows * self.values.codes_per_word * self.values.padded


@dataclass(frozen=True)
class DecodeWgmmaSpec(DecodeSpec):
    """What the kernel for many query rows is compiled for: each warp has 16 rows and all tokens of a tile.

    Warps copy runs of tokens as in `DecodeSpec`; no other work is divided by tokens.
    """

    wgmma: ClassVar[bool] = True

    @property
    def warps_q(self) -> int:
        return 1

    @property
    def equal_parts(self) -> bool:
        return True  # memory is reinterpreted as a whole only

    @property
    def dim(self) -> int:
        """Columns of operands: head_dim, rounded up."""
        return self.keys.codes_per_word * self.keys.padded

    @property
    def shared_bytes(self) -> int:
        ring = self.ring_bytes // self.stages * (self.stages + self.pad_slots)
        return ring + 2 * self.dim * (self.padded_rows + 3 * self.tile)


def padded(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()
