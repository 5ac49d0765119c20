"""Study `step`: a decode step of whole models through `generate()`, and where its time goes, launch by launch.

Known sizes with random weights, in 16 bits with transformers' static cache, by plain generate(), with a graph a step, and with
fused blocks: what a user gets, and on a GPU the replayed graph by itself. `--filter '8b-8 .*fused'` chooses one case and one way;
all ways but fused blocks compile, which takes a minute each for 32 layers. The last case of one rank is traced behind all that is
timed, as tracing slows what follows it; several ranks run where there are as many GPUs. Before a packed model is timed, the first
block's linear layers, the output layer and attention over a cache of that size must keep the accuracy promise. On a CPU: the
shipped model's sizes.

A rank of several has its heads, its columns of the feed-forward and its rows of the output layer, with random weights; embeddings,
norms and the residual are the same on every rank. Behind o_proj, down_proj and the output layer run transformers' own collectives,
which on GPUs a recorded step holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import halfbyte
from halfbyte.device import Device
from halfbyte.experts import QuantExperts
from halfbyte.hf.every_forward import packed_forwards
from halfbyte.hf.model_support import blocks, head_dims, layer_types, read_config, text_config
from halfbyte.nn import FusedProjections, QuantLinear
from halfbyte.paths import resolve_model
from halfbyte_lab.cases.experts_cases import drawn_call, run
from halfbyte_lab.cases.experts_cases import promise as experts_promise
from halfbyte_lab.cases.rank import first_of_ranks
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.caches import DecodeCase, Inputs, Promise, fill, held_by
from halfbyte_lab.measure.checks import BenchmarkRefused
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.linear import promise
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table, times_text
from halfbyte_lab.model_sizes import SIZES, of_sizes
from halfbyte_lab.model_step import ALONE, PACKED, PLAIN, WAYS, Formats, Steps, Way, measure
from halfbyte_lab.studies import Study

OP, NEW, NEW_ON_CPU = "generate", 129, 9
#: What a launch is counted as: the first kind whose pattern its name holds.
KINDS = {
    "recurrence": "gated_delta",
    "attention": "decode|attention|flash|fmha|sdpa",
    "append": "append",
    "norm": "norm",
    "activation": "gated|silu|gelu",
    "linear": "linear|projections|gemm|nvjet|cutlass|addmm|::mm",
}
OTHER, GAPS, BYTES = "other", "gaps", "bytes at the read roofline"


@dataclass(frozen=True)
class Case:
    """Sizes, a batch, and what is wanted of the fastest way on an H200."""

    name: str
    model: str
    batch: int
    context: int
    target: str = ""
    ranks: int = 1
    weights: str = "int4_g128"
    lm_head: str | None = "int8_col"

    @property
    def formats(self) -> Formats:
        """Of the quantized model: the same in every case but for weights whose K groups of 128 do not divide, and for an output
        layer in 16 bits, as engines have it.
        """
        return Formats(self.weights, "int8", "int4_g32", self.lm_head)

    @property
    def ways(self) -> Sequence[Way]:
        """How it can run: 16 bits of the largest model leave no room; ranks and what stands beside engines take the fastest way."""
        if self.ranks > 1 or self.lm_head is None:
            return PACKED[2:]
        return PACKED if self.model == "llama-3-70b" else WAYS


CASES = (
    Case("8b-1", "llama-3-8b", 1, 1024, "600 tokens/s"),
    Case("8b-8", "llama-3-8b", 8, 8192, "2.7 ms"),
    Case("8b-64", "llama-3-8b", 64, 2048, "55 % of the roofline"),
    *(Case(f"8b, {b} x {n:,}", "llama-3-8b", b, n, lm_head=None) for b, n in ((1, 2048), (8, 8192), (64, 8192))),
    Case("0.6b-1", "qwen3-0.6b", 1, 1024, "3x 16 bits"),
    Case("1.7b-1", "qwen3-1.7b", 1, 1024, "3x 16 bits"),
    Case("70b-1", "llama-3-70b", 1, 1024, "80 tokens/s"),
    *(Case(f"70b-1 on {ranks}", "llama-3-70b", 1, 1024, ranks=ranks) for ranks in (2, 4, 8)),
    *(
        Case(f"{name}-{batch}", model, batch, 1024, "55 % of the roofline", weights=weights)
        for name, model, weights in (
            ("9b", "qwen3.5-9b", "int4_g128"),
            ("30b", "qwen3-30b-a3b", "int4_g128"),
            ("20b", "gpt-oss-20b", "mxfp4"),
        )
        for batch in (1, 8)
    ),
)
SMALL = (Case("demo-2", "demo", 2, 64), Case("demo-2 on 2", "demo", 2, 64, ranks=2))


def jobs(session: Session) -> list[Job]:
    """One for each case that the filter lets through, with `--quick` for the first; the last is traced."""
    gpus = torch.cuda.device_count()
    cases = (CASES[:1] if session.options.quick else CASES) if session.device.kind == "cuda" else SMALL
    selection = [case for case in cases if _ways(session, case) and (case.ranks <= max(gpus, 1) or session.device.kind == "cpu")]
    last = [case for case in selection if case.ranks == 1][-1:]
    return [StepJob(case, traced=case in last) for case in selection]


def _ways(session: Session, case: Case) -> list[Way]:
    return [way for way in case.ways if session.wants(case.name, "bf16" if way is PLAIN else str(case.formats), way.name)]


@dataclass(frozen=True)
class StepJob:
    """One case in every way that is wanted."""

    case: Case
    traced: bool = False
    op: str = OP

    @property
    def name(self) -> str:
        return self.case.name

    def measure(self, session: Session) -> Iterator[Record]:
        """Each way's record as soon as it is timed, and again with the parts of a step where that is traced."""
        session.free()
        case, gpu = self.case, session.device.kind == "cuda"
        config = SIZES[case.model] if case.model in SIZES else read_config(resolve_model(case.model))
        steps, ways, judge_case = (
            Steps(case.batch, case.context, NEW if gpu else NEW_ON_CPU),
            _ways(session, case),
            partial(judge, case),
        )
        records: Iterable[Record]
        if case.ranks > 1:
            whole = Whole(config, case.formats, steps, ways, judge_case, case.ranks)
            records = first_of_ranks(partial(_measured, whole), case.ranks, session.device.kind)
        else:
            model = of_sizes(config, session.device, case.formats)
            records = measure(model, case.formats, steps, session.device, traced=self.traced, ways=ways, judged=judge_case)
        for record in records:
            yield replace(record, case=case.name, method="generate(), less the shortest call that ends with the first token")


