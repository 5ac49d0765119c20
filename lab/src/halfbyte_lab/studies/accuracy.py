"""Study `accuracy`: what the bits cost, on the model that ships with the library. Nothing is timed.

Of the whole model, on held-out text that is fed in chunks so that older keys and values come from the cache: perplexity, KL
divergence from the 16-bit run, error of the hidden states behind each layer. Of the keys alone, layer by layer: attention of the
newest token over the keys that a cache gives back, in float64, against attention over the 16-bit keys, so that nothing but the
format is seen. The kernels must keep their accuracy promise on the model's own heads and weights, or there is no figure. Keys
come with and without Hadamard rotation, and as they are or with a large constant in two channels of each head, as Qwen2's key bias
makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from halfbyte.cache import KVCache
from halfbyte.formats import KV_FORMATS, weight_format
from halfbyte.memory import quantized_bytes
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.ops.linear import linear
from halfbyte.reference.quantize import quantize
from halfbyte.text import heldout_text, windows
from halfbyte_lab.evals.model import load
from halfbyte_lab.evals.outliers import BIAS, Heads, Outliers, recorded_heads, with_outliers
from halfbyte_lab.evals.quality import Quality, Setting, evaluate, every_kv_setting, every_weight_setting
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.checks import BenchmarkRefused, eager_attention, float64_attention, timed_attention_accuracy
from halfbyte_lab.measure.linear import promise
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session, reason
from halfbyte_lab.measure.tables import Table
from halfbyte_lab.measure.timing import fixed_threads
from halfbyte_lab.studies import Study

T = TypeVar("T")
QUALITY, KEYS = "quality", "attention over quantized keys"
CACHES, WEIGHTS, PLAIN, BIASED = "KV cache", "weights", "keys", f"keys, bias {BIAS:.0f}"
#: Windows and tokens of each: of the whole model, of the keys alone; in a quick run the smaller ones.
TEXT, QUICK_TEXT, KEYS_TEXT, QUICK_KEYS_TEXT, CHUNK = (8, 256), (2, 128), (8, 512), (4, 256), 16
#: Tokens that kernels are judged on where windows are long; the run that others are compared with.
JUDGED, PLAIN_CACHE = 256, Setting()
#: Share of a device's memory that logits of the base may take.
LOGITS_SHARE = 1 / 20
#: What a quick run leaves in.
QUICK = (
    *("int8", "fp8", "int4", "int4_g32", "int4_channel / int4", "int8 / int4_g32", "int4 rotated"),
    *("int8_col", "int4_g128", "nf4", "mxfp4", "int4_channel", "int4_g32 rotated"),
)


@functools.lru_cache(maxsize=1)
def _shipped(device: torch.device) -> tuple[Any, list[int]]:
    """The shipped model and the held-out text as its tokens."""
    model, tokenizer = load("demo", device)
    return model, tokenizer.encode(heldout_text())


def shipped(device: torch.device, outliers: Outliers | None = None) -> tuple[Any, list[int]]:
    """The shipped model, or its variant with these outliers, and the held-out text as its tokens."""
    model, tokens = _shipped(device)
    return (model if outliers is None else with_outliers(model, outliers)), tokens


def jobs(session: Session) -> list[Job]:
    """The whole model with every cache and with all weights, then the keys alone, as they are and with a bias."""
    quick = session.options.quick
    text, keys_text = (QUICK_TEXT, QUICK_KEYS_TEXT) if quick else (TEXT, KEYS_TEXT)
    caches, weights = [*every_kv_setting(), Setting("int8", "int8", rotate_keys=True)], every_weight_setting()
    keys = [(name, rotated) for name, fmt in KV_FORMATS.items() if fmt.is_quantized for rotated in (False, True)]
    if quick:
        caches, weights = ([s for s in group if formats_of(s) in QUICK] for group in (caches, weights))
        keys = [pair for pair in keys if _name(*pair) in QUICK]
    quality = [QualityJob(CACHES, tuple(caches), *text), QualityJob(WEIGHTS, tuple(weights), *text)]
    return [*quality, KeysJob(PLAIN, tuple(keys), *keys_text), KeysJob(BIASED, tuple(keys), *keys_text)]


def formats_of(setting: Setting) -> str:
    """The formats of a setting as a record names them: those of its weights, or of its cache."""
    return setting.kv if setting.weights is None else setting.weights + " clipped" * (setting.clip is not None)


def _name(keys: str, rotated: bool) -> str:
    return keys + " rotated" * rotated


@dataclass(frozen=True)
class QualityJob:
    """The whole model under several settings, beside its 16-bit run."""

    name: str
    settings: tuple[Setting, ...]
    count: int
    length: int
    op: str = QUALITY
    outliers: Outliers | None = None

    def measure(self, session: Session) -> Iterator[Record]:
        """The record of the 16-bit run, then one for each setting."""
        selection = [s for s in self.settings if session.wants(self.name, formats_of(s), "halfbyte")]
        if not selection:
            return
        model, tokens = shipped(session.device.torch, self.outliers)
        cut = windows(tokens, self.length, self.count)
        with fixed_threads(session.threads):
            yield from quality_records(session, self.op, self.name, model, cut, selection)


def quality_records(
    session: Session,
    op: str,
    case: str,
    model: Any,
    cut: torch.Tensor,
    settings: Sequence[Setting],
    base: Setting = PLAIN_CACHE,
    late: bool = False,
) -> Iterator[Record]:
    """The record of the 16-bit run `base`, then one for each setting; `cut` [windows, T]. One whose kernels break a promise is
    refused. late: windows are long; KL is that of their second half, and kernels are judged in a few layers, on
    the beginning of the first window.
    """
    heads, (count, length) = recorded_heads(model, cut[:1, :JUDGED] if late else cut), cut.shape
    layers = dict([*enumerate(heads)][:: max(1, len(heads) // 4) if late else 1])
    plain, *reasons = [broken_promise(model, layers, s) for s in (Setting(), *settings)]
    why = dict(zip(settings, [plain or mine for mine in reasons], strict=True))
    usable = [s for s in settings if not why[s]]
    window = length * model.config.vocab_size * model.dtype.itemsize
    batch = max(1, min(count, int(LOGITS_SHARE * session.device.memory_bytes) // window))
    results = evaluate(model, [base, *usable], cut, chunk=CHUNK, batch=batch) if usable else []
    for result in results:
        record = quality_record(session, op, case, (count, length), model, result, results[0])
        yield replace(record, error=result.late_kl, noise=result.late_noise) if late else record
    for s in (s for s in settings if why[s]):
        blank = Record(op, {"windows": count, "T": length}, formats_of(s), "halfbyte", 0, session.environment, case=case)
        yield replace(blank, refused=f"{case} {formats_of(s)}: {why[s]}")


def of_layer(value: T | tuple[T, ...], layer: int) -> T:
    """What an option of all layers, or of each, is in one."""
    return value[layer] if isinstance(value, tuple) else value


def broken_promise(model: Any, layers: Mapping[int, Heads], s: Setting) -> str:
    """Which promise the kernels of a setting break on the heads of some layers of this model, by number, and on its weights, in
    words; "" where they keep all."""
    try:
        for layer, heads in layers.items():
            attended(heads, of_layer(s.keys, layer), of_layer(s.values, layer), of_layer(s.rotate_keys, layer))
        if s.weights is not None:
            _judge_products(model, s.weights)
    except BenchmarkRefused as error:
        return str(error)
    return ""


@torch.no_grad()
def _judge_products(model: Any, weights: str) -> None:
    """`linear` on the weights of one layer. Raises `BenchmarkRefused`."""
    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, torch.nn.Linear):
            x = torch.randn(CHUNK, module.in_features, generator=torch.Generator().manual_seed(0)).to(module.weight)
            weight = quantize(module.weight, weights)
            promise(x, weight)(linear(x, weight)).require(f"linear over {name} in {weights}")


def quality_record(
    session: Session, op: str, case: str, text: tuple[int, int], model: Any, result: Quality, base: Quality
) -> Record:
    """The quality of one setting as a record; `text` is the number of windows and their length."""
    weights = result.setting.weights
    if weights is None:
        bits, nbytes = 16 * result.kv_bytes_per_token / base.kv_bytes_per_token, round(result.kv_bytes_per_token)
    else:
        saving, parameters = quantized_bytes(model, weight_format(weights))
        bits, nbytes = 16 - 8 * saving / parameters, result.weight_bytes
    shape = dict(zip(("windows", "T"), text, strict=True))
    return Record(
        *(op, shape, formats_of(result.setting), "halfbyte", nbytes, session.environment),
        case=case,
        error=result.kl_mean,
        error_kind="mean KL divergence, nats",
        perplexity=result.perplexity,
        change=result.change,
        bits=bits,
        by_layer=tuple(result.layer_error),
        noise=result.kl_noise,
        top1=result.top1,
        by_position=tuple(result.kl_by_quarter),
    )


@dataclass(frozen=True)
class KeysJob:
    """Keys of the shipped model, quantized in several formats, rotated or not; values stay in bf16."""

    name: str
    keys: tuple[tuple[str, bool], ...]
    count: int
    length: int
    op: str = KEYS
    outliers: Outliers | None = None

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each format; one whose kernel breaks its promise is refused."""
        selection = [pair for pair in self.keys if session.wants(self.name, _name(*pair), "halfbyte")]
        if not selection:
            return
        with torch.no_grad(), fixed_threads(session.threads):
            model, tokens = shipped(session.device.torch, self.outliers)
            layers = recorded_heads(model, windows(tokens, self.length, self.count))
            if self.name == BIASED:
                layers = [heads.with_key_bias() for heads in layers]
            for keys, rotated in selection:
                yield self._record(session, layers, keys, rotated)

    def _record(self, session: Session, layers: Sequence[Heads], keys: str, rotated: bool) -> Record:
        shape = {"B": self.count, "T": self.length}
        cache_shape = (self.count, layers[0].k.shape[1], self.length, layers[0].k.shape[3])
        fmt = KV_FORMATS[keys]
        blank = Record(KEYS, shape, _name(keys, rotated), "halfbyte", fmt.nbytes(cache_shape), session.environment, case=self.name)
        try:
            errors = [key_error(heads, keys, rotated) for heads in layers]
        except Exception as error:
            return replace(blank, refused=f"{self.name} {blank.formats}: {reason(error)}")
        whole = (sum(e**2 for e, _ in errors) / sum(n**2 for _, n in errors)) ** 0.5
        return replace(
            blank,
            error=whole,
            error_kind="relative L2 of attention's output",
            bits=fmt.bits_per_element(cache_shape),
            by_layer=tuple(e / n for e, n in errors),
        )


