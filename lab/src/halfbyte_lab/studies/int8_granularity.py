"""Study `int8-granularity`: what shares one scale of an INT8 cache, and what that costs in time, bytes and error.

FP16 against INT8 with a scale per tensor, token, head and group of 32; batch 128, 32 query heads on 32, 8 and 1 KV heads of 128,
and 128 to 131,072 tokens, as far as they fit into memory; with ALiBi and with outlier channels of keys in a few cases. The batch
repeats 4 different sequences. Two errors are told: of the result over the codes, by the accuracy promise, and of the result over
what the cache was filled with. Times are alone: launches kept apart. On a CPU few sequences of few tokens.

The published work (RTX 3090, 2023) has the same four granularities and finds that INT8 halves the cache and is a little slower
than FP16; it gives no table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

import halfbyte
from halfbyte.cache import KVCache
from halfbyte.formats import key_format
from halfbyte_lab import precompile
from halfbyte_lab.cases.decode_variants import DecodeVariant, time_variants
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.caches import DecodeCase, Inputs, Promise, fill, given, held_by
from halfbyte_lab.measure.checks import float64_attention
from halfbyte_lab.measure.decode import Attend, DecodeShape, sdpa_variants
from halfbyte_lab.measure.figures import flop
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session, reason
from halfbyte_lab.measure.tables import Table, rate_text, times_text, us
from halfbyte_lab.measure.timing import MANY_GRAPHS, paired_launches
from halfbyte_lab.studies import Study

OP, QUALITY = "granularity study", "granularity study, error"
OURS, FP16 = "halfbyte auto", "fp16"
#: What shares a scale, by format.
SCALES = {FP16: "", "int8_tensor": "tensor", "int8_token": "token", "int8": "token and head", "int8_g32": "group of 32"}
HEADS = {"MHA": (32, 32), "GQA": (32, 8), "MQA": (32, 1)}
BATCH, DIM, CONTEXTS = 128, 128, (128, 512, 2048, 8192, 32768, 131072)
#: Contexts with ALiBi, and the one with outlier channels of keys; all of them GQA.
ALIBI, OUTLIERS = (2048, 32768), 2048
QUICK_CONTEXTS, CPU_CONTEXT, QUICK_CPU_CONTEXT = (512, 8192), 512, 128

#: Different sequences, which the batch repeats, so that all its results can be held against float64.
DISTINCT = 4
#: Every so many channels of keys are so many times larger, and of queries smaller, which changes no exact result.
_APART, _LARGER = 32, 8
#: torch's kernels are given keys of fewer numbers than this at a time.
_MOST_NUMBERS = 2**31
#: Memory beside the caches: graphs, workspaces, results.
_ASIDE = 2**30


def jobs(session: Session) -> list[Job]:
    """One for each case. With `--quick` GQA alone, and on a GPU no ALiBi, for which every format would be compiled."""
    quick = session.options.quick
    names = ("GQA",) if quick else tuple(HEADS)
    if session.device.kind == "cuda":
        cases = [_case(name, context) for name in names for context in (QUICK_CONTEXTS if quick else CONTEXTS)]
        more = [] if quick else [*(_case("GQA", context, alibi=True) for context in ALIBI), _case("GQA", OUTLIERS, outliers=True)]
    else:
        context = QUICK_CPU_CONTEXT if quick else CPU_CONTEXT
        cases = [_smaller(_case(name, context)) for name in names]
        more = [_smaller(_case("GQA", context, alibi=True)), _smaller(_case("GQA", context, outliers=True))]
    return [*cases, *more]


def _case(heads: str, context: int, alibi: bool = False, outliers: bool = False) -> CaseJob:
    return CaseJob(heads, DecodeShape(BATCH, *HEADS[heads], DIM, context), alibi, outliers)


def _smaller(case: CaseJob) -> CaseJob:
    """The same for a CPU."""
    s = case.shape
    return replace(case, shape=DecodeShape(DISTINCT, s.q_heads // 4, max(1, s.kv_heads // 4), DIM // 2, s.context))


@dataclass(frozen=True)
class CaseJob:
    """One shape in every format."""

    heads: str
    shape: DecodeShape
    alibi: bool = False
    outliers: bool = False
    op: str = OP

    @property
    def name(self) -> str:
        s, more = self.shape, ", ALiBi" * self.alibi + ", outlier keys" * self.outliers
        return f"int8-granularity, {self.heads} {s.q_heads}/{s.kv_heads}, {s.context:,}{more}"

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """Every format, launches kept apart; kernels with ALiBi are others."""
        for formats in SCALES if not self.alibi else ():
            if session.wants(self.name, formats, OURS):
                yield from precompile.attention(session.device, self.shape, formats, (False,), "fp16")

    def measure(self, session: Session) -> Iterator[Record]:
        """Times and error of each format; one that does not fit says how much it needs."""
        selection = [f for f in SCALES if session.wants(self.name, f, OURS)]
        session.free()
        room = free_bytes(session)
        fits = [f for f in selection if self.needs(f, session) <= room]
        if fits:
            inputs = self._inputs(session)
            slopes = slopes_of(self.shape.q_heads, session.device.torch) if self.alibi else None
            exact = exactly(inputs, slopes)
        for f in selection:
            blank = replace(self._blank(session, f), implementation=OURS, refused=f"{self.name} {f}: ")
            if f not in fits:
                why = f"skipped: {self.needs(f, session):,} bytes are needed and {room:,} are free"
                yield replace(blank, refused=blank.refused + why)
                continue
            try:
                yield from self._format(session, inputs, slopes, exact, f)
            except Exception as error:
                yield replace(blank, refused=blank.refused + reason(error))
                session.free()

    def needs(self, formats: str, session: Session) -> int:
        """Bytes: the caches or, ahead of them, one sequence in float64; the different sequences; something aside."""
        one = (1, self.shape.kv_heads, self.shape.context, self.shape.dim)
        nbytes, plain = 2 * key_format(formats).nbytes(one), 2 * key_format(FP16).nbytes(one)
        caches = _copies(session, nbytes * self.shape.batch) * nbytes * self.shape.batch
        return max(caches, 12 * plain) + DISTINCT * (plain + nbytes) + _ASIDE

    def _blank(self, session: Session, formats: str) -> Record:
        s = self.shape
        nbytes = 2 * key_format(formats).nbytes((s.batch, s.kv_heads, s.context, s.dim))
        shape = {**s.sizes, "ALiBi": int(self.alibi), "outliers": int(self.outliers)}
        return Record(OP, shape, formats, "", nbytes, session.environment, case=self.name)

    def _inputs(self, session: Session) -> Inputs:
        """The different sequences, in fp16."""
        problem = DecodeCase(self.name, replace(self.shape, batch=DISTINCT))
        inputs = Inputs.random(problem, session.device.torch).half()
        if self.outliers:
            inputs.q[..., ::_APART] /= _LARGER
            for k, _ in inputs.spans:
                k[..., ::_APART] *= _LARGER
        return inputs

    def _format(
        self, session: Session, inputs: Inputs, slopes: torch.Tensor | None, exact: torch.Tensor, formats: str
    ) -> Iterator[Record]:
        few = fill(inputs, formats)
        promise = Promise(inputs.q, held_by(few), slopes)
        index = torch.arange(self.shape.batch, device=few.device) % DISTINCT
        blank, q = self._blank(session, formats), inputs.q[index]
        caches = [few.select(index) for _ in range(_copies(session, blank.nbytes))]

        def ours(cache: KVCache) -> torch.Tensor:
            out = halfbyte.decode_attention(q, cache, alibi_slopes=slopes)
            assert isinstance(out, torch.Tensor)  # the pair with lse comes only on request
            return out

        ways: dict[str, Callable[[KVCache], torch.Tensor]] = {OURS: ours}
        if formats == FP16:
            ways |= {name: partial(_over, q, way) for name, way in _peers(session, slopes, self.shape).items()}
        records = time_variants(
            session,
            blank,
            caches,
            lambda outs: promise.judge([part for out in outs for part in out.split(DISTINCT)]),
            {name: DecodeVariant(call) for name, call in ways.items()},
            roof=False,
        )
        yield from records
        if not records[0].refused:
            with torch.no_grad(), paired_launches(False):
                out = ours(caches[0])[:DISTINCT].double()
            error = float((out - exact).norm() / exact.norm())
            kind = "relative L2, of the result over what the cache was filled with"
            yield replace(blank, op=QUALITY, implementation=OURS, error=error, error_kind=kind)


def _copies(session: Session, nbytes: int) -> int:
    """How many caches rotate: beyond the GPU's last cache; on a CPU two."""
    return session.copies(nbytes) if session.device.kind == "cuda" else 2