def judge(case: Case, model: Any) -> None:
    """Raise `BenchmarkRefused` unless the linear layers and experts of the first block of each kind, the output layer and attention
    keep the accuracy promise."""
    config = text_config(model)
    kinds_of_blocks = layer_types(config)
    firsts = [block for i, block in enumerate(blocks(model)) if kinds_of_blocks.index(kinds_of_blocks[i]) == i]
    for module in (*chain.from_iterable(block.modules() for block in firsts), model.get_output_embeddings()):
        if isinstance(module, QuantLinear | FusedProjections):
            weight = module.weight
            x = torch.randn(case.batch, weight.shape[1], device=model.device, dtype=torch.bfloat16)
            promise(x, weight)(halfbyte.linear(x, weight)).require(f"{case.name}: {module}")
        elif isinstance(module, QuantExperts):
            rng = torch.Generator(model.device).manual_seed(0)
            bias = None if module.bias is None else module.bias.bfloat16()
            call = drawn_call(module.weight, bias, module.activation, case.batch, config.num_experts_per_tok, rng)
            experts_promise(call)(run(call, "auto")).require(f"{case.name}: {module}")
    shape = DecodeShape(case.batch, config.num_attention_heads, config.num_key_value_heads, head_dims(config)[0], case.context)
    inputs = Inputs.random(DecodeCase(case.name, shape), model.device)
    cache = fill(inputs, f"{case.formats.keys}+{case.formats.values}")
    out = halfbyte.decode_attention(inputs.q, cache)
    assert isinstance(out, torch.Tensor)  # a pair only with return_lse
    Promise(inputs.q, held_by(cache)).judge([out]).require(f"{case.name}: attention")


# ---------------------------------------------------------------------------------------------------------------- several ranks


class Whole(NamedTuple):
    """What all ranks together are, and what is measured of them: as for `measure`."""

    config: Any
    formats: Formats
    steps: Steps
    ways: Sequence[Way]
    judged: Callable[[Any], object]
    ranks: int


