"""What a job launches, for `halfbyte_lab.precompile` to compile before anything is timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from halfbyte.device import Device
from halfbyte.formats import weight_format
from halfbyte.plans.decode_attention import gluon_plan
from halfbyte.plans.decode_problem import dense_problem
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.tuning_cache import plan_by_table, table_of
from halfbyte_lab.measure.decode import DecodeShape, parse_formats
from halfbyte_lab.measure.session import Session
from halfbyte_lab.precompile import BiasedProblem, Pair

#: Launches in sequence, and overlapping (PDL): two kernels.
BOTH = (False, True)


@runtime_checkable
class Precompiled(Protocol):
    """A job that knows what it launches."""

    def to_compile(self, session: Session) -> Iterable[Pair]:
        """Problems of the tuned kernels with the plans that they get on this GPU."""


def products(
    device: Device, formats: str, features: Sequence[int], rows: int, width: int, half: str = "bf16", biased: bool = False
) -> Iterator[Pair]:
    """x [rows, width] times weights of one format in one launch; `biased`: each with a bias."""
    problem = GemmProblem(tuple((weight_format(formats), n) for n in features), rows, width, half)
    for pair in BOTH:
        plan, _ = plan_by_table(problem, device.gpu, pair, table_of(device.name, device.gpu.num_sms))
        if not isinstance(plan, str):
            yield BiasedProblem(*problem) if biased else problem, plan


def attention(
    device: Device, shape: DecodeShape, formats: str, pairs: Sequence[bool] = BOTH, dtype: str = "bf16"
) -> Iterator[Pair]:
    """One new token of each sequence over a full cache, which lies as caches are allocated."""
    s, (keys, values), gpu = shape, parse_formats(formats), device.gpu
    group = s.q_heads // s.kv_heads
    problem = dense_problem(dtype, s.batch, s.kv_heads, group, 1, s.dim, s.context, keys.name, values.name)
    for pair in pairs:
        plan = gluon_plan(problem, gpu.num_sms, gpu.capability, pair)
        if not isinstance(plan, str):
            yield problem, plan
