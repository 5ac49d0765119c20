"""How the GPU levels of `experts_linear` divide their work: pure functions of the problem and the device, never of the ids.

**Portable.** S = tokens * top_k pairs of a token and an expert. A program takes an expert, `block_n` rows of its weight and
`block_m` of its pairs at a time. Up to `INLINE_TOKENS` tokens programs find their pairs by reading all ids: there are min(S, E)
*slots*, one for each pair whose expert no pair before it has, or one for each expert. Beyond, the pairs come sorted by expert, and
a slot is a block of `block_m` pairs of one expert; there are at most S / block_m + E of them.

**Tuned**, for decoding. The host fixes tiles and as many programs as run at once; the programs divide what the ids need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from halfbyte.formats import Format
from halfbyte.plans.linear import MOST_ROWS, gluon_linear, staged
from halfbyte.plans.linear_portable import folds_exactly
from halfbyte.plans.linear_spec import LinearSpec
from halfbyte.reference.experts import Activation

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


def experts_tiles(fmt: Format, experts: int, features: int, width: int, *, tokens: int, top_k: int, num_sms: int) -> ExpertsTiles:
    """Tiles for `tokens` tokens of `top_k` experts each, of a stack [experts, features, width]."""
    pairs = tokens * top_k
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


# ---------------------------------------------------------------------------------------------------------------- the tuned kernel

#: The most tokens that the tuned kernel takes, and the sizes of its table of pairs, all of which every program sorts.
_MOST_TOKENS, _TABLES = 64, (32, 128, 512)


@dataclass(frozen=True)
class ExpertsMmaSpec(LinearSpec):
    """Everything the tuned kernel (kernels/linear/experts_mma.py) is compiled for; x_rows: of a block of an expert's pairs.

    top_k       experts of a token
    shared      x has one row a token, and not one a pair
    pairs       room for so many pairs in the table: 32, 128 or 512
    activation  of pairs of columns; None: none
    """

    top_k: int
    shared: bool
    pairs: int
    activation: Activation | None

    @property
    def sorted(self) -> int:
        """How many pairs are sorted, those that are not there included: at least one a thread."""
        return max(self.pairs, 32 * self.warps)

    @property
    def halves(self) -> int:
        """Columns of the product that become one of the result."""
        return 1 if self.activation is None else 2

    @property
    def tokens(self) -> int:
        """Tokens whose weighted sums are made together."""
        return min(8, self.x_rows)

    @property
    def ring_bytes(self) -> int:
        """The rings, and behind them the table of pairs: three numbers for each, and two more."""
        return self.order_at + -(-4 * (3 * self.pairs + 2) // 128) * 128

    @property
    def order_at(self) -> int:
        """Where the sorted pairs lie in shared memory."""
        return super().ring_bytes

    @property
    def rows_at(self) -> int:
        return self.order_at + 4 * self.pairs

    @property
    def blocks_at(self) -> int:
        return self.rows_at + 4 * self.pairs


@dataclass(frozen=True)
class ExpertsPlan:
    """A launch of the tuned kernel: what it is compiled for, its programs, fp32 numbers of workspace, and semaphores."""

    spec: ExpertsMmaSpec
    programs: int
    floats: int
    counters: int


def tuned_experts(
    fmt: Format,
    experts: int,
    features: int,
    width: int,
    *,
    tokens: int,
    top_k: int,
    shared: bool,
    activation: Activation | None,
    gated: bool,
    dtype: str,
    num_sms: int,
    capability: tuple[int, int],
    use_pdl: bool,
) -> ExpertsPlan | str:
    """How the tuned kernel computes a call of `experts_tiles`' sizes; in words, why it cannot. dtype: "fp16" or "bf16"."""
    pairs = tokens * top_k
    if tokens > _MOST_TOKENS or pairs > _TABLES[-1]:
        return f"{tokens} tokens of {top_k} experts; the tuned kernel takes up to {_MOST_TOKENS} tokens and {_TABLES[-1]} pairs"
    rows = block_rows(experts, tokens, top_k)
    hit, most = min(pairs, experts), min(pairs, experts + pairs // rows)
    facts = {"width": width, "dtype": dtype, "num_sms": num_sms, "capability": capability, "use_pdl": use_pdl}
    dense = gluon_linear([(fmt, features)] * hit, m=rows, **facts)  # type: ignore[arg-type]
    if isinstance(dense, str):
        return dense
    assert isinstance(dense.spec, LinearSpec)
    room = next(n for n in _TABLES if pairs <= n)
    fields = vars(dense.spec) | {"weights": dense.spec.weights[:1], "pad_slots": 0}
    shape = ExpertsMmaSpec(**fields, top_k=top_k, shared=shared and top_k > 1, pairs=room, activation=activation)
    per_sm = dense.programs_per_sm
    spec = staged(shape, per_sm, capability) or staged(shape, 1, capability)
    if spec is None:
        return f"two stages of its ring take {replace(shape, stages=2).shared_bytes} bytes of shared memory, more than this GPU has"
    assert isinstance(spec, ExpertsMmaSpec)
    columns, steps = -(-features // spec.tile), -(-width // spec.step)
    if most * columns * steps >= 2**24 or experts >= 2**19 or experts * features >= 2**31:
        return f"{experts} experts of [{features}, {width}]; the tuned kernel counts steps of tiles up to 2^24"
    programs = min(per_sm * num_sms, most * columns * steps)
    return ExpertsPlan(
        spec,
        programs,
        2 * programs * spec.partial_floats + gated * pairs * features,
        programs + gated * columns,
    )


def block_rows(experts: int, tokens: int, top_k: int) -> int:
    """Pairs of one expert that are multiplied together: a power of two, at most 16.

    An expert with more is read again, a block for fewer is faster. Two standard deviations above the mean of tokens that
    choose at random hold nearly all of them; no more than there are tokens.
    """
    mean = tokens * top_k / experts
    return min(MOST_ROWS, 1 << max(0, math.ceil(math.log2(min(tokens, max(1.0, mean + 2 * math.sqrt(mean)))))))