def _measured(whole: Whole, machine: Device) -> Iterator[Record]:
    """What one of the ranks measures."""

    def judged(quantized: Any) -> None:
        whole.judged(quantized)
        connect(quantized, whole.ranks, machine)

    model = share(whole.config, whole.ranks, machine, whole.formats)
    for record in measure(model, whole.formats, whole.steps, machine, traced=False, ways=whole.ways, judged=judged):
        yield replace(record, shape={**record.shape, "ranks": whole.ranks})


def share(config: Any, ranks: int, machine: Device, formats: Formats) -> Any:
    """One rank's part of a model of these sizes, not quantized and not connected yet."""
    mine = deepcopy(config)
    mine.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % ranks:
            raise BenchmarkRefused(f"{ranks} ranks cannot share {name}={getattr(config, name)}")
        setattr(mine, name, getattr(config, name) // ranks)
    mine.tie_word_embeddings = False
    torch.manual_seed(1 + dist.get_rank())
    model = of_sizes(mine, machine, formats)
    torch.manual_seed(0)
    with machine.torch:
        model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size, dtype=model.dtype))
    return model


def connect(model: Any, ranks: int, machine: Device) -> None:
    """Put the collectives of transformers behind the layers that need other ranks, and see that all ranks choose the same token."""
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    except ImportError as error:
        raise BenchmarkRefused(f"ranks need the parallel styles of transformers 5.23, not {version('transformers')}") from error

    mesh, head = init_device_mesh(machine.kind, (ranks,)), model.get_output_embeddings()
    rows = [layer for block in blocks(model) for layer in (block.self_attn.o_proj, block.mlp.down_proj)]  # type: ignore[union-attr]
    for layer, style in [*((layer, "rowwise") for layer in rows), (head, "colwise_gather_output")]:
        layer.parallel_style = style
        ALL_PARALLEL_STYLES[style].install_forward(layer, mesh)
    head.out_features *= ranks
    model.config.distributed_config = DistributedConfig(tp_size=ranks)
    ids = torch.arange(8, device=machine.torch)[None]
    with torch.no_grad(), packed_forwards(model):
        logits = model(ids).logits[0].float().contiguous()
    others = [torch.empty_like(logits) for _ in range(ranks)]
    dist.all_gather(others, logits)
    if not all(torch.equal(logits, other) for other in others):
        raise BenchmarkRefused(f"{ranks} ranks have different logits")


# ------------------------------------------------------------------------------------------------------------- how it is told

#: What cases call the sizes, and the engine that is measured beside.
MODELS = {
    "8b": "Llama 3 8B",
    "70b": "Llama 3 70B",
    "0.6b": "Qwen3 0.6B",
    "1.7b": "Qwen3 1.7B",
    "9b": "Qwen3.5 9B",
    "30b": "Qwen3 30B-A3B",
    "20b": "gpt-oss 20B",
}
TRANSFORMERS, ENGINE, FASTEST = PLAIN.name, "vLLM 0.33", "halfbyte, fused blocks"
SUMMARY = ("model", "batch x context", "16 bits, ms", "halfbyte, ms", "vLLM, ms", "faster than 16 bits", "tokens/s", "moves, GB")
HEADERS = ("case", "way", "formats", "ms a step", "tokens/s", "x 16 bits", "GB", "of roofline", "first token, ms", "target")
#: What targets are of, by their units; all but milliseconds are to be reached from below.
_MS, _TOKENS, _SHARE, _TIMES = "ms", "tokens/s", "% of the roofline", "x 16 bits"


def summary(measured: Sequence[Record]) -> Table:
    """One row for each model, batch and context: a step in 16 bits, with halfbyte and in vLLM; what halfbyte makes and reads."""
    timed = [r for r in measured if r.op == OP and r.seconds]
    return SUMMARY, [_compared([r for r in timed if r.case == case]) for case in dict.fromkeys(r.case for r in timed)]


def _compared(of_case: Sequence[Record]) -> tuple[str, ...]:
    by_way = {r.implementation: r for r in of_case}
    first, ours = of_case[0], by_way.get(FASTEST)
    sizes, _, ranks = first.case.partition(" on ")
    name = MODELS.get(re.split("[-,]", sizes)[0], sizes) + (f" on {ranks} GPUs" if ranks else "")
    plain, *others = (by_way[way].seconds if way in by_way else None for way in (TRANSFORMERS, FASTEST, ENGINE))
    return (
        *(name, f"{first.shape['B']} x {first.shape['T']:,}"),
        *("" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in (plain, *others)),
        f"{times}x" if (times := times_text(plain, ours.seconds if ours else None)) else "",
        *((f"{ours.shape['B'] / (ours.seconds or 1.0):,.0f}", f"{ours.nbytes / 1e9:.2f}") if ours else ("", "")),
    )


