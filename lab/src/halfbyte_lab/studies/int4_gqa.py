"""Study `int4-gqa`: 8 query heads on one KV head over 8,192 tokens, BF16 and INT4, as the INT4 work measures it.

Every implementation with 1 to 128 splits, of which the best is reported, and halfbyte as it plans by itself; torch's attention in
16 bits in every way there is, and the other peers that are installed: FBGEMM among them, whose kernel the published figures are of.
FlexAttention, which compiles for each batch, has the first and the last. The tuned kernel ends where a split is one of its tiles,
beyond which it would be another kernel. INT4 has one scale and offset a row, or four. Times are alone: launches kept apart. On a
CPU few sequences of few tokens.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from halfbyte.cache import KVCache
from halfbyte.errors import Unsupported
from halfbyte.ops import by_plan
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte_lab import precompile
from halfbyte_lab.baselines.run import attention_baselines
from halfbyte_lab.cases import decode_variants
from halfbyte_lab.cases.decode_cases import measure_baselines
from halfbyte_lab.cases.decode_variants import DecodeVariant, fastest, measure_variants
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.caches import DecodeCase, Inputs
from halfbyte_lab.measure.decode import DecodeShape, attend
from halfbyte_lab.measure.figures import flop, rooflines
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Candidate, Case, Job, Session
from halfbyte_lab.measure.tables import Table, rate_text, times_text, us
from halfbyte_lab.measure.timing import MANY_GRAPHS
from halfbyte_lab.studies import Study
from halfbyte_lab.studies.published_gqa import BASELINE, BATCHES, BEFORE, CONTEXT, RATES, RATES_BEFORE, TIMES, case_of, published

OP = "gqa study"
#: The peer that compiles for each batch.
COMPILES = "flex attention"
ROW_WISE = "int4"
#: What the published figures are of: how it is called, and its groups.
THEIRS = {"grouped fbgemm": "four groups", "row-wise fbgemm": "one group"}
#: How records of it with 32 splits alone called it, before all of them were tried.
UNSWEPT = "fbgemm"
FORMATS = ("bf16", ROW_WISE, "int4_g32")
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
#: (batch, context) of each job, and with --quick; on a CPU.
CASES, QUICK_CASES = tuple((batch, CONTEXT) for batch in BATCHES), ((128, CONTEXT),)
CPU_CASES, QUICK_CPU_CASES = ((2, 512), (4, 512)), ((2, 512),)
QUICK_FORMATS = (ROW_WISE,)
QUICK_SPLITS = (2, 8, 32)


def jobs(session: Session) -> list[Job]:
    """One for each batch."""
    quick, gpu = session.options.quick, session.device.kind == "cuda"
    cases = (QUICK_CASES if quick else CASES) if gpu else (QUICK_CPU_CASES if quick else CPU_CASES)
    formats, counts = (QUICK_FORMATS, QUICK_SPLITS) if quick else (FORMATS, SPLITS)
    ends = cases[0], cases[-1]
    return [
        BatchJob(batch, context, formats, counts, not quick, not quick and (batch, context) in ends) for batch, context in cases
    ]


@dataclass(frozen=True)
class BatchJob:
    """One batch: torch's attention in bf16, `others`: other peers, `compiled`: FlexAttention too; then every format, every way."""

    batch: int
    context: int
    formats: tuple[str, ...] = FORMATS
    splits: tuple[int, ...] = SPLITS
    others: bool = False
    compiled: bool = False
    op: str = OP

    @property
    def problem(self) -> DecodeCase:
        """What is measured, and its name."""
        return case_of("int4-gqa", self.batch, self.context)

    @property
    def name(self) -> str:
        return self.problem.name

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """Every format as planned; splits of the tuned kernel are numbers of its launch."""
        for formats in self.formats:
            if session.wants(self.name, formats, "halfbyte"):
                yield from precompile.attention(session.device, self.problem.shape, formats, (False,))

    def measure(self, session: Session) -> Iterator[Record]:
        """The peers' records, then ours, which know the fastest peer."""
        selection = [f for f in self.formats if session.wants(self.name, f, "halfbyte")]
        if not selection:
            return
        session.free()
        inputs = Inputs.random(self.problem, session.device.torch)
        peers = [replace(r, op=OP) for r in measure_baselines(session, inputs)]
        peers += self._others(session, inputs) if self.others else []
        yield from peers
        peer = fastest([r for r in peers if r.formats == "bf16"])
        beside = {"peer": peer.implementation, "peer_seconds": peer.seconds} if peer else {}
        for formats in selection:
            ours = measure_variants(session, OP, inputs, formats, partial(self._ways, session, inputs))
            yield from (replace(r, **beside) for r in ours)  # type: ignore[arg-type]

    def _others(self, session: Session, inputs: Inputs) -> list[Record]:
        """What else is installed and reads these formats; FlexAttention only if peers that compile are wanted."""
        session.free()
        ((k, v),) = inputs.spans

        def candidates() -> list[Candidate]:
            records = attention_baselines(session, self.name, inputs.q, k, v, FORMATS)
            return [peer for peer in records if self.compiled or peer.implementation != COMPILES]

        records = session.measure(Case(OP, self.name, self.problem.shape.sizes, candidates))
        return [replace(r, case=self.name) for r in records]

    def _ways(self, session: Session, inputs: Inputs, cache: KVCache) -> dict[str, DecodeVariant]:
        """halfbyte as it plans by itself, and each kernel with each number of splits."""
        q = inputs.q
        if session.device.kind != "cuda":
            return {f"halfbyte {impl}": DecodeVariant(partial(attend, q, impl=impl)) for impl in ("cpu", "reference")}
        variants = {
            "halfbyte auto": DecodeVariant(partial(attend, q, impl="auto"), sizes=_sizes(by_plan.planned(q, cache, "auto")))
        }
        for impl in ("gluon", "triton"):
            with contextlib.suppress(Unsupported):
                cuts = swept(by_plan.unpaired(by_plan.planned(q, cache, impl)), self.splits, self.context)
                for count, cut in cuts.items():
                    name = f"halfbyte {impl}, {count} split{'s' * (count > 1)}"
                    variants[name] = DecodeVariant(partial(by_plan.attend, q, plan=cut), sizes=_sizes(cut))
        return variants