def _peers(session: Session, slopes: torch.Tensor | None, shape: DecodeShape) -> dict[str, Attend]:
    """torch's attention: with heads as they are, because folded ones are not faster; with ALiBi folded, because only then every
    backend takes a bias."""
    ways = sdpa_variants(session.device.kind, True, None if slopes is None else bias_of(slopes, shape))
    return {name: way for name, way in ways.items() if ("folded" in name) == (slopes is not None)}


def bias_of(slopes: torch.Tensor, shape: DecodeShape) -> torch.Tensor:
    """What ALiBi adds to the scores of one new token in folded heads: fp16 [1, H, Hq / H, T]."""
    ahead = torch.arange(1 - shape.context, 1, device=slopes.device)
    return (slopes.view(1, shape.kv_heads, -1, 1) * ahead).half()


def _over(q: torch.Tensor, way: Attend, cache: KVCache) -> torch.Tensor:
    """Large caches in several calls: kernels that count elements in 32 bits could end the run."""
    k, v = cache.keys.codes, cache.values.codes
    step = max(1, (_MOST_NUMBERS - 1) // k[0].numel())
    parts = zip(q.split(step), k.split(step), v.split(step), strict=True)
    return torch.cat([way(*part) for part in parts]) if step < len(q) else way(q, k, v)


def slopes_of(heads: int, device: torch.device) -> torch.Tensor:
    """ALiBi's slopes for so many query heads: 2^(-8/n), 2^(-16/n), ... 2^-8."""
    return torch.exp2(torch.arange(1, heads + 1, device=device) * (-8.0 / heads))


def exactly(inputs: Inputs, slopes: torch.Tensor | None) -> torch.Tensor:
    """float64 attention over the inputs themselves."""
    pairs = list(given(inputs))
    queries = inputs.q.split([k.shape[0] for k, _ in pairs])
    return torch.cat([float64_attention(q, k, v, q.shape[-1] ** -0.5, slopes) for q, (k, v) in zip(queries, pairs, strict=True)])


def free_bytes(session: Session) -> int:
    """Memory that can be had now; on a CPU half of all."""
    if session.device.kind == "cuda":
        return int(torch.cuda.mem_get_info(session.device.torch)[0])
    return session.device.memory_bytes // 2


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = (
    *("case", "format", "a scale per", "implementation", "us", "x FP16", "x fastest 16 bits", "GB/s", "TFLOP/s", "MB"),
    *("error over codes", "error over inputs"),
)


def table(measured: Sequence[Record]) -> Table:
    """A row for each case, format and implementation. "x FP16": how many times faster than halfbyte itself over FP16; "x fastest
    16 bits": than whatever is fastest over FP16 in the case.
    """
    return HEADERS, [_row(r, measured) for r in measured if r.op == OP and r.shape]


def _row(r: Record, measured: Sequence[Record]) -> tuple[str, ...]:
    base, error = _ours(measured, r.case, FP16), error_of(measured, r.case, r.formats) if r.implementation == OURS else None
    return (
        r.case,
        r.formats,
        SCALES[r.formats],
        r.implementation,
        us(r.seconds) or ("skipped" if "skipped:" in r.refused else "refused"),
        times_text(base.seconds if base else None, r.seconds),
        times_text(_fastest_16_bit(measured, r.case), r.seconds),
        rate_text(r.gb_per_s),
        f"{flop(r) / r.seconds / 1e12:.3g}" if r.seconds else "",
        f"{r.nbytes / 1e6:,.1f}",
        "" if r.error is None else f"{r.error:.2g}",
        "" if error is None else f"{error:.2g}",
    )


def _ours(measured: Sequence[Record], case: str, formats: str) -> Record | None:
    """halfbyte's time on a case in a format."""
    of = (OP, case, formats, OURS)
    return next((r for r in measured if (r.op, r.case, r.formats, r.implementation) == of and r.seconds), None)


def _fastest_16_bit(measured: Sequence[Record], case: str) -> float | None:
    """Seconds of the fastest attention over FP16, ours or torch's."""
    return min((r.seconds for r in measured if (r.op, r.case, r.formats) == (OP, case, FP16) and r.seconds), default=None)


def error_of(measured: Sequence[Record], case: str, formats: str) -> float | None:
    """The error over what the cache was filled with; None unless its run gave a time too: what was wrong gets none."""
    record = _ours(measured, case, formats)
    of = (QUALITY, case, formats, record.environment.date if record else "")
    return next((r.error for r in measured if (r.op, r.case, r.formats, r.environment.date) == of), None)


def drawn(measured: Sequence[Record]) -> list[str]:
    """Time by context, and the speed-up over the fastest FP16, a panel for each sharing of heads; errors by granularity."""
    seconds: dict[str, dict[str, list[tuple[float, float]]]] = {}
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for r in measured:
        if r.op == OP and r.implementation == OURS and r.seconds and not (r.shape["ALiBi"] or r.shape["outliers"]):
            panel, k_tokens, line = r.case.split(", ")[1], r.shape["T"] / 1024, _told(r.formats)
            seconds.setdefault(panel, {}).setdefault(line, []).append((k_tokens, 1e6 * r.seconds))
            if fastest := _fastest_16_bit(measured, r.case):
                times.setdefault(panel, {}).setdefault(line, []).append((k_tokens, fastest / r.seconds))
    figures = []
    x_label = "context, K tokens"
    several = any(len(points) > 1 for lines in seconds.values() for points in lines.values())
    if several:
        text = "Time of one token by context"
        figures.append(charts.panels(seconds, x_label=x_label, y_label="us", title=text, log_y=True))
    if several and times:
        text = "Speed-up over the fastest attention over FP16, by context"
        figures.append(charts.panels(times, x_label=x_label, y_label="times the fastest", title=text, line=1.0))
    if errors := _errors(measured):
        labels = {name: f"{error:.2g}" for name, error in errors.items()}
        title = "Error by what shares a scale"
        figures.append(charts.bars(errors, x_label="relative error over what the cache was filled with", title=title, shown=labels))
    return figures


def _told(formats: str) -> str:
    """ "INT8 per token" of "int8_token"."""
    return f"INT8 per {SCALES[formats]}" if SCALES[formats] else "FP16"


def _errors(measured: Sequence[Record]) -> dict[str, float]:
    """Errors of the case with outlier keys, and of the same one without them, by what they are of."""
    errors: dict[str, float] = {}
    for r in measured:
        if r.op == QUALITY and r.shape["outliers"] and (error := error_of(measured, r.case, r.formats)) is not None:
            plain = error_of(measured, r.case.removesuffix(", outlier keys"), r.formats)
            errors |= {} if plain is None else {_told(r.formats): plain}
            errors[f"{_told(r.formats)}, outlier keys"] = error
    return errors


def says(measured: Sequence[Record]) -> list[str]:
    """Time and bytes at the longest context that has an FP16 time, and errors by granularity."""
    bases = [r for r in measured if r.op == OP and (r.formats, r.implementation) == (FP16, OURS) and r.seconds]
    base = max(bases, key=lambda r: (r.shape["T"], r.shape["H"], -r.shape["ALiBi"], -r.shape["outliers"]), default=None)
    if base is None:
        return ["FP16 was not measured, so that nothing can be held against it."]
    ours = {f: r for f in SCALES if f != FP16 and (r := _ours(measured, base.case, f))}
    first = f"At {_short(base.case)} FP16 takes {us(base.seconds)} us"
    if ours:
        parts = [f"{(r.seconds or 0.0) / (base.seconds or 1.0):.2f} ({SCALES[f]})" for f, r in ours.items()]
        of_bytes = [r.nbytes / base.nbytes for r in ours.values()]
        first += f" and INT8 {', '.join(parts)} of that, in {min(of_bytes):.2f} to {max(of_bytes):.2f} of the bytes"
    first += "; the published kernel (RTX 3090) is a little slower with INT8."
    sentences = [first, _losses_said(measured), _without_peers(measured), _errors_said(measured, base.case)]
    return [sentence for sentence in sentences if sentence]


def _losses_said(measured: Sequence[Record]) -> str:
    """Where INT8 with a scale per token and head is slower than the fastest FP16 kernel, worst first; "" where nowhere."""
    ours = [
        (r.case, best / r.seconds) for r in measured if _is_int8(r) and r.seconds and (best := _fastest_16_bit(measured, r.case))
    ]
    slower = sorted(((ratio, case) for case, ratio in ours if ratio < 1))
    if not slower:
        return ""
    losses = ", ".join(f"{ratio:.2f}x at {_short(case)}" for ratio, case in slower)
    return (
        f"Against the fastest FP16 kernel of each case, INT8 (token and head) is slower in {len(slower)} of {len(ours)}: {losses}."
    )


def _without_peers(measured: Sequence[Record]) -> str:
    """Cases whose fastest FP16 kernel can only be ours; "" where there are none."""
    peers = {r.case for r in measured if r.op == OP and r.implementation != OURS and r.seconds}
    alone = [_short(r.case) for r in measured if _is_int8(r) and r.seconds and r.case not in peers]
    return f"Without a time of torch's attention, so that the fastest FP16 kernel is ours: {'; '.join(alone)}." if alone else ""


def _is_int8(r: Record) -> bool:
    return (r.op, r.formats, r.implementation) == (OP, "int8", OURS)


def _short(case: str) -> str:
    """ "GQA 32/8, 2,048" of a case's name."""
    return case.partition(", ")[2]


def _errors_said(measured: Sequence[Record], case: str) -> str:
    """Errors at one case and, beside them, with outlier keys."""

    def of(name: str) -> str:
        by_scale = {f: error for f in SCALES if (error := error_of(measured, name, f)) is not None}
        return ", ".join(f"{error:.2g} ({SCALES[f] or 'FP16'})" for f, error in by_scale.items())

    outliers = next((r.case for r in measured if r.op == QUALITY and r.shape["outliers"]), "")
    beside = f"; at {_short(outliers)}: {errors}" if outliers and (errors := of(outliers)) else ""
    return f"The result differs from that over the unquantized cache, relatively, by {of(case)}{beside}." if of(case) else ""


STUDY = Study("int8-granularity", table, drawn, says, text_columns=4, effort=MANY_GRAPHS, jobs=jobs)
