"""What a run launches, as far as that is known before it: problems and plans of the tuned kernels, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from halfbyte.bench.compile_ahead import BiasedProblem, Pair
from halfbyte.bench.decode import DecodeShape, parse_formats
from halfbyte.device import Device
from halfbyte.formats import weight_format
from halfbyte.plans.decode_attention import dense_problem
from halfbyte.plans.tuning_cache import LinearProblem, decode_plan, linear_plan, table_of

if TYPE_CHECKING:
    from halfbyte.bench.session import Session

#: Launches kept apart, and overlapping: two kernels.
BOTH = (False, True)


@runtime_checkable
class Foreseen(Protocol):
    """A job that knows what it launches."""

    def foreseen(self, session: Session) -> Iterable[Pair]:
        """Problems of the tuned kernels with the plans that they get on this GPU."""


def products(
    device: Device, formats: str, features: Sequence[int], rows: int, width: int, half: str = "bf16", biased: bool = False
) -> Iterator[Pair]:
    """x [rows, width] times weights of one format in one launch; `biased`: each with a bias."""
    weights, num_sms = [(weight_format(formats), n) for n in features], device.sm_count or 1
    gpu = {"num_sms": num_sms, "capability": device.capability or (0, 0), "table": table_of(device.name, num_sms)}
    for pair in BOTH:
        plan, _ = linear_plan(weights, m=rows, width=width, dtype=half, use_pdl=pair, **gpu)  # type: ignore[arg-type]
        problem = LinearProblem.of(weights, rows, width, half)
        if not isinstance(plan, str):
            yield BiasedProblem(**vars(problem)) if biased else problem, plan


def attention(
    device: Device, shape: DecodeShape, formats: str, pairs: Sequence[bool] = BOTH, dtype: str = "bf16"
) -> Iterator[Pair]:
    """One new token of each sequence over a full cache, which lies as caches are allocated."""
    s, (keys, values), num_sms = shape, parse_formats(formats), device.sm_count or 1
    group = s.q_heads // s.kv_heads
    problem = dense_problem(dtype, s.batch, s.kv_heads, group, 1, s.dim, s.context, keys.name, values.name)
    for pair in pairs:
        plan, _ = decode_plan(problem, num_sms, device.capability or (0, 0), pair, table_of(device.name, num_sms))
        if not isinstance(plan, str):
            yield problem, plan
