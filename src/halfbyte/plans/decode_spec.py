"""What the tuned kernels of decode attention are compiled for, the tiles they work on, and the plan of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.plans.kv_codec import KVSpec


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
    latent: ClassVar[bool] = False  # or that over latents (MLA)

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


@dataclass(frozen=True)
class DecodeLatentSpec(DecodeSpec):
    """What the kernel over latents (MLA) is compiled for: warps divide a tile's tokens for scores, and dims for outputs."""

    latent: ClassVar[bool] = True

    @property
    def warps_q(self) -> int:
        return 1

    @property
    def wgmma_values(self) -> bool:
        """Whether products with values are those of warp groups, too: they take as long for 16 rows as for 64."""
        return self.wgmma and self.padded_rows > 16

    @property
    def equal_parts(self) -> bool:
        return True  # memory is reinterpreted as a whole only

    @property
    def shared_bytes(self) -> int:
        ring = self.ring_bytes // self.stages * (self.stages + self.pad_slots)
        dims = sum(s.codes_per_word * s.padded for s in (self.keys, self.values))
        return ring + 2 * self.padded_rows * (dims + self.tile) + 4 * self.warps * (self.padded_rows + 1)


@dataclass(frozen=True)
class DecodeLatentWgmmaSpec(DecodeLatentSpec):
    """The same with products by warp groups, on Hopper."""

    wgmma: ClassVar[bool] = True


@dataclass(frozen=True)
class DecodePlan:
    """A launch of the tuned kernel: what it is compiled for, how many programs share the work, and their workspace.

    blocks, first_block    sequences are so many blocks of `spec.queries` of the call's queries, from that one on; 0: the call's own
    """

    spec: DecodeSpec
    programs: int
    work_items: int  # KV heads of sequences, or pairs of them
    why: str
    groups: int = 0  # of `reduce_fanin` splits of fixed size, in a full work item
    blocks: int = 0
    first_block: int = 0

    @property
    def floats(self) -> int:
        """fp32 numbers of a workspace: two partial results per program, or two groups of splits, and sums of groups."""
        partials = 2 * self.programs * (self.spec.reduce_fanin if self.spec.split else 1) + self.work_items * self.groups
        return partials * self.spec.partial_floats

    @property
    def counters(self) -> int:
        """Counters of a workspace: a semaphore a work item, and two per `reduce_fanin` programs (fixed splits: one a program)."""
        if self.spec.split:
            return self.work_items + self.programs
        return self.work_items + 2 * -(-self.programs // self.spec.reduce_fanin)

    def describe(self) -> dict[str, str]:
        """The plan in words, in reading order."""
        spec = self.spec
        wgmma = isinstance(spec, DecodeWgmmaSpec)
        share = f"16 of {spec.padded_rows} query rows" if wgmma else f"{spec.tokens} by {spec.padded_rows} query rows"
        exact = f"{spec.chunks} chunks of {spec.chunk} tokens in 16 bits, each shared out as {spec.chunk_cost / 8:g} tiles"
        tail = {"tail": exact} if spec.tail_rows else {}
        splits = "where shares meet inside a work item; the last program to arrive reduces, in fixed order"
        if spec.split:
            splits = f"{spec.split} tokens each, whatever the batch; the last program to arrive reduces, in the order of tokens"
        return {
            "kernel": "gluon (tuned)" + ", wgmma for many query rows" * wgmma + ", over latents (MLA)" * spec.latent,
            "tile": f"{spec.tile} tokens: {spec.warps} warps of {share}",
            **tail,
            "ring": f"{spec.stages} tiles, {spec.shared_bytes / 1024:.0f} KB of shared memory a program",
            "programs": f"{self.programs}; each takes an equal share of the tokens, by the lengths on the device",
            "splits": splits,
        }
