"""`halfbyte bench linear`: the GEMMs of decoding, low-bit weights compared with torch's own linear layer in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import halfbyte
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.plans import plan
from halfbyte.reference.linear import factors
from halfbyte.tensors import QuantTensor
from halfbyte_lab.measure.checks import Accuracy, linear_accuracy
from halfbyte_lab.measure.session import Candidate, Case, Session


@dataclass(frozen=True)
class LinearShape:
    """y [rows, n] = x [rows, k] @ w [n, k]^T."""

    rows: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check(value > 0, f"{name}={value}; it must be above 0")

    def __str__(self) -> str:
        return f"M{self.rows} N{self.n} K{self.k}"

    @property
    def sizes(self) -> dict[str, int]:
        """The shape as a record keeps it."""
        return {"M": self.rows, "N": self.n, "K": self.k}


DEFAULT_SHAPES = (LinearShape(1, 4096, 4096), LinearShape(16, 4096, 4096))
CPU_SHAPES = tuple(LinearShape(m, n, 4096) for n in (4096, 14336) for m in (1, 4, 16, 512))
QUICK_SHAPES = (LinearShape(1, 2048, 2048),)
DEFAULT_FORMATS = ("int8_col", "int4_g128", "nf4", "mxfp4")
CPU_FORMATS = (*DEFAULT_FORMATS, "int4_g32", "nvfp4")


def cases(
    session: Session, shapes: Sequence[LinearShape] = (), formats: Sequence[str] = (), impls: Sequence[str] = ()
) -> list[Case]:
    """One case for each shape; its candidates are made when it is measured. What is not chosen is that of the default cases."""
    is_cpu = session.device.kind == "cpu"
    shapes = shapes or (QUICK_SHAPES if session.options.quick else CPU_SHAPES if is_cpu else DEFAULT_SHAPES)
    formats = formats or (CPU_FORMATS if is_cpu else DEFAULT_FORMATS)
    for name in formats:
        weight_format(name, "formats")
    impls = impls or (("cpu",) if is_cpu else ("auto",))
    for impl in impls:
        plan("linear", impl, session.device.kind)

    def build(shape: LinearShape) -> Case:
        return Case("linear", str(shape), shape.sizes, lambda: candidates(session, shape, formats, impls))

    return [build(shape) for shape in shapes]


def candidates(session: Session, shape: LinearShape, formats: Sequence[str], impls: Sequence[str]) -> list[Candidate]:
    """torch's linear in bf16, on a CPU in fp16 as well, which is faster at M = 1; then each format with each implementation."""
    x, w = inputs(shape, session.device.torch)
    halves = (torch.bfloat16, torch.float16) if session.device.kind == "cpu" else (torch.bfloat16,)
    return [_peer(session, x.to(half), w.to(half)) for half in halves] + [
        _ours(session, x, w, name, impl) for name, impl in itertools.product(formats, impls)
    ]


def inputs(shape: LinearShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x in bf16 and w in fp32, random normal, the same every time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.rows, shape.k, generator=generator).bfloat16().to(device)
    return x, torch.randn(shape.n, shape.k, generator=generator).mul_(shape.k**-0.5).to(device)


def _peer(session: Session, x: torch.Tensor, w: torch.Tensor) -> Candidate:
    nbytes = w.nbytes + _activations(x, w.shape[0])
    fns = [lambda w=w: F.linear(x, w) for w in [w, *(w.clone() for _ in range(session.copies(nbytes) - 1))]]
    return Candidate("torch linear", "bf16" if w.dtype is torch.bfloat16 else "fp16", nbytes, fns, promise(x, w))


def _ours(session: Session, x: torch.Tensor, w: torch.Tensor, name: str, impl: str) -> Candidate:
    weight = halfbyte.quantize(w, name)
    nbytes = weight.nbytes + _activations(x, w.shape[0])
    rotation = copies_of(weight, session.copies(nbytes))
    fns = [lambda weight=weight: halfbyte.linear(x, weight, impl=impl) for weight in rotation]
    return Candidate(f"halfbyte {impl}", name, nbytes, fns, promise(x, weight))


def _activations(x: torch.Tensor, n: int) -> int:
    """Bytes of x and y."""
    return x.nbytes + x.shape[0] * n * x.element_size()


def promise(x: torch.Tensor, weight: QuantTensor | torch.Tensor) -> Callable[[torch.Tensor], Accuracy]:
    """The promise over a weight [N, K], for results of the first rows of any x [M, K]; the reference is computed once, when it is
    first needed. Where a format rounds x, it is over what is multiplied then.
    """
    references: list[tuple[torch.Tensor, torch.Tensor]] = []

    def judge(out: torch.Tensor) -> Accuracy:
        if not references:
            rows, values = factors(x, weight) if isinstance(weight, QuantTensor) else (x.double(), weight.double())
            references.append((F.linear(rows.to(x.dtype), values.to(x.dtype)), F.linear(rows, values)))
        base, ref = references[0]
        return linear_accuracy(out, base[: out.shape[0]], ref[: out.shape[0]])

    return judge


def copies_of(weight: QuantTensor, count: int) -> list[QuantTensor]:
    """`count` of the same weight, in memory of their own but for the first."""

    def copied() -> QuantTensor:
        return QuantTensor(weight.format, weight.shape, **{name: t.clone() for name, t in weight.parts().items()})

    return [weight, *(copied() for _ in range(count - 1))]
