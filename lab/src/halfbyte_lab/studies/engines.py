"""Study `engines`: the attention of an engine's step over packed pages, beside vLLM's own kernels.

A layer of Llama-3-8B. "step" appends the new tokens by slot and attends, "attention" leaves the append out; both run what the vLLM
plugin runs: requests that decode in one call, the chunk of a prompt in another; with `deterministic_batch` as well, which vLLM asks
for by VLLM_BATCH_INVARIANT. vLLM's kernels store 16 bits, INT8 or INT4 with a scale per token and head, as "int8" and "int4" of
halfbyte do; see `halfbyte_lab.baselines.vllm_kernels` for where they come from.
torch in 16 bits reads contiguous memory instead of pages. Host times are those of eager calls; an engine with CUDA graphs pays only
`build`, once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from halfbyte_lab.baselines import vllm_kernels
from halfbyte_lab.baselines.run import attention_baselines
from halfbyte_lab.baselines.vllm_kernels import VllmCache
from halfbyte_lab.cases import overhead
from halfbyte_lab.cases.engine_step import Cache, Dense, Packed, Requests, Step
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.checks import HEAD_ERROR, Accuracy, timed_attention_accuracy
from halfbyte_lab.measure.decode import sdpa_variants
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table, range_text, rate_text, seconds_of, times_text, us
from halfbyte_lab.measure.timing import MANY_GRAPHS, Call, Work, fixed_threads, is_cold
from halfbyte_lab.measure.trials import Trial, one_by_one
from halfbyte_lab.studies import Study

OP, HOST = "engine step", "engine host"
FORMATS = ("int8", "int8+int4_g32", "int4")
Q_HEADS, KV_HEADS, DIM = 32, 8, 128
CASES = (
    Requests(64, 8192),
    Requests(64, 8192, prompt=512, past=3584),
    Requests(16, 8192),
    Requests(256, 1024),
    Requests(1, 131072),
    Requests(256, 8192),
    Requests(64, 8192, page=64),
    Requests(8, 131072),
    Requests(1, 1024),
)
QUICK, CPU = CASES[:2], (Requests(2, 96), Requests(2, 40, prompt=24, past=30))
STEP, ATTENTION, DECODE, INVARIANT = "step", "attention", "decode_attention", "attention, deterministic_batch"


def jobs(session: Session) -> list[Job]:
    """One for each batch, and the host's times."""
    cases = CPU if session.device.kind != "cuda" else QUICK if session.options.quick else CASES
    return [*(StepJob(requests) for requests in cases), HostJob()]


@dataclass(frozen=True)
class StepJob:
    """One batch, in every format and by every library."""

    requests: Requests
    op: str = OP

    @property
    def name(self) -> str:
        return f"engines, {self.requests}"

    def measure(self, session: Session) -> Iterator[Record]:
        """The caches one after the other, so that only one and its copies are in memory."""
        step = Step.random(self.requests, Q_HEADS, KV_HEADS, DIM, session.device.torch)
        for formats in FORMATS:
            yield from self._measure(session, step, partial(Packed, step, formats), "halfbyte", formats)
        if session.device.kind == "cuda" and not vllm_kernels.missing():
            for formats in vllm_kernels.MODES:
                yield from self._measure(session, step, partial(VllmCache, step, formats), "vllm", formats)
        yield from self._in_16_bits(session, step)

    def _measure(
        self, session: Session, step: Step, make: Callable[[], Packed | VllmCache], library: str, formats: str
    ) -> list[Record]:
        names = [STEP, ATTENTION]
        if library == "halfbyte":
            names += [DECODE] * (not self.requests.prompt) + [INVARIANT]
        names = [name for name in names if session.wants(self.name, formats, f"{library} {name}")]
        if not names:
            return []
        session.free()
        cache = make()
        step.fill(cache)
        return self._timed(session, step, [cache], {f"{library} {name}": _way(name, step) for name in names})

    def _in_16_bits(self, session: Session, step: Step) -> Iterator[Record]:
        """torch's attention, and FlashInfer's where it is installed and every request decodes."""
        session.free()
        pairs = Dense.tokens(step)
        variants = {
            n: a for n, a in sdpa_variants(session.device.kind, Q_HEADS > KV_HEADS).items() if session.wants(self.name, "bf16", n)
        }
        for name, attention in variants.items():
            yield from self._timed(session, step, [Dense(step, name, attention, pairs)], {name: _way(ATTENTION, step)})
        if find_spec("flashinfer") and not self.requests.prompt:
            q, (k, v) = step.q[:, :, None], pairs[0]
            for peer in attention_baselines(session, self.name, q, k, v, ("bf16", "fp8")):
                if peer.implementation.startswith("flashinfer"):
                    trial = Trial(peer.implementation, Work(peer.fns), one_by_one(peer.accuracy))
                    yield from self._records(session, peer.formats, peer.nbytes, len(peer.fns), {peer.implementation: trial})

    def _timed(
        self, session: Session, step: Step, caches: list[Any], ways: Mapping[str, Callable[[Any], torch.Tensor]]
    ) -> list[Record]:
        """Records of ways to use one cache, over as many copies of it as leave the L2."""
        first = caches[0]
        copies = session.copies(first.nbytes) if session.device.kind == "cuda" else 1
        caches = [first, *(first.copied() for _ in range(copies - 1))]
        judge = _judge(step, first)
        trials = {name: Trial(name, Work([partial(way, c) for c in caches]), judge) for name, way in ways.items()}
        return self._records(session, first.formats, first.nbytes, copies, trials)

    def _records(self, session: Session, formats: str, nbytes: int, copies: int, trials: dict[str, Trial]) -> list[Record]:
        r, records = self.requests, []
        shape = {"B": r.decodes, "T": r.context, "L": r.prompt, "P": r.past, "page": r.page, "Hq": Q_HEADS, "H": KV_HEADS, "D": DIM}
        cold = is_cold(copies, nbytes, session.device.cache_bytes) or nbytes > 32 * session.device.cache_bytes
        for name, outcome in session.time(trials).items():
            record = Record(OP, shape, formats, name, nbytes, session.environment, case=self.name)
            if outcome.timing and outcome.accuracy:
                timing = replace(outcome.timing, method=outcome.timing.method + ("" if cold else ", partly from cache"))
                records.append(session.against_roofline(with_timing(record, timing, outcome.accuracy)))
            else:
                records.append(replace(record, refused=f"{self.name} {formats} {name}: {outcome.refused}"))
        return records