def key_error(heads: Heads, keys: str, rotated: bool) -> tuple[float, float]:
    """(norm of the error, norm) of attention's output over keys in this format, against the 16-bit keys; both in float64.

    Raises `BenchmarkRefused` when what `decode_attention` makes of the same cache is outside of its accuracy promise.
    """
    exact = float64_attention(heads.q, heads.k, heads.v, heads.q.shape[-1] ** -0.5)
    return float((attended(heads, keys, "bf16", rotated) - exact).norm()), float(exact.norm())


def attended(heads: Heads, keys: str, values: str, rotated: bool) -> torch.Tensor:
    """float64 attention [B, Hq, 1, D] over what a cache in these formats gives back.

    Raises `BenchmarkRefused` when `decode_attention` over the same cache breaks its accuracy promise.
    """
    q, (batch, kv_heads, tokens, dim) = heads.q, heads.k.shape
    cache = KVCache(batch, kv_heads, dim, tokens, keys=keys, values=values, rotate_keys=rotated, device=q.device)
    cache.append(heads.k, heads.v)
    k, v = (x[:, :, :tokens] for x in cache.dequantized())  # which gives whole blocks: the last may be part empty
    ref, out = float64_attention(q, k, v, dim**-0.5), decode_attention(q, cache)
    assert isinstance(out, torch.Tensor)  # the pair with lse comes only on request
    accuracy = timed_attention_accuracy(out, eager_attention(q, k, v, dim**-0.5), ref)
    accuracy.require(f"decode_attention over {_name(keys, rotated)} keys and {values} values")
    return ref


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("case", "formats", "bits", "perplexity", "change, %", "KL, nats", "attention error", "by layer")
#: The keys that the charts by layer show.
DRAWN = ("int8", "int4", "int4 rotated", "int4_g32", "int4_g32 rotated", "int4_channel")


