"""`GemmProblem`: all of a GEMM with quantized weights, dense or of experts, that its plan may depend on. It holds no tensor."""

from __future__ import annotations

from typing import NamedTuple

from halfbyte.formats import Format
from halfbyte.reference.experts import Activation


class Routing(NamedTuple):
    """Which tokens meet which weights of a stack [E, N, K]: pairs of a token and one of its experts, known to the device only.

    experts     E
    top_k       experts of a token
    shared      x has one row a token, and not one a pair
    gated       gates add up the pairs of a token
    ids_early   ids are complete before the kernel begins that x comes from
    """

    experts: int
    top_k: int
    shared: bool = True
    gated: bool = False
    ids_early: bool = False


class GemmProblem(NamedTuple):
    """x [rows, width] in `half` ("fp16" or "bf16") times weights of these formats and N. Fields are named as in tuning tables.

    routing     the weight is a stack, N that of one expert, and rows are tokens; None: each row meets all weights
    activation  of pairs of neighboring columns; None: none
    """

    weights: tuple[tuple[Format, int], ...]
    rows: int
    width: int
    half: str
    routing: Routing | None = None
    activation: Activation | None = None

    @property
    def features(self) -> tuple[int, ...]:
        """N of each weight."""
        return tuple(n for _, n in self.weights)

    @property
    def rounds_x(self) -> bool:
        """Whether x and weights are rounded to INT8 where a kernel does that."""
        return self.routing is None and all(fmt.rounds(self.rows, self.width) for fmt, _ in self.weights)

    @property
    def pairs(self) -> int:
        """Rows of the product: pairs of a token and an expert."""
        return self.rows * (self.routing.top_k if self.routing else 1)

    def tiles(self, rows: int) -> int:
        """Tiles of so many rows of the weights, none of which is in two of them."""
        return sum(-(-n // rows) for _, n in self.weights)
