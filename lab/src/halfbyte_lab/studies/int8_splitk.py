"""Study `int8-splitk`: one sequence of 1,024 tokens in INT8, as a split-K design document lays it out.

Batch 1, 32 query heads on 8 KV heads, D=128, one scale for each of keys and values. Each kernel with 1 to 16 splits of a KV head
and as it plans by itself: the tuned one, which adds splits up in the same launch, and the portable one, which takes a second. With
queries in BF16 and, as the design has them, in FP16; in the orders [B,H,T,D] and [B,T,H,D]; and with 8 sequences of 128 to 1,024
tokens beside as many tokens in even lengths. Times are alone: launches kept apart; with one sequence in the first order also with
launches overlapping. Where no kernel runs, the cpu level does as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from halfbyte.cache import KVCache
from halfbyte.device import Device
from halfbyte.errors import Unsupported
from halfbyte.formats import key_format
from halfbyte.ops import by_plan
from halfbyte.plans.decode_problem import dense_problem
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte_lab.cases import decode_variants
from halfbyte_lab.cases.decode_cases import measure_baselines
from halfbyte_lab.cases.decode_variants import DecodeVariant, fastest, measure_variants
from halfbyte_lab.cases.overhead import bare_launch
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.caches import DecodeCase, Inputs
from halfbyte_lab.measure.decode import DecodeShape, attend
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table, times_text
from halfbyte_lab.measure.timing import MANY_GRAPHS, measure
from halfbyte_lab.precompile import taken
from halfbyte_lab.studies import Study

OP, FORMAT = "int8 split-k study", "int8_tensor"
SPLITS, QUICK_SPLITS = (1, 2, 4, 8, 16), (1, 4)
IMPLS = ("gluon", "triton")
PLANNED, OVERLAPPING = ", as planned", ", overlapping"
#: What the design document expects of an A100: us, how many times slower [B,T,H,D] is, % of SMs with work. Published, not measured.
EXPECTED, EXPECTED_US, EXPECTED_ORDER, EXPECTED_SMS = "published: expected, A100", (1.3, 1.5), (6, 8), 30

ONE = DecodeCase("int8-splitk, [B,H,T,D]", DecodeShape(1, 32, 8, 128, 1024))
#: The design has queries in FP16.
HALF = replace(ONE, name="int8-splitk, [B,H,T,D], FP16 queries")
TOKENS_FIRST = replace(ONE, name="int8-splitk, [B,T,H,D]", layout="tokens first")
LENGTHS = tuple(128 * n for n in range(1, 9))
VARIED = DecodeCase(
    "int8-splitk, 128 to 1,024 tokens", replace(ONE.shape, batch=len(LENGTHS)), runs=tuple((1, length) for length in LENGTHS)
)
EVEN = replace(VARIED.evened(), name="int8-splitk, 576 tokens each")
EMPTY = "int8-splitk, empty launch"


def jobs(session: Session) -> list[Job]:
    """The launch that does nothing, and each problem; on a CPU nothing is cut, and with `--quick` little."""
    if session.device.kind != "cuda":
        return [AttendJob(ONE), AttendJob(HALF, half=True), *(AttendJob(p) for p in (TOKENS_FIRST, VARIED, EVEN))]
    if session.options.quick:
        return [EmptyJob(), AttendJob(ONE, QUICK_SPLITS)]
    return [
        EmptyJob(),
        AttendJob(ONE, SPLITS, baselines=True, overlapping=True),
        AttendJob(HALF, SPLITS, baselines=True, overlapping=True, half=True),
        AttendJob(TOKENS_FIRST, SPLITS),
        AttendJob(VARIED, SPLITS),
        AttendJob(EVEN),
    ]


@dataclass(frozen=True)
class EmptyJob:
    """The time of a kernel that does next to nothing, one after the other in a CUDA graph: what any launch costs."""

    op: str = OP
    name: str = EMPTY

    def measure(self, session: Session) -> Iterator[Record]:
        """One record."""
        if not session.wants(EMPTY, "", "empty kernel"):
            return
        timing = measure([bare_launch(session.device.torch)], device=session.device, threads=session.threads, effort=session.effort)
        record = Record(OP, {"launches": 1}, "", "empty kernel", 0, session.environment, case=EMPTY)
        times = {"p10": timing.p10, "p90": timing.p90, "repeats": timing.repeats, "method": timing.method}
        yield replace(record, seconds=timing.median, alone=timing.median, **times)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AttendJob:
    """One problem: each kernel as planned and with each number of `splits`, one after the other and, if asked for, overlapping.

    half: inputs are fp16, not bf16.
    """

    problem: DecodeCase
    splits: tuple[int, ...] = ()
    baselines: bool = False
    overlapping: bool = False
    half: bool = False
    op: str = OP

    @property
    def name(self) -> str:
        return self.problem.name

    def measure(self, session: Session) -> Iterator[Record]:
        """torch's attention in 16 bits if asked for, then ours."""
        if not session.wants(self.name, FORMAT, "halfbyte"):
            return
        inputs = Inputs.random(self.problem, session.device.torch)
        inputs = inputs.half() if self.half else inputs
        if self.baselines:
            yield from (replace(r, op=OP) for r in measure_baselines(session, inputs))
        yield from measure_variants(session, OP, inputs, FORMAT, partial(self._ways, session, inputs))

    def _ways(self, session: Session, inputs: Inputs, cache: KVCache) -> dict[str, DecodeVariant]:
        """Every kernel in every number of splits that it has."""
        variants: dict[str, DecodeVariant] = {}
        for impl in IMPLS:
            with contextlib.suppress(Unsupported):
                for name, plan in cuts(by_plan.planned(inputs.q, cache, impl), self.splits, self.problem.shape.context).items():
                    found_by = sizes(plan, self.problem) | occupancy(session.device, self.problem, plan, self.half)
                    way = DecodeVariant(partial(by_plan.attend, inputs.q, plan=plan), sizes=found_by)
                    variants[f"halfbyte {impl}{name}"] = way
                    if self.overlapping:
                        variants[f"halfbyte {impl}{name}{OVERLAPPING}"] = replace(way, paired=True)
        return variants or {"halfbyte cpu": DecodeVariant(partial(attend, inputs.q, impl="cpu"))}


