"""How the tuned kernel of `experts_linear` divides its work: pure functions of the problem and the device, never of the ids.

The host fixes tiles and as many programs as run at once; the programs divide what the ids need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from halfbyte.device import GPU
from halfbyte.plans.linear import gluon_linear, staged
from halfbyte.plans.linear_spec import ExpertsProblem, LinearPlan, LinearProblem, LinearSpec
from halfbyte.reference.experts import Activation

#: The most tokens that the tuned kernel takes, and the sizes of its table of pairs, all of which every program sorts.
MOST_TOKENS, _TABLES = 64, (32, 128, 512)

#: What a program reads in the time that splitting a tile takes.
_SPLIT_BYTES = 48 << 10

#: Measured time of reading a weight once for blocks of so many rows (docs/internals/log/linear.md), over that for one.
_TIMES = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.18, 16: 1.65}


@dataclass(frozen=True)
class ExpertsMmaSpec(LinearSpec):
    """Everything the tuned kernel (kernels/linear/experts_mma.py) is compiled for; x_rows: of a block of an expert's pairs.

    top_k       experts of a token
    shared      x has one row a token, and not one a pair
    pairs       room for so many pairs in the table: 32, 128 or 512
    activation  of pairs of columns; None: none
    ids_early   ids are read, and weights requested, ahead of the wait for the kernel before
    """

    top_k: int
    shared: bool
    pairs: int
    activation: Activation | None
    ids_early: bool

    @property
    def halves(self) -> int:
        """Columns of the product that become one of the result."""
        return 1 if self.activation is None else 2

    @property
    def steps_of_a_split(self) -> int:
        """Steps that take a program about as long as its part of a split tile: partial results, a fence and a semaphore."""
        return max(1, _SPLIT_BYTES // self.weights[0].slot_bytes(self))

    @property
    def used_bytes(self) -> int:
        """The rings, and behind them the table of pairs: three numbers for each, and two more."""
        return self.order_at + -(-4 * (3 * self.pairs + 2) // 128) * 128

    @property
    def unsorted(self) -> bool:
        """Few pairs, each a block of its own."""
        return self.x_rows == 1 and self.pairs == _TABLES[0]

    @property
    def order_at(self) -> int:
        """Where the sorted pairs lie in shared memory."""
        return super().used_bytes

    @property
    def rows_at(self) -> int:
        return self.order_at + 4 * self.pairs

    @property
    def blocks_at(self) -> int:
        return self.rows_at + 4 * self.pairs


@dataclass(frozen=True)
class ExpertsPlan:
    """A launch of the tuned kernel: what it is compiled for, its programs, and the results of pairs that it keeps, fp32 numbers."""

    spec: ExpertsMmaSpec
    programs: int
    kept: int
    per_sm: int

    @property
    def registers(self) -> int:
        """What a thread may have so that `per_sm` programs run at once on an SM, whose registers are 65,536."""
        return min(255, 65536 // (32 * self.spec.warps * self.per_sm) // 8 * 8)

    @property
    def partials(self) -> int:
        """fp32 numbers of the workspace ahead of the results of pairs: two partial results a program."""
        return 2 * self.programs * self.spec.partial_floats

    @property
    def floats(self) -> int:
        """fp32 numbers of workspace."""
        return self.partials + self.kept

    @property
    def counters(self) -> int:
        """Semaphores: a tile that is split has one, and there are fewer of those than programs."""
        return self.programs


def tuned_experts(p: ExpertsProblem, gpu: GPU, use_pdl: bool) -> ExpertsPlan | str:
    """How the tuned kernel computes a call; in words, why it cannot."""
    (experts, features, width), pairs = p.stack, p.pairs
    if p.tokens > MOST_TOKENS or pairs > _TABLES[-1]:
        return f"{p.tokens} tokens of {p.top_k} experts; the tuned kernel takes up to {MOST_TOKENS} tokens and {_TABLES[-1]} pairs"
    rows = block_rows(experts, p.tokens, p.top_k)
    hit, most = min(pairs, experts), min(pairs, experts + pairs // rows)
    dense = gluon_linear(LinearProblem(((p.format, features),) * hit, rows, width, p.half), gpu, use_pdl)
    if isinstance(dense, str):
        return dense
    finer, most_per_sm = _finer(dense, width, gpu.num_sms)
    room = next(n for n in _TABLES if pairs <= n)
    fields = vars(finer) | {"weights": finer.weights[:1], "pad_slots": 0, "whole_tiles": features % finer.tile == 0}
    fields |= {"top_k": p.top_k, "shared": p.shared and p.top_k > 1, "pairs": room, "ids_early": p.ids_early}
    shape = ExpertsMmaSpec(**fields, activation=p.activation)
    fitting = ((staged(shape, n, gpu.capability), n) for n in (most_per_sm, 1))
    spec, per_sm = next((pair for pair in fitting if pair[0]), (None, 1))
    if spec is None:
        return f"two stages of its ring take {replace(shape, stages=2).shared_bytes} bytes of shared memory, more than this GPU has"
    assert isinstance(spec, ExpertsMmaSpec)
    columns, steps = -(-features // spec.tile), -(-width // spec.step)
    if most * columns * steps >= 2**24 or experts >= 2**19 or experts * features >= 2**31:
        return f"{experts} experts of [{features}, {width}]; the tuned kernel counts steps of tiles up to 2^24"
    programs = min(per_sm * gpu.num_sms, most * columns * steps)
    return ExpertsPlan(spec, programs, p.gated * pairs * features // spec.halves, per_sm)


def _finer(dense: LinearPlan, width: int, num_sms: int) -> tuple[LinearSpec, int]:
    """The shape of a dense weight's plan, and how many programs run at once on an SM.

    One token waits for its ids, then for few bytes: four programs an SM (three with zero points, for their registers) share those
    out more evenly than two, as long as a tile has more than one step. As measured (docs/internals/log/linear.md); with more tokens
    tiles of 64 rows are faster.
    """
    spec = dense.spec
    assert isinstance(spec, LinearSpec)
    few = spec.x_rows == 1 and spec.tile == 64 and not spec.weights[0].codebook and dense.tiles <= 4 * num_sms
    if few and spec.k_slices == 4 and width > spec.step:
        return replace(spec, tile=32), 3 if spec.weights[0].zero else 4
    return spec, dense.programs_per_sm


def block_rows(experts: int, tokens: int, top_k: int) -> int:
    """Pairs of one expert that are multiplied together: what is fastest if tokens choose at random.

    An expert with more pairs is read again, and a block for more takes longer.
    """
    chance = min(1.0, top_k / experts)
    of = [math.comb(tokens, n) * chance**n * (1 - chance) ** (tokens - n) for n in range(tokens + 1)]  # pairs of an expert

    def time(rows: int) -> float:
        return _TIMES[rows] * sum(-(-n // rows) * p for n, p in enumerate(of))

    return min((rows for rows in _TIMES if rows < 2 * tokens), key=time)
