"""Write the generated tables of README.md and docs/: between `<!-- name -->` and `<!-- /name -->` nothing is written by hand.

python scripts/make_tables.py            rewrite the tables, and the chart of the GPU's records
python scripts/make_tables.py --check    exit 1 if a table is out of date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halfbyte.bench import bars, charts, records
from halfbyte.bench.records import Record
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS, Format
from halfbyte.hf.families import REFUSED, TESTED

ROOT = Path(__file__).parent.parent
KV_SHAPE, WEIGHT_SHAPE = (1, 8, 4096, 128), (4096, 4096)
SHARED = {"tensor": "tensor", "token": "token, all heads", "head": "head of a token", "column": "row of the weight"}


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def formats() -> str:
    """Every format: where it applies, what its codes are, what shares a scale, bits an element."""
    rows = [_format_row(f, "keys" if f.token_block else "keys, values", KV_SHAPE) for f in KV_FORMATS.values()]
    rows += [_format_row(f, "weights", WEIGHT_SHAPE) for f in WEIGHT_FORMATS.values()]
    return markdown(("format", "for", "codes", "one scale for each", "bits an element"), rows)


def _format_row(f: Format, use: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    offset = {"none": "", "int": ", zero point", "float": ", offset"}[f.offset]
    return f"`{f.name}`", use, f.code.name + offset, _scale_text(f), f"{f.bits_per_element(shape):.4g}"


def _scale_text(f: Format) -> str:
    if f.scale is None:
        return "-"
    group, kind = f.scale.group, f.scale.granularity
    where = {"group": f"{group} neighbours", "channel": f"dim over {group} tokens"}.get(kind) or SHARED[kind]
    extras = [f"in 8 bits, blocks of {f.scale.nested}"] * bool(f.scale.nested) + ["and one for the tensor"] * f.tensor_scale
    stored = f.scale.dtype.upper() if f.scale.dtype.startswith("e") else f.scale.dtype.replace("f", "fp")
    return ", ".join([where, stored, *extras])


def models() -> str:
    """Families that were executed, and those that are refused, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    rows = [("run in the tests", ", ".join(TESTED))]
    rows += [(f"refused: {reason}", ", ".join(sorted(names))) for reason, names in reasons.items()]
    return markdown(("", "model types"), rows)


def quality() -> str:
    """Selected rows of the demo's own record."""
    shown = ("bf16", "int8", "int8 / int4_g32", "int4_g32", "int4_channel / int4", "int4", "fp8")
    records = _records("demo.jsonl")
    caches = [r for name in shown for r in records if r["kv"] == name and r["weights"] is None]
    weights = [r for r in records if r["kv"] == "bf16" and r["weights"] in ("int8_col", "int4_g64", "nf4", "nvfp4", "mxfp4")]
    rows = [
        (
            r["kv"],
            r["weights"] or "bf16",
            f"{r['change']:+.2f} %",
            f"{r['kl_mean']:.1e}",
            f"{100 * r['top1']:.1f} %",
            _sizes(r, records[0]),
        )
        for r in [*caches, *weights]
    ]
    return markdown(("KV cache (keys / values)", "weights", "perplexity", "mean KL (nats)", "top-1", "smaller"), rows)


def _sizes(record: dict[str, Any], base: dict[str, Any]) -> str:
    key = "weight_bytes" if record["weights"] else "kv_bytes_per_token"
    return f"{base[key] / record[key]:.2f}x"


