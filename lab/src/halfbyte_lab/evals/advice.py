"""Which formats fit a model on a GPU, what they save, and their loss by an evidence card. No weights are read.

A decode step reads the weights and the cache once: bytes / bandwidth is the least time it can take. Of a mixture of E experts, of
which each token uses k, a step of B sequences reads a share 1 - (1 - k/E)^B, if all are used equally often. Layers with a sliding
window read no more than the window, and their cache keeps a ring of it.
"""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from halfbyte import settings
from halfbyte.checkpoints.adapters import make_adapter
from halfbyte.device import DATASHEETS, Datasheet, datasheet_name, describe
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported, check
from halfbyte.formats import plain_format
from halfbyte.memory import (
    CacheSizes,
    Stored,
    load_config,
    meta_model,
    notes,
    packed_layers,
    parse_bytes,
    plain_bytes,
    quant_method,
    quantized_bytes,
    room,
    stored_weights,
    weight_or_plain,
)
from halfbyte.paths import SHIPPED, resolve_model
from halfbyte.settings import HALVES, check_half
from halfbyte_lab.evals.card import TOLERATED, WEIGHTS, Card, Evidence, card_of, first_fitting, fits, nearest_card
from halfbyte_lab.evals.choices import caches


@dataclass(frozen=True)
class Choice:
    """Formats, and what they take, for the batch and context of the `Advice`. Sizes in bytes.

    largest_batch    sequences of that context that fit; largest_context: tokens of each of that many sequences,
                     at most the model's positions
    step_bytes       what a decode step reads; step_seconds: the least time that takes, None for an unknown bandwidth
    evidence         what the card says of exactly these formats; None: it says nothing, or there is none
    """

    keys: str
    values: str
    weights: str
    weight_bytes: int
    kv_bytes: int
    fits: bool
    largest_batch: int
    largest_context: int
    step_bytes: int
    step_seconds: float | None
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Advice:
    """Every choice for a model, the one that is recommended (None: none is) and why.

    is_quantized: the model's files are quantized already; has_cache: they have settings of a packed cache; card: the model whose
    evidence card was used, None without one; is_own: it is of a model of these sizes, and decides; dtype: the 16-bit type, which
    what is not quantized is called by.
    """

    model: str
    gpu: str
    sheet: Datasheet
    batch: int
    context: int
    is_quantized: bool
    card: str | None
    choices: tuple[Choice, ...]
    recommended: Choice | None
    reason: str
    notes: tuple[str, ...]
    dtype: str = "bf16"
    has_cache: bool = False
    is_own: bool = True


#: What a machine without a GPU is called.
CPU = "the CPU here"


def find_gpu(name: str | None) -> tuple[str, Datasheet]:
    """(name, memory and bandwidth) of a GPU of `DATASHEETS` or of a size such as "24GB"; None: the GPU here, else the CPU."""
    if name is None:
        here = describe(None)
        datasheet = DATASHEETS.get(datasheet_name(here.name) or "")
        where = CPU if here.kind == "cpu" else here.name
        return where, Datasheet(here.memory_bytes, None if datasheet is None else datasheet.bytes_per_second)
    query = name.lower()
    for gpu, sheet in DATASHEETS.items():
        if gpu.replace("-", "") == query.replace("-", "").replace(" ", ""):
            return gpu, sheet
    try:
        size = parse_bytes(query if query[-1:].isalpha() else "", "gpu")  # a unit is needed: 24 means GB, and 4090 is a name
        return f"a GPU of {name}", Datasheet(size, None)
    except InvalidArgument:
        raise InvalidArgument(f"gpu={name!r}; give one of {', '.join(DATASHEETS)}, or a size of memory such as 24GB") from None


