"""Short tables for the README, the home page and the guides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from docgen.sources import (
    CLIP,
    HEAD_DIM,
    OPS,
    ROOT,
    TEXTS,
    WEIGHTS,
    Record,
    attention,
    by_machine,
    evidence,
    formats_of,
    key_format,
    linear,
    rotated,
    step,
    tables,
)
from halfbyte.settings import HALVES
from halfbyte_lab.evals.choices import caches, is_safe
from halfbyte_lab.evals.quality import Setting

markdown = tables.markdown

#: Attention cases of the short table: record, formats, and how the README calls the case. Losses stay in.
ATTENTION = (
    ("batch 128 x 8,192", "int8", "128 x 8K, GQA 8:1"),
    ("batch 128 x 8,192", "int8+int4_g32", "128 x 8K, GQA 8:1"),
    ("batch 128 x 8,192", "int4", "128 x 8K, GQA 8:1"),
    ("batch 32 x 8,192", "int4", "32 x 8K, GQA 8:1"),
    ("layer 8 x 16,384", "int8", "8 x 16K, Llama-3-8B layer"),
    ("layer 8 x 16,384", "int4", "8 x 16K, Llama-3-8B layer"),
    ("batch 1 x 1,048,576", "int4", "1 x 1M, GQA 8:1"),
    ("128 rows, 128/1", "int4", "128 x 8K, MQA 128:1"),
)
LINEAR = (
    ("8192 x 8192, 1 row", "int4_sym_g128"),
    ("8192 x 8192, 16 rows", "int4_sym_g128"),
    ("8192 x 8192, 64 rows", "int4_sym_g128"),
    ("4096 x 4096, 64 rows", "int4_sym_g128"),
)


def find(measured: Sequence[Record], case: str, formats: str) -> Record:
    """The one record of a case and format."""
    (found,) = [r for r in measured if r.case == case and r.formats == formats]
    return found


def alone(r: Record) -> float:
    """Seconds of a call whose launches overlap no other's, as those of 16 bits are timed."""
    return float(r.alone or r.seconds or 1.0)


def speedup(r: Record) -> float:
    """Time of the fastest 16-bit kernel of the same run over ours, both alone."""
    return float((r.peer_seconds or 0.0) / alone(r))


def _cells(r: Record) -> tuple[str, ...]:
    bf16, share = f"{1e6 * (r.peer_seconds or 0.0):.1f} us", 100 * (r.roof_share or 0.0) * (r.seconds or 0.0) / alone(r)
    return f"{1e6 * alone(r):.1f} us", bf16, f"**{speedup(r):.2f}x**", f"{share:.0f} %"


def results() -> str:
    """Eight rows of attention and four of linear layers."""
    heads = ("time", "fastest 16-bit", "speed-up", "of roofline")
    cached = [
        (name, f"`{formats.replace('+', '` / `')}`", *_cells(find(attention(), case, formats))) for case, formats, name in ATTENTION
    ]
    layers = [(tables.case_name(case), f"`{formats}`", *_cells(find(linear(), case, formats))) for case, formats in LINEAR]
    return "\n\n".join(
        (
            markdown(("decode attention", "KV cache", *heads), cached),
            markdown(("linear layer", "weights", *heads), layers),
            f"{tables.where_text([*attention(), *linear()])}",
        )
    )


#: The choices of the short table: a name, and a cache or weights.
CHOICES: tuple[tuple[str, Setting], ...] = (
    *((name, Setting(*formats)) for name, formats in caches().items()),
    ("6.7 bits", Setting("int8", "int4_g32", rotate_keys=True, sink_tokens=4, recent_tokens=16)),
    ("Weights, 8 bits", Setting(weights="int8_col")),
    ("Weights, default", Setting(weights=WEIGHTS, clip=CLIP)),
    ("Weights, fastest", Setting(weights="int4_sym_g128")),
)


def choice() -> str:
    """Answers to 'which format': size, divergence on a real model and on the worst outlier variant of the shipped one, speed."""
    rows = [(name, _formats(setting), *_choice(setting)) for name, setting in CHOICES]
    return markdown(("", "format", "smaller", "faster", "safe", "KL, nats", "perplexity", "same token", "toy, outliers"), rows)