def _way(name: str, step: Step) -> Callable[[Any], torch.Tensor]:
    """One call of a cache. A token is stored where it lies already, so a step can be repeated."""

    def whole(cache: Packed) -> torch.Tensor:
        cache.append(step.k, step.v, step.slots)
        return cache.attend()

    return {
        STEP: whole,
        ATTENTION: lambda cache: cache.attend(),
        DECODE: lambda cache: cache.decode(),
        INVARIANT: lambda cache: cache.attend(deterministic_batch=True),
    }[name]


def _judge(step: Step, cache: Cache) -> Callable[[Any], Accuracy]:
    """halfbyte is held to its promise, token by token; a peer to a relative L2 error over what it holds."""
    base, ref = step.right(cache)

    def judge(outs: Any) -> Accuracy:
        out = torch.stack(list(outs))
        if isinstance(cache, Packed):
            return timed_attention_accuracy(out[..., None, :], base[..., None, :], ref[..., None, :])
        return Accuracy(max(float((o.double() - ref).norm() / ref.norm()) for o in out), HEAD_ERROR, "relative L2")

    return judge


# ----------------------------------------------------------------------------------------------------------- the host's time


@dataclass(frozen=True)
class HostJob:
    """Host time of eager calls of a step, which needs a GPU; of the plugin's `build`, which needs vLLM."""

    op: str = HOST
    name: str = "engines, host"

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each call."""
        with torch.no_grad(), fixed_threads(session.threads):
            for requests in (CPU[0], CPU[1]):
                calls = {
                    name: call
                    for name, call in self._calls(session, requests).items()
                    if session.wants(self.name, FORMATS[1], name)
                }
                wait = partial(torch.cuda.synchronize, session.device.torch) if session.device.kind == "cuda" else lambda: None
                for name, timing in overhead.host_seconds(calls, wait).items():
                    blank = Record(HOST, {"B": requests.decodes, "L": requests.prompt}, FORMATS[1], name, 0, session.environment)
                    record = replace(blank, case=f"{self.name}, {'mixed' if requests.prompt else 'decode'}")
                    yield replace(
                        record, seconds=timing.median, p10=timing.p10, p90=timing.p90, repeats=timing.repeats, method=timing.method
                    )

    def _calls(self, session: Session, requests: Requests) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        step = Step.random(requests, Q_HEADS, KV_HEADS, DIM, session.device.torch)
        if session.device.kind == "cuda":
            cache = Packed(step, FORMATS[1])
            step.fill(cache)
            calls = {
                "append_slots": partial(cache.append, step.k, step.v, step.slots),
                "attention_varlen": cache.attend,
                STEP: partial(_way(STEP, step), cache),
            }
        if find_spec("halfbyte.vllm") and _vllm_installed():
            calls["build"] = _build(step)
        return calls


def _vllm_installed() -> bool:
    """Whether vLLM itself is there; stand-ins of `vllm_kernels` are not."""
    try:
        return find_spec("vllm") is not None
    except ValueError:  # a stand-in
        return False


def _build(step: Step) -> Call:
    """The plugin's metadata of one step, from vLLM's."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from halfbyte.vllm.batches import HalfbyteBuilder

    builder = HalfbyteBuilder.__new__(HalfbyteBuilder)  # `build` reads nothing else of an engine
    builder.reorder_batch_threshold = 1
    requests = step.requests
    metadata = CommonAttentionMetadata(
        query_start_loc=step.cu_seqlens_q,
        query_start_loc_cpu=step.cu_seqlens_q.cpu(),
        seq_lens=step.lengths,
        num_reqs=len(requests.lengths),
        num_actual_tokens=step.q.shape[0],
        max_query_len=max(requests.queries),
        max_seq_len=max(requests.lengths),
        block_table_tensor=step.page_table,
        slot_mapping=step.slots,
    )
    return partial(builder.build, 0, metadata)


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("case", "format", "implementation", "us", "GB/s", "of roofline", "x vLLM, same bits", "x decode_attention", "error")


