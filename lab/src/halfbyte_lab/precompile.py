"""Kernels of plans compiled by many processes before they are launched: one after the other they would take minutes.

Nothing is launched and no GPU is needed: a launch on tensors without memory says what would be compiled
(`kernels/compiling/`). What comes of it lies in Triton's cache, where the launch finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rich.console import Console

from halfbyte.device import DRIVER_SHARED_BYTES, Capability, Device, sm_limits
from halfbyte.errors import Unsupported, require
from halfbyte.formats import kv_format, weight_format
from halfbyte.plans.decode_attention import gluon_plan
from halfbyte.plans.decode_problem import DecodeProblem, dense_problem
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.tuning_cache import plan_by_table, table_of
from halfbyte_lab.measure.decode import DecodeShape, parse_formats
from halfbyte_lab.measure.session import Session
from halfbyte_lab.progress import progress

if TYPE_CHECKING:
    from halfbyte.kernels.compiling import Configuration
    from halfbyte.kv_buffer import DecodeCall

Plan = GemmPlan | DecodePlan
Pair = tuple[GemmProblem | DecodeProblem, Plan]


class BiasedProblem(GemmProblem):
    """The same with a bias for each weight, in the dtype of x: other kernels by the same plans."""


def compile_ahead(wanted: Iterable[Pair], capability: tuple[int, int], fewest: int = 2) -> int:
    """Compile what these plans launch, each variant once; how many there are. What fails to compile fails again at its launch.

    Fewer variants than `fewest` are left to their launches.
    """
    from halfbyte.kernels.compiling.parallel import Ahead

    variants = list({_variant(problem, plan): (problem, plan) for problem, plan in wanted}.values())
    if len(variants) >= fewest:
        ahead = Ahead(capability)
        for configuration in (c for problem, plan in variants for c in configurations(problem, plan)):
            ahead.add(configuration)
        ahead.begin()
        with progress(Console(stderr=True)) as bar:
            task = bar.add_task("compiling kernels", total=len(ahead.jobs))
            for _ in ahead.results():
                bar.advance(task)
    return len(variants)


def _variant(problem: GemmProblem | DecodeProblem, plan: Plan) -> tuple[object, ...]:
    """What kernels are compiled for; how many weights and programs there are is in it, or plays no part."""
    return type(problem), plan.spec


@dataclass(frozen=True)
class Taken:
    """What a program of one kernel takes of an SM, how many fit by which `limit`, and the share of an SM's warps that these are."""

    kernel: str
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    programs: int
    limit: str
    share: float


def taken(problem: GemmProblem | DecodeProblem, plan: Plan, capability: tuple[int, int]) -> Iterator[Taken]:
    """The kernels of a tuned plan, compiled; needs no GPU. Raises `MissingPackage` without Triton."""
    require("triton", "explain --compile")
    from halfbyte.kernels.compiling import Target, build

    for configuration in configurations(problem, plan):
        binary = build(configuration, Target(10 * capability[0] + capability[1]))
        threads = 32 * configuration.options.get("num_warps", 4)
        room = blocks_by_resource(capability, threads=threads, registers=binary.registers, shared_bytes=binary.shared_bytes)
        programs, limit = min((count, name) for name, count in room.items())
        share = programs * threads / sm_limits(capability).threads
        name = configuration.kernel.__name__.strip("_")
        yield Taken(name, threads, binary.registers, binary.spill_bytes, binary.shared_bytes, programs, limit, share)


def resources(problem: GemmProblem | DecodeProblem, plan: Plan, capability: tuple[int, int]) -> dict[str, str]:
    """`taken` in words. Raises `Unsupported` for caches in pages or with tokens in 16 bits."""
    if isinstance(problem, DecodeProblem) and (problem.page or problem.sink_tokens or problem.recent_tokens):
        raise Unsupported("--compile describes contiguous caches without 16-bit tokens; pages and windows are other variants")
    facts: dict[str, str] = {}
    for t in taken(problem, plan, capability):
        spills = f"{t.spill_bytes} bytes spilled" if t.spill_bytes else "none spilled"
        facts[f"{t.kernel} takes"] = (
            f"{t.registers} registers a thread, {spills}; {t.shared_bytes / 1024:.0f} KB of shared memory, {t.threads} threads"
        )
        facts[f"{t.kernel} fits"] = (
            f"{t.programs} programs a multiprocessor, limited by {t.limit}: {100 * t.share:.0f} % of its warps"
        )
    return facts


def configurations(problem: GemmProblem | DecodeProblem, plan: Plan) -> Iterator[Configuration]:
    """What a launch by this plan would compile."""
    from halfbyte.kernels.compiling import attention_launches, gemm_launches, recorded

    if isinstance(problem, GemmProblem) and isinstance(plan, GemmPlan):
        for launch in gemm_launches(problem, plan, isinstance(problem, BiasedProblem)):
            yield from recorded("linear", launch)
    elif isinstance(problem, DecodeProblem) and isinstance(plan, DecodePlan):
        for launch in attention_launches(_call_of(problem), plan):
            yield from recorded("decode", launch)


def _call_of(p: DecodeProblem) -> DecodeCall:
    """A call of decode attention without memory."""
    from halfbyte.kernels.compiling import empty, half_type, kv_buffer
    from halfbyte.kv_buffer import AttentionOptions, DecodeCall

    dtype = half_type(p.dtype)
    keys, values = (
        kv_buffer(kv_format(name), (p.batch, p.heads, p.capacity, p.dim), p.batch, dtype) for name in (p.keys, p.values)
    )
    q = empty(p.batch, p.heads * p.group, p.queries, p.dim, dtype=dtype)
    return DecodeCall(q, keys, values, empty(p.batch), None, None, AttentionOptions(p.dim**-0.5, rotate_keys=p.rotate_keys))


def resident_blocks(capability: Capability, *, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that one SM holds at a time (its occupancy), at least 1.

    threads: per block; registers: per thread, rounded up to a multiple of 8; shared_bytes: what the kernel allocates per block.
    """
    limits = blocks_by_resource(capability, threads=threads, registers=registers, shared_bytes=shared_bytes)
    return max(1, min(limits.values()))


def blocks_by_resource(capability: Capability, *, threads: int, registers: int, shared_bytes: int) -> dict[str, int]:
    """How many blocks each resource of one SM has room for; arguments as in `resident_blocks`."""
    sm = sm_limits(capability)
    return {
        "registers": sm.registers // (-(-registers // 8) * 8 * threads),
        "shared memory": sm.shared_bytes // (shared_bytes + DRIVER_SHARED_BYTES),
        "threads": sm.threads // threads,
        "resident blocks": sm.blocks,
    }


# ------------------------------------------------------------------------------------------------------------ what jobs launch

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