def advise(
    model: str,
    *,
    gpu: str | None = None,
    batch: int = 1,
    context: int | None = None,
    weights: str | None = None,
    card: Card | None = None,
    dtype: str = "bf16",
) -> Advice:
    """Choices for a model folder, a Hub id or "demo", from its configuration alone.

    gpu      as in `find_gpu`
    context  None: 8,192 tokens, or as many as the model has positions
    weights  the only weight format to consider, also for a model that another library quantized; None: those of `WEIGHTS`, or
             those that a folder of `halfbyte quantize` or another library's configuration names
    card     the evidence, of a model of the same sizes; None: the shipped one, else that of the nearest real model, which is shown
             and decides nothing
    dtype    the 16-bit type of what is not quantized, one of `halfbyte.settings.HALVES`

    Raises as `halfbyte.memory.estimate` does.
    """
    for name, value in (("batch", batch), ("context", context)):
        check(value is None or 0 < value < 2**31, f"{name}={value}; it must be above 0 and below 2^31")
    from halfbyte.hf.default_cache import SAVED

    gpu_name, sheet = find_gpu(gpu)
    check_half(dtype)
    if weights is not None and weight_or_plain(weights) is None:
        weights = dtype
    config = load_config(resolve_model(model))
    method = quant_method(config)
    checkpoint = stored_weights(config)
    if checkpoint is not None:
        checkpoint.check(weights, model)
    elif method is not None and weights is None and (weights := expected_weights(config)) is None:
        raise InvalidArgument(
            f"model={model!r} is quantized already ({method}); name the format of its weights, such as --weights int4_g128"
        )
    sizes = _Sizes(config, model, batch, context, sheet, checkpoint, dtype)
    is_own = (card := card or card_of(config)) is not None
    check(card is None or card.matches(config), f"card is of {card and card.model}, whose sizes are not those of {model}")
    card = card or nearest_card(config)
    default = settings.CPU_WEIGHTS if gpu_name == CPU else settings.WEIGHTS
    several = [(default,) if names == (settings.WEIGHTS,) else names for names in WEIGHTS]
    candidates = ((checkpoint.name,),) if checkpoint is not None else ((dtype,), *several) if weights is None else ((weights,),)
    plain = tuple(choice for names in candidates for choice in sizes.choices(names))
    choices = tuple(_judged(choice, card, method) for choice in plain)
    if not choices:
        raise Unsupported(f"model={model!r}: none of the weight formats considered fits the sizes of its layers")
    best, reason = recommend(choices if is_own else plain, default)
    best = next((choice for choice, bare in zip(choices, plain, strict=True) if best in (choice, bare)), None)
    remarks = (*notes(sizes.skeleton, sizes.plain, None, None, None), *sizes.notes())
    measured_model = card.model if card is not None and any(c.evidence for c in choices) else None
    if card is not None and measured_model is not None and is_own and card.dtype != dtype:
        remarks = (*remarks, f"the evidence card was measured in {card.dtype}, not in {dtype}")
    facts = (method is not None, measured_model, choices, best, reason, remarks, dtype, hasattr(config, SAVED), is_own)
    return Advice(model, gpu_name, sheet, batch, sizes.context, *facts)


def expected_weights(config: Any) -> str | None:
    """The weight format that files of another library load as, if their configuration says so."""
    section = getattr(config, "quantization_config", None)
    if not isinstance(section, dict) or "quant_method" not in section:
        return None
    with suppress(CheckpointError, Unsupported):
        fmt = make_adapter(section).expected()
        return None if fmt is None else fmt.name
    return None


def recommend(choices: Sequence[Choice], default: str = settings.WEIGHTS) -> tuple[Choice | None, str]:
    """(choice, reason): with evidence the safe formats with the fewest bytes a step, else those within `TOLERATED`; without
    evidence, the library's defaults or what fits."""
    fitting = [c for c in choices if c.fits]
    if not fitting:
        return None, "nothing fits: use a larger GPU, fewer sequences or a shorter context"
    if any(c.evidence for c in fitting):
        safe = [c for c in fitting if c.evidence and c.evidence.safe]
        good = safe or [c for c in fitting if c.evidence and abs(c.evidence.change) + c.evidence.noise <= TOLERATED]
        if not good:
            return None, f"of what fits, nothing is measured to change perplexity by less than {TOLERATED:g} %, noise included"
        bound = "that are safe" if safe else f"with perplexity within {TOLERATED:g} %, noise included; nothing that fits is safe"
        return min(good, key=lambda c: c.step_bytes), f"fewest bytes per step of the formats {bound}"
    is_cache_only = len({c.weights for c in choices}) == 1  # the weights are as they are: only the cache is chosen
    for c in fitting:
        if (c.keys, c.values) == (settings.KEYS, settings.VALUES) and (is_cache_only or c.weights == default):
            return c, "the defaults of halfbyte.hf.quantize; their quality on this model is not known"
    return max(fitting, key=lambda c: c.weight_bytes + c.kv_bytes), "most bits of those that fit; quality on this model not known"


