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
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.utils import logging

from halfbyte.device import Device
from halfbyte.errors import check
from halfbyte.formats import key_format, plain_format, value_format, weight_format
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.cache_layers import CacheSettings, layer_options
from halfbyte.hf.checkpoint import load as load_folder
from halfbyte.hf.mixtures import expert_stacks, unread_experts
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

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
_LLAMA: dict[str, Any] = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
_LLAMA |= {"max_position_embeddings": 131072, "rope_parameters": _ROPE}
_QWEN: dict[str, Any] = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
_QWEN |= {"max_position_embeddings": 40960, "tie_word_embeddings": True}
#: Sizes of known models, by name: random weights take as long as others.
SIZES: dict[str, PretrainedConfig] = {
    "llama-3-8b": LlamaConfig(hidden_size=4096, intermediate_size=14336, **_LLAMA),
    "llama-3-70b": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, **{**_LLAMA, "num_hidden_layers": 80, "num_attention_heads": 64}
    ),
    "qwen3-0.6b": Qwen3Config(hidden_size=1024, intermediate_size=3072, **_QWEN),
    "qwen3-1.7b": Qwen3Config(hidden_size=2048, intermediate_size=6144, **_QWEN),
}
#: Calls whose median is taken, behind so many that compile and record.
_REPEATS, _WARM_UP = 5, 2
#: Parts below this share of a step are left out of its record.
_LEAST = 1e-3
#: Share of a GPU's free memory that 16-bit weights may take; quantizing, prompts and caches need the rest.
_MOST_IN_16_BITS = 0.7
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
    """The 16-bit model of a folder, a Hub id or `demo` on a device; fp32 on a CPU, where 16 bits are slower.

    Raises for formats that do not fit it, and for a model that is quantized already, which has no 16 bits to compare with.
    """
    logging.disable_progress_bar()
    with machine.torch:
        model = load_folder(resolve_model(name), dtype=plain_format(formats.dtype).code.dtype).to(machine.torch).eval()
    quantized = getattr(model, "hf_quantizer", None) is not None or any(isinstance(m, QuantLayer) for m in model.modules())
    check(not quantized, f"model={name!r} is quantized already; give one of 16-bit weights, to compare with")
    return checked(_computing(model, machine), formats)


def of_sizes(config: Any, machine: Device, formats: Formats) -> Any:
    """A model of a configuration, with random weights; otherwise as `load`.

    Where the 16-bit weights of all blocks do not fit on a GPU, every block has those of the first one. Quantized, each has its own.
    """
    dtype = plain_format(formats.dtype).code.dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    if machine.kind == "cuda" and nbytes > _MOST_IN_16_BITS * torch.cuda.mem_get_info(machine.torch)[0]:
        return checked(_repeated(model, machine), formats)
    with machine.torch:
        return checked(_computing(AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), machine), formats)


def _repeated(model: Any, machine: Device) -> Any:
    """`model`, which has no weights yet, with those of a model of one block."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    with machine.torch:
        one = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    weights, state = one.state_dict(), model.state_dict()
    model.load_state_dict({name: weights[re.sub(r"\.\d+\.", ".0.", name)] for name in state}, assign=True)
    for name, module in model.named_modules():
        for buffer, _ in module.named_buffers(recurse=False):
            setattr(module, buffer, getattr(one.get_submodule(re.sub(r"\.\d+(?=\.|$)", ".0", name)), buffer))
    return model


def _computing(model: Any, machine: Device) -> Any:
    """The model in the type that the device computes in."""
    return model if machine.kind == "cuda" else model.float()


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
            yield side, way, _record(shape, names, way.name, bytes_read(side, steps, *formats_of_cache, wider), where, times, rate)

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
                yield _record(shape, record.formats, way.name + ALONE, record.nbytes, where, Times(0.0, seconds), rate)
    for side, way, record in results if traced else ():
        if in_turn or way is not PLAIN:
            yield with_parts(side, way, record)


def _record(shape: dict[str, int], formats: str, name: str, nbytes: int, where: Environment, times: Times, rate: float) -> Record:
    step = times.step
    rates = {"gb_per_s": nbytes / step / 1e9, "roof_gb_per_s": rate, "roof_share": nbytes / rate / 1e9 / step}
    spread = {"p10": min(times.steps), "p90": max(times.steps), "repeats": len(times.steps)}
    note = f"first token {1e3 * times.first:.1f} ms" if times.first else ""
    return Record("generate", shape, formats, name, nbytes, where, step, **rates, **spread, note=note)  # type: ignore[arg-type]


def bytes_read(model: Any, steps: Steps, keys: str, values: str, wider: int = 1) -> int:
    """What a step reads: the weights, without embeddings that only look up a token and, on average, experts that no token uses,
    and the cache of the prompts; layers with a sliding window read no more of it than that."""
    weights = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    lookup = 0 if getattr(head, "weight", None) is embedding.weight else embedding.weight.nbytes
    config, unread = text_config(model), 0.0
    for stack in expert_stacks(model):
        weight = stack.weight if isinstance(stack, QuantLayer) else stack
        unread += weight.nbytes * unread_experts(config, weight.shape[0], steps.batch)
    cache, holding = PackedCache(model.config, steps.context, keys=keys, values=values), layer_types(config)
    windows = [layer_reach(config, i) or steps.context for i, kind in enumerate(holding) if kind in ATTENTION]
    tokens = sum(min(window, steps.context) for window in windows) / len(windows)
    return int(weights - lookup - unread + steps.batch * tokens * cache.bytes_per_token * wider)


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
