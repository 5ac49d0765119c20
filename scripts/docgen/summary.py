"""Short tables for the README, the home page and the guides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from docgen.sources import (
    HEAD_DIM,
    OPS,
    PLAIN,
    ROOT,
    WEIGHTS,
    Record,
    attention,
    by_machine,
    key_format,
    linear,
    rotated,
    step,
    tables,
)
from halfbyte.evals.choices import caches, safe_where

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


#: The choices of the short table: a name, keys and values, or weights.
CHOICES = (
    *((name, *formats) for name, formats in list(caches().items())[1:]),
    ("Weights, default", f"{WEIGHTS} clipped", ""),
    ("Weights, fastest", "int4_sym_g128", ""),
)


def choice() -> str:
    """Answers to 'which format': size, divergence on the shipped model and on the worst outlier variant, speed of the kernels."""
    rows = [
        (
            name,
            f"`{keys}` keys, `{values}` values" if values else f"`{keys}`".replace(" clipped`", "`, clipped"),
            *_choice(keys, values),
        )
        for name, keys, values in CHOICES
    ]
    return markdown(("", "format", "smaller", "KL", "KL, outliers", "safe", "faster"), rows)


def _choice(keys: str, values: str) -> tuple[str, ...]:
    formats = keys if keys == values or not values else f"{keys} / {values}"
    turned = bool(values) and rotated(None, key_format(keys), HEAD_DIM)
    op, name = OPS[bool(values)], formats + " rotated" * turned
    measured = {r.case: r for r in tables.study_records("quality-per-bit") if (r.op, r.formats) == (op, name)}
    plain, worst = measured[PLAIN], max(measured.values(), key=lambda r: r.error or 0.0)
    timed, case = (attention(), "batch 128 x 8,192") if values else (linear(), "8192 x 8192, 1 row")
    kernel = formats.replace(" / ", "+").removesuffix(" clipped")
    faster = [f"{speedup(r):.2f}x" for r in timed if (r.case, r.formats) == (case, kernel)]
    safe = safe_where([plain.error or 0.0, worst.error or 0.0]).replace("plain", "without outliers")
    kl = (f"{plain.error:.1e}", f"{worst.error:.1e}", safe)
    return f"{16 / (plain.bits or 16):.2f}x", *kl, (faster or ["not measured"])[-1]


def whole_models() -> str:
    """A step of each whole model, GPU by GPU: of docs/performance/step.md the rows that compare, and all of one H200."""
    rows = []
    for machine, measured in by_machine(tables.study_records("step")).items():
        gpu, (headers, cells) = tables.short_name(machine), step.summary(measured)
        ours = [row for row in cells if row[headers.index("halfbyte, ms")]]
        compares = [any(row[headers.index(side)] for side in ("16 bits, ms", "vLLM, ms")) for row in ours]
        alone = [gpu == "H200" and "GPUs" not in row[0] for row in ours]
        rows += [(gpu, *row) for row, *shown in zip(ours, compares, alone, strict=True) if any(shown)]
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