def _formats(s: Setting) -> str:
    if s.weights is not None:
        return f"`{s.weights}`" + ", clipped" * (s.clip is not None)
    return f"`{s.keys}` keys{', rotated' * (s.rotate_keys is True)}, `{s.values}` values" + (
        f", first {s.sink_tokens} and last {s.recent_tokens} tokens in 16 bits" if any(s.exact) else ""
    )


def _choice(s: Setting) -> tuple[str, ...]:
    is_cache = s.weights is None
    turned = replace(s, rotate_keys=s.rotate_keys or (is_cache and rotated(None, key_format(str(s.keys)), HEAD_DIM)))
    name, real = formats_of(turned), tables.study_records("evidence")
    by_text = {r.case: r for r in real if r.formats == name and r.error}
    toy = [r for r in tables.study_records("quality-per-bit") if (r.op, r.formats) == (OPS[is_cache], name) and r.error]
    worst = max((r.error or 0.0 for r in toy), default=None)
    floor = min(value for case, value in evidence.floors(real).items() if case.endswith("bf16"))  # the toy's records have none
    words = {None: "not measured", False: "no", True: "yes" if worst is None or is_safe(worst, 0.0, floor) else "without outliers"}
    word = words[evidence.verdicts(real).get(name)]
    timed, case = (attention(), "batch 128 x 8,192") if is_cache else (linear(), "8192 x 8192, 1 row")
    kernel = (s.weights or (str(s.keys) if s.keys == s.values else f"{s.keys}+{s.values}")) if not any(s.exact) else ""
    faster = [f"{speedup(r):.2f}x" for r in timed if (r.case, r.formats) == (case, kernel) and r.peer_seconds]
    unknown = "" if s.keys in HALVES and is_cache else "not measured"
    bits = evidence.bits_of(by_text[f"{TEXTS[0]}, bf16"])[0] if f"{TEXTS[0]}, bf16" in by_text else (toy[0].bits or 16)
    read = [by_text[f"{text}, bf16"] for text in TEXTS if f"{text}, bf16" in by_text]
    harm = ("", "", "") if len(read) < len(TEXTS) else _harm(read)
    return f"{16 / bits:.2f}x", (faster or [unknown])[-1], word, *harm, "" if worst is None else f"{worst:.1e}"


def _harm(read: Sequence[Record]) -> tuple[str, str, str]:
    """The worst of all texts: divergence, rise of the perplexity, and how often the likeliest token is that of 16 bits."""
    change, same = max(r.change or 0.0 for r in read), min(r.top1 or 0.0 for r in read)
    return f"{max(r.error or 0.0 for r in read):.1e}", f"{change:+.1f} %", f"{100 * same:.1f} %"


def whole_models() -> str:
    """A step of each whole model, GPU by GPU: of docs/performance/step.md the rows that compare."""
    rows = []
    for machine, measured in by_machine(tables.study_records("step")).items():
        gpu, (headers, cells) = tables.short_name(machine), step.summary(measured)
        ours = [row for row in cells if row[headers.index("halfbyte, ms")]]
        compares = [any(row[headers.index(side)] for side in ("16 bits, ms", "vLLM, ms")) for row in ours]
        rows += [(gpu, *row) for row, shown in zip(ours, compares, strict=True) if shown]
    return markdown(("GPU", *step.SUMMARY), rows)


#: What GPUs of a compute capability are called.
GPUS = {
    "sm_90": "H200, H100",
    "sm_80": "A100",
    "sm_86": "RTX 3090, A10, A40",
    "sm_89": "RTX 4090, L4, L40S",
    "sm_100": "B200",
    "sm_120": "RTX 5090, RTX PRO 6000",
}


def gpus() -> str:
    """What is known of each kind of GPU: figures of records, or variants of kernels in the manifest of compiled ones."""
    entries = map(json.loads, (ROOT / "scripts" / "manifest.jsonl").read_text(encoding="utf-8").splitlines())
    compiled = Counter(entry["target"] for entry in entries)
    figures = Counter(tables.short_name(r.environment.device) for r in tables.every_gpu_record() if r.seconds)
    rows = []
    for target, names in GPUS.items():
        measured = [f"{name}: {figures[name]:,} figures" for name in names.split(", ") if figures[name]]
        state = f"measured, {', '.join(measured)}" if measured else "compiled and checked, not run"
        rows.append(
            (
                names,
                f"{target[3:-1]}.{target[-1]}",
                state if compiled[target] else "neither compiled nor run",
            )
        )
    return markdown(("GPU", "compute capability", "state"), rows)
