"""Study `int4-ladder`: what each step from the portable kernel to the tuned one as planned is worth, in INT4.

8 query heads on one KV head over 8,192 tokens, one scale and offset a row, as the ten-step table of the INT4 work has it. A rung
differs from the one before by one parameter that the kernels have: stages of the ring, where scales go, how addresses are formed,
tokens of a tile, programs, paired launches; the first rung of the tuned kernel changes the kernel, and with it the second launch
that adds splits up. Batch 512 is the published one; at batch 32, where units are fewer than programs, the tiles are as planned.
Then keys are rotated, as they are by default, and the last rung has four groups in place of one. Rungs have
one name on every GPU; the numbers of a plan are sizes of the record. On a CPU there are other rungs: the reference, the CPU's,
torch in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from halfbyte.cache import KVCache
from halfbyte.ops import by_plan
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.plans.decode_spec import DecodePlan, DecodeSpec
from halfbyte.plans.kv_codec import KVSpec
from halfbyte_lab.cases.decode_cases import measure_baselines
from halfbyte_lab.cases.decode_variants import DecodeVariant, fastest, measure_variants
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.caches import DecodeCase, Inputs
from halfbyte_lab.measure.decode import attend
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table, rate_text, times_text, us
from halfbyte_lab.measure.timing import MANY_GRAPHS
from halfbyte_lab.studies import Study
from halfbyte_lab.studies.published_gqa import BASELINE, CONTEXT, LADDERS, RATES, TIMES, case_of, ladder

OP = "ladder study"
ROW_WISE, GROUPS = "int4", "int4_g32"
#: Where the published steps are in the tuned kernel, which has all of them from its first rung on.
HERE = (
    "halfbyte's kernel has these steps in every rung: a tile is unrolled (step 1); P, maximum and sum stay in registers (2 to 4, "
    "7 to 9); a ring of stages fetches V ahead (5); copies have 16 bytes (6); rows in shared memory are swizzled, not padded (10)."
)
#: Their kernel in `LADDERS` whose ten steps stand beside ours.
PUBLISHED = "CU INT4"
#: The batch of the published ladder, and one where a unit is shared by several programs.
WHOLE, SHARED = 512, 32
#: Tokens of a stream of the tuned kernel's first rung, and its stages: the fewest that it has.
_TOKENS, _STAGES = 16, 2

#: How the sizes that a rung changes are told.
_SIZES = {"splits": "{} splits", "tile": "tiles of {} tokens", "stages": "{} stages", "programs": "{:,} programs"}
#: What each rung changes, and its seconds.
Rungs = Sequence[tuple[str, float | None]]


def jobs(session: Session) -> list[Job]:
    """A ladder for each batch; with --quick one, without the rungs of the tuned kernel's tiles."""
    quick = session.options.quick
    if session.device.kind != "cuda":
        return [LadderJob(2, 512) if quick else LadderJob(4, 2048)]
    return [LadderJob(WHOLE, CONTEXT, tiles=False)] if quick else [LadderJob(WHOLE, CONTEXT, True), LadderJob(SHARED, CONTEXT)]


@dataclass(frozen=True)
class LadderJob:
    """One batch; `tiles`: with the rungs on which the tuned kernel's tiles grow."""

    batch: int
    context: int
    tiles: bool = False
    op: str = OP

    @property
    def problem(self) -> DecodeCase:
        """What is measured, and its name."""
        return case_of("int4-ladder", self.batch, self.context)

    @property
    def name(self) -> str:
        return self.problem.name

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each rung, in order; `shape` says which it is."""
        if not session.wants(self.name, ROW_WISE, "halfbyte"):
            return
        session.free()
        inputs = Inputs.random(self.problem, session.device.torch)
        if session.device.kind != "cuda":
            yield from _numbered(self._on_cpu(session, inputs))
            return
        ours = measure_variants(session, OP, inputs, ROW_WISE, partial(self._rungs, inputs), rotate_keys=False)
        rotated = measure_variants(session, OP, inputs, ROW_WISE, partial(_last, "keys rotated", inputs))
        groups = measure_variants(session, OP, inputs, GROUPS, partial(_last, "the same with four groups a row", inputs))
        yield from _numbered([*ours, *rotated, *groups])

    def _rungs(self, inputs: Inputs, cache: KVCache) -> dict[str, DecodeVariant]:
        gluon, portable = (by_plan.planned(inputs.q, cache, impl) for impl in ("gluon", "triton"))
        assert isinstance(gluon, DecodePlan)
        assert isinstance(portable, TritonTiles)
        rungs = climb(gluon, portable, self.tiles)
        return {
            name: DecodeVariant(partial(by_plan.attend, inputs.q, plan=r.plan), _paired(r.plan), r.sizes)
            for name, r in rungs.items()
        }

    def _on_cpu(self, session: Session, inputs: Inputs) -> list[Record]:
        """The float64 reference, the CPU's implementation, torch in 16 bits."""
        ways = {f"halfbyte {impl}": DecodeVariant(partial(attend, inputs.q, impl=impl)) for impl in ("reference", "cpu")}
        ours, peer = measure_variants(session, OP, inputs, ROW_WISE, lambda _: ways), fastest(measure_baselines(session, inputs))
        return [*ours, *([replace(peer, op=OP)] if peer else [])]


