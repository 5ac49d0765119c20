"""How the Triton level of `experts_linear` divides its work: pure functions of the problem and the device, never of the ids.

S = tokens * top_k pairs of a token and an expert. A program takes an expert, `block_n` rows of its weight and `block_m` of its
pairs at a time. Up to `INLINE_TOKENS` tokens programs find their pairs by reading all ids: there are min(S, E) *slots*, one for
each pair whose expert no pair before it has, or one for each expert. Beyond, the pairs come sorted by expert, and a slot is a block
of `block_m` pairs of one expert; there are at most S / block_m + E of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.plans.linear_portable import folds_exactly
from halfbyte.plans.linear_spec import ExpertsProblem

#: Tokens up to which no sort is launched, and the most pairs then.
INLINE_TOKENS, INLINE_PAIRS = 64, 1024
#: fp32 partial results of one launch; more tokens are computed in parts.
_MOST_FLOATS = 1 << 26
#: The most partial results that are added for one number, and the fewest columns of one.
_MOST_SPLITS, _FEWEST_COLUMNS = 8, 256


@dataclass(frozen=True)
class ExpertsTiles:
    """One launch: `slots` times the tiles of N times `splits` of K, `share` steps of `block_k` columns each.

    inline     pairs are found by reading the ids; else they come sorted
    by_expert  a slot is an expert; else a pair, or a block of sorted pairs
    fold       group scales multiply the codes in 16 bits; else fp32 sums
    """

    inline: bool
    by_expert: bool
    slots: int
    block_n: int
    block_m: int
    block_k: int
    splits: int
    share: int
    fold: bool
    num_warps: int
    num_stages: int


def experts_tiles(p: ExpertsProblem, num_sms: int) -> ExpertsTiles:
    """Tiles of the portable kernel."""
    fmt, (experts, features, width), tokens, pairs = p.format, p.stack, p.tokens, p.pairs
    if tokens > INLINE_TOKENS or pairs > INLINE_PAIRS:
        block_m = 128 if pairs >= 96 * experts else 64
        slots = -(-pairs // block_m) + experts
        return ExpertsTiles(False, False, slots, 128, block_m, 64, 1, -(-width // 64), True, 8, 3)
    block_m = 16 if pairs <= 8 * experts else max(16, 1 << (tokens - 1).bit_length())
    block_k = min(128, fmt.group_size(width) * (4 if folds_exactly(fmt) else 1))
    block_k = 1 << max(5, block_k.bit_length() - 1)
    steps, slots = -(-width // block_k), min(pairs, experts)
    programs = max(1, slots * -(-features // 64))
    splits = max(1, min(4 * num_sms // programs, width // _FEWEST_COLUMNS, _MOST_SPLITS))
    share = -(-steps // splits)
    return ExpertsTiles(
        True, experts <= pairs, slots, 64, block_m, block_k, -(-steps // share), share, False, 4, 4 if block_k > 32 else 6
    )


def tokens_at_once(features: int, top_k: int) -> int:
    """How many tokens one launch may take whose partial results are kept for a sum over experts."""
    return max(INLINE_TOKENS, _MOST_FLOATS // max(1, features * top_k))
