"""Study `evidence`: what formats cost a real model. Nothing is timed.

SmolLM2-135M-Instruct (`halfbyte_lab.evals.real_model`) reads news, code and chats in chunks, so that older keys and values come
from the cache; the base is transformers' own attention over its own cache, in the same arithmetic. The row `bf16` is the floor:
what a packed cache of 16 bits costs beside it, by another order of rounding. In bf16 that is what 16-bit arithmetic costs by
itself; fp32 shows the formats alone. KL divergence and its noise are those of the second half of each window. A format is safe
where its KL in bf16, noise included, is at most twice the floor on every text.

Weights are also calibrated, on other prose and code than they are judged on, as they are and off their grid (`dithered`); so are
formats by layer.

`--output FILE` makes a run resumable: what the file holds is not measured again. With `--quick` the shipped model stands in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from halfbyte.settings import CLIP
from halfbyte.text import Tokenizer, heldout_text, windows
from halfbyte_lab.evals import choices, real_model
from halfbyte_lab.evals.long_context import Tasks, found
from halfbyte_lab.evals.quality import Setting
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table
from halfbyte_lab.measure.timing import fixed_threads
from halfbyte_lab.studies import Study
from halfbyte_lab.studies.accuracy import QUALITY, formats_of, quality_records
from halfbyte_lab.studies.calibrated import (
    BASE,
    BITS,
    CALIBRATED_WEIGHTS,
    PLANS,
    CalibratedJob,
    PlansJob,
    calibrated_table,
    gains,
    model_of,
)

CACHE, OF_WEIGHTS, RETRIEVAL = "real model, cache", "real model, weights", "real model, retrieval"
#: Windows and tokens of each on a GPU, on a CPU, and of a quick run.
TEXT, CPU_TEXT, QUICK_TEXT = (16, 4096), (4, 512), (1, 64)
#: Tokens of the contexts that hide a key.
CONTEXT, CPU_CONTEXT, QUICK_CONTEXT = 7168, 1024, 256
FLOOR = Setting()


def _rotated(keys: str, values: str, sinks: int = 0, recent: int = 0) -> Setting:
    """A cache that rotates its keys, with these first and last tokens in 16 bits."""
    return Setting(keys, values, rotate_keys=True, sink_tokens=sinks, recent_tokens=recent)


#: Caches: the floor first, then those that are recommended or asked for, then the rest of the ladder.
LADDER = (
    FLOOR,
    Setting("int8_channel", "int8"),
    Setting("int8", "int8"),
    _rotated("int8", "int4_g32", 4, 16),
    Setting("int4_channel", "int8"),
    Setting("int4_channel", "int4"),
    _rotated("int4", "int4"),
    _rotated("int4", "int4", 4, 64),
    _rotated("int8", "int4_g32"),
    _rotated("int8", "int8"),
    Setting("fp8", "fp8"),
    _rotated("int2_g32", "int2_g32", 4, 64),
    _rotated("int4_g32", "int4_g32"),
    _rotated("int2_g32", "int2_g32"),
    Setting("int4", "int4"),
    _rotated("int8", "int4_g32", 0, 16),
    _rotated("int8", "int4_g32", 4, 64),
    Setting("int8_channel", "int4_g32"),
    Setting("int4_channel", "int4_g32"),
    _rotated("int4", "int4", 4, 0),
    _rotated("int4_g32", "int4_g32", 4, 64),
    _rotated("int2_g32", "int4_g32", 4, 0),
    _rotated("int2", "int2"),
)
#: Weights: the defaults first. Groups of 128 do not divide the model's 576 columns.
WEIGHTS = (
    Setting(weights="int8_col"),
    Setting(weights="nvfp4", clip=CLIP),
    Setting(weights="int4_g32", clip=CLIP),
    Setting(weights="int4_g64"),
    Setting(weights="nf4"),
    Setting(weights="nvfp4"),
    Setting(weights="mxfp4"),
    *(Setting(weights=name) for name in ("int4_g32", "int4_sym_g32", "int4_sym_g64", "fp4_bnb", "int4_col", "int4_sym_col")),
    *(Setting(weights=name, clip=CLIP) for name in ("mxfp4", "int4_sym_g32")),
)
#: Weights that are read on every text.
MAIN_WEIGHTS = WEIGHTS[:6]
RETRIEVED = LADDER[:12]
#: In fp32, which no kernel of a GPU reads.
EXACT = LADDER[:9]
#: Settings that one job measures; each job reads the base again.
GROUP = 5


def jobs(session: Session) -> list[Job]:
    """Caches text by text in bf16, weights, retrieval, then caches on prose in fp32. A quick run takes the first of each."""
    size, quick = _size(session), session.options.quick
    context = QUICK_CONTEXT if quick else CONTEXT if session.device.kind == "cuda" else CPU_CONTEXT
    weights = {text: WEIGHTS if text == "prose" else MAIN_WEIGHTS for text in real_model.TEXTS}
    parts = [
        *(TextJob(text, "bf16", LADDER, *size) for text in real_model.TEXTS),
        *(TextJob(text, "bf16", settings, *size, op=OF_WEIGHTS) for text, settings in weights.items()),
        TextJob("prose", "fp32", EXACT, *size),
    ]
    groups = [part for job in parts for part in job.parts(session)[: 1 if quick else None]]
    calibrated = [CalibratedJob(name, moved) for moved in (False, True) for name in CALIBRATED_WEIGHTS][: 1 if quick else None]
    retrieved = [RetrievalJob(setting, context) for setting in RETRIEVED[: 2 if quick else None]]
    return [*groups[:-1], *calibrated, PlansJob(BITS[: 1 if quick else None]), *retrieved, *groups[-1:]]


def _size(session: Session) -> tuple[int, int]:
    return QUICK_TEXT if session.options.quick else TEXT if session.device.kind == "cuda" else CPU_TEXT


def _tokens(session: Session, text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(heldout_text()) if session.options.quick else real_model.TEXTS[text](tokenizer)


@dataclass(frozen=True)
class TextJob:
    """The whole model on one text under several settings, in one arithmetic."""

    text: str
    arithmetic: str
    settings: tuple[Setting, ...]
    count: int
    length: int
    op: str = CACHE

    @property
    def name(self) -> str:
        """The case of its records."""
        return f"{self.text}, {self.arithmetic}"

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each setting that the output does not hold yet."""
        done = {r.formats for r in session.earlier() if (r.op, r.case, r.shape.get("T")) == (self.op, self.name, self.length)}
        if not (selection := [s for s in self._selection(session) if formats_of(s) not in done]):
            return
        model, tokenizer = model_of(session, self.arithmetic)
        cut = windows(_tokens(session, self.text, tokenizer), self.length, self.count, tokenizer.bos)
        with fixed_threads(session.threads):
            try:
                records = list(quality_records(session, self.op, self.name, model, cut, selection, BASE, late=True))
            except Exception:
                if len(selection) == 1:
                    raise
                records = [r for s in selection for r in self._alone(session, s)]
        yield from (r for r in records if r.formats != BASE.kv)

    def _alone(self, session: Session, setting: Setting) -> list[Record]:
        """The record of one setting of a group that failed as a whole."""
        job = replace(self, settings=(setting,))
        try:
            return list(job.measure(session))
        except Exception as error:
            return [session.failed(job, error)]

    def _selection(self, session: Session) -> list[Setting]:
        return [s for s in self.settings if session.wants(f"{self.op}: {self.name}", formats_of(s), "halfbyte")]

    def parts(self, session: Session) -> list[TextJob]:
        """Jobs of `GROUP` of the settings that the filter lets through, so that an interrupt loses no more."""
        selection = tuple(self._selection(session))
        return [replace(self, settings=selection[i : i + GROUP]) for i in range(0, len(selection), GROUP)]