def _last(name: str, inputs: Inputs, cache: KVCache) -> dict[str, DecodeVariant]:
    """The tuned kernel as planned for this cache."""
    plan = by_plan.planned(inputs.q, cache, "gluon")
    return {name: DecodeVariant(partial(by_plan.attend, inputs.q, plan=plan), _paired(plan))}


def _paired(plan: by_plan.Plan) -> bool:
    return isinstance(plan, DecodePlan) and plan.spec.use_pdl


def _numbered(measured: Sequence[Record]) -> list[Record]:
    return [replace(r, shape={**r.shape, "rung": i}) for i, r in enumerate(measured, 1)]


@dataclass(frozen=True)
class Rung:
    """A plan, and the sizes that this rung changes, as a record's shape names them."""

    plan: by_plan.Plan
    sizes: Mapping[str, int] = field(default_factory=dict)


def climb(tuned: DecodePlan, portable: TritonTiles, tiles: bool) -> dict[str, Rung]:
    """The rungs by what each changes, from the portable kernel without stages to the tuned one as planned."""
    whole = replace(portable, splits=1, pdl=False)
    ladder = {
        "portable kernel, no pipelining": Rung(replace(whole, num_stages=1)),
        "pipelined": Rung(whole, {"stages": whole.num_stages}),
    }
    if portable.splits > 1:
        ladder["split, added up by a second launch"] = Rung(replace(portable, pdl=False), {"splits": portable.splits})
    programs = portable.splits * tuned.work_items
    alone = replace(tuned.spec, use_pdl=False)
    rungs = _tile_rungs(alone) if tiles else {"tuned kernel as planned, one launch": (alone, {})}
    for name, (spec, sizes) in rungs.items():
        ladder[name] = Rung(replace(tuned, spec=spec, programs=programs), sizes)
    if tuned.programs != programs:
        ladder["programs as planned"] = Rung(replace(tuned, spec=alone), {"programs": tuned.programs})
    if tuned.spec.use_pdl:
        ladder["launches overlap"] = Rung(tuned)
    return ladder