def table(measured: Sequence[Record]) -> Table:
    """A row for each batch, format, library and part of the step; then the host's times."""
    return HEADERS, [_row(measured, r) for r in measured if r.op in (OP, HOST) and r.shape]


def _row(measured: Sequence[Record], r: Record) -> tuple[str, ...]:
    part = r.implementation.removeprefix("halfbyte ")
    ours = r.op == OP and part != r.implementation
    return (
        *(r.case, r.formats, r.implementation),
        us(r.seconds) if r.seconds else "refused",
        rate_text(r.gb_per_s) if r.op == OP else "",
        f"{100 * r.roof_share:.1f} %" if r.roof_share else "",
        times_text(seconds_of(measured, r, f"vllm {part}"), r.seconds) if ours else "",
        times_text(seconds_of(measured, r, f"halfbyte {DECODE}"), r.seconds) if ours and part == ATTENTION else "",
        "" if r.error is None else f"{r.error:.2g}",
    )


def faster(measured: Sequence[Record], part: str, than: str, formats: str = "") -> dict[str, float]:
    """How many times as fast a part of halfbyte's step is as another implementation, by case and format."""
    speedups = {}
    for r in measured:
        other = seconds_of(measured, r, than)
        if r.op == OP and r.implementation == f"halfbyte {part}" and r.seconds and other and formats in ("", r.formats):
            speedups[f"{r.case.removeprefix('engines, ')}, {r.formats}"] = other / r.seconds
    return speedups


def drawn(measured: Sequence[Record]) -> list[str]:
    """A step beside vLLM's fastest, whatever its format."""
    speedups = over_fastest(measured)
    title = "Append and attention of a step, beside vLLM's fastest format"
    return [charts.bars(speedups, x_label="times the speed of vLLM's fastest", title=title, line=1.0)] if speedups else []


def over_fastest(measured: Sequence[Record]) -> dict[str, float]:
    """How many times as fast a step is as vLLM's in the format in which vLLM is fastest, by case and format."""
    theirs = [r for r in measured if r.op == OP and r.implementation == f"vllm {STEP}" and r.seconds]
    fastest = {case: min(r.seconds or 0.0 for r in theirs if r.case == case) for case in dict.fromkeys(r.case for r in theirs)}
    return {
        f"{r.case.removeprefix('engines, ')}, {r.formats}": fastest[r.case] / r.seconds
        for r in measured
        if r.op == OP and r.implementation == f"halfbyte {STEP}" and r.seconds and r.case in fastest
    }


def says(measured: Sequence[Record]) -> list[str]:
    """Against vLLM at the same bits, against decode_attention and itself with deterministic_batch, and on the host."""
    sentences = []
    if speedups := over_fastest(measured):
        by_format = {f: {case: x for case, x in speedups.items() if case.endswith(f", {f}")} for f in FORMATS}
        parts = [f"{range_text(by_case)} times as fast in {f}" for f, by_case in by_format.items() if by_case]
        sentences.append(f"Append and attention of a step run {', '.join(parts)} as vLLM's Triton kernels in their best format.")
    against = {f: speedups for f in FORMATS if (speedups := faster(measured, STEP, f"vllm {STEP}", f))}
    if against:
        parts = [f"{range_text(speedups)} times as fast in {f}" for f, speedups in against.items()]
        sentences.append(f"At the same bits: {', '.join(parts)}.")
    if speedups := faster(measured, ATTENTION, f"halfbyte {DECODE}"):
        sentences.append(
            f"Over a batch that decodes, attention_varlen is {range_text(speedups)} times as fast as decode_attention."
        )
    if speedups := faster(measured, ATTENTION, f"halfbyte {INVARIANT}"):
        sentences.append(f"With deterministic_batch attention takes {range_text(speedups)} times as long.")
    host = [r for r in measured if r.op == HOST and r.seconds]
    if host:
        each = "; ".join(f"{r.implementation} {us(r.seconds)} us ({r.case.rpartition(', ')[2]})" for r in host)
        sentences.append(f"Host time of eager calls: {each}.")
    return sentences


STUDY = Study("engines", table, drawn, says, text_columns=3, effort=MANY_GRAPHS, jobs=jobs)