@dataclass(frozen=True)
class RetrievalJob:
    """Share of the tokens of hidden keys that a cache retrieves from long prose, in bf16."""

    setting: Setting
    context: int
    op: str = RETRIEVAL

    @property
    def name(self) -> str:
        """The case of its record."""
        return f"{self.context:,} tokens"

    def measure(self, session: Session) -> Iterator[Record]:
        """The record of the setting, unless the output holds it."""
        shape, formats = {"T": self.context}, formats_of(self.setting)
        done = any((r.op, r.formats, r.shape) == (self.op, formats, shape) for r in session.earlier())
        if done or not session.wants(f"{self.op}: {self.name}", formats, "halfbyte"):
            return
        model, tokenizer = model_of(session, "bf16")
        tasks = Tasks(model, tokenizer, _tokens(session, "prose", tokenizer), self.context)
        with fixed_threads(session.threads):
            share = found(model, self.setting, tasks, lambda: None)
        blank = Record(self.op, shape, formats, "halfbyte", 0, session.environment, case=self.name)
        yield replace(blank, error=1 - share, error_kind="share of key tokens not retrieved")


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("measure", "formats", "bits", "KL, nats", "noise", "by quarter", "perplexity, %", "top-1, %", "safe")
BY_NAME = {formats_of(s): s for s in (*LADDER, *WEIGHTS)}
#: The case of the shipped model without outliers in the study `quality-per-bit`, and its operation for weights.
TOY, TOY_WEIGHTS = "no outliers", "quality of weights"
#: Changes of perplexity of Llama 3 8B by weights of llama.cpp (ggml-org/llama.cpp#6936), as the divergence that they amount to.
PUBLISHED = ((math.log(1.0004), "llama.cpp Q8_0 weights, published"), (math.log(1.028), "llama.cpp Q4_K_M weights, published"))
#: What windows are counted for in the bits of a cache.
CONTEXTS = (2048, 32768)


