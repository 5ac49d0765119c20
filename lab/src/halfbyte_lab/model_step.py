"""Decode steps of a whole model, in 16 bits and quantized: how long one takes, what it must read, and where its time goes.

Calls that end with the first token are timed by themselves and the shortest subtracted, so a step is what every further token
costs, and prompts that vary make none look faster. Both calls have caches of the same capacity, and the long one runs first, so the
timed calls compile and record nothing. A trace of a long call less one of a short call leaves what a step runs: kernels on a GPU
(CUPTI), each without its overlap with those before, ops on a CPU. What no kernel accounts for is waiting. On a CPU, which other
programs share, all sides are timed in turn; a GPU holds one side at a time. There the graph of a forward is replayed alone, too:
what `generate()` takes beyond that is the choice of a token, and the host.
"""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging

from halfbyte.device import Device, fastest_type
from halfbyte.errors import check
from halfbyte.formats import key_format, plain_format, value_format, weight_format
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.cache_layers import CacheSettings, layer_options, state_bytes
from halfbyte.hf.checkpoint import load as load_folder
from halfbyte.hf.mixtures import projections, unread_experts
from halfbyte.hf.model_support import ATTENTION, half_type, layer_reach, layer_types, text_config
from halfbyte.hf.quantize_model import quantize
from halfbyte.hf.recorded_step import kept_steps, release
from halfbyte.hf.weights import check_fits, find_lm_head, select
from halfbyte.nn import QuantLayer
from halfbyte.paths import resolve_model
from halfbyte.settings import HALVES, check_half
from halfbyte_lab.measure.cupti import busy_parts_of
from halfbyte_lab.measure.environment import Environment, environment
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.roofline import Roofline
from halfbyte_lab.measure.timing import QUICK

#: Calls whose median is taken, behind so many that compile and record.
_REPEATS, _WARM_UP = 5, 2
#: Tokens of the call that counts what steps use.
_COUNTED = 9
#: Parts below this share of a step are left out of its record.
_LEAST = 1e-3
#: Letters of a kernel's name.
_SHOWN = 60


class Way(NamedTuple):
    """A way to generate: what records call it, and options of `generate()`."""

    name: str
    options: dict[str, Any]


#: In 16 bits; its cache may be compiled and captured, as halfbyte's.
PLAIN = Way("transformers", {"cache_implementation": "static"})
#: With a packed cache.
PACKED = (
    Way("halfbyte", {"recorded": False}),
    Way("halfbyte, one graph a step", {"fuse_blocks": False}),
    Way("halfbyte, fused blocks", {}),
)
#: All of them, in the order in which they are measured.
WAYS = (PLAIN, *PACKED)
#: What records of a replayed graph say behind the name of the way.
ALONE = ", its graph alone"


@dataclass(frozen=True)
class Part:
    """What a step runs under one name: seconds in all, and how often."""

    seconds: float = 0.0
    times: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(self.seconds + other.seconds, self.times + other.times)


@dataclass(frozen=True)
class Times:
    """Seconds of the fastest first token, and of a decode step by each call."""

    first: float
    steps: tuple[float, ...]

    @property
    def step(self) -> float:
        """Of a decode step: the median."""
        return statistics.median(self.steps)


@dataclass(frozen=True)
class Formats:
    """What `hf.quantize` makes of a model, and the 16-bit type of the rest, which it has before."""

    weights: str
    keys: str
    values: str
    lm_head: str | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        """Unknown names are refused here."""
        weight_format(self.weights), key_format(self.keys), value_format(self.values), weight_format(self.lm_head or self.weights)
        check_half(self.dtype)

    def __str__(self) -> str:
        head = f", {self.lm_head} lm_head" if self.lm_head else ""
        suffix = "" if self.dtype == HALVES[0] else f", {self.dtype}"
        return f"{self.weights}{head}, {self.keys}/{self.values}{suffix}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of `hf.quantize`."""
        return {name: value for name, value in asdict(self).items() if name != "dtype"}


