"""Every peer that runs here beside halfbyte, on a case of attention and of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from halfbyte.device import Device
from halfbyte_lab.baselines import Baseline, Prepared, attention
from halfbyte_lab.baselines import linear as linear_layers
from halfbyte_lab.cases.linear_baselines import BASELINE_ERROR, judged_loosely
from halfbyte_lab.cases.linear_targets import INT4
from halfbyte_lab.measure import decode, linear
from halfbyte_lab.measure.checks import Accuracy, float64_attention
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.linear import LinearShape
from halfbyte_lab.measure.session import Candidate, Case, Session

ATTENTION_FORMATS, LINEAR_FORMATS = ("int8", "int4"), (INT4, "nf4")


def jobs(session: Session) -> list[Case]:
    """One case of attention, small on a CPU, and two of a linear layer."""
    gpu = session.device.kind == "cuda"
    attention = DecodeShape(8, 32, 8, 128, 8192) if gpu else DecodeShape(1, 8, 2, 64, 1024)
    size = 8192 if gpu else 1024 if session.options.quick else 4096
    products = [LinearShape(m, size, size) for m in (1, 16)]
    return [
        Case("decode_attention", str(attention), attention.sizes, partial(_attention, session, attention)),
        *(Case("linear", str(shape), shape.sizes, partial(_linear, session, shape)) for shape in products),
    ]


def _attention(session: Session, shape: DecodeShape) -> list[Candidate]:
    q, k, v = decode.inputs(shape, session.device.torch)
    return decode.candidates(session, shape, ATTENTION_FORMATS, _impls(session)) + attention_baselines(session, str(shape), q, k, v)


def attention_baselines(
    session: Session, case: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, formats: Sequence[str] = ()
) -> list[Candidate]:
    """The peers of attention beyond torch's own that run here and are wanted; of these formats, if any are named."""
    return _others(session, "attention", case, (q, k, v), lambda held: _judge(q, *held), formats)


def _linear(session: Session, shape: LinearShape) -> list[Candidate]:
    x, w = linear.inputs(shape, session.device.torch)
    own = linear.candidates(session, shape, LINEAR_FORMATS, _impls(session))
    return own + _others(session, "linear", str(shape), (x, w), lambda held: judged_loosely(held[0], x))


def _impls(session: Session) -> Sequence[str]:
    return ("cpu",) if session.device.kind == "cpu" else ("auto",)


def _others(
    session: Session,
    op: str,
    case: str,
    given: tuple[torch.Tensor, ...],
    judge: Callable[[tuple[torch.Tensor, ...]], Callable[[torch.Tensor], Accuracy]],
    formats: Sequence[str] = (),
) -> list[Candidate]:
    """The peers of one operation that run here and are wanted; one that cannot be prepared says why where its result is due."""
    candidates = []
    for peer in every():
        if peer.op != op or peer.prepare is None or peer.missing(session.device) or (formats and peer.formats not in formats):
            continue
        if session.wants(case, peer.formats, peer.name):
            try:
                with torch.no_grad():
                    ready: Prepared = peer.prepare(*given, session.copies)
                candidates.append(Candidate(peer.name, peer.formats, ready.nbytes, ready.calls, judge(ready.held)))
            except Exception as error:
                candidates.append(_failing(peer, error))
    return candidates


def _failing(peer: Baseline, error: Exception) -> Candidate:
    def fail() -> torch.Tensor:
        raise error

    return Candidate(peer.name, peer.formats, 0, [fail], lambda _: Accuracy(0.0, 0.0, ""))


def _judge(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[torch.Tensor], Accuracy]:
    """Relative L2 error over the keys and values that a peer holds."""
    ref = float64_attention(q, k, v, q.shape[-1] ** -0.5)
    return lambda out: Accuracy(float((out.double() - ref).norm() / ref.norm()), BASELINE_ERROR, "relative L2")


HEADERS = ("peer", "of", "formats", "runs here")


def every() -> tuple[Baseline, ...]:
    """All peers, torch's own first."""
    return (*attention.BASELINES, *linear_layers.BASELINES)


def table_rows(device: Device) -> list[tuple[str, ...]]:
    """A row for each peer: what it is, and whether it runs on `device`."""
    reasons = ((peer, peer.missing(device)) for peer in every())
    return [(peer.name, peer.op, peer.formats, f"no: {reason}" if reason else "yes") for peer, reason in reasons]