def floors(measured: Sequence[Record]) -> dict[str, float]:
    """By case, the divergence of a packed cache of 16 bits."""
    return {r.case: r.error for r in measured if r.op == CACHE and r.formats == formats_of(FLOOR) and r.error is not None}


def is_safe(r: Record, floor: float) -> bool:
    """Whether a format diverges at most twice as much as 16 bits do, noise included."""
    return choices.is_safe(r.error or 0.0, r.noise or 0.0, floor)


def verdicts(measured: Sequence[Record]) -> dict[str, bool]:
    """By formats, whether they are safe in bf16 on every text that was read."""
    limits, judged = floors(measured), dict[str, list[bool]]()
    for r in measured:
        if r.op in (CACHE, OF_WEIGHTS) and r.error is not None and r.case.endswith("bf16") and r.case in limits:
            judged.setdefault(r.formats, []).append(is_safe(r, limits[r.case]))
    return {formats: all(texts) for formats, texts in judged.items()}


def bits_of(r: Record) -> tuple[float, ...]:
    """Bits an element, the tokens that stay in 16 bits counted at each of `CONTEXTS`; one number where there are none."""
    bits, exact = r.bits or 16.0, sum(BY_NAME[r.formats].exact) if r.formats in BY_NAME and r.op != PLANS else 0
    return tuple(bits + (16 - bits) * exact / context for context in CONTEXTS) if exact else (bits,)


def table(measured: Sequence[Record]) -> Table:
    """One row for each text and format, from the most bits on."""
    order = {name: i for i, name in enumerate(BY_NAME)}
    rows = [r for r in measured if r.error is not None and r.op in (CACHE, OF_WEIGHTS)]
    rows.sort(key=lambda r: (r.op != CACHE, r.case.endswith("fp32"), r.case, -bits_of(r)[0], order.get(r.formats, 0)))
    limits = floors(measured)
    found_rows = [r for r in measured if r.op == RETRIEVAL and r.error is not None]
    by_layer = sorted((r for r in measured if r.op == PLANS and r.error is not None), key=lambda r: (r.case, r.error or 0.0))
    return HEADERS, [*(_row(r, limits) for r in (*rows, *by_layer)), *(_retrieved(r) for r in found_rows)]


