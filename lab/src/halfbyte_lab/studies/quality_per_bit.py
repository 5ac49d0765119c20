"""Study `quality-per-bit`: what few bits cost, by format and method, with and without outliers. Nothing is timed.

On the shipped model and its outlier variants (`halfbyte_lab.evals.outliers`), over held-out text: KL divergence from the 16-bit run
with the same cache formats in all layers, keys rotated or not, with formats by layer, calibrated on other text, and with quantized
weights, clipped or not; error of attention over quantized keys in float64, as in the study `accuracy`. Greedy continuations to
the end of the model's positions: where they part from the 16-bit run's, and how likely that finds them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS
from halfbyte.reference.quantize import has_searched_clip
from halfbyte.settings import CLIP
from halfbyte.settings import KEYS as DEFAULT_KEYS
from halfbyte.settings import VALUES as DEFAULT_VALUES
from halfbyte.settings import WEIGHTS as DEFAULT_WEIGHTS
from halfbyte.text import ByteTokenizer, windows
from halfbyte_lab.evals.assignment import candidates
from halfbyte_lab.evals.calibrate import Divergence, Measurements, calibrate, fingerprint
from halfbyte_lab.evals.long_context import LongContext, Tasks, long_context
from halfbyte_lab.evals.outliers import BY_TOKEN, PROFILES, Outliers, recorded_heads
from halfbyte_lab.evals.quality import Setting, every_kv_setting
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table
from halfbyte_lab.measure.timing import fixed_threads
from halfbyte_lab.studies import Study
from halfbyte_lab.studies.accuracy import (
    CHUNK,
    KEYS,
    QUALITY,
    KeysJob,
    QualityJob,
    broken_promise,
    formats_of,
    front,
    quality_records,
    shipped,
)

BY_LAYER, OF_WEIGHTS, WRITTEN, PLAIN = "quality by layer", "quality of weights", "long continuations", "no outliers"
MODELS: dict[str, Outliers | None] = {PLAIN: None, **{p.name: p for p in (*PROFILES, BY_TOKEN)}}
#: Windows and tokens of each; in a quick run the smaller ones.
TEXT, QUICK_TEXT = (3, 256), (1, 128)
#: Sizes of the plans, in bits an element, and the formats that they choose from.
BITS, QUICK_BITS = (3.0, 3.5, 4.5, 5.5, 6.5), (4.5,)
FORMATS = ("int8", "int8_channel", "int4", "int4_g32", "int4_channel", "int2", "int2_g32")
DEFAULT, OF_DEFAULT_WEIGHTS = Setting(DEFAULT_KEYS, DEFAULT_VALUES), Setting(weights=DEFAULT_WEIGHTS, clip=CLIP)
#: Weights of four bits, and those whose clip is searched, too.
WEIGHTS = tuple(name for name, fmt in WEIGHT_FORMATS.items() if fmt.code.bits == 4)
CLIPPED = tuple(name for name in WEIGHTS if has_searched_clip(WEIGHT_FORMATS[name]))
#: Tokens of a text with its continuation, nearly all that the shipped model has positions for; and the caches that continue it.
CONTEXT, QUICK_CONTEXT = 2000, 160
CONTINUED = (
    DEFAULT,
    Setting("int8", "int8"),
    Setting("int4", "int4", rotate_keys=True),
    Setting("int4", "int2_g32", rotate_keys=True),
    Setting("int2_g32", "int2_g32", rotate_keys=True),
    Setting("int2_g32", "int2_g32", rotate_keys=True, sink_tokens=64, recent_tokens=256),
)
#: Dims of a head of the shipped model: groups of as many are the head.
HEAD_DIM = 64
#: Keys and values in different formats.
MIXED = (
    DEFAULT,
    *(Setting("int8_channel", values) for values in ("int4", "int4_g32")),
    *(Setting("int4_channel", values) for values in ("int8", "int4_g32", "int2", "int2_g32")),
    *(Setting("int8", values, rotate_keys=True) for values in ("int4", "int4_g32", "int2_g32")),
    *(Setting(keys, "int2_g32", rotate_keys=True) for keys in ("int4", "int4_g32")),
    *(Setting("int4", "int8", rotate_keys=turned) for turned in (False, True)),
)
QUICK = ("int8", "int4", "int4 rotated", "int4_channel / int8", "nvfp4")


def settings() -> tuple[Setting, ...]:
    """Every format for keys and values alike, with and without rotation of the keys, and the mixed ones."""
    alike = [Setting(s.keys, s.values) for s in every_kv_setting() if isinstance(s.keys, str) and _differs(s.keys)]
    rotated = [Setting(s.keys, s.values, rotate_keys=True) for s in alike if s.keys == s.values]
    return tuple(dict.fromkeys((*alike, *rotated, *MIXED)))


def _differs(keys: str) -> bool:
    scale = KV_FORMATS[keys].scale
    return scale is not None and scale.group != HEAD_DIM


def jobs(session: Session) -> list[Job]:
    """For each model: all layers alike, formats by layer, keys alone, weights."""
    quick = session.options.quick
    text, bits = (QUICK_TEXT, QUICK_BITS) if quick else (TEXT, BITS)
    alike = tuple(s for s in settings() if not quick or s.kv in QUICK)
    keys = tuple(dict.fromkeys((str(s.keys), s.rotate_keys is True) for s in alike))
    weights = [Setting(weights=w) for w in WEIGHTS] + [Setting(weights=w, clip=CLIP) for w in CLIPPED]
    weights = [s for s in weights if not quick or formats_of(s) in QUICK]
    all_jobs: list[Job] = []
    for name, outliers in MODELS.items():
        all_jobs += [
            QualityJob(name, alike, *text, outliers=outliers),
            PlansJob(name, bits, *text, outliers=outliers),
            KeysJob(name, keys, *text, outliers=outliers),
            QualityJob(name, tuple(weights), *text, OF_WEIGHTS, outliers),
            ContinuationsJob(name, CONTINUED[: 1 if quick else None], QUICK_CONTEXT if quick else CONTEXT, outliers=outliers),
        ]
    return all_jobs


@dataclass(frozen=True)
class PlansJob:
    """The whole model with formats by layer, for each size a plan that was calibrated on other windows than it is measured on."""

    name: str
    bits: tuple[float, ...]
    count: int
    length: int
    op: str = BY_LAYER
    outliers: Outliers | None = None

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each size."""
        if not session.wants(self.name, "by layer", "halfbyte"):
            return
        model, tokens = shipped(session.device.torch, self.outliers)
        cut = windows(tokens, self.length, 2 * self.count)  # the even ones are those of `QualityJob`
        with fixed_threads(session.threads), tempfile.TemporaryDirectory() as folder:
            store = Measurements(Path(folder) / "measured.jsonl", fingerprint(model, cut[1::2], CHUNK))
            plans = calibrate(Divergence(model, cut[1::2], CHUNK), candidates(model, FORMATS), store, self.bits)
            settings = [replace(Setting.of_plan(m.plan), plan=f"within {b:g} bits") for m, b in zip(plans, self.bits, strict=True)]
            records = list(quality_records(session, self.op, self.name, model, cut[::2], settings))
        yield from (r for r in records if r.formats != Setting().kv)