def table(measured: Sequence[Record]) -> Table:
    """One row for each case and way."""
    return HEADERS, [_row(r, measured) for r in measured if r.op == OP and r.seconds]


def _row(r: Record, measured: Sequence[Record]) -> tuple[str, ...]:
    seconds = r.seconds or 0.0
    same = (p for p in measured if p.environment == r.environment)  # of one run
    plain = next((p.seconds for p in same if (p.case, p.implementation) == (r.case, PLAIN.name)), None)
    first = re.search(r"first token ([\d.]+) ms", r.note)
    target = next((case.target for case in CASES if case.name == r.case), "")
    if target and r.implementation == FASTEST:
        any_run = next((p.seconds for p in measured if (p.case, p.implementation) == (r.case, PLAIN.name)), None)
        target = f"{target}: {'met' if _is_met(target, r, any_run) else 'missed'}"
    return (
        *(r.case, r.implementation, r.formats, f"{1e3 * seconds:.2f}", f"{r.shape['B'] / seconds:,.0f}"),
        times_text(plain, seconds),
        f"{r.nbytes / 1e9:.2f}" if r.nbytes else "",
        f"{r.roof_share:.0%}" if r.roof_share else "",
        *(first[1] if first else "", target),
    )


def _is_met(target: str, r: Record, plain: float | None) -> bool:
    """Whether a record reaches what its case wants; `plain`: seconds in 16 bits."""
    bound, unit = re.fullmatch(r"([\d.]+) ?(.*)", target).groups()  # type: ignore[union-attr]
    seconds = r.seconds or float("inf")
    value = {
        _MS: -1e3 * seconds,
        _TOKENS: r.shape["B"] / seconds,
        _SHARE: round(100 * (r.roof_share or 0.0)),
        _TIMES: (plain or 0.0) / seconds,
    }[unit]
    return value >= (-float(bound) if unit == _MS else float(bound))


def kinds(r: Record) -> dict[str, float]:
    """Microseconds of a traced step by kind of launch, and those in which nothing runs."""
    by_kind = dict.fromkeys((*KINDS, OTHER), 0.0)
    for name, seconds in r.kernels.items():
        by_kind[next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)] += 1e6 * seconds
    by_kind[GAPS] = max(0.0, 1e6 * (r.seconds or 0.0) - sum(by_kind.values()))
    return {kind: us for kind, us in by_kind.items() if us > 0}


def drawn(measured: Sequence[Record]) -> list[str]:
    """For each case that was traced, the ways by kind of launch, and below each the time in which its bytes could be read."""
    figures = []
    for case in dict.fromkeys(r.case for r in measured if r.kernels):
        stacks: dict[str, dict[str, float]] = {}
        for r in (r for r in measured if r.case == case and r.kernels):
            stacks[r.implementation] = kinds(r)
            stacks[f"{r.implementation}: roofline"] = {BYTES: 1e6 * (r.seconds or 0.0) * (r.roof_share or 0.0)}
        figures.append(charts.stacked_bars(stacks, x_label="us a step", title=f"{_title(measured, case)}: where a step goes"))
    return figures


def _title(measured: Sequence[Record], case: str) -> str:
    """ "8b-8: Llama 3 8B, 8 x 8,192", as in the tables."""
    name, sizes, *_ = _compared([r for r in measured if r.case == case])
    return f"{case}: {name}, {sizes}"


def says(measured: Sequence[Record]) -> list[str]:
    """The cases in which a graph alone took longer than the step that it is part of."""
    seconds = {(r.case, r.implementation): r.seconds for r in measured if r.op == OP and r.seconds}
    longer = [case for (case, way), step in seconds.items() if seconds.get((case, way + ALONE), 0.0) > step]
    if not longer:
        return []
    noise = "by the noise of the two calls whose difference a step is"
    return [f"The graph alone takes longer than its step in {', '.join(dict.fromkeys(longer))}, {noise}."]


STUDY = Study("step", summary, drawn, says, text_columns=3, also=table, jobs=jobs)