@dataclass(frozen=True)
class Steps:
    """A batch of random prompts of `context` tokens, and `new` tokens behind them."""

    batch: int
    context: int
    new: int

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("new", 2)):
            value = getattr(self, name)
            check(value >= least, f"{name}={value}; expected at least {least}")

    def prompts(self, model: Any) -> torch.Tensor:
        """The prompts [batch, context]; the same each time."""
        rng = torch.Generator().manual_seed(0)
        return torch.randint(text_config(model).vocab_size, (self.batch, self.context), generator=rng).to(model.device)


def load(name: str, machine: Device, formats: Formats) -> Any:
    """The 16-bit model of a folder, a Hub id or `demo` on a device; in fp32 where a CPU computes faster so.

    Raises for formats that do not fit it, and for a model that is quantized already, which has no 16 bits to compare with.
    """
    logging.disable_progress_bar()
    with machine.torch:
        model = load_folder(resolve_model(name), dtype=plain_format(formats.dtype).code.dtype).to(machine.torch).eval()
    quantized = getattr(model, "hf_quantizer", None) is not None or any(isinstance(m, QuantLayer) for m in model.modules())
    check(not quantized, f"model={name!r} is quantized already; give one of 16-bit weights, to compare with")
    return checked(computing(model, machine), formats)


def computing(model: Any, machine: Device) -> Any:
    """The model in the type that the device computes in fastest."""
    return model.to(fastest_type(model.dtype, machine.torch))


def checked(model: Any, formats: Formats) -> Any:
    """`model`, which the formats fit: what would be refused is refused before anything is timed."""
    check_fits(select(model, ()), weight_format(formats.weights))
    if formats.lm_head is not None:
        find_lm_head(model, weight_format(formats.lm_head))
    layer_options(text_config(model), half_type(model), CacheSettings(formats.keys, formats.values))
    return model


def measure(
    model: Any,
    formats: Formats,
    steps: Steps,
    machine: Device,
    said: Callable[[str], object] = lambda text: None,
    traced: bool = True,
    ways: Sequence[Way] = WAYS,
    judged: Callable[[Any], object] = lambda model: None,
) -> Iterator[Record]:
    """A record for each of the `ways` as soon as it is timed: in 16 bits, then of the model quantized in place to `formats`.

    `seconds` of a record is a decode step, `p10` and `p90` those of its shortest and its longest call. On a GPU the replay of a
    graph has a record of its own. Where a step is `traced`, a second record with `kernels`, seconds by count and name, follows
    once all are timed, as tracing slows what is timed behind it on a GPU; there is none of 16 bits there. `said` is called with
    what is done, `judged` with the quantized model before it is timed.
    """
    layers, roof = text_config(model).num_hidden_layers, Roofline(machine, torch.get_num_threads(), QUICK)
    shape = {"B": steps.batch, "T": steps.context, "layers": layers}
    rate = roof.read(2**28 if machine.kind == "cuda" else 2**24).gb_per_s
    where = environment(machine, torch.get_num_threads())

    def timing(sides: Sequence[tuple[Any, Way]]) -> Iterator[tuple[Any, Way, Record]]:
        said(f"{', '.join(way.name for _, way in sides)}: timing")
        for (side, way), times in zip(sides, timed_in_turn(sides, steps), strict=True):
            wider = side.dtype.itemsize // 2 if way is PLAIN else 1
            formats_of_cache = (formats.dtype, formats.dtype) if way is PLAIN else (formats.keys, formats.values)
            names = ("fp32" if wider > 1 else formats.dtype) if way is PLAIN else str(formats)
            use = used(side, steps, way)
            nbytes = bytes_moved(side, steps, *formats_of_cache, use, wider)
            notes = [f"first token {1e3 * times.first:.1f} ms"]
            notes += [f"{statistics.fmean(use.experts.values()):.0%} of the experts"] if use.experts else []
            yield side, way, step_record(shape, names, way.name, nbytes, where, times, rate, "; ".join(notes))

    def with_parts(side: Any, way: Way, record: Record) -> Record:
        said(f"{way.name}: tracing")
        parts, least = parts_of(side, steps, way), _LEAST * (record.seconds or 0)
        return replace(record, kernels={f"{p.times:.0f} x {part}": p.seconds for part, p in parts.items() if p.seconds >= least})

    torch.compiler.reset()  # which holds the model that was measured before
    in_turn, packed = machine.kind == "cpu", [(model, way) for way in PACKED if way in ways]
    plain = [(copy.deepcopy(model) if in_turn and packed else model, PLAIN)] if PLAIN in ways else []
    results = []
    for sides in [[*plain, *packed]] if in_turn else [plain, *([side] for side in packed)]:
        if sides == packed[:1] or (in_turn and packed):
            torch.compiler.reset()
            judged(quantize(model, **formats.options, fuse_qkv=True, fuse_gate_up=True))
        for side, way, record in timing(sides) if sides else ():
            yield record
            results.append((side, way, record))
            if seconds := replays(side, way, steps):
                yield step_record(shape, record.formats, way.name + ALONE, record.nbytes, where, Times(0.0, seconds), rate)
    for side, way, record in results if traced else ():
        if in_turn or way is not PLAIN:
            yield with_parts(side, way, record)