@dataclass(frozen=True)
class ContinuationsJob:
    """Greedy texts of the whole model to `context` tokens, each beside that of its 16-bit run."""

    name: str
    settings: tuple[Setting, ...]
    context: int
    op: str = WRITTEN
    outliers: Outliers | None = None

    def measure(self, session: Session) -> Iterator[Record]:
        """The record of the 16-bit run, then one for each setting."""
        selection = [s for s in self.settings if session.wants(self.name, s.kv, "halfbyte")]
        if not selection:
            return
        model, tokens = shipped(session.device.torch, self.outliers)
        tasks, base = Tasks(model, ByteTokenizer(), tokens, self.context), None
        layers = dict(enumerate(recorded_heads(model, windows(tokens, CHUNK, 1))))
        with fixed_threads(session.threads):
            for setting in (Setting(), *selection):
                blank = Record(self.op, {"T": self.context}, setting.kv, "halfbyte", 0, session.environment, case=self.name)
                if why := broken_promise(model, layers, setting):
                    yield replace(blank, refused=f"{self.name} {setting.kv}: {why}")
                    continue
                result, text = long_context(model, setting, tasks, base, model)
                base = text if base is None else base
                yield _continued(blank, result)


def _continued(blank: Record, result: LongContext) -> Record:
    """The record of a setting's continuations, `error` being the share of their tokens from the first on that differs."""
    shape, share = {**blank.shape, "written": result.written}, 1 - result.median_parted / result.written
    kind = "share of tokens from the first on that differs, median"
    return replace(blank, shape=shape, error=share, error_kind=kind, perplexity=math.exp(result.nll))


# ------------------------------------------------------------------------------------------------------------------- the text


