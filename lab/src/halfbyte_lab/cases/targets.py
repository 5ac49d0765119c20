"""The targets of the GPU kernels as data: which cases are measured, and what each must reach. Pure; `decode_cases.py` measures.

A share of the roof is time at the speed of a read-only kernel over the same number of bytes in the same run, over the time taken.
Bytes count the codes, scales and offsets of all visible tokens once, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from halfbyte_lab.measure.caches import EVENLY, DecodeCase
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.records import Record, Verdict
from halfbyte_lab.measure.tables import Table, us

#: How a bar of each quantity is said, and in what unit: "%", "x", "us" or "T". "at least": the quantity must reach its bound; the
#: others must not exceed it.
QUANTITIES: dict[str, tuple[str, str]] = {
    "roof_share": ("at least {} of roofline", "%"),
    "times_16_bit": ("at least {} 16 bits", "x"),
    "flops": ("at least {}", "T"),
    "seconds": ("at most {}", "us"),
    "times_even": ("at most {} even", "x"),
    "over_copy": ("copy + {}", "us"),
    "over_launch": ("launch + {}", "us"),
    "times_4_bit": ("at least {} 4-bit baselines", "x"),
    "times_quoted": ("at least {} quoted", "x"),
    "share_of_int4": ("at least {} of int4's share", "%"),
    "times_published": ("at least {} the published kernel", "x"),
    "gain": ("at least {} data-parallel, in the mean", "x"),
    "peak_gain": ("at least {} data-parallel, at best", "x"),
    "times_three": ("at least {} three launches", "x"),
    "times_naive": ("at least {} naive", "x"),
}
#: What was measured of a case, as far as it could be, by quantity.
Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class Target:
    """What one case must reach in one format: at least `bound`, or at most (see `QUANTITIES`).

    roof_share    share of the read roofline at the same number of bytes
    times_16_bit  how many times faster than torch's fastest 16-bit attention, or linear layer, on the same case
    flops         multiplications and additions of both products, in a second
    seconds       time of one call
    times_even    time over that of the same bytes in sequences of one length
    over_copy     seconds beyond a copy kernel that moves the same bytes
    over_launch   host seconds of a call beyond Triton's own cached launch

    Of linear layers and of the fused projection:

    times_4_bit      how many times faster than the fastest 4-bit baseline of the same run
    times_quoted     the same, of the figures in `literature.py`, which are of another run on the same type of GPU
    share_of_int4    share of the roof over int4's share of its own
    times_published  how many times faster than the published split-K kernel
    gain, peak_gain  how many times faster the best decomposition is than data-parallel tiles: mean, largest
    times_three      how many times faster one launch for q, k and v is than three of the same kernel
    times_naive      how many times faster than the naive variant of quantized attention
    """

    case: str
    formats: str
    quantity: str
    bound: float


def judge(bars: Sequence[Target], figures: Figures) -> tuple[Verdict, ...]:
    """Each bar with what was measured. Nothing measured, or NaN, is not met."""

    def met(bar: Target, value: float | None) -> bool:
        if value is None:
            return False
        return value >= bar.bound if QUANTITIES[bar.quantity][0].startswith("at least") else value <= bar.bound

    values = [(bar, figures.get(bar.quantity)) for bar in bars]
    return tuple(Verdict(bar.quantity, bar.bound, value, met(bar, value)) for bar, value in values)


def targets_of(case: str, formats: str) -> list[Target]:
    """The bars of one case in one format."""
    return [bar for bar in TARGETS if (bar.case, bar.formats) == (case, formats)]


def formats_of(case: str) -> list[str]:
    """The formats in which a case is measured."""
    return list(dict.fromkeys(bar.formats for bar in TARGETS if bar.case == case))


def _one_head(batch: int, context: int = 8192) -> DecodeCase:
    return DecodeCase(f"batch {batch} x {context:,}", DecodeShape(batch, 8, 1, 128, context), baselines=True)


def _layer(batch: int, context: int) -> DecodeCase:
    return DecodeCase(f"layer {batch} x {context:,}", DecodeShape(batch, 32, 8, 128, context), baselines=True)


#: The shapes hold 2^20 tokens of a KV head of 128 (or as many bytes), 143 MB in INT4, so that they share one roof.
_SHAPES = (
    DecodeCase("MHA 32/32", DecodeShape(4, 32, 32)),
    DecodeCase("MQA 32/1", DecodeShape(128, 32, 1)),
    DecodeCase("GQA 4, 32/8", DecodeShape(16, 32, 8)),
    DecodeCase("GQA 5, 40/8", DecodeShape(16, 40, 8)),
    DecodeCase("GQA 7, 28/4", DecodeShape(32, 28, 4)),
    DecodeCase("GQA 16, 32/2", DecodeShape(64, 32, 2)),
    DecodeCase("D=64, 64/8", DecodeShape(32, 64, 8, 64)),
    DecodeCase("D=256, 32/4", DecodeShape(16, 32, 4, 256)),
    DecodeCase("[B,T,H,D] order, 64/8", DecodeShape(16, 64, 8), "tokens first"),
    DecodeCase("pages of 64, 64/8", DecodeShape(16, 64, 8), "pages"),
)
_WIDE = ("MQA 32/1", "GQA 16, 32/2")
#: Query rows of several new tokens of several heads cost what as many heads of one token do.
_ROWS = (
    DecodeCase("64 rows, 64/1", DecodeShape(128, 64, 1), baselines=True),
    DecodeCase("128 rows, 128/1", DecodeShape(128, 128, 1), baselines=True),
)

#: Heads of 256 and 512 (Qwen3.5, Gemma 4), and 200 short heads of 64 whose lengths are spread evenly by their logarithm.
_WIDE_HEADS = tuple(
    DecodeCase(f"D={dim}, {q}/{kv}, 32 x 8,192", DecodeShape(32, q, kv, dim))
    for dim, q, kv in ((256, 24, 4), (256, 16, 2), (512, 16, 2), (512, 8, 1))
)
_RAGGED = DecodeCase(
    "D=64, 12/2, 200 lengths to 16,384",
    DecodeShape(200, 12, 2, 64, 16384),
    runs=tuple((1, round(16 * 1024 ** (i * 73 % 200 / 199))) for i in range(200)),
)
#: Latents of 512 with rotary keys of 64 (DeepSeek V2 and V3), by query heads.
_LATENTS = tuple(
    DecodeCase(f"MLA, {heads} heads, {batch} x {context:,}", DecodeShape(batch, heads, 1, 576, context), latent=512)
    for heads, (batch, context) in product((16, 128), ((64, 4096), (128, 8192)))
)
_ONE_KV_HEAD = DecodeCase("MQA 32/1, 64 x 8,192", DecodeShape(64, 32, 1))

SKEWED = DecodeCase("63 x 512 and 1 x 65,536", DecodeShape(64, 64, 8, 128, 65536), runs=((63, 512), (1, 65536)))
#: q_heads plays no part in an append.
APPEND = DecodeCase("append, batch 128", DecodeShape(128, 64, 8, 128, 64))
CALL = "host time of a call"

PROBLEMS: tuple[DecodeCase, ...] = (
    *(_one_head(batch) for batch in (512, 128, 32)),
    _layer(8, 16384),
    _layer(1, 32768),
    _layer(1, 1024),
    _one_head(4, 131072),
    _one_head(1, 1048576),
    *_SHAPES,
    *_ROWS,
    SKEWED,
    *_WIDE_HEADS,
    _RAGGED,
    _ONE_KV_HEAD,
    *_LATENTS,
)


def _three(formats: str, quantity: str, *bounds: float) -> list[Target]:
    """Bars at T=8,192 and batch 512, 128 and 32, as many as there are bounds."""
    batches = (512, 128, 32)[: len(bounds)]
    return [Target(_one_head(batch).name, formats, quantity, bound) for batch, bound in zip(batches, bounds, strict=True)]


TARGETS: tuple[Target, ...] = (
    *_three("int4", "roof_share", 0.94, 0.92, 0.76),
    *_three("int4", "times_16_bit", 3.5, 3.3, 2.7),
    *_three("int4_g32", "roof_share", 0.93, 0.90, 0.74),
    *_three("int2", "roof_share", 0.80, 0.70),
    *_three("int8", "roof_share", 0.97, 0.94, 0.82),
    *_three("int8", "times_16_bit", 1.85, 1.85),
    *(Target("batch 128 x 8,192", formats, "roof_share", 0.90) for formats in ("fp8", "int8+int4", "int8+int4_g32")),
    Target("batch 128 x 8,192", "int8_channel+int8", "times_16_bit", 1.8),
    Target("batch 128 x 8,192", "int4_channel+int8", "times_16_bit", 2.1),
    Target("batch 128 x 8,192", "int4_channel+int4", "times_16_bit", 2.5),
    Target("layer 8 x 16,384", "int8", "times_16_bit", 1.8),
    Target("layer 8 x 16,384", "int4", "times_16_bit", 3.2),
    Target("layer 1 x 32,768", "int8", "seconds", 22e-6),
    Target("layer 1 x 32,768", "int4", "seconds", 15e-6),
    Target("layer 1 x 1,024", "int8_tensor", "seconds", 6.5e-6),
    Target("batch 4 x 131,072", "int4", "roof_share", 0.74),
    Target("batch 1 x 1,048,576", "int4", "roof_share", 0.85),
    *(Target(p.name, formats, "roof_share", 0.78 if p.name in _WIDE else 0.85) for p in _SHAPES for formats in ("int4", "int8")),
    *(Target(p.name, formats, "times_16_bit", 1.0) for p in _ROWS for formats in ("int4", "int4_g32", "int8")),
    Target(SKEWED.name, "int4", "times_even", 1.15),
    *(Target(p.name, "int8", "roof_share", 0.88 if p.shape.dim == 256 else 0.85) for p in _WIDE_HEADS),
    *(Target(p.name, "int4", "roof_share", 0.80 if p.shape.dim == 256 else 0.75) for p in _WIDE_HEADS),
    Target(_RAGGED.name, "int4_g32", "roof_share", 0.65),
    Target(_ONE_KV_HEAD.name, "int4", "roof_share", 0.60),
    Target(_ROWS[1].name, "int4", "flops", 350e12),
    *(Target(p.name, "int8", "roof_share", 0.80) for p in _LATENTS if p.shape.q_heads == 16),
    *(Target(p.name, "int4", "roof_share", 0.65) for p in _LATENTS if p.shape.q_heads == 16),
    *(Target(p.name, formats, "flops", 350e12) for p in _LATENTS if p.shape.q_heads == 128 for formats in ("int8", "int4")),
    Target(APPEND.name, "int4", "over_copy", 2e-6),
    Target(CALL, "int8", "over_launch", 12e-6),
)

#: The ops of these cases, as records name them.
OPS = ("decode_attention", "append", "call")
#: What `--quick` measures.
QUICK_CASES = ("batch 128 x 8,192", "layer 1 x 32,768", "GQA 4, 32/8", APPEND.name, CALL)


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("case", "format", "MB", "us alone", "us paired", "GB/s", "of roofline", "x 16-bit", "target", "verdict")


def table(measured: Sequence[Record]) -> Table:
    """One row for each record of a case of attention, 16-bit peers included; several bars of one record lie on several lines."""
    return HEADERS, [_row(r) for r in measured if r.case and r.op in OPS]


def _row(r: Record) -> tuple[str, ...]:
    faster = r.peer_seconds / r.seconds if r.op == "decode_attention" and r.peer_seconds and r.seconds else None
    return (
        r.case,
        _format_and_level(r),
        f"{r.nbytes / 1e6:,.1f}" if r.nbytes else "",
        us(r.alone),
        us(r.paired),
        "" if r.gb_per_s is None else f"{r.gb_per_s:,.0f}",
        "" if r.roof_share is None else f"{100 * r.roof_share:.1f} %",
        "" if faster is None else f"{faster:.2f}",
        "\n".join(bound_text(v) for v in r.bars),
        "\n".join(verdict_text(v) for v in r.bars) or ("refused" if r.refused else ""),
    )


#: By unit: what a quantity is multiplied by, and what stands behind it.
_UNITS = {"%": (100, " %"), "x": (1, "x"), "us": (1e6, " us"), "T": (1e-12, " TFLOPS")}


def _in_unit(value: float, unit: str, digits: str) -> str:
    factor, name = _UNITS[unit]
    return f"{round(factor * value, 6):{digits}}{name}"


def bound_text(v: Verdict) -> str:
    """The bar in words."""
    words, unit = QUANTITIES[v.quantity]
    bound = _in_unit(v.bound, unit, "g")
    return words.format(bound)


def verdict_text(v: Verdict) -> str:
    """ "met: 95.1 %", "missed: 14.2 us (by 9 %)": what was measured, and how far a missed bar is, in parts of the bar."""
    if v.value is None:
        return "not measured"
    unit = QUANTITIES[v.quantity][1]
    value = _in_unit(v.value, unit, {"x": ".2f", "T": ".0f"}.get(unit, ".1f"))
    return f"met: {value}" if v.met else f"missed: {value} (by {100 * abs(v.value / v.bound - 1):.0f} %)"


def latest(measured: Sequence[Record]) -> list[Record]:
    """Of several runs the last record of each case, format and implementation, in the order of the cases."""
    last = {(r.case, r.formats, r.implementation): r for r in measured if r.case and r.op in OPS and r.implementation}
    order = {name: i for i, name in enumerate(problem.name for problem in PROBLEMS)}
    return sorted(last.values(), key=lambda r: order.get(r.case.removesuffix(EVENLY), len(order)))


def shares(measured: Sequence[Record]) -> tuple[dict[str, float], dict[str, float]]:
    """Percent of the roof that our records reach, and what their bars ask for, by "case, format"."""
    ours = [r for r in measured if r.case and r.op in OPS and r.roof_share and r.implementation.startswith("halfbyte")]
    bounds = {_label(r): 100 * v.bound for r in ours for v in r.bars if v.quantity == "roof_share"}
    return {_label(r): 100 * (r.roof_share or 0.0) for r in ours}, bounds


def _label(r: Record) -> str:
    return f"{r.case}, {_format_and_level(r)}"


def _format_and_level(r: Record) -> str:
    """The format, and who reads it unless that is what halfbyte itself chooses."""
    return r.formats if r.implementation in ("halfbyte auto", "") else f"{r.formats}, {r.implementation.removeprefix('halfbyte ')}"