def _judged(choice: Choice, card: Card | None, method: str | None) -> Choice:
    """A choice with its evidence; a card calls weights that were quantized before "as saved"."""
    weights = choice.weights if method is None else "as saved"
    return choice if card is None else replace(choice, evidence=card.evidence(choice.keys, choice.values, weights))


class _Sizes:
    """What a model of a configuration takes and reads, in any formats."""

    def __init__(
        self, config: Any, name: str, batch: int, context: int | None, sheet: Datasheet, stored: Stored | None, dtype: str
    ) -> None:
        from halfbyte.hf.model_support import text_config

        self.config, self.batch, self.sheet, self.stored = config, batch, sheet, stored
        self.dtype = dtype
        self.text = text_config(config)
        self.plain = packed_layers(config, dtype, dtype, ())  # refuses what a packed cache cannot serve before a model is built
        self.skeleton = meta_model(config, name)
        self.room = room(sheet.memory_bytes)
        self.expert_shapes = _expert_shapes(self.skeleton)
        limit = getattr(self.text, "max_position_embeddings", None)
        self.positions = limit if isinstance(limit, int) else 2**31
        self.context = min(8192, self.positions) if context is None else context

    def choices(self, candidates: Sequence[str]) -> list[Choice]:
        """Every cache with the first of these weight formats that fits; none if none does."""
        name: str | None
        if self.stored is not None:
            name, saving = self.stored.name, self.stored.quantized_bytes(self.skeleton)[0]
        elif (name := first_fitting(self.skeleton, candidates)) is None:
            return []
        else:
            saving = quantized_bytes(self.skeleton, weight_or_plain(name))[0]
        size = plain_bytes(self.skeleton) - saving
        pairs = [pair for pair in caches(self.dtype).values() if fits(self.config, *pair)]
        return [self._choice(keys, values, name, size) for keys, values in pairs]

    def _choice(self, keys: str, values: str, weights: str, size: int) -> Choice:
        cache, rate = packed_layers(self.config, keys, values, ()), self.sheet.bytes_per_second
        kv, left = cache.nbytes(self.batch, self.context), self.room - size
        step = size - self._unread(weights) + self._read(cache)
        return Choice(
            keys,
            values,
            weights,
            weight_bytes=size,
            kv_bytes=kv,
            fits=kv <= left,
            largest_batch=_largest(left, lambda n: cache.nbytes(n, self.context)),
            largest_context=min(_largest(left, lambda n: cache.nbytes(self.batch, n)), self.positions),
            step_bytes=step,
            step_seconds=None if rate is None else step / rate,
        )

    def _read(self, cache: CacheSizes) -> int:
        """Bytes of the cache that a step reads, layer by layer."""
        from halfbyte.hf.model_support import ATTENTION, layer_reach, layer_types

        holding = [i for i, kind in enumerate(layer_types(self.text)) if kind in ATTENTION]
        windows = (layer_reach(self.text, i) or self.context for i in holding)
        return sum(
            layer.nbytes(self.batch, min(window, self.context), cache.window)
            for layer, window in zip(cache.layers, windows, strict=True)
        )

    def _unread(self, weights: str) -> int:
        """Bytes of weights that a step does not read: an embedding of its own, of which it takes rows, and experts not hit."""
        from halfbyte.hf.weights import is_tied

        model: Any = self.skeleton
        embedding = 0 if is_tied(model) else 2 * math.prod(model.get_input_embeddings().weight.shape)
        stacks = 0
        for name, shape in self.expert_shapes.items():
            fmt = self.stored.formats.get(name) if self.stored else weight_or_plain(weights)
            stacks += 2 * math.prod(shape) if fmt is None else fmt.nbytes(shape)
        return embedding + int(stacks * (1 - self._hit()))

    def _hit(self) -> float:
        """Expected share of the experts that a step uses; 1 where the configuration does not say how many a token uses."""
        from halfbyte.hf.mixtures import unread_experts

        shapes = list(self.expert_shapes.values())
        return 1 - unread_experts(self.text, shapes[0][0], self.batch) if shapes else 1.0

    def notes(self) -> list[str]:
        """What the figures assume."""
        lines = []
        if self.expert_shapes:
            lines.append(
                f"a step of {self.batch:,} sequences reads {self._hit():.0%} of the experts, if all are used equally often"
            )
        if self.context > self.positions:
            lines.append(f"a context of {self.context:,} tokens is more than the {self.positions:,} positions of this model")
        if self.batch > 16:
            lines.append(f"with M = {self.batch:,} linear layers may be compute-bound: halfbyte bench linear --rows {self.batch}")
        return lines