def cuts(plan: by_plan.Plan, counts: Sequence[int], context: int) -> dict[str, by_plan.Plan]:
    """The plan, and the plan with each number of splits that its kernel has, by what they are called."""
    plans = {PLANNED: plan}
    for count in counts:
        with contextlib.suppress(Unsupported):
            plans[f", {count} split{'s' * (count > 1)}"] = decode_variants.split(plan, count, context)
    return plans


def sizes(plan: by_plan.Plan, problem: DecodeCase) -> dict[str, int]:
    """Programs that have work, and launches of a call. The tuned kernel gives a program a tile's worth of work, or none."""
    units = problem.shape.batch * problem.shape.kv_heads
    programs = units * round(decode_variants.splits_of(plan))
    if isinstance(plan, DecodePlan):
        tiles = sum(n * -(-tokens // plan.spec.tile) for n, tokens in problem.spans) * problem.shape.kv_heads
        programs = min(plan.programs, tiles + units)  # a unit costs a tile beside its own
    return {"programs": programs, "launches": decode_variants.launches(plan)}


def occupancy(device: Device, problem: DecodeCase, plan: by_plan.Plan, half: bool = False) -> dict[str, int]:
    """SMs of the GPU and, of the tuned kernel over a cache as it is allocated, registers a thread and % of an SM's warps."""
    sizes = {"SMs": device.sm_count or 0}
    if isinstance(plan, DecodePlan) and problem.layout == "heads first":
        s, formats = problem.shape, key_format(FORMAT).name
        call = ("fp16" if half else "bf16", s.batch, s.kv_heads, s.q_heads // s.kv_heads, 1, s.dim, s.context, formats, formats)
        for kernel in taken(dense_problem(*call), plan, device.capability or (0, 0)):
            sizes |= {"registers": kernel.registers, "warps": round(100 * kernel.share)}
    return sizes


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = (
    *("case", "kernel", "programs", "launches", "SMs with work", "registers", "warps of an SM", "us", "us, overlapping"),
    *("of roofline", "x as planned", "error"),
)


def table(measured: Sequence[Record]) -> Table:
    """A row for each case and kernel, the floors last. "x as planned": its time over that of the same kernel as planned."""
    mine = [r for r in measured if r.op == OP and r.shape and not r.implementation.endswith(OVERLAPPING)]
    by_name = {(r.case, r.implementation): r for r in measured if r.op == OP}
    rows = [_row(r, by_name) for r in mine if r.case != EMPTY]
    low, high = EXPECTED_US
    rows += [(EXPECTED, "a design, not measured", "32", "2", f"{EXPECTED_SMS} %", "", "", f"{low} - {high}", *[""] * 4)]
    rows += [_floor(EMPTY, r.implementation, r.seconds) for r in mine if r.case == EMPTY]
    if r := read_of(measured):
        rows.append(_floor(ONE.name, f"only reading its {r.nbytes / 1e6:.2f} MB", roof_seconds(r)))
    return HEADERS, rows


def _row(r: Record, by_name: Mapping[tuple[str, str], Record]) -> tuple[str, ...]:
    kernel = r.implementation.partition(",")[0]
    baseline = by_name.get((r.case, kernel + PLANNED))
    overlapping = by_name.get((r.case, r.implementation + OVERLAPPING))
    return (
        r.case,
        r.implementation,
        *(str(r.shape.get(name, "")) for name in ("programs", "launches")),
        _sms_with_work(r),
        str(r.shape.get("registers", "")),
        f"{r.shape['warps']} %" if "warps" in r.shape else "",
        us_finely(r.seconds) or "refused",
        us_finely(overlapping.seconds if overlapping else None),
        "" if r.roof_share is None else f"{100 * r.roof_share:.0f} %",
        times_text(r.seconds, baseline.seconds if baseline else None),
        "" if r.error is None else f"{r.error:.2g}",
    )


def _sms_with_work(r: Record) -> str:
    """ "48 %": the share of SMs that a program runs on, if no SM has two before each has one."""
    programs, sms = (r.shape.get(name, 0) for name in ("programs", "SMs"))
    return f"{100 * min(programs, sms) / sms:.0f} %" if programs and sms else ""


def _floor(case: str, what: str, seconds: float | None) -> tuple[str, ...]:
    return (case, what, "", "1", "", "", "", us_finely(seconds), *[""] * 4)


def us_finely(seconds: float | None) -> str:
    """Microseconds with two decimals; "" for None."""
    return "" if seconds is None else f"{1e6 * seconds:.2f}"


def of_case(measured: Sequence[Record], case: str, impl: str = "", cut: str = "") -> Record | None:
    """The fastest record of ours on a case, launches kept apart; of one kernel and one cut if they are named."""
    ours = [r for r in measured if (r.op, r.case) == (OP, case) and r.implementation.startswith(f"halfbyte {impl}")]
    return fastest([r for r in ours if r.implementation.endswith(cut) and not r.implementation.endswith(OVERLAPPING)])


def read_of(measured: Sequence[Record]) -> Record | None:
    """A record of the first case that knows the read roofline at its number of bytes."""
    return next((r for r in measured if r.case == ONE.name and r.formats == FORMAT and r.roof_gb_per_s), None)


def roof_seconds(r: Record) -> float:
    """Seconds of only reading as many bytes, launch included."""
    return r.nbytes / (r.roof_gb_per_s or 1.0) / 1e9


def drawn(measured: Sequence[Record]) -> list[str]:
    """Time by splits, a panel for each case; and the best time of the first case beside its floors."""
    figures = []
    panels = {p.name.partition(", ")[2]: _lines(measured, p.name) for p in (ONE, TOKENS_FIRST, VARIED)}
    panels = {title: lines for title, lines in panels.items() if lines}
    if panels:
        levels = [f"{impl}{PLANNED}" for impl in IMPLS]
        text = "INT8 attention of one token by splits of a KV head"
        figures.append(charts.panels(panels, x_label="splits", y_label="us", title=text, columns=3, dashed=levels))
    if bars := _floors(measured):
        labels = {name: f"{value:.2f}" for name, value in bars.items()} | {EXPECTED: " to ".join(map(str, EXPECTED_US))}
        figures.append(charts.bars(bars, x_label="us, median; shorter is better", title="One sequence, 1,024 tokens", shown=labels))
    return figures


def _lines(measured: Sequence[Record], case: str) -> charts.Lines:
    """Both kernels by splits, and what they take as planned, as level lines."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for impl in IMPLS:
        points = []
        for n in SPLITS:
            r = of_case(measured, case, impl, f", {n} split{'s' * (n > 1)}")
            points += [(float(n), 1e6 * r.seconds)] if r and r.seconds else []
        baseline = of_case(measured, case, impl, PLANNED)
        if points:
            lines[impl] = points
            if baseline and baseline.seconds:
                lines[f"{impl}{PLANNED}"] = [(x, 1e6 * baseline.seconds) for x in (points[0][0], points[-1][0])]
    return lines


def _floors(measured: Sequence[Record]) -> dict[str, float]:
    """us of the first case by what takes them."""
    empty, read = fastest([r for r in measured if r.case == EMPTY]), read_of(measured)
    peer = fastest([r for r in measured if r.case == ONE.name and r.formats == "bf16"])
    ours = {r.implementation: r for impl in (*IMPLS, "cpu") if (r := of_case(measured, ONE.name, impl))}
    if not ours:
        return {}
    floors = {EXPECTED: 1e-6 * EXPECTED_US[1]}
    floors |= {"an empty launch": empty.seconds} if empty and empty.seconds else {}
    floors |= {"only reading as many bytes": roof_seconds(read)} if read else {}
    floors |= {f"{r.implementation}, {r.formats}": r.seconds for r in (*ours.values(), peer) if r and r.seconds}
    return {name: 1e6 * seconds for name, seconds in floors.items()}


def says(measured: Sequence[Record]) -> list[str]:
    """The best time against its floors, then what order, a second launch and uneven lengths cost."""
    best, baseline = of_case(measured, ONE.name), of_case(measured, ONE.name, cut=PLANNED)
    empty, read = fastest([r for r in measured if r.case == EMPTY]), read_of(measured)
    if best is None:
        return ["No kernel gave a right result in time that could be measured."]
    facts = [f"{best.implementation} takes {us_finely(best.seconds)} us"]
    facts += [f"{baseline.implementation} {us_finely(baseline.seconds)} us"] if baseline and baseline != best else []
    facts += [f"only reading its {read.nbytes / 1e6:.2f} MB {us_finely(roof_seconds(read))} us"] if read else []
    facts += [f"an empty launch {us_finely(empty.seconds)} us"] if empty else []
    low, high = EXPECTED_US
    return [f"{', '.join(facts)}; the published design expects {low} to {high} us of an A100.", _second(measured)]


def _second(measured: Sequence[Record]) -> str:
    low, high = EXPECTED_ORDER
    parts = [
        _ratio(measured, TOKENS_FIRST, ONE, f"[B,T,H,D] takes {{:.2f}} times as long as [B,H,T,D] (the design: {low} to {high})"),
        _ratio(measured, HALF, ONE, "FP16 queries take {:.2f} times as long as BF16"),
        _ratio(measured, VARIED, EVEN, "lengths of 128 to 1,024 take {:.2f} times as long as 576 each"),
    ]
    ours = [r for r in measured if r.case == ONE.name and not r.implementation.endswith(OVERLAPPING)]
    one, two = (fastest([r for r in ours if r.shape.get("launches") == n]) for n in (1, 2))
    if one and two and one.seconds and two.seconds:
        times = two.seconds / one.seconds
        parts.append(f"{two.implementation}, in two launches, takes {times:.2f} times as long as {one.implementation}, in one")
    text = "; ".join(filter(None, parts))
    return f"{text}." if text else "Other orders and lengths were not measured."


def _ratio(measured: Sequence[Record], of: DecodeCase, over: DecodeCase, text: str) -> str:
    """How many times longer one case takes than another, as planned; "" if one of them was not measured."""
    a, b = (of_case(measured, p.name, cut=PLANNED) or of_case(measured, p.name, "cpu") for p in (of, over))
    return text.format(a.seconds / b.seconds) if a and b and a.seconds and b.seconds else ""


STUDY = Study("int8-splitk", table, drawn, says, text_columns=2, effort=MANY_GRAPHS, jobs=jobs)