def step_record(
    shape: dict[str, int], formats: str, name: str, nbytes: int, where: Environment, times: Times, rate: float, note: str = ""
) -> Record:
    """What was measured of a way of this name; rate: GB/s that the device reads."""
    step = times.step
    rates = {"gb_per_s": nbytes / step / 1e9, "roof_gb_per_s": rate, "roof_share": nbytes / rate / 1e9 / step}
    spread = {"p10": min(times.steps), "p90": max(times.steps), "repeats": len(times.steps)}
    return Record("generate", shape, formats, name, nbytes, where, step, **rates, **spread, note=note)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Used:
    """What steps use that no shape tells: bytes of recurrent and convolutional states, and by mixture the share of its experts."""

    states: int
    experts: dict[Any, float]


def used(model: Any, steps: Steps, way: Way) -> Used:
    """What the first steps of a call use, on average. A mixture whose ids are not among its inputs (Llama 4) has no share."""
    experts = {module: _stack(module, names[0]).shape[0] for module in model.modules() if (names := projections(module))}
    shares: dict[Any, list[float]] = {}

    def count(module: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = (t for t in (*inputs, *options.values()) if isinstance(t, torch.Tensor) and not t.is_floating_point())
        for ids in given:
            if len(ids) == steps.batch:  # of a step
                shares.setdefault(module, []).append(ids.unique().numel() / experts[module])

    prompts, new = steps.prompts(model), min(steps.new, _COUNTED)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "disable_compile": True}
    options |= {} if way is PLAIN else {"recorded": False}
    hooks = [module.register_forward_pre_hook(count, with_kwargs=True) for module in experts]
    try:
        made = model.generate(prompts, attention_mask=torch.ones_like(prompts), return_dict_in_generate=True, **options)
    finally:
        for hook in hooks:
            hook.remove()
    states = sum(state_bytes(layer) for layer in made.past_key_values.layers)
    return Used(states, {module: statistics.fmean(found) for module, found in shares.items()})


def _stack(module: Any, name: str) -> Any:
    """The weights of a projection of a mixture, [experts, ...]."""
    stack = getattr(module, name)
    return stack.weight if isinstance(stack, QuantLayer) else stack


def bytes_moved(model: Any, steps: Steps, keys: str, values: str, use: Used, wider: int = 1) -> int:
    """What a step reads: the weights, without embeddings that only look up a token and experts that no token uses, and the cache
    of the prompts, of which layers with a sliding window read no more than that; and states, which it reads and writes."""
    weights = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    lookup = 0 if getattr(head, "weight", None) is embedding.weight else embedding.weight.nbytes
    config, unread = text_config(model), 0.0
    for module in model.modules():
        for name in projections(module) or ():
            stack = _stack(module, name)
            share = use.experts.get(module)
            unread += stack.nbytes * (unread_experts(config, stack.shape[0], steps.batch) if share is None else 1 - share)
    cache, holding = PackedCache(model.config, steps.context, keys=keys, values=values), layer_types(config)
    windows = [layer_reach(config, i) or steps.context for i, kind in enumerate(holding) if kind in ATTENTION]
    tokens = sum(min(window, steps.context) for window in windows) / len(windows)
    return int(weights - lookup - unread + steps.batch * tokens * cache.bytes_per_token * wider + 2 * use.states)