def table(measured: Sequence[Record]) -> Table:
    """One row for each format and measure."""
    return HEADERS, [_row(r) for r in measured if r.bits is not None]


def _row(r: Record) -> tuple[str, ...]:
    error = "" if r.error is None else f"{r.error:.1e}"
    return (
        r.case,
        r.formats,
        f"{r.bits:.2f}",
        "" if r.perplexity is None else f"{r.perplexity:.4f}",
        "" if r.change is None else f"{r.change:+.2f}",
        *((error, "") if r.op == QUALITY else ("", error)),
        " ".join(f"{e:.0e}" for e in r.by_layer),
    )


def front(records: Sequence[Record]) -> list[Record]:
    """The records with a fifth less error than any of this list with fewer bits: those worth a name in a crowded chart."""
    points: list[Record] = []
    for r in sorted(records, key=lambda r: (r.bits or 0.0, r.error or 0.0)):
        if not points or (r.error or 0.0) < 0.8 * (points[-1].error or 0.0):
            points.append(r)
    return points


def drawn(measured: Sequence[Record]) -> list[str]:
    """KL divergence against bits, the fronts named; error of attention by layer for keys as they are and with a bias."""
    figures = []
    quality = [r for r in measured if r.op == QUALITY and r.error and r.bits]
    if quality:
        on_front = [id(r) for case in (CACHES, WEIGHTS) for r in front([r for r in quality if r.case == case])]
        points = [charts.Point(r.formats if id(r) in on_front else "", r.bits or 0.0, r.error or 0.0, r.case) for r in quality]
        title = "Divergence from the 16-bit run against bits"
        x_label = "bits an element (named: a fifth less divergence than any named one with fewer bits)"
        figures.append(charts.divergence(points, x_label=x_label, title=title))
    for case, what in ((PLAIN, "as they are"), (BIASED, f"bias of {BIAS:.0f} in two channels")):
        by_name = {r.formats: r.by_layer for r in measured if r.op == KEYS and r.case == case and r.by_layer}
        series = {name: by_name[name] for name in DRAWN if name in by_name}
        if series:
            title = f"Error of attention over quantized keys, {what}"
            figures.append(charts.lines(series, x_label="layer", y_label="relative error of the output", title=title, log_y=True))
    return figures