def _expert_shapes(skeleton: Any) -> dict[str, tuple[int, ...]]:
    """By name, the stacks of experts of a model."""
    from halfbyte.hf.weights import targets

    return {name: tuple(t.shape) for name, t in targets(skeleton).items() if len(t.shape) == 3}


def _largest(left: int, nbytes: Callable[[int], int]) -> int:
    """The largest count whose bytes are at most `left`."""
    return max(0, bisect_right(range(2**31), left, key=nbytes) - 1)


def shown(advice: Advice) -> list[Choice]:
    """What a short table has: every choice with evidence of this model; without any, 16 bits, what is recommended, the INT8 cache
    with the same weights, and the fewest bytes."""
    if evidence := [c for c in advice.choices if c.evidence is not None and advice.is_own]:
        return evidence
    first, took = advice.choices[0], advice.recommended or advice.choices[0]
    int8 = [c for c in advice.choices if (c.weights, c.keys, c.values) == (took.weights, *caches()["8 bits, fastest"])]
    few = (first, took, *int8, min(advice.choices, key=lambda c: c.weight_bytes + c.kv_bytes))
    return [c for c in advice.choices if any(c is one for one in few)]


def python_lines(advice: Advice, choice: Choice) -> str:
    """The lines that load the model in the formats of a choice."""
    formats = {} if choice.weights == advice.dtype or advice.is_quantized else {"weights": choice.weights}
    if formats and (clip := _clip(choice)):
        formats["clip"] = clip
    if advice.has_cache or not choice.keys == choice.values == advice.dtype:
        formats |= {"keys": choice.keys, "values": choice.values}
    name = "halfbyte.paths.shipped_model()" if advice.model in SHIPPED else repr(advice.model)
    arguments = ", ".join([name, *(f'{option}="{value}"' for option, value in formats.items())])
    return f"import torch, halfbyte\n\nmodel = halfbyte.hf.load({arguments}, dtype={plain_format(advice.dtype).code.dtype})"


def _clip(choice: Choice) -> str | None:
    """The clip of the weights: what the evidence is of, or that of the defaults."""
    if choice.evidence is not None:
        return choice.evidence.clip
    return settings.CLIP if choice.weights in (settings.WEIGHTS, settings.CPU_WEIGHTS) else None


def command(advice: Advice, choice: Choice) -> str:
    """The command that generates text in the formats of a choice."""
    clip = f" --clip {_clip(choice)}" if _clip(choice) else ""
    weights = "" if choice.weights == advice.dtype or advice.is_quantized else f" --weights {choice.weights}{clip}"
    option = "" if advice.dtype == HALVES[0] else f" --dtype {advice.dtype}"
    name = shlex.quote(advice.model)
    return f'halfbyte generate {name} --prompt "..." --keys {choice.keys} --values {choice.values}{weights}{option}'