def speed() -> str:
    """The CPU benchmark's records, each beside the fastest 16-bit operator of torch on the same shape in the same run."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in _records("cpu.jsonl"):
        if record["seconds"] is not None:
            case = " ".join(f"{name}={size}" for name, size in record["shape"].items())
            groups.setdefault((record["op"], case), []).append(record)
    rows: list[tuple[str, ...]] = []
    for (op, case), found in groups.items():
        peer = min((r for r in found if r["implementation"].startswith("torch")), key=lambda r: r["seconds"])
        ours = sorted((r for r in found if not r["implementation"].startswith("torch")), key=lambda r: r["formats"])
        rows += [(op.replace("_", " "), case, *_speed_cells(r, peer)) for r in [peer, *ours]]
    return markdown(("op", "shape", "format", "by", "time", "x the time of 16 bits", "bytes"), rows)


def _speed_cells(record: dict[str, Any], peer: dict[str, Any]) -> tuple[str, ...]:
    ratio = f"{record['seconds'] / peer['seconds']:.2f}x"
    return (
        record["formats"],
        record["implementation"],
        f"{1e3 * record['seconds']:.2f} ms",
        ratio,
        f"{record['nbytes'] / 1e6:.1f} MB",
    )


def _records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()]


# ------------------------------------------------------------------------------------------------------------------- the GPU

NOTHING = "Nothing was measured yet."
CHART = "docs/decode_attention.svg"


def gpu() -> str:
    """Every measured time of attention on a GPU that has a bar, in short, and the chart."""
    measured = gpu_records()
    rows = [_gpu_cells(r) for r in measured if r.seconds and r.implementation.startswith("halfbyte")]
    if not rows:
        return NOTHING
    table = markdown(("case", "format", "time", "of the roof", "x the fastest 16 bits"), rows)
    picture = f"\n\n![Share of the read roof, case by case]({CHART})" if bars.shares(measured)[0] else ""
    return f"{_where(measured)}\n\n{table}{picture}"


def all_bars() -> str:
    """Every bar with what was measured, and the 16-bit peers."""
    measured = gpu_records()
    if not measured:
        return NOTHING
    rows = [[cell.replace("\n", "<br>") for cell in row] for row in bars.table_rows(measured)]
    left = len(bars.BARS) - sum(len(r.bars) for r in measured)
    missing = f"; {left} more are not in these records" if left > 0 else ""
    return f"{_where(measured)} {bars.count_text(measured)}{missing}.\n\n{markdown(bars.HEADERS, rows)}"


def gpu_records() -> list[Record]:
    """The last record of each case that has bars."""
    path = ROOT / "results" / "gpu.jsonl"
    return bars.latest(records.read(path).records) if path.exists() else []


def _gpu_cells(r: Record) -> tuple[str, ...]:
    share = "" if r.roof_share is None else f"{100 * r.roof_share:.0f} %"
    faster = f"{r.peer_seconds / r.seconds:.2f}x" if r.op == "decode_attention" and r.peer_seconds and r.seconds else ""
    return r.case, r.formats, f"{1e6 * (r.seconds or 0.0):.1f} us", share, faster


def _where(measured: Sequence[Record]) -> str:
    """The machines, versions and days of the records."""
    where = [r.environment for r in measured]
    devices = ", ".join(sorted({e.device for e in where}))
    versions = sorted({f"{name} {e.versions[name]}" for e in where for name in ("torch", "triton") if name in e.versions})
    dates = sorted({e.date[:10] for e in where})
    return f"{devices}; {', '.join(versions)}; {', '.join(dates)}."


def write_chart() -> None:
    """The chart of all shares of the roof; nothing when nothing was measured."""
    reached, asked = bars.shares(gpu_records())
    if reached:
        svg = charts.marked_bars(reached, asked, x_label="% of the read roof at the same number of bytes")
        (ROOT / CHART).write_text(charts.as_image(svg), encoding="utf-8")


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"formats": formats, "models": models, "quality": quality, "speed": speed, "gpu": gpu},
    "docs/decode_attention.md": {"bars": all_bars},
}


def main() -> int:
    stale = 0
    for page, tables in TABLES.items():
        path = ROOT / page
        before = after = path.read_text(encoding="utf-8")
        for name, make in tables.items():
            block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            if not block.search(after):
                print(f"{page} has no table <!-- {name} -->", file=sys.stderr)
                return 1
            text = make()
            after = block.sub(lambda m, text=text: f"{m[1]}{text}\n{m[2]}", after)  # type: ignore[misc]
        if "--check" not in sys.argv[1:]:
            path.write_text(after, encoding="utf-8")
        elif after != before:
            print(f"{page} is out of date; run `make docs`", file=sys.stderr)
            stale = 1
    if "--check" not in sys.argv[1:]:
        write_chart()
    return stale


if __name__ == "__main__":
    sys.exit(main())