def says(measured: Sequence[Record]) -> list[str]:
    """Perplexity of some caches and of 4-bit weights; what rotation does to 4-bit keys."""
    sentences = []
    caches = {r.formats: r for r in measured if r.op == QUALITY and r.case == CACHES and r.change is not None}
    if caches:
        names = [name for name in ("int8", "int8 / int4_g32", "int4_g32", "int4") if name in caches]
        parts = [f"{name} ({caches[name].bits:.1f} bits) {caches[name].change:+.2f} %" for name in names]
        four = [r.change or 0.0 for r in measured if r.case == WEIGHTS and (r.bits or 16) < 7]
        weights = f"; 4-bit weights change it by {min(four):+.2f} to {max(four):+.2f} %" if four else ""
        sentences.append(f"Perplexity against the 16-bit run, by cache: {', '.join(parts)}{weights}.")
    plain, with_bias = (_errors(measured, case) for case in (PLAIN, BIASED))
    if both := [name for name in DRAWN if name in plain and name in with_bias]:
        parts = [f"{name} {plain[name]:.2g} and {with_bias[name]:.2g}" for name in both]
        sentences.append(
            f"Relative error of attention over quantized keys, as they are and with a bias of {BIAS:.0f}: {', '.join(parts)}."
        )
    return sentences


def _errors(measured: Sequence[Record], case: str) -> dict[str, float]:
    return {r.formats: r.error for r in measured if r.op == KEYS and r.case == case and r.error is not None}


STUDY = Study("accuracy", table, drawn, says, text_columns=2, jobs=jobs)