def timed(model: Any, steps: Steps, way: Way) -> tuple[float, float]:
    """Seconds of the shortest call that ends with the first token, and of a decode step: a long call less that one."""
    (times,) = timed_in_turn([(model, way)], steps)
    return times.first, times.step


def timed_in_turn(sides: Sequence[tuple[Any, Way]], steps: Steps) -> list[Times]:
    """`timed` of several models and ways, a call of each after the other: what else runs here then slows all of them."""
    calls = [(_call(model, steps, way, 1), _call(model, steps, way, steps.new)) for model, way in sides]

    def seconds(run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    for _, whole in calls:
        for _ in range(_WARM_UP):
            whole()
    samples = [[(seconds(once), seconds(whole)) for once, whole in calls] for _ in range(_REPEATS)]
    results = []
    for mine in zip(*samples, strict=True):
        first = min(once for once, _ in mine)
        results.append(Times(first, tuple(max(whole - first, 1e-9) / (steps.new - 1) for _, whole in mine)))
    return results


def replays(model: Any, way: Way, steps: Steps, times: int = 20) -> tuple[float, ...]:
    """Seconds of replays of the forward that a call has just used, behind `context` tokens; none where nothing is recorded.

    They use up the step that the model keeps: the next call makes a new one.
    """
    forward = kept_steps(model)[-1].forwards[-1] if way.options.get("recorded", way is not PLAIN) and kept_steps(model) else None
    if forward is None or forward.recorded.graph is None:
        return ()
    lengths = [layer.kv.lengths for layer in kept_steps(model)[-1].cache.packed if layer.kv is not None]
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for began, end in pairs:
        for length in lengths:
            length.fill_(steps.context)
        began.record()
        forward.recorded.graph.replay()
        end.record()
    torch.cuda.synchronize(model.device)
    release(model)
    return tuple(began.elapsed_time(end) / 1e3 for began, end in pairs)


def _call(model: Any, steps: Steps, way: Way, new: int) -> Callable[[], None]:
    """A call of generate() that ends with `new` tokens, and when the device has made them."""
    prompts = steps.prompts(model)
    arguments = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    arguments["max_cache_len"] = steps.context + steps.new

    def run() -> None:
        model.generate(prompts, **arguments, **way.options)
        if prompts.is_cuda:
            torch.cuda.synchronize(prompts.device)

    return run


def parts_of(model: Any, steps: Steps, way: Way) -> dict[str, Part]:
    """What a decode step runs, the longest first. Tracing slows what is timed later on a GPU."""
    _call(model, steps, way, steps.new)()  # fused blocks are proved before their first step
    short, long = (_traced(_call(model, steps, way, new), model.device) for new in (1, steps.new))
    each = 1 / (steps.new - 1)
    parts = {}
    for name, whole in long.items():
        once = short.get(name, Part())
        if whole.times > once.times:  # the seconds of what is short may differ by less than they vary
            parts[name] = Part(max(0.0, whole.seconds - once.seconds) * each, (whole.times - once.times) * each)
    return dict(sorted(parts.items(), key=lambda item: -item[1].seconds))


def _traced(run: Callable[[], None], device: torch.device) -> dict[str, Part]:
    """All that runs, by name."""
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        return {e.key: Part(e.self_cpu_time_total / 1e6, e.count) for e in profiler.key_averages()}
    parts: dict[str, Part] = {}
    for kernel in busy_parts_of(run):
        name = short_name(kernel.name)
        parts[name] = parts.get(name, Part()) + Part(kernel.seconds, 1)
    return parts


def short_name(kernel: str) -> str:
    """A kernel's name without its return type, namespaces, template arguments and parameters."""
    plain = kernel.removeprefix("void ")
    while plain != (cut := re.sub(r"<[^<>]*>|\([^()]*\)", "", plain)):
        plain = cut
    return plain.rpartition("::")[2].strip()[:_SHOWN] or kernel[:_SHOWN]