def _row(r: Record, limits: dict[str, float]) -> tuple[str, ...]:
    judged = r.case in limits and r.case.endswith("bf16")
    return (
        f"{r.case}{', weights' * (r.op == OF_WEIGHTS)}",
        r.formats,
        ", ".join(f"{bits:.2f}" for bits in bits_of(r)),
        f"{r.error:.2e}",
        f"{r.noise:.0e}",
        " ".join(f"{kl:.1e}" for kl in r.by_position),
        f"{r.change:+.2f}",
        f"{100 * (r.top1 or 0):.1f}",
        ("yes" if is_safe(r, limits[r.case]) else "no") if judged else "",
    )


def _retrieved(r: Record) -> tuple[str, ...]:
    share = f"{100 * (1 - (r.error or 0)):.0f} % of key tokens retrieved"
    return (f"retrieval, {r.case}", r.formats, "", share, *[""] * (len(HEADERS) - 4))


def drawn(measured: Sequence[Record]) -> list[str]:
    """KL divergence against bits of caches and of weights on prose in bf16, beside the toy: the limit of what is safe, and what
    published changes of perplexity amount to. Names are of formats that every text judges: more would cover each other.
    """
    limit = choices.limit(floors(measured).get("prose, bf16", 0.0))
    figures = []
    for what, op, toy_op, exact in (("caches", CACHE, QUALITY, {"bf16"}), ("weights", OF_WEIGHTS, TOY_WEIGHTS, set[str]())):
        rows = [r for r in measured if r.op == op and r.case == "prose, bf16" and r.error and r.formats not in exact]
        names = {r.formats for r in rows}
        toy = [r for r in measured if (r.op, r.case) == (toy_op, TOY) and r.formats in names and r.error and r.bits]
        labels = {r.formats for r in measured if r.op == op and r.case == "code, bf16"} or names
        points = [
            charts.Point(r.formats if r.formats in labels else "", bits_of(r)[0], r.error or 0.0, real_model.NAME) for r in rows
        ]
        points += [charts.Point("", bits_of(r)[0], r.error or 0.0, "the shipped toy, fp32") for r in toy]
        rules = [(limit, f"safe up to {limit:.1e}")] * (limit > 0) + list(PUBLISHED)
        x_label = f"bits an element (16-bit tokens counted at {CONTEXTS[0]:,})"
        title = f"Divergence against bits: {what}, on prose in bf16"
        if rows:
            y_label = "KL divergence, nats"
            figures.append(charts.scatter(points, x_label=x_label, y_label=y_label, title=title, log_y=True, rules=rules))
    return figures


def says(measured: Sequence[Record]) -> list[str]:
    """Which caches are safe, and the smallest of them."""
    limits = {case: floor for case, floor in floors(measured).items() if case.endswith("bf16")}
    gained = gains(measured)
    if not limits:
        return gained
    names = [r for r in measured if r.op == CACHE and r.case == "prose, bf16" and r.formats != formats_of(FLOOR)]
    safe = [r for r in names if verdicts(measured)[r.formats]]
    text = ", ".join(f"{floor:.1e} ({case.partition(',')[0]})" for case, floor in limits.items())
    sentences = [f"A packed cache of 16 bits diverges by {text} nats from transformers' own in bf16; safe is at most twice that."]
    if safe:
        least = min(safe, key=lambda r: bits_of(r)[0])
        parts = ", ".join(r.formats for r in sorted(safe, key=lambda r: -bits_of(r)[0]))
        sentences.append(f"Safe on every text: {parts}. The smallest is {least.formats}, {bits_of(least)[0]:.2f} bits.")
    return [*sentences, *gained]


STUDY = Study("evidence", table, drawn, says, text_columns=2, also=calibrated_table, beside="quality-per-bit", jobs=jobs)