def _tile_rungs(planned: DecodeSpec) -> dict[str, tuple[DecodeSpec, dict[str, int]]]:
    """The tuned kernel from its smallest tiles to those of its plan; those before the last have no larger ring."""
    spec = replace(planned, tokens=_TOKENS, stages=_STAGES, keys=_plain(planned.keys), values=_plain(planned.values))
    rungs = {"tuned kernel, one launch, smallest tiles": (spec, {"tile": spec.tile})}
    spec = replace(spec, keys=replace(spec.keys, token_stride=planned.keys.token_stride))
    spec = replace(spec, values=replace(spec.values, token_stride=planned.values.token_stride))
    rungs["distances of codes known when compiling"] = (spec, {})
    spec = replace(spec, keys=planned.keys, values=planned.values)
    rungs["scales past the registers (cp.async)"] = (spec, {})
    ring = planned.tokens * planned.stages
    spec = replace(spec, stages=ring // spec.tokens)
    rungs["ring as large as planned"] = (spec, {"stages": spec.stages})
    while spec.tokens < planned.tokens:
        spec = replace(spec, tokens=2 * spec.tokens, stages=ring // (2 * spec.tokens))
        name = f"tiles {spec.tokens // _TOKENS} times the smallest"
        rungs[name] = (spec, {"tile": spec.tile, "stages": spec.stages})
    return rungs


def _plain(side: KVSpec) -> KVSpec:
    """The same codes and scales; scales pass through registers, and distances of codes are numbers of the launch."""
    return replace(side, token_stride=0, scale_stride=0)


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("case", "rung", "what changes", "us", "GB/s", "of roofline", "x the rung before", "x the first", "x FD BF16")


def table(measured: Sequence[Record]) -> Table:
    """One row for each rung; then, where the published batch was measured, the published ladders of every batch."""
    rows = [row for rungs in _by_case(measured).values() for row in _rows(rungs)]
    return HEADERS, rows + (_published_rows() if _has_published(measured) else [])


def _by_case(measured: Sequence[Record]) -> dict[str, list[Record]]:
    """Rungs in order, by case: those of its last run, since a step is between two rungs of one run."""
    cases: dict[str, list[Record]] = {}
    for r in measured:
        if r.op == OP and "rung" in r.shape:
            cases.setdefault(r.case, []).append(r)
    return {case: sorted(_of_last_run(rungs), key=lambda r: r.shape["rung"]) for case, rungs in cases.items()}


def _of_last_run(rungs: Sequence[Record]) -> list[Record]:
    last = max(r.environment.date for r in rungs)
    return [r for r in rungs if r.environment.date == last]


def _has_published(measured: Sequence[Record]) -> bool:
    return any(r.shape.get("B") == WHOLE and r.shape["T"] == CONTEXT for r in measured if r.op == OP and r.seconds)


def steps(rungs: Rungs) -> dict[str, float]:
    """How many times faster each rung is than the one before it, by name; only where both were measured."""
    return {name: before / now for (_, before), (name, now) in pairwise(rungs) if before and now}


def _named(rungs: Sequence[Record]) -> Rungs:
    return [(_label(r), r.seconds) for r in rungs]


def _label(r: Record) -> str:
    """ "pipelined: 3 stages": what a rung changes, with its numbers."""
    numbers = ", ".join(words.format(r.shape[name]) for name, words in _SIZES.items() if name in r.shape)
    return f"{r.implementation}: {numbers}" if numbers else r.implementation


def _rows(rungs: Sequence[Record]) -> list[tuple[str, ...]]:
    before = [None, *(r.seconds for r in rungs)]
    return [
        (
            r.case,
            str(r.shape["rung"]),
            _label(r),
            us(r.seconds) or "refused",
            rate_text(r.gb_per_s),
            "" if r.roof_share is None else f"{100 * r.roof_share:.1f} %",
            times_text(before[i], r.seconds),
            times_text(rungs[0].seconds, r.seconds),
            "",
        )
        for i, r in enumerate(rungs)
    ]


def _published_rows() -> list[tuple[str, ...]]:
    return [row for kernel, batches in LADDERS.items() for batch in batches for row in _published_ladder(kernel, batch)]


def _published_ladder(kernel: str, batch: int) -> list[tuple[str, ...]]:
    rungs = ladder(kernel, batch)
    (_, first), before = rungs[0], [None, *(seconds for _, seconds in rungs)]
    number = len(LADDERS[PUBLISHED][batch]) - len(rungs)  # of the first rung: four groups begin with the sixth step
    rate, time = (table["A100"].get(kernel, {}).get(batch) for table in (RATES, TIMES))
    gigabytes = 1e-6 * rate * time if rate and time else None  # of a call, by what was printed for the last rung
    flash = 1e-6 * TIMES["A100"][BASELINE][batch]
    return [
        (
            _published_case(kernel, batch),
            str(number + i),
            name,
            f"{1e6 * seconds:.0f}",
            rate_text(gigabytes / seconds) if gigabytes else "",
            "",
            times_text(before[i], seconds),
            times_text(first, seconds),
            times_text(flash, seconds),
        )
        for i, (name, seconds) in enumerate(rungs)
    ]


def _published_case(kernel: str, batch: int) -> str:
    """ "published, A100, batch 512, 4 groups"."""
    return f"published, A100, batch {batch}{kernel.removeprefix(PUBLISHED)}"


def drawn(measured: Sequence[Record]) -> list[str]:
    """The time of every rung and its step, a chart for each case and one for what was published."""
    figures = [_bars(case, _named(rungs)) for case, rungs in _by_case(measured).items() if any(r.seconds for r in rungs)]
    if _has_published(measured):
        with charts.measured_on("NVIDIA A100, published"):
            figures.append(_bars(_published_case(PUBLISHED, WHOLE), ladder(PUBLISHED, WHOLE)))
    return figures


def _bars(case: str, rungs: Rungs) -> str:
    times, gains = {name: seconds for name, seconds in rungs if seconds}, steps(rungs)
    labels = {name: _us(seconds) + (f", {gains[name]:.2f}x" if name in gains else "") for name, seconds in times.items()}
    values = {name: 1e6 * seconds for name, seconds in times.items()}
    return charts.bars(values, x_label="microseconds; x the rung before", title=case, shown=labels)


def says(measured: Sequence[Record]) -> list[str]:
    """The first and the last rung and the largest step of each ladder, and of the published one."""
    ladders = _by_case([r for r in measured if r.formats == ROW_WISE])
    parts = [text for rungs in ladders.values() if (text := _told(f"batch {rungs[0].shape['B']}", _named(rungs)))]
    if not parts:
        return []
    ours = f"On {measured[0].environment.device}: {'; '.join(parts)}."
    if not _has_published(measured):
        return [ours, f"The rungs of the kernels need a GPU, and the published ladder batch {WHOLE} over {CONTEXT:,} tokens."]
    theirs = _told(f"batch {WHOLE}", ladder(PUBLISHED, WHOLE))
    return [ours, f"Published for ten other steps on an A100, not measured here: {theirs}.", HERE]


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}" if seconds < 1e-3 else f"{1e6 * seconds:,.0f}"


def _told(case: str, rungs: Rungs) -> str:
    """ "batch 512, 1,659 to 930.0 us, 1.78x, the largest step "V swizzled" with 1.14x"; "" without a step."""
    gains, times = steps(rungs), [seconds for _, seconds in rungs if seconds]
    if not gains:
        return ""
    largest = max(gains, key=lambda name: gains[name])
    ends = f"{_us(times[0])} to {_us(times[-1])} us, {times_text(times[0], times[-1])}x"
    return f'{case}, {ends}, the largest step "{largest}" with {gains[largest]:.2f}x'


STUDY = Study("int4-ladder", table, drawn, says, text_columns=3, effort=MANY_GRAPHS, jobs=jobs)
