"""`add_norm`, `norm_rows`, `gated`: what surrounds the projections of a decoder block; `greedy`: the choice of a token behind it.

One launch each on a GPU, `greedy` two. On every other device, and for types or widths without a kernel, torch code that rounds as
the modules do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import InvalidArgument, check
from halfbyte.ops._library import level, pairs_launches
from halfbyte.ops.all_reduce import AllReduce
from halfbyte.reference import block as reference
from halfbyte.reference.block import GATES, KINDS, Norm
from halfbyte.reference.greedy import Ends, Held
from halfbyte.reference.greedy import greedy as greedy_in_torch

_HALF = (torch.float16, torch.bfloat16)
#: The widest row of a norm that a program holds in registers.
WIDEST = 16384


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    before: Norm | None,
    *,
    after: Norm | None = None,
    multiplier: float = 1.0,
    all_reduce: AllReduce | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """hidden = residual + multiplier * after(x), and before(hidden): x and residual [..., N] of one type.

    after       the norm of a branch's output, as in Gemma 2; None: x as it is
    before      the norm of the next branch's input; None: the second result is None
    all_reduce  sums x over tensor-parallel ranks first, all of which call this; x may be overwritten

    hidden has the bits of the separate modules unless there is an `after`; a norm has them but for the order of its sum. Raises
    `InvalidArgument` naming the argument at fault.
    """
    check_tensor("x", x, x.shape)
    check_tensor("residual", residual, x.shape, device=x.device)
    check(x.dtype is residual.dtype, f"residual is {residual.dtype} and x {x.dtype}; they must have the same type")
    norms = {"before": before, "after": after}
    for name, norm in norms.items():
        if norm is not None:
            check_norm(name, norm, x)
    tensors = [x, residual, *(norm.weight for norm in norms.values() if norm is not None)]
    launches = _launches("add_norm", impl, tensors, x.shape[-1])
    exchange = all_reduce.exchange_of(x) if all_reduce is not None and launches else None
    if all_reduce is not None and exchange is None:
        x = all_reduce(x)
    if not launches:
        return reference.add_norm(x, residual, after, multiplier, before)
    from halfbyte.kernels.block.norm import launch_add_norm

    if exchange is not None and x.data_ptr() % 4:
        x = x.clone()  # it is read two numbers at a time
    x_rows, hidden = _rows(x).contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = None if before is None else torch.empty_like(hidden)
    rows, use_pdl = (_rows(hidden), None if out is None else _rows(out)), pairs_launches(x.device)
    with torch.cuda.device_of(x):
        launch_add_norm(x_rows, _rows(residual).contiguous(), after, multiplier, before, *rows, use_pdl, exchange)
    return hidden, out


def norm_rows(xs: Sequence[torch.Tensor], norms: Sequence[Norm], *, impl: str = "auto") -> list[torch.Tensor]:
    """Each x [..., N] by its norm: one or two tensors, of widths of their own. Norms of one launch share `eps` and kind."""
    check(len(xs) == len(norms) in (1, 2), f"{len(xs)} tensors and {len(norms)} norms were given; pass one or two of each")
    for i, (x, norm) in enumerate(zip(xs, norms, strict=True)):
        check_tensor(f"xs[{i}]", x, x.shape, device=xs[0].device)
        check_norm(f"norms[{i}]", norm, x)
    alike = len({(x.dtype, norm.eps, norm.kind) for x, norm in zip(xs, norms, strict=True)}) == 1
    tensors = [*xs, *(norm.weight for norm in norms)]
    if not alike or not _launches("norm_rows", impl, tensors, max(x.shape[-1] for x in xs)):
        return [reference.rms_norm(x, norm) for x, norm in zip(xs, norms, strict=True)]
    from halfbyte.kernels.block.norm import launch_norm_rows

    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    rows = [_rows(x).contiguous() for x in xs]
    with torch.cuda.device_of(xs[0]):
        launch_norm_rows(rows, norms, [_rows(out) for out in outs], pairs_launches(xs[0].device))
    return outs


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str, *, impl: str = "auto") -> torch.Tensor:
    """activation(gate) * up: both [..., N] of one type, say the halves of one tensor; activation "silu", "gelu_tanh" or
    "sigmoid"."""
    check_tensor("gate", gate, gate.shape)
    check_tensor("up", up, gate.shape, device=gate.device)
    check(gate.dtype is up.dtype, f"up is {up.dtype} and gate {gate.dtype}; they must have the same type")
    if activation not in GATES:
        raise InvalidArgument(f"activation={activation!r}; choose one of: {', '.join(GATES)}")
    if not _launches("gated", impl, (gate, up), 1):
        return reference.gated(gate, up, activation)
    from halfbyte.kernels.block.gate import launch

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups = (t if t.stride(1) == 1 else t.contiguous() for t in (_rows(gate), _rows(up)))
    with torch.cuda.device_of(gate):
        launch(gates, ups, activation, _rows(out), pairs_launches(gate.device))
    return out


def greedy(logits: torch.Tensor, held: Held, ends: Ends | None = None, *, impl: str = "auto") -> None:
    """Append argmax(logits) [B, V] to `held`, in place. Ties and NaN are those of `torch.argmax` over fp32.

    With `ends`, a finished sequence is given padding and grows no more. On a GPU a token beyond the columns of ids is counted and
    not written. Raises `InvalidArgument` naming the argument at fault.
    """
    check_tensor("logits", logits, ("B", "V"))
    batch, device = len(logits), logits.device
    check(logits.shape[1] > 0, "logits has no columns; expected one for each token of the vocabulary")
    check_tensor("held.ids", held.ids, (batch, "columns"), "integer", device)
    check_tensor("held.last", held.last, (batch, 1), "integer", device)
    check_tensor("held.lengths", held.lengths, (batch, 1), "integer", device)
    flags = held.unfinished
    check(
        flags.dtype is torch.bool and flags.shape == (batch,) and flags.device == device,
        f"held.unfinished is {flags.dtype} {list(flags.shape)} on {flags.device}; expected torch.bool [{batch}] on {device}",
    )
    if ends is not None:
        check_tensor("ends.tokens", ends.tokens, ("E",), "integer", device)
        check_tensor("ends.padding", ends.padding, (), "integer", device)
    if not batch:
        return
    if level("greedy", impl, device) != "triton":
        greedy_in_torch(logits, held, ends)
        return
    from halfbyte.kernels.block.greedy import launch

    with torch.cuda.device_of(logits):
        launch(logits if logits.stride(1) == 1 else logits.contiguous(), held, ends)


def _rows(t: torch.Tensor) -> torch.Tensor:
    """[M, N] of a tensor [..., N]: a view, where its strides allow."""
    return t.reshape(-1, t.shape[-1])


def check_norm(name: str, norm: Norm, x: torch.Tensor) -> None:
    """Raise `InvalidArgument` unless `norm` has the width of x."""
    check_tensor(f"{name}.weight", norm.weight, x.shape[-1:], device=x.device)
    check(norm.kind in KINDS, f"{name}.kind={norm.kind!r}; choose one of: {', '.join(KINDS)}")


def _launches(op: str, impl: str, tensors: Sequence[torch.Tensor], width: int) -> bool:
    """Whether the kernel runs: for tensors of one 16-bit type without a gradient. Requested by name, it runs or raises."""
    best, x = level(op, impl, tensors[0].device), tensors[0]
    if best != "triton" or x.numel() == 0:
        return False
    reason = {
        f"{op} has a kernel for tensors of float16 or of bfloat16": x.dtype not in _HALF or len({t.dtype for t in tensors}) > 1,
        f"rows of {width} are wider than the {WIDEST} that the kernel of {op} takes": width > WIDEST,
        f"{op} has no gradient": torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
    }
    refusal = next((why for why, holds in reason.items() if holds), None)
    check(refusal is None or impl == "auto", f"impl={impl!r}: {refusal}; use impl='auto'")
    return refusal is None
