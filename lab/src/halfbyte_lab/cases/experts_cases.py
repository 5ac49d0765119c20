"""`python -m halfbyte_lab experts`: mixtures of experts, both projections: decoding against reading the experts that are hit and,
in MXFP4, against Triton's own kernel; prompts against a grouped GEMM in 16 bits, each projection by itself and both in one call.

Tokens choose their experts at random. Bytes are those of the experts that are hit, each once. All calls of a case use the same
ids; each has a copy of the stack, more of them than the L2 cache holds. On a CPU one small mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

import halfbyte
from halfbyte.errors import Unsupported
from halfbyte.formats import weight_format
from halfbyte.ops.experts_mlp import Projection, experts_mlp
from halfbyte.plans import plan
from halfbyte.reference.experts import Activation, ExpertsCall, expert_values, experts_linear, hit
from halfbyte.tensors import QuantTensor
from halfbyte_lab.baselines import triton_experts
from halfbyte_lab.cases.targets import Figures, Target, judge
from halfbyte_lab.measure.checks import Accuracy, linear_accuracy
from halfbyte_lab.measure.linear import copies_of
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.timing import NOT_CAPTURED, Work, fixed_threads, is_cold
from halfbyte_lab.measure.trials import Outcome, Trial, one_by_one, reason

#: One projection, and both in one call.
OPS = ("experts_linear", "experts_mlp")
TOKENS, PROMPTS = (1, 4, 16, 64), (512, 2048, 8192)
#: Shares of the roofline by number of tokens; how many times faster than Triton's kernel those are, and a prompt than 16 bits.
BARS, TRITON_BAR, PROMPT_BAR = {1: 0.85, 4: 0.85, 16: 0.7}, 1.5, 1.0
#: The shares of both projections in one call, by model.
BOTH_BARS = {
    "Qwen3-30B-A3B": {1: 0.72, 4: 0.80, 16: 0.80},
    "GPT-OSS-20B": {1: 0.75, 4: 0.80, 16: 0.80},
    "Mixtral-8x7B": {1: 0.82, 4: 0.86, 16: 0.84},
}
#: The 16-bit peer of prompts, and that of MXFP4 where it cannot be had.
GROUPED, TRITON = "grouped GEMM", "triton_kernels"
#: Weights that are drawn and quantized at a time.
_PIECE = 1 << 26


@dataclass(frozen=True)
class Layer:
    """Experts of a model: their number, how many a token takes, hidden and intermediate size."""

    model: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    formats: str
    activation: Activation
    bias: bool = False
    prompts: tuple[int, ...] = PROMPTS


_SILU, _OAI = Activation("silu"), Activation("silu", 1.702, 7.0, 1.0)
LAYERS = (
    Layer("Qwen3-30B-A3B", 128, 8, 2048, 768, "int4_g128", _SILU),
    Layer("GPT-OSS-20B", 32, 4, 2880, 2880, "mxfp4", _OAI, bias=True),
    Layer("GPT-OSS-120B", 128, 4, 2880, 2880, "mxfp4", _OAI, bias=True),
    Layer("Mixtral-8x7B", 8, 2, 4096, 14336, "int4_g128", _SILU),
)
SMALL = Layer("a small mixture", 4, 2, 256, 128, "int4_g128", _SILU, prompts=(96,))


def jobs(impls: Sequence[str], kind: str, quick: bool = False) -> list[Job]:
    """Both projections of each layer; `quick`: of the smallest."""
    for impl in impls:
        plan("experts_linear", impl, kind)
    layers = (SMALL,) if kind != "cuda" else LAYERS[:1] if quick else LAYERS
    projections = [ProjectionJob(layer, down, tuple(impls)) for layer in layers for down in (False, True)]
    return [*projections, *(BothJob(layer) for layer in layers if "auto" in impls)]


@dataclass(frozen=True)
class ProjectionJob:
    """One projection of a layer with all numbers of tokens: gate and up with their activation, or down with the weighted sum."""

    layer: Layer
    down: bool
    impls: tuple[str, ...]
    op: str = OPS[0]

    @property
    def name(self) -> str:
        return f"{self.layer.model}, {'down' if self.down else 'gate and up'}"

    def case(self, tokens: int) -> str:
        return f"{self.name}, {tokens} token{'s' * (tokens > 1)}"

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each number of tokens and implementation."""
        selection = {
            t: [i for i in self.impls if session.wants(self.case(t), self.layer.formats, f"halfbyte {i}")]
            for t in (*TOKENS, *self.layer.prompts)
        }
        if not any(selection.values()):
            return
        session.free()
        generator = torch.Generator(session.device.torch).manual_seed(0)
        with torch.no_grad(), fixed_threads(session.threads):
            stack = self.stack(generator)
            for tokens, impls in selection.items():
                if impls:
                    yield from self._case(session, self.call(stack, tokens, generator), impls)

    def stack(self, generator: torch.Generator) -> QuantTensor:
        """The weight of all experts, drawn and quantized some at a time."""
        layer = self.layer
        n, k = (layer.hidden, layer.inner) if self.down else (2 * layer.inner, layer.hidden)
        pieces, step = [], max(1, _PIECE // (n * k))
        for first in range(0, layer.experts, step):
            size = (min(step, layer.experts - first), n, k)
            values = torch.randn(size, generator=generator, device=generator.device).mul_(k**-0.5)
            pieces.append(halfbyte.quantize(values, layer.formats))
        parts = {name: torch.cat([piece.parts()[name] for piece in pieces]) for name in pieces[0].parts()}
        return QuantTensor(weight_format(layer.formats), (layer.experts, n, k), **parts)

    def call(self, stack: QuantTensor, tokens: int, generator: torch.Generator) -> ExpertsCall:
        """One of so many tokens, whose experts are drawn."""
        layer, size = self.layer, (stack.shape[0], stack.shape[1])
        bias = torch.randn(size, generator=generator, device=generator.device).bfloat16() if layer.bias else None
        return drawn_call(stack, bias, None if self.down else layer.activation, tokens, layer.top_k, generator)

    def _case(self, session: Session, call: ExpertsCall, impls: Sequence[str]) -> Iterator[Record]:
        """The records of one number of tokens: those of peers, and ours."""
        (experts, n, k), (tokens, top_k), active = call.weight.shape, call.ids.shape, len(hit(call))
        nbytes, name, case = call.weight.nbytes * active // experts, self.layer.formats, self.case(tokens)
        copies = max(2, session.copies(nbytes))
        stacks, judge_result = copies_of(call.weight, copies), promise(call)
        judge_one = one_by_one(judge_result)
        trials = {
            impl: Trial(f"{self.name} {impl}", Work([partial(run, call._replace(weight=w), impl) for w in stacks]), judge_one)
            for impl in impls
        }
        peers: dict[str, Trial] = {}
        others: dict[str, Outcome] = {}
        if tokens in self.layer.prompts:
            peers[GROUPED] = Trial(f"{self.name} {GROUPED}", Work([partial(grouped, call, _values(call))]), judge_one)
        elif name == "mxfp4" and session.device.kind == "cuda":
            try:
                peers = in_triton(self.name, call, copies, judge_result)
            except Exception as error:
                others[TRITON] = Outcome(refused=reason(error))
        shape = {"T": tokens, "top_k": top_k, "E": experts, "hit": active, "N": n, "K": k}
        blank = Record(self.op, shape, name, "", nbytes, session.environment, case=case)
        warm = "" if is_cold(copies, nbytes, session.device.cache_bytes) else ", partly from cache"
        outcomes = session.time(peers | trials)
        others |= {peer: outcomes[peer] for peer in peers}
        for peer, outcome in others.items():
            r = replace(blank, formats="bf16" if peer == GROUPED else name, implementation=peer)
            yield _finished(session, r, outcome, "" if peer == GROUPED else warm, {})
        for impl in trials:
            yield _finished(session, replace(blank, implementation=f"halfbyte {impl}"), outcomes[impl], warm, others)


@dataclass(frozen=True)
class BothJob:
    """Both projections of a layer in one call; of prompts in two as well, and in 16 bits, which sorts the pairs once, too."""

    layer: Layer
    op: str = OPS[1]

    @property
    def name(self) -> str:
        return f"{self.layer.model}, both projections"

    def case(self, tokens: int) -> str:
        return f"{self.name}, {tokens} token{'s' * (tokens > 1)}"

    def measure(self, session: Session) -> Iterator[Record]:
        """The records of each number of tokens."""
        every = (*TOKENS, *self.layer.prompts)
        selection = [t for t in every if session.wants(self.case(t), self.layer.formats, "halfbyte auto")]
        if not selection:
            return
        session.free()
        generator = torch.Generator(session.device.torch).manual_seed(0)
        with torch.no_grad(), fixed_threads(session.threads):
            parts = [ProjectionJob(self.layer, down, ("auto",)) for down in (False, True)]
            stacks = [part.stack(generator) for part in parts]
            for tokens in selection:
                up, down = (part.call(w, tokens, generator) for part, w in zip(parts, stacks, strict=True))
                yield from self._case(session, up, down._replace(ids=up.ids))

    def _case(self, session: Session, up: ExpertsCall, down: ExpertsCall) -> Iterator[Record]:
        name, (tokens, top_k), (experts, n, k), active = self.layer.formats, up.ids.shape, up.weight.shape, len(hit(up))
        truth = experts_linear(down._replace(x=experts_linear(up._replace(x=up.x.double()))))
        eager = _in_16_bits(down._replace(x=_in_16_bits(up)))
        nbytes = (up.weight.nbytes + down.weight.nbytes) * active // experts
        is_prompt = tokens in self.layer.prompts
        copies = 1 if is_prompt else max(2, session.copies(nbytes))
        stacks = zip(copies_of(up.weight, copies), copies_of(down.weight, copies), strict=True)
        calls = [partial(_in_one_call, up._replace(weight=u), down._replace(weight=d)) for u, d in stacks]
        ways: dict[str, Work] = {"halfbyte auto": Work(calls)}
        if is_prompt:
            ways["halfbyte auto, two calls"] = Work([partial(_in_two_calls, up, down)])
            ways[GROUPED] = Work([partial(grouped_both, up, down, _values(up), _values(down))])
        judge_one = one_by_one(lambda out: linear_accuracy(out, eager, truth))
        outcomes = session.time({way: Trial(f"{self.name} {way}", work, judge_one) for way, work in ways.items()})
        shape = {"T": tokens, "top_k": top_k, "E": experts, "hit": active, "N": n, "K": k}
        blank = Record(self.op, shape, name, "", nbytes, session.environment, case=self.case(tokens))
        warm = "" if is_cold(copies, nbytes, session.device.cache_bytes) else ", partly from cache"
        beside = {GROUPED: outcomes[GROUPED]} if is_prompt else {}
        for way, outcome in outcomes.items():
            r = replace(blank, implementation=way, formats="bf16" if way == GROUPED else name)
            yield _finished(session, r, outcome, warm, beside)


def drawn_call(
    weight: QuantTensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    tokens: int,
    top_k: int,
    generator: torch.Generator,
) -> ExpertsCall:
    """A call of so many tokens, drawn with their experts: a first projection or, without an activation, one with a weighted sum."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=generator.device).bfloat16()

    experts, _, k = weight.shape
    ids = torch.rand(tokens, experts, generator=generator, device=generator.device).argsort(1)[:, :top_k].contiguous()
    if activation is not None:
        return ExpertsCall(normal(tokens, k), weight, ids, None, bias, activation)
    return ExpertsCall(normal(tokens, top_k, k), weight, ids, normal(tokens, top_k).softmax(1), bias, None)


def in_triton(name: str, call: ExpertsCall, copies: int, promised: Callable[[torch.Tensor], Accuracy]) -> dict[str, Trial]:
    """Triton's own kernel in each of its ways. Raises where it cannot be had."""
    if missing := triton_experts.missing():
        raise Unsupported(missing)
    experts = triton_experts.Experts(call, copies)
    judge_one = one_by_one(lambda out: promised(experts.result(out)))
    return {way.name: Trial(f"{name} {way.name}", Work(experts.calls(way)), judge_one) for way in triton_experts.WAYS}


def _finished(session: Session, r: Record, outcome: Outcome, warm: str, others: Mapping[str, Outcome]) -> Record:
    """The record with its time, or why it has none; ours with its bar, beside peers."""
    timing, bars = outcome.timing, _bars(r)
    if timing is None or outcome.accuracy is None:
        return replace(r, refused=f"{r.case} {r.implementation}: {outcome.refused}", bars=judge(bars, {}))
    r = with_timing(r, replace(timing, method=timing.method + warm), outcome.accuracy)
    if not r.implementation.startswith("halfbyte"):
        return r
    r = session.against_roofline(r)
    timings = {peer: o.timing for peer, o in others.items() if o.timing and NOT_CAPTURED not in o.timing.method}
    seconds = {peer: timing.median for peer, timing in timings.items()}
    if GROUPED in seconds:
        r = replace(r, peer=GROUPED, peer_seconds=seconds.pop(GROUPED))
    return replace(r, bars=judge(bars, figures(r, min(seconds.values(), default=None))))


def figures(r: Record, triton: float | None) -> Figures:
    """What the bars ask for; `triton`: seconds of Triton's own kernel. Times that are not those of a graph are not judged."""
    if not r.seconds or NOT_CAPTURED in r.method:
        return {}
    return {
        "roof_share": r.roof_share,
        "times_16_bit": r.peer_seconds / r.seconds if r.peer_seconds else None,
        "times_4_bit": triton / r.seconds if triton else None,
    }


def _bars(r: Record) -> list[Target]:
    """What our own choice of a kernel must reach."""
    if r.implementation != "halfbyte auto":
        return []
    tokens = r.shape["T"]
    if r.op == OPS[1] and tokens in TOKENS:
        bound = BOTH_BARS.get(r.case.partition(",")[0], {}).get(tokens)
        return [] if bound is None else [Target(r.case, r.formats, "roof_share", bound)]
    if tokens in BARS:
        triton = [Target(r.case, r.formats, "times_4_bit", TRITON_BAR)] if r.formats == "mxfp4" else []
        return [Target(r.case, r.formats, "roof_share", BARS[tokens]), *triton]
    return [Target(r.case, r.formats, "times_16_bit", PROMPT_BAR)] if tokens > max(TOKENS) else []


# ------------------------------------------------------------------------------------------------------- the calls, and their truth


def run(call: ExpertsCall, impl: str) -> torch.Tensor:
    """The call by one implementation."""
    return halfbyte.experts_linear(*call[:4], bias=call.bias, activation=call.activation, impl=impl)


def _values(call: ExpertsCall) -> torch.Tensor:
    """The dequantized experts, bf16, as a 16-bit model keeps them: gate rows ahead of up rows where the activation is SiLU."""
    stack = torch.stack([expert_values(call.weight, e, torch.float32).bfloat16() for e in range(call.weight.shape[0])])
    return torch.cat((stack[:, ::2], stack[:, 1::2]), 1) if call.activation == _SILU else stack


def _in_one_call(up: ExpertsCall, down: ExpertsCall) -> torch.Tensor:
    first, last = (Projection([*call.weight.parts().values()], call.weight.format.name, call.bias) for call in (up, down))
    assert down.gates is not None
    assert up.activation is not None
    return experts_mlp(up.x, first, last, up.ids, down.gates, up.activation)


def _in_two_calls(up: ExpertsCall, down: ExpertsCall) -> torch.Tensor:
    return run(down._replace(x=run(up, "auto")), "auto")


def grouped(call: ExpertsCall, values: torch.Tensor) -> torch.Tensor:
    """A projection of a 16-bit model, whose weights are `_values`: pairs sorted, torch's grouped GEMM, what follows, and back."""
    keys, order, ends = _sorted(call.ids, len(values))
    x = call.x
    rows = x.reshape(-1, x.shape[-1])[order // (1 if x.ndim == 3 else call.ids.shape[1])]
    return _back(call, _product(call, rows, values, keys, ends), order)


def grouped_both(up: ExpertsCall, down: ExpertsCall, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Both projections of it, whose rows stay sorted in between."""
    keys, order, ends = _sorted(up.ids, len(first))
    inner = _product(up, up.x[order // up.ids.shape[1]], first, keys, ends)
    return _back(down, _product(down, inner, last, keys, ends), order)


def _sorted(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts of the sorted pairs, which pairs those are, and where each expert's end."""
    keys, order = ids.flatten().sort(stable=True)
    return keys, order, torch.searchsorted(keys, torch.arange(experts, device=keys.device), right=True, out_int32=True)


def _product(call: ExpertsCall, rows: torch.Tensor, values: torch.Tensor, keys: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sorted rows times their experts, with bias and activation."""
    y = F.grouped_mm(rows, values.mT, offs=ends)
    y = y if call.bias is None else y + call.bias[keys]
    if call.activation == _SILU:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return y if call.activation is None else call.activation(y)


def _back(call: ExpertsCall, y: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Sorted results in their places, and their weighted sum."""
    back = torch.empty_like(y).index_copy_(0, order, y).view(*call.ids.shape, -1)
    return back if call.gates is None else (back * call.gates.unsqueeze(-1)).sum(1)


def promise(call: ExpertsCall) -> Callable[[torch.Tensor], Accuracy]:
    """The promise of a call, whose reference is computed now."""
    truth, eager = experts_linear(call._replace(x=call.x.double())), _in_16_bits(call)
    return lambda out: linear_accuracy(out, eager, truth)


def _in_16_bits(call: ExpertsCall) -> torch.Tensor:
    """What eager torch makes of the dequantized experts, one by one, each step rounded to x's dtype."""
    x, weight, ids, gates, bias, activation = call[:6]
    rows = x if x.ndim == 3 else x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    y = rows.new_zeros(*ids.shape, weight.shape[1])
    for expert in hit(call):
        here, values = ids == expert, expert_values(weight, expert, torch.float32).to(x.dtype)
        y[here] = F.linear(rows[here], values, None if bias is None else bias[expert])
    y = y if activation is None else activation(y)
    return y if gates is None else (y * gates.unsqueeze(-1)).sum(1)