def swept(plan: by_plan.Plan, counts: Sequence[int], context: int) -> dict[int, by_plan.Plan]:
    """The plan with each number of splits that its kernel has, without compiling it for other tiles."""
    plans: dict[int, by_plan.Plan] = {}
    for count in counts:
        with contextlib.suppress(Unsupported):
            cut = decode_variants.split(plan, count, context)
            if not (isinstance(cut, DecodePlan) and isinstance(plan, DecodePlan) and cut.spec != plan.spec):
                plans[count] = cut
    return plans


def _sizes(plan: by_plan.Plan) -> dict[str, int]:
    """What a record says of a plan: programs, where splits of a unit may be a fraction."""
    return {"programs": plan.programs} if isinstance(plan, DecodePlan) else {"splits": plan.splits}


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = (
    "case",
    "format",
    "implementation",
    "published beside it",
    "splits",
    "us",
    "GB/s",
    "of roofline",
    "FLOP/byte",
    "x 16-bit",
    "x FD INT4",
    *(f"{gpu} published, {what}" for gpu in TIMES for what in ("us", "us before", "GB/s", "GB/s before", "GB/s at our bytes")),
    f"x {BASELINE}",
)
#: The published kernel that each of ours is nearest to.
_BESIDE = {
    ("bf16", "torch sdpa flash"): "FA BF16",
    ("bf16", "halfbyte gluon"): "CU BF16",
    ("bf16", "halfbyte triton"): "FD BF16",
    (ROW_WISE, "halfbyte gluon"): "CU INT4",
    (ROW_WISE, "halfbyte triton"): "FD INT4",
    ("int4_g32", "halfbyte gluon"): "CU INT4, 4 groups",
    ("int4_g32", "halfbyte triton"): "FD INT4, 4 groups",
    ("int4_g32", "grouped fbgemm"): "CU INT4, 4 groups",
    (ROW_WISE, "row-wise fbgemm"): "CU INT4",
}


