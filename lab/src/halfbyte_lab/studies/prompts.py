"""Study `prompts`: attention of a prompt's tokens, over themselves and over a packed past, against 16 bits.

A layer of Llama-3-8B. The first token of an answer waits for this, and every further turn of a conversation reads the packed past
with many queries at once. "halfbyte triton" is the portable kernel for both parts; 16 bits are torch's attention over what the
cache holds, rounded to bf16. All results are held against float64. On a CPU a small chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import halfbyte
from halfbyte.cache import KVCache
from halfbyte.kv_buffer import KVBuffer
from halfbyte_lab.cases.decode_variants import DecodeVariant, time_variants
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.checks import Accuracy, eager_attention, float64_attention, timed_attention_accuracy
from halfbyte_lab.measure.decode import parse_formats
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table, range_text, seconds_of, times_text
from halfbyte_lab.measure.timing import MANY_GRAPHS
from halfbyte_lab.studies import Study

OP, OURS, PORTABLE, TORCH = "prompts study", "halfbyte auto", "halfbyte triton", "torch sdpa, 16 bits"
FORMATS = ("int8+int4_g32", "int4")
Q_HEADS, KV_HEADS, DIM = 32, 8, 128
#: Sequences, new tokens, tokens before them.
CASES = ((1, 1024, 0), (1, 8192, 0), (8, 2048, 0), (1, 128, 32768), (1, 1024, 32768), (8, 512, 8192), (1, 8192, 8192))
QUICK, CPU = CASES[3:4], ((1, 48, 0), (1, 48, 80))
#: Scores that are held in float64 at once.
_SCORES = 2**27


def jobs(session: Session) -> list[Job]:
    """One for each number of sequences, of new tokens, and of tokens before."""
    cases = CPU if session.device.kind != "cuda" else QUICK if session.options.quick else CASES
    return [CaseJob(*case) for case in cases]


@dataclass(frozen=True)
class CaseJob:
    """`new` tokens of each sequence behind `past`, in every format; without a past there is nothing to quantize that is read."""

    batch: int
    new: int
    past: int
    op: str = OP

    @property
    def name(self) -> str:
        behind = f" behind {self.past:,}" if self.past else ""
        return f"prompts, {self.batch} x {self.new:,}{behind}"

    @property
    def products(self) -> int:
        """Additions and multiplications of the two products, of what is visible."""
        return 2 * self.batch * Q_HEADS * DIM * self.new * (self.new + 1 + 2 * self.past)

    def measure(self, session: Session) -> Iterator[Record]:
        """Each format: halfbyte, the portable kernel, and torch in 16 bits."""
        for formats in FORMATS if self.past else FORMATS[:1]:
            if any(session.wants(self.name, formats, name) for name in (OURS, PORTABLE, TORCH)):
                session.free()
                yield from self._measure(session, formats)

    def _measure(self, session: Session, formats: str) -> list[Record]:
        chunk = Chunk.random(self, formats, session.device.torch)
        ways: dict[str, Callable[[KVCache], torch.Tensor]] = {OURS: chunk.ours, TORCH: chunk.in_16_bits()}
        if session.device.kind == "cuda":
            ways[PORTABLE] = partial(chunk.ours, impl="triton")
        ways = {name: way for name, way in ways.items() if session.wants(self.name, formats, name)}
        shape = {"B": self.batch, "L": self.new, "P": self.past, "H": KV_HEADS, "Hq": Q_HEADS, "D": DIM}
        blank = Record(OP, shape, formats, "", chunk.cache.nbytes, session.environment, case=self.name)
        variants: Mapping[str, DecodeVariant] = {name: DecodeVariant(way) for name, way in ways.items()}
        return time_variants(session, blank, [chunk.cache], chunk.judge, variants, roof=False)


@dataclass(frozen=True)
class _Alone:
    """A cache of which the host knows that it holds no more than `length_bound` tokens, also where a graph is recorded."""

    keys: KVBuffer
    values: KVBuffer
    lengths: torch.Tensor
    length_bound: int
    page_table: torch.Tensor | None = None
    rotate_keys: bool = False


@dataclass(frozen=True)
class Chunk:
    """New tokens q, k, v [B, heads, L, D], the cache that holds them and all before, and what is to be read: float32 k, v."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache
    read: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def random(case: CaseJob, formats: str, device: torch.device) -> Chunk:
        """Random normal, the same every time."""
        generator, (keys, values) = torch.Generator(device).manual_seed(0), parse_formats(formats)

        def normal(heads: int, tokens: int) -> torch.Tensor:
            size = (case.batch, heads, tokens, DIM)
            return torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)

        q, k, v = 4 * normal(Q_HEADS, case.new), normal(KV_HEADS, case.new), normal(KV_HEADS, case.new)
        cache = KVCache(case.batch, KV_HEADS, DIM, case.past + case.new, keys=keys, values=values, device=device)
        if case.past:
            cache.append(normal(KV_HEADS, case.past), normal(KV_HEADS, case.past))
        old = (x[:, :, : case.past] for x in cache.dequantized())
        k_read, v_read = (torch.cat([x, new], 2) for x, new in zip(old, (k, v), strict=True))
        cache.append(k, v)
        return Chunk(q, k, v, cache, (k_read, v_read))

    @property
    def past(self) -> int:
        return self.read[0].shape[2] - self.q.shape[2]

    def ours(self, cache: KVCache, impl: str = "auto") -> torch.Tensor:
        alone = _Alone(cache.keys, cache.values, cache.lengths, self.q.shape[2])
        out = halfbyte.prefill_attention(self.q, self.k, self.v, cache if self.past else alone, impl=impl)
        assert isinstance(out, torch.Tensor)  # the pair with lse comes only on request
        return out

    def in_16_bits(self) -> Callable[[KVCache], torch.Tensor]:
        """torch's attention as a careful user asks for it: no mask of numbers, no repeated heads."""
        k, v = (x.bfloat16() for x in self.read)
        how: dict[str, Any] = {"attn_mask": causal_lower_right(self.q.shape[2], k.shape[2])} if self.past else {"is_causal": True}
        return lambda _: F.scaled_dot_product_attention(self.q, k, v, enable_gqa=True, **how)

    def judge(self, outs: Sequence[torch.Tensor]) -> Accuracy:
        """The promise at every position of every sequence."""
        return timed_attention_accuracy(torch.stack(list(outs)), *self._right)

    @cached_property
    def _right(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Eager and float64 results [B, Hq, L, D], some positions at a time."""
        scale, k, v = DIM**-0.5, *self.read
        step, parts, end = max(1, _SCORES // (self.q.shape[0] * self.q.shape[1] * k.shape[2])), [], self.past
        for q in self.q.split(step, 2):
            end += q.shape[2]
            prefix = k[:, :, :end], v[:, :, :end]
            parts.append((eager_attention(q, *prefix, scale), float64_attention(q, *prefix, scale)))
        return torch.cat([base for base, _ in parts], 2), torch.cat([ref for _, ref in parts], 2)


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("case", "format", "implementation", "us", "x 16 bits", "TFLOPS", "error")


def table(measured: Sequence[Record]) -> Table:
    """A row for each case, format and implementation."""
    return HEADERS, [_row(r, measured) for r in measured if r.op == OP and r.shape]


def _row(r: Record, measured: Sequence[Record]) -> tuple[str, ...]:
    case = CaseJob(r.shape["B"], r.shape["L"], r.shape["P"])
    return (
        *(r.case, r.formats if case.past else "", r.implementation),
        f"{1e6 * r.seconds:,.1f}" if r.seconds else "refused",
        times_text(seconds_of(measured, r, TORCH), r.seconds),
        f"{case.products / r.seconds / 1e12:.3g}" if r.seconds else "",
        "" if r.error is None else f"{r.error:.2g}",
    )


def _faster(measured: Sequence[Record], than: str, keep: Callable[[Record], bool]) -> dict[str, float]:
    """How many times as fast as another implementation halfbyte is, by case and format."""
    speedups = {}
    for r in measured:
        other = seconds_of(measured, r, than)
        if r.op == OP and r.implementation == OURS and r.seconds and other and keep(r):
            speedups[r.case.removeprefix("prompts, ") + (f", {r.formats}" if r.shape["P"] else "")] = other / r.seconds
    return speedups


def drawn(measured: Sequence[Record]) -> list[str]:
    """How many times as fast as 16 bits."""
    faster = _faster(measured, TORCH, lambda _: True)
    return (
        [charts.bars(faster, x_label="times as fast as torch in 16 bits", title="Attention of a prompt", line=1.0)]
        if faster
        else []
    )


def says(measured: Sequence[Record]) -> list[str]:
    """Against 16 bits without and with a past, and against the portable kernel."""
    parts = []
    for what, keep in (("over itself", lambda r: not r.shape["P"]), ("behind a packed past", lambda r: r.shape["P"] > 0)):
        if speedups := _faster(measured, TORCH, keep):
            parts.append(f"{what} {range_text(speedups)} times as fast as torch in 16 bits")
    if portable := _faster(measured, PORTABLE, lambda _: True):
        parts.append(f"{range_text(portable, 1)} times as fast as the portable kernel")
    return [f"Attention of a prompt {', '.join(parts)}."] if parts else []


STUDY = Study("prompts", table, drawn, says, text_columns=3, effort=MANY_GRAPHS, jobs=jobs)
