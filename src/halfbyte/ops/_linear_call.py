"""`LinearCall`: a GEMM with quantized weights as one object, made once and passed on, and its flat form in the dispatcher."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.ops.launch_cache import Signature, signature
from halfbyte.tensors import QuantTensor, weight_of

#: Tensors of a weight and its bias, in the order of a signature: codes, scales, zero points, bias, scale of the whole tensor.
KINDS = 5


class LinearCall(NamedTuple):
    """x [..., K] times one to three weights [N, K], each plus its bias [N] or None. `impl`: as requested, or the level chosen."""

    x: torch.Tensor
    weights: Sequence[QuantTensor]
    biases: Sequence[torch.Tensor | None]
    impl: str = "auto"
    row_invariant: bool = False

    def signature(self) -> Signature | None:
        """The signature for the launch cache, of an unchecked call; None if it takes more than one launch."""
        weights, biases = self.weights, self.biases
        if self.row_invariant or self.impl not in ("auto", "gluon") or len(weights) != len(biases):
            return None
        for w in weights:
            if not isinstance(w, QuantTensor) or w.perm is not None or w.nested is not None:
                return None
        tensors = (
            self.x,
            *[w.codes for w in weights],
            *[w.scales for w in weights],
            *[w.offsets for w in weights],
            *biases,
            *[w.tensor_scale for w in weights],
        )
        return signature("linear", (self.impl,), tuple([w.format for w in weights]), tensors)

    def check(self, names: Sequence[str]) -> None:
        """Raise `InvalidArgument` naming the argument at fault. names: of weights, followed by "weight", and of biases."""
        for name, weight, bias in zip(names, self.weights, self.biases, strict=False):
            _check(self.x, weight, bias, f"{name}weight", f"{name}bias")

    def new_outs(self) -> list[torch.Tensor]:
        """Memory for [..., N] of each weight."""
        return [self.x.new_empty(*self.x.shape[:-1], w.shape[0]) for w in self.weights]


def _check(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, weight_name: str, bias_name: str) -> None:
    check(
        isinstance(weight, QuantTensor), f"{weight_name} is {type(weight).__name__}; expected a QuantTensor from halfbyte.quantize"
    )
    check(len(weight.shape) == 2, f"{weight_name} has shape {list(weight.shape)}; expected [N, K]")
    out_features, in_features = weight.shape
    weight_format(weight.format, f"the format of {weight_name}")
    leading = [*map(str, x.shape[:-1])] if isinstance(x, torch.Tensor) else ["..."]
    check_tensor("x" if weight_name == "weight" else f"x (for {weight_name})", x, (*leading, in_features), device=weight.device)
    if bias is not None:
        check_tensor(bias_name, bias, (out_features,), device=x.device)


# ----------------------------------------------------------------------------------------------- the flat form for the dispatcher

#: Arguments of the op `projections`: the tensors of all weights, how many each weight has, biases, names of formats.
Flat = tuple[torch.Tensor, list[torch.Tensor], list[int], list[torch.Tensor | None], str]


def flattened(
    x: torch.Tensor, parts: Sequence[list[torch.Tensor]], biases: Sequence[torch.Tensor | None], formats: Sequence[str]
) -> Flat:
    """x, the tensors of each weight in storage order, biases and names of formats as the dispatcher takes them."""
    every, counts = [t for own in parts for t in own], [len(own) for own in parts]
    return (x, every, counts, list(biases), ",".join(formats))


def unflattened(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    counts: list[int],
    biases: list[torch.Tensor | None],
    formats: str,
    level: str,
    row_invariant: bool = False,
) -> LinearCall:
    """The call that the dispatcher passed on."""
    ends = list(itertools.accumulate(counts))
    each = [parts[end - count : end] for count, end in zip(counts, ends, strict=True)]
    weights = [weight_of(weight_format(fmt), own) for own, fmt in zip(each, formats.split(","), strict=True)]
    return LinearCall(x, weights, biases, level, row_invariant)
