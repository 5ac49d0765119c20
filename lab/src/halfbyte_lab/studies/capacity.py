"""Study `capacity`: tokens a second, and GPU time a token, with the largest batch that fits, by context and KV format.

The rank and the step are those of `decode-70b`: one of eight tensor-parallel ranks of Llama 2 70B, random weights, no all-reduce.
Weights and caches may fill 90 % of the GPU's memory; batches are multiples of 8. On a GPU the step of that batch is measured.
Without one it is derived from recorded steps of `decode-70b`: a line through the two nearest batches of the same context and
format, up to twice the largest recorded batch. Such records say "derived", and how far off such a line is where it can be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte_lab.cases.rank import ONE_OF_EIGHT, PLAIN, Model, Rank
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.compare import latest
from halfbyte_lab.measure.records import Record, read
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table, times_text
from halfbyte_lab.measure.timing import MANY_GRAPHS
from halfbyte_lab.precompile import Pair
from halfbyte_lab.studies import Study, decode_70b

OP, DERIVED, RANKS = "capacity", "derived", 8
FORMATS = (PLAIN, "int8", "int8+int4_g32", "int4_g32", "int4")
CONTEXTS, QUICK_CONTEXTS = (4096, 8192, 16384, 32768), (16384,)
#: The share of memory that weights and caches may fill, what a batch is a multiple of, how far beyond a recorded batch is derived.
SHARE, MULTIPLE, BEYOND = 0.9, 8, 2
#: Recorded steps, and the memory of the GPU that they are of.
RECORDS, MEMORY = Path(__file__).parents[4] / "results" / "gpu.jsonl", 141 * 10**9


def jobs(session: Session) -> list[Job]:
    """On a GPU one for each context and format; else what recorded steps say."""
    if session.device.kind != "cuda":
        return [DerivedJob()]
    rank = ONE_OF_EIGHT
    model = Model(rank, session.device, decode_70b.TIMED, session.copies(rank.head_bytes))
    contexts = QUICK_CONTEXTS if session.options.quick else CONTEXTS
    return [CapacityJob(model, context, f, session.device.memory_bytes) for context in contexts for f in FORMATS]


def largest(rank: Rank, context: int, formats: str, fp8: bool, memory: int) -> int:
    """The largest batch whose weights and caches fit."""
    weights = rank.held_bytes(0, context, formats, fp8)
    one = rank.held_bytes(MULTIPLE, context, formats, fp8) - weights
    return max(0, int((SHARE * memory - weights) // one)) * MULTIPLE


@dataclass(frozen=True)
class CapacityJob:
    """The largest batch of one context and format, timed in every way there is, of which the fastest counts."""

    model: Model
    context: int
    formats: str
    memory: int
    op: str = OP

    @property
    def name(self) -> str:
        return f"capacity, {self.context:,} tokens"

    @property
    def _step(self) -> decode_70b.StepJob:
        batch = largest(self.model.rank, self.context, self.formats, self.model.fp8, self.memory)
        return decode_70b.StepJob(self.model, batch, self.context, (self.formats,))

    def to_compile(self, session: Session) -> Iterator[Pair]:
        """As the step has it."""
        yield from self._step.to_compile(session)

    def measure(self, session: Session) -> Iterator[Record]:
        """The fastest way's record; without one, those that say why."""
        step = self._step
        if not step.batch or not session.wants(self.name, self.formats, "halfbyte"):
            return
        records = [replace(r, op=OP, case=self.name, shape={**r.shape, "fits": step.batch}) for r in step.measure(session)]
        fits = [r for r in records if r.seconds]
        yield from [min(fits, key=lambda r: r.seconds or 0.0)] if fits else records