def best(measured: Sequence[Record]) -> list[Record]:
    """The fastest record of each case, format and kernel: of all its splits, of all ways to call it."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for r in measured:
        if r.op == OP and r.shape and _kernel(r) != UNSWEPT:
            groups.setdefault((r.case, r.formats, _kernel(r)), []).append(r)
    return [record for group in groups.values() if (record := fastest(group))]


def _kernel(r: Record) -> str:
    """ "halfbyte gluon" of "halfbyte gluon, 8 splits"."""
    return r.implementation.partition(",")[0]


def _shape(r: Record) -> DecodeShape:
    return DecodeShape(r.shape["B"], r.shape["Hq"], r.shape["H"], r.shape["D"], r.shape["T"])


def table(measured: Sequence[Record]) -> Table:
    """One row for each case, format and kernel."""
    records = best(measured)
    portable = {r.case: r for r in records if _BESIDE.get((r.formats, _kernel(r))) == "FD INT4"}
    return HEADERS, [_row(r, _fastest_16_bit(records, r.case), portable.get(r.case)) for r in records]


def _fastest_16_bit(found: Sequence[Record], case: str) -> Record | None:
    """The fastest attention over 16-bit keys and values that is not ours."""
    return fastest([r for r in found if r.case == case and r.formats == "bf16" and not r.implementation.startswith("halfbyte")])


def _row(r: Record, sixteen: Record | None, portable: Record | None) -> tuple[str, ...]:
    kernel, shape = _BESIDE.get((r.formats, _kernel(r)), ""), _shape(r)
    return (
        r.case,
        r.formats,
        _kernel(r),
        kernel if published("A100", kernel, shape) else "",
        _splits(r),
        us(r.seconds),
        rate_text(r.gb_per_s),
        f"{100 * (r.roof_share or 0):.1f} %",
        f"{flop(r) / r.nbytes:.1f}",
        times_text(sixteen.seconds if sixteen else None, r.seconds),
        times_text(portable.seconds if portable else None, r.seconds) if "INT4" in kernel else "",
        *(cell for gpu in TIMES for cell in _published_cells(gpu, kernel, r)),
        times_text(published("H100", BASELINE, shape), published("H100", kernel, shape)),
    )


def _published_cells(gpu: str, kernel: str, r: Record) -> tuple[str, ...]:
    """Microseconds after the optimisations and before, GB/s of both as printed, and GB/s of our bytes in the first time."""
    after, *others = (published(gpu, kernel, _shape(r), times) for times in (TIMES, BEFORE, RATES, RATES_BEFORE))
    return *(f"{figure:,}" if figure else "" for figure in (after, *others)), f"{r.nbytes / after / 1e3:,.0f}" if after else ""


def _splits(r: Record) -> str:
    """Programs for each KV head of a sequence, by the name of the implementation or its plan; below one they take several."""
    match = re.search(r"(\d+) splits?$", r.implementation)
    count = int(match[1]) if match else r.shape.get("splits") or r.shape.get("programs", 0) / (r.shape["B"] * r.shape["H"])
    return f"{count:g}" if count else ""


#: Lines of the chart: name, format, how the implementations begin that count.
_LINES = (
    ("halfbyte, INT4", ROW_WISE, "halfbyte"),
    ("halfbyte, INT4 in 4 groups", "int4_g32", "halfbyte"),
    ("halfbyte, portable kernel, INT4", ROW_WISE, "halfbyte triton"),
    ("torch, BF16", "bf16", "torch"),
    ("flex attention, BF16", "bf16", "flex"),
    ("FlashInfer, BF16", "bf16", "flashinfer"),
    ("FBGEMM, INT4 in 4 groups", "int4_g32", "grouped fbgemm"),
    ("FBGEMM, INT4", ROW_WISE, "row-wise fbgemm"),
)


def drawn(measured: Sequence[Record]) -> list[str]:
    """Time by batch beside the published ones, and by the number of splits."""
    records = best(measured)
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, formats, begins in _LINES:
        for case in dict.fromkeys(r.case for r in records):
            r = fastest([r for r in records if r.case == case and r.formats == formats and r.implementation.startswith(begins)])
            if r and r.seconds:
                lines.setdefault(name, []).append((r.shape["B"], 1e6 * r.seconds))
    theirs = {f"published, H100: {kernel}": list(TIMES["H100"][kernel].items()) for kernel in ("CU INT4", BASELINE)}
    if any(published("H100", BASELINE, _shape(r)) for r in records):
        lines |= {name: [(float(x), float(y)) for x, y in points] for name, points in theirs.items()}
    if not lines:
        return []
    title = "Time of one call by batch, 8 query heads on one KV head"
    figures = [charts.curves(lines, x_label="sequences", y_label="microseconds", title=title, dashed=list(theirs))]
    by_case = _by_splits(measured)
    if by_case:
        title = "Time by the number of splits, over the best of its batch and kernel"
        figures.append(charts.panels(by_case, x_label="splits", y_label="times the best", title=title, line=1.0))
    return [*figures, *rooflines(records)[1:]]


def _by_splits(measured: Sequence[Record]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Row-wise INT4 of each kernel, as times of its best, by batch."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for r in measured:
        if r.op == OP and r.formats == ROW_WISE and r.seconds and r.implementation.endswith(("split", "splits")):
            points = panels.setdefault(f"batch {r.shape['B']}", {}).setdefault(_kernel(r), [])
            points.append((float(_splits(r)), r.seconds))
    return {
        batch: {name: [(x, y / min(t for _, t in points)) for x, y in points] for name, points in lines.items()}
        for batch, lines in panels.items()
    }


def says(measured: Sequence[Record]) -> list[str]:
    """What row-wise INT4 takes here, and what was published."""
    records = best(measured)
    ours = [
        r for c in dict.fromkeys(r.case for r in records) if (r := fastest([o for o in records if o.case == c and _is_ours(o)]))
    ]
    if not ours:
        return []
    device, batches = ours[0].environment.device, _listed([str(r.shape["B"]) for r in ours])
    rates = _between([r.gb_per_s or 0.0 for r in ours], rate_text)
    ratios = [s.seconds / r.seconds for r in ours if (s := _fastest_16_bit(records, r.case)) and s.seconds and r.seconds]
    sentence = f"On {device}, row-wise INT4 takes {_listed([us(r.seconds) for r in ours])} us at batch {batches} ({rates} GB/s)"
    sentence += f", {_between(ratios)} times as fast as the fastest BF16 kernel." if ratios else "."
    shapes = [_shape(r) for r in ours if published("H100", "CU INT4", _shape(r))]
    if not shapes:
        return [
            sentence,
            f"The published figures are of {CONTEXT:,} tokens at batch 32 to 512 on GPUs, with which this does not compare.",
        ]
    times = [published("H100", "CU INT4", shape) or 0 for shape in shapes]
    faster = [(published("H100", BASELINE, shape) or 0) / t for shape, t in zip(shapes, times, strict=True)]
    theirs = f"Published for an H100, not measured here: {_listed([str(t) for t in times])} us"
    beside = f"{theirs}, {_between(faster)} times as fast as Flash-Decoding in BF16."
    return [sentence, *_short_of_four(records, ours), *_theirs_said(records), beside]


def _short_of_four(found: Sequence[Record], ours: Sequence[Record]) -> list[str]:
    """Where the rest of the 4x of the codes goes: to scales and offsets, and to a smaller share of the roofline."""
    r = ours[-1]
    sixteen = _fastest_16_bit(found, r.case)
    if not (sixteen and sixteen.seconds and r.seconds and sixteen.roof_share and r.roof_share):
        return []
    return [
        f"4-bit codes are a quarter of BF16; with scales and offsets the bytes are {sixteen.nbytes / r.nbytes:.2f} times fewer, "
        f"and {100 * r.roof_share:.0f} % of the roofline instead of {100 * sixteen.roof_share:.0f} % "
        f"leave {sixteen.seconds / r.seconds:.2f}x at batch {r.shape['B']}."
    ]


def _theirs_said(found: Sequence[Record]) -> list[str]:
    """The kernel of the published figures, where it was measured, too."""
    sentences = []
    for kernel, groups in THEIRS.items():
        if theirs := [r for r in found if _kernel(r) == kernel]:
            batches, times = _listed([str(r.shape["B"]) for r in theirs]), _listed([us(r.seconds) for r in theirs])
            sentences.append(f"FBGEMM's own kernel, with {groups}, takes {times} us at batch {batches}.")
    return sentences


def _is_ours(r: Record) -> bool:
    return r.formats == ROW_WISE and r.implementation.startswith("halfbyte")


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


def _between(values: Sequence[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """ "2.46 to 3.55"; one of them where they read the same."""
    ends = dict.fromkeys(form(value) for value in (min(values), max(values)))
    return " to ".join(ends)


STUDY = Study("int4-gqa", table, drawn, says, text_columns=4, effort=MANY_GRAPHS, jobs=jobs)
