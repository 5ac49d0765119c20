"""How the portable Triton level of `decode_attention` divides a call into programs: pure functions that query no device."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.device import Capability
from halfbyte.formats import Format, kv_format
from halfbyte.plans.decode_problem import DecodeProblem
from halfbyte.plans.decode_shapes import FIXED_SPLIT

#: Warps that keep one SM busy: beyond them, more splits only cost.
_WARPS_PER_SM = 16
#: Query rows of a tile. Not 64: those use Hopper's wgmma, with which Triton 3.6 read memory that it had already reused.
FEW_ROWS, MANY_ROWS = 16, 32


@dataclass(frozen=True)
class TritonTiles:
    """One launch: each program takes `block_rows` query rows and walks its share of the tokens in blocks of `block_tokens`.

    `chunk` 0: `splits` equal shares of a sequence's visible tokens. `chunk` > 0, a multiple of `block_tokens`: split s takes tokens
    [s * chunk, (s + 1) * chunk), so that a sequence's bits do not depend on the batch; splits * chunk is the capacity or more.
    `pdl`: programmatic dependent launch (from compute capability 9.0 on).
    """

    block_tokens: int
    block_rows: int
    splits: int
    chunk: int
    num_warps: int
    num_stages: int
    pdl: bool = False

    def describe(self, p: DecodeProblem) -> dict[str, str]:
        """The launch in words, as `halfbyte explain` prints it."""
        share = f"{self.chunk} tokens each, whatever the batch" if self.chunk else "equal shares of a sequence's true length"
        return {
            "kernel": "triton (portable)",
            "tile": f"{self.block_tokens} tokens by {self.block_rows} query rows, {self.num_warps} warps, {self.num_stages} stages",
            "programs": f"{p.batch * p.heads * self.splits * -(-p.rows // self.block_rows)}",
            "splits": f"{self.splits} a work item, {share}; a second kernel reduces, in fixed order",
        }


def portable_plan(p: DecodeProblem, num_sms: int, capability: Capability) -> TritonTiles:
    """How the portable kernel runs a problem."""
    if not p.ragged:
        return _tiles(p, p.batch, p.rows, num_sms, capability)
    few, many = (_tiles(p, p.rows // rows + p.batch, rows, num_sms, capability) for rows in (FEW_ROWS, MANY_ROWS))
    return (
        few if p.deterministic_batch or many.splits > 1 else many
    )  # tiles that do not depend on the number of queries, or that fill the GPU


def _tiles(p: DecodeProblem, batch: int, rows: int, num_sms: int, capability: Capability) -> TritonTiles:
    """Tiles of `batch` blocks of `rows` query rows per KV head."""
    return triton_tiles(
        kv_format(p.keys),
        kv_format(p.values),
        batch=batch,
        heads=p.heads,
        rows=rows,
        capacity=p.capacity,
        dim=p.dim + p.value_dim if p.latent else max(p.dim, p.value_dim),
        num_sms=num_sms,
        capability=capability,
        chunk=FIXED_SPLIT if p.deterministic_batch else 0,
    )


def triton_tiles(
    keys: Format,
    values: Format,
    *,
    batch: int,
    heads: int,
    rows: int,
    capacity: int,
    dim: int,
    num_sms: int,
    capability: Capability = (8, 0),
    chunk: int = 0,
) -> TritonTiles:
    """Tiles for a call: `rows` query rows per KV head (queries * query heads per KV head), `num_sms` SMs.

    `chunk` > 0 requests the same bits in every batch; it is rounded up to whole blocks.
    """
    latents = dim > 512  # with rotary keys: tiles that spill little, not measured
    block_rows = FEW_ROWS if rows <= FEW_ROWS or latents else MANY_ROWS
    bits, channels = (keys.code.bits, values.code.bits), keys.token_block is not None
    in_groups = "group" in (keys.granularity, values.granularity)
    wide = max(bits) >= 16 or min(bits) <= 2 or channels or dim > 128 or (dim & (dim - 1) > 0 and not in_groups)
    block_tokens = 32 if wide or block_rows > FEW_ROWS else 64  # the most that registers hold
    num_warps = 2 if channels and block_rows == FEW_ROWS and dim <= 128 else 4  # as measured with 8 query rows
    if latents:
        block_tokens, num_warps = 16 if in_groups and not channels else 32, 8
    tiles = -(-rows // block_rows)
    if chunk:
        chunk = -(-chunk // block_tokens) * block_tokens
        splits = max(1, -(-capacity // chunk))
    else:
        programs = max(1, batch * heads * tiles)
        enough = num_sms * _WARPS_PER_SM // (num_warps * programs)
        splits = max(1, min(enough, -(-capacity // (4 * block_tokens)), 128))
    return TritonTiles(block_tokens, block_rows, splits, chunk, num_warps, 3, capability >= (9, 0))