@dataclass(frozen=True)
class DerivedJob:
    """What recorded steps say of the largest batches."""

    op: str = OP
    name: str = "capacity, derived"

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each context and format that steps were recorded of."""
        for r in derived(read(RECORDS).records):
            if session.wants(r.case, r.formats, "halfbyte"):
                yield r


def derived(recorded: Sequence[Record]) -> list[Record]:
    """Records of the largest batches, by the fastest recorded steps of `decode-70b`; their environment is that of the steps."""
    fastest: dict[tuple[int, str], dict[int, Record]] = {}
    for r in latest(recorded):
        if r.op == decode_70b.OP and r.seconds:
            batches = fastest.setdefault((r.shape["T"], r.formats), {})
            best = batches.get(r.shape["B"])
            if best is None or r.seconds < (best.seconds or 0.0):
                batches[r.shape["B"]] = r
    order = sorted((key for key, steps in fastest.items() if len(steps) > 2), key=lambda key: (key[0], FORMATS.index(key[1])))
    return [_derived(*key, fastest[key]) for key in order if key[0] in CONTEXTS]


def _derived(context: int, formats: str, steps: dict[int, Record]) -> Record:
    """The largest batch of one context and format, or twice the largest recorded one."""
    rank, last = ONE_OF_EIGHT, steps[max(steps)]
    fits = largest(rank, context, formats, True, MEMORY)
    batch = min(fits, BEYOND * max(steps))
    times = {b: r.seconds or 0.0 for b, r in steps.items()}
    seconds, off = (
        line(times, batch),
        abs(line({b: s for b, s in times.items() if b < max(steps)}, max(steps)) / times[max(steps)] - 1),
    )
    shape = {**last.shape, "B": batch, "fits": fits}
    blank = Record(OP, shape, formats, last.implementation, rank.step_bytes(batch, context, formats, True), last.environment)
    how = f"{DERIVED}: a line through recorded steps of batch {', '.join(map(str, nearest(list(steps), batch)))}"
    kind = "of the step at the largest recorded batch, by a line through the two before"
    record = replace(blank, seconds=seconds, p10=seconds, p90=seconds, method=how)
    return replace(record, case=f"capacity, {context:,} tokens", error=off, error_kind=kind)


def nearest(batches: Sequence[int], batch: int) -> tuple[int, int]:
    """The recorded batches around `batch`, or the two largest."""
    ascending = sorted(batches)
    above = next((i for i, b in enumerate(ascending) if b >= batch), len(ascending) - 1)
    above = max(1, above)
    return ascending[above - 1], ascending[above]


def line(seconds: dict[int, float], batch: int) -> float:
    """Seconds of a step of `batch` sequences, on the line through the nearest recorded ones."""
    low, high = nearest(list(seconds), batch)
    return seconds[low] + (batch - low) * (seconds[high] - seconds[low]) / (high - low)


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("case", "KV cache", "fits", "batch", "ms a step", "tokens/s", "x bf16", "GPU hours per 1M tokens", "how")


def tokens_per_second(r: Record) -> float:
    """Of the whole model: every rank takes part in every token."""
    return r.shape["B"] / (r.seconds or float("inf"))


def gpu_hours(r: Record) -> float:
    """Of all ranks, for a million tokens: times the price of a GPU hour, what they cost."""
    return RANKS * 1e6 / tokens_per_second(r) / 3600


def table(measured: Sequence[Record]) -> Table:
    """One row for each context and format."""
    return HEADERS, [_row(r, _plain(measured, r.case)) for r in measured if r.op == OP and r.seconds]


def _plain(measured: Sequence[Record], case: str) -> Record | None:
    return next((r for r in measured if (r.case, r.formats) == (case, PLAIN) and r.seconds), None)


def _row(r: Record, plain: Record | None) -> tuple[str, ...]:
    return (
        *(r.case, r.formats, f"{r.shape['fits']:,}", f"{r.shape['B']:,}"),
        f"{1e3 * (r.seconds or 0.0):.1f}",
        f"{tokens_per_second(r):,.0f}",
        times_text(1 / tokens_per_second(plain) if plain else None, 1 / tokens_per_second(r)),
        f"{gpu_hours(r):.3f}",
        DERIVED if r.method.startswith(DERIVED) else "measured",
    )


def drawn(measured: Sequence[Record]) -> list[str]:
    """Tokens a second by context, a line for each format."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in (r for r in measured if r.op == OP and r.seconds):
        lines.setdefault(r.formats, []).append((r.shape["T"] / 1024, tokens_per_second(r)))
    if not any(len(points) > 1 for points in lines.values()):
        return []
    title = "Tokens a second with the largest batch that fits, 8 GPUs"
    y_label = "tokens/s" + ", derived from steps of one rank" * any(r.method.startswith(DERIVED) for r in measured)
    return [charts.curves(lines, x_label="context, K tokens", y_label=y_label, title=title)]


def says(measured: Sequence[Record]) -> list[str]:
    """At the longest context that 16 bits have, each format against them; and how the figures were made."""
    plain = max((r for r in measured if r.op == OP and r.formats == PLAIN and r.seconds), key=lambda r: r.shape["T"], default=None)
    if plain is None:
        return []
    others = [r for r in measured if r.case == plain.case and r.formats != PLAIN and r.seconds]
    parts = [f"{r.formats} {tokens_per_second(r):,.0f} ({tokens_per_second(r) / tokens_per_second(plain):.2f}x)" for r in others]
    context, most = plain.case.removeprefix("capacity, "), f"{tokens_per_second(plain):,.0f}"
    sentences = [f"Over {context} a bf16 cache gives {most} tokens/s, {', '.join(parts)}." if parts else ""]
    if any(r.method.startswith(DERIVED) for r in measured):
        off = [r.error for r in measured if r.op == OP and r.error is not None]
        sentences.append(
            f"Derived from recorded steps of decode-70b and not measured, up to {BEYOND} times their largest batch; a line through "
            f"the two batches before that one misses its step by {100 * min(off):.0f} to {100 * max(off):.0f} %."
        )
    return [sentence for sentence in sentences if sentence]


STUDY = Study("capacity", table, drawn, says, text_columns=2, effort=MANY_GRAPHS, derive=derived, jobs=jobs)