def _by_formats(measured: Sequence[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """(what was measured, formats) to the records by model. A plan goes by the size that it must keep to."""
    by_formats: dict[tuple[str, str], dict[str, Record]] = {}
    for r in measured:
        if r.bits is not None and r.error is not None and not r.refused and r.formats != "bf16":
            by_formats.setdefault((r.op, r.formats), {})[r.case] = r
    return by_formats


def table(measured: Sequence[Record]) -> Table:
    """One row for each setting; by model its divergence, error of attention, or how far a greedy text is that of the 16-bit run."""
    records = _by_formats(measured)
    what = {QUALITY: "KL, all layers alike", BY_LAYER: "KL, by layer", KEYS: "attention error, keys", OF_WEIGHTS: "KL, weights"}
    order = sorted(records, key=lambda key: (list(what).index(key[0]), next(iter(records[key].values())).bits or 0, key[1]))
    rows = []
    for op, name in order:
        mine = records[op, name]
        bits = next(iter(mine.values())).bits or 0.0
        rows.append((what[op], name, f"{bits:.2f}", *(f"{mine[m].error:.1e}" if m in mine else "" for m in MODELS)))
    return ("measure", "formats", "bits", *MODELS), rows + _continued_rows([r for r in measured if r.op == WRITTEN])


def _continued_rows(measured: Sequence[Record]) -> list[tuple[str, ...]]:
    """For each cache: equal tokens of a continuation, the median, and the text's perplexity by the 16-bit model."""
    rows = []
    for name in dict.fromkeys(r.formats for r in measured if r.error is not None):
        mine = {r.case: r for r in measured if r.formats == name and r.error is not None}
        length = next(iter(mine.values())).shape["written"]
        cells = (f"{(1 - (r.error or 0)) * length:,.0f}, {r.perplexity:.3f}" if (r := mine.get(m)) else "" for m in MODELS)
        rows.append((f"equal tokens of {length:,}, perplexity", name, "", *cells))
    return rows


def drawn(measured: Sequence[Record]) -> list[str]:
    """KL divergence against bits: without outliers, and the largest over all models that were measured together."""
    figures, both = [], [name for name in MODELS if any((r.op, r.case) == (QUALITY, name) for r in measured)]
    for title, cases in (
        ("Without outliers", [PLAIN]),
        ("Largest divergence of the models with and without outliers", both if PLAIN in both else []),
    ):
        points = _worst([r for r in measured if r.case in cases], len(cases))
        if points:
            on_front = {id(r) for r in front([r for r in points if r.op == QUALITY])}
            dots = [charts.Point(r.formats * (id(r) in on_front), r.bits or 0.0, r.error or 0.0, _method(r)) for r in points]
            label = "bits an element (named: a fifth less divergence than any named one with fewer bits)"
            figures.append(charts.divergence(dots, x_label=label, title=title))
    return figures


def _worst(measured: Sequence[Record], models: int) -> list[Record]:
    """The largest divergence of each cache that was measured on all models."""
    by_formats = [mine for (op, _), mine in _by_formats(measured).items() if op in (QUALITY, BY_LAYER) and len(mine) == models]
    return [max(mine.values(), key=lambda r: r.error or 0.0) for mine in by_formats]


def _method(r: Record) -> str:
    if r.op == BY_LAYER:
        return "formats by layer"
    return "rotated keys" if "rotated" in r.formats else "per-channel keys" if "channel" in r.formats else "all layers alike"


def says(measured: Sequence[Record]) -> list[str]:
    """The default and the plans, each compared with the best uniform choice of no more bits."""
    parts, gains = [], dict[str, float]()
    for what, op, default in (("cache", QUALITY, DEFAULT.kv), ("weights", OF_WEIGHTS, formats_of(OF_DEFAULT_WEIGHTS))):
        if comparison := _compared([r for r in measured if r.op == op], default):
            parts.append(f"KL of the default {what}, {default}, and of the best other choice of no more bits: {comparison}.")
    for plan in (r for r in measured if r.op == BY_LAYER and r.error):
        others = [r.error or 0.0 for r in measured if r.case == plan.case and r.op == QUALITY and r.error and _fits(r, plan)]
        if others:
            gains[f"{plan.case}, {plan.formats}"] = min(others) / (plan.error or 1.0)
    if gains:
        least, better = min(gains, key=lambda name: gains[name]), sum(gain > 1 for gain in gains.values())
        parts.append(
            "On other text than that of their calibration, formats by layer diverge less than the best uniform choice of no more "
            f"bits in {better} of {len(gains)} cases, by a factor of {gains[least]:.2f} ({least}) to {max(gains.values()):.2f}."
        )
    if ratios := _clipped([r for r in measured if r.op == OF_WEIGHTS and r.error]):
        low, high = min(ratios, key=lambda name: ratios[name]), max(ratios, key=lambda name: ratios[name])
        parts.append(
            f"4-bit weights have {ratios[low]:.2f} ({low}) to {ratios[high]:.2f} ({high}) times the KL with their clip searched."
        )
    return parts


def _clipped(measured: Sequence[Record]) -> dict[str, float]:
    """By model and format, KL with clip="search" over KL without."""
    errors = {(r.case, r.formats): r.error or 0.0 for r in measured}
    with_clipping = {key: error for key, error in errors.items() if key[1].endswith(" clipped")}
    plain = {(case, name): errors.get((case, name.removesuffix(" clipped"))) for case, name in with_clipping}
    return {f"{case}, {name}": with_clipping[case, name] / kl for (case, name), kl in plain.items() if kl}


def _compared(measured: Sequence[Record], default: str) -> str:
    """By model, the divergence of the default and of the best of the others that take no more bits."""
    text = []
    for name in MODELS:
        mine = [r for r in measured if r.case == name and r.error and r.bits]
        for ours in (r for r in mine if r.formats == default):
            others = [r for r in mine if r is not ours and _fits(r, ours)]
            best = min(others, key=lambda r: r.error or 0.0, default=None)
            text.append(f"{name} {ours.error:.2g}" + (f" and {best.error:.2g} ({best.formats})" if best else ""))
    return "; ".join(text)


def _fits(r: Record, other: Record) -> bool:
    return (r.bits or 0.0) <= (other.bits or 0.0) + 1e-9


STUDY = Study("quality-per-bit", table, drawn, says, text_columns=2, jobs=jobs)
