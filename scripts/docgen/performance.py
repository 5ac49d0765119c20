"""Tables of the performance pages: speed-up by batch size, where halfbyte loses, libraries that were measured in the same run."""

from __future__ import annotations

from collections.abc import Sequence

from docgen.sources import OF_EXPERTS, OURS, QUESTIONS, Record, attention, by_machine, linear, tables
from docgen.summary import alone, speedup

markdown = tables.markdown


def by_batch() -> str:
    """INT4 weights over cuBLAS, from the worst layer to the best, by batch size M."""
    ours = [r for r in linear() if r.formats == "int4_sym_g128" and r.peer_seconds]
    rows = []
    for m in sorted({r.shape["M"] for r in ours}):
        mine = [r for r in ours if r.shape["M"] == m]
        large = [r for r in mine if r.shape["N"] * r.shape["K"] >= 8192**2]
        rows.append((f"{m:,}", _span(mine), _span(large), _roofline(mine)))
    heads = ("M", "speed-up, all layers", "8192 x 8192 and larger", "of roofline, all layers")
    return f"{tables.where_text(ours)}\n\n{markdown(heads, rows)}"


def _span(measured: Sequence[Record]) -> str:
    ratios = sorted(map(speedup, measured))
    return f"{ratios[0]:.2f}-{ratios[-1]:.2f}x"


def _roofline(measured: Sequence[Record]) -> str:
    shares = sorted(100 * (r.roof_share or 0.0) * (r.seconds or 0.0) / alone(r) for r in measured)
    return f"{shares[0]:.0f}-{shares[-1]:.0f} %"


def losses() -> str:
    """Every measured case in which 16 bits are faster."""
    slower = [r for r in (*attention(), *linear()) if r.peer_seconds and speedup(r) < 1]
    times = [(f"{1e6 * alone(r):.1f} us", f"{1e6 * (r.peer_seconds or 0):.1f} us", f"{speedup(r):.2f}x") for r in slower]
    rows = [(tables.case_name(r.case), r.formats, *cells) for r, cells in zip(slower, times, strict=True)]
    return markdown(("case", "format", "halfbyte", "fastest 16-bit kernel", "speed-up"), rows)


def libraries() -> str:
    """Each library that ran in the same process as halfbyte on a GPU, its last time, and halfbyte's of the same commit."""
    timed = [r for r in tables.every_gpu_record() if r.study == "peers" and r.seconds]
    last = {(r.op, str(sorted(r.shape.items())), r.formats, r.implementation): r for r in timed}
    groups: dict[tuple[str, str], list[Record]] = {}
    for (op, shape, *_), r in last.items():
        groups.setdefault((op, shape), []).append(r)
    rows = []
    for (op, _), found in groups.items():
        shape = ", ".join(f"{name} = {size:,}" for name, size in found[0].shape.items())
        rows += [
            (
                op.replace("_", " "),
                shape,
                r.implementation.replace("halfbyte auto", "**halfbyte**"),
                r.formats,
                f"{1e6 * r.seconds:.1f} us",
            )
            for r in sorted(found, key=lambda r: r.seconds or 0.0)
            if r.seconds
        ]
    return f"{tables.where_text(timed)}\n\n{markdown(('op', 'shape', 'library', 'format', 'time'), rows)}"


def study_list() -> str:
    """Every study with its question."""
    rows = [(f"[{name}]({name}.md)", f"{asks[:1].upper()}{asks[1:]}") for name, asks in QUESTIONS.items()]
    return markdown(("study", "question"), rows)


def experts() -> str:
    """Mixtures of experts, machine by machine: ours, Triton's own kernel in its fastest way, and 16 bits."""
    timed = [r for r in tables.every_gpu_record() if r.op in OF_EXPERTS and r.seconds]
    told = []
    for measured in by_machine(timed).values():
        last = {(r.case, r.formats, r.implementation): r for r in measured}
        rows = [_beside_peers(r, [p for p in last.values() if p.case == r.case]) for r in last.values() if r.implementation == OURS]
        told.append(f"{tables.where_text(measured)}\n\n{markdown(EXPERTS_HEADERS, rows)}")
    return "\n\n".join(told)


EXPERTS_HEADERS = ("mixture", "format", "halfbyte", "of roofline", "triton_kernels", "16 bits", "x 16 bits", "x triton_kernels")


def _beside_peers(r: Record, same: Sequence[Record]) -> tuple[str, ...]:
    triton = min((p.seconds for p in same if p.implementation.startswith("triton_kernels") and p.seconds), default=None)
    plain = next((p.seconds for p in same if p.formats == "bf16"), None)
    share = f"{100 * r.roof_share:.0f} %" if r.roof_share else ""
    times = (f"{1e6 * seconds:.1f} us" if seconds else "" for seconds in (r.seconds, triton, plain))
    ours, theirs, full = times
    faster = (f"{base / r.seconds:.2f}x" if base and r.seconds else "" for base in (plain, triton))
    return r.case, f"`{r.formats}`", ours, share, theirs, full, *faster
