"""Formats by layer, chosen by measurement: `halfbyte calibrate`.

1. Sensitivity. For each layer, side (keys, values) and candidate format, the KL divergence of the next-token distribution from the
   16-bit run when that one side of that one layer changes and all else stays in 16 bits. With sink and recent tokens, which a layer
   has for both sides or none, the layer's other side takes its largest format.
2. Assignment. Divergences of small, independent errors add up, so the plan has the least sum of sensitivities for its size. That is
   a multiple-choice knapsack, one choice per side and layer; sizes are integers, and dynamic programming solves it exactly.
3. Confirmation. The plan and the best uniform choices of no more bytes run as a whole, and the one with the lowest divergence is
   taken: on the calibration text no plan is worse than they are.

`search` does so with each of several numbers of sink and recent tokens, and with calibrated keys: the best of all is the plan.

Measurements are kept in a file next to the plan, one a line: an interrupted run resumes, and another size costs only its
confirmation.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from halfbyte.cache_plan import CachePlan, LayerFormats, ModelSizes
from halfbyte.errors import InvalidArgument, check
from halfbyte.formats import KV_FORMATS, plain_format
from halfbyte.paths import append_line, write_whole
from halfbyte.settings import HALVES
from halfbyte_lab.evals.assignment import SIDES, TOKENS, Candidate, Options, Sensitivity, candidates
from halfbyte_lab.evals.quality import check_exact

#: Uniform choices that a plan is compared with.
UNIFORM = 4
#: Sink and recent tokens that `search` tries.
WINDOWS = ((0, 0), (4, 0), (4, 64))


class Divergence:
    """Mean KL divergence, in nats a token, of runs with other caches from the 16-bit run over the same windows, int64 [n, T].

    exact: how many sink and how many recent tokens of a sequence those caches keep in 16 bits. calibration: their calibrated keys.
    """

    def __init__(
        self, model: Any, windows: torch.Tensor, chunk: int, exact: tuple[int, int] = (0, 0), calibration: str = ""
    ) -> None:
        from halfbyte.hf.model_support import half_type

        check(chunk >= 1, f"chunk={chunk}; expected at least one token")
        check_exact(exact, windows.shape[1])
        self.model, self.windows, self.chunk, self.exact = model, windows.to(model.device), chunk, exact
        self.calibration = calibration
        self.plain = plain_format(half_type(model)).name
        self._base = list(self._log_probs(keys=self.plain, values=self.plain))
        self._known: dict[tuple[LayerFormats, ...], float] = {}

    def beside(self, exact: tuple[int, int], calibration: str) -> Divergence:
        """Of caches with other tokens in 16 bits, or other keys, over the same windows and from the same run."""
        check_exact(exact, self.windows.shape[1])
        other = copy.copy(self)
        other.exact, other.calibration, other._known = exact, calibration, {}
        return other

    def of(self, layers: Sequence[LayerFormats]) -> float:
        """For a cache with these formats by layer; measured once."""
        if (key := tuple(layers)) not in self._known:
            options: dict[str, Any] = {f.name: [getattr(layer, f.name) for layer in layers] for f in fields(LayerFormats)}
            if any(KV_FORMATS[layer.keys].is_quantized or KV_FORMATS[layer.values].is_quantized for layer in layers):
                options |= {"sink_tokens": self.exact[0], "recent_tokens": self.exact[1]}
                options |= {"calibration": self.calibration or None}
            pairs = zip(self._base, self._log_probs(**options), strict=True)
            total = sum(float((p.exp() * (p - q)).sum(dtype=torch.float64)) for p, q in pairs)
            self._known[key] = max(total / self.windows.numel(), 0.0)
        return self._known[key]

    @torch.no_grad()
    def _log_probs(self, **options: Any) -> Iterator[torch.Tensor]:
        """Log-probabilities [n, chunk, V] of the next token, chunk by chunk, on the model's device."""
        from halfbyte.hf.cache import PackedCache
        from halfbyte.hf.every_forward import part_of_text
        from halfbyte.hf.model_support import CACHE

        cache = PackedCache(self.model, self.windows.shape[1], **options)
        cache.expect_steps(self.chunk)
        for piece in self.windows.split(self.chunk, 1):
            with torch.no_grad(), part_of_text(self.model, self.windows.shape[1] - 1):
                logits = self.model(input_ids=piece, **{CACHE: cache}, use_cache=True).logits
            yield torch.log_softmax(logits.float(), -1)


def missing(choices: dict[str, list[Candidate]], known: Sequence[Sensitivity], layers: int) -> list[tuple[int, str, Candidate]]:
    """What is yet to be measured, in order; the 16-bit formats need not be.

    All layers in one format, then in the next: the first of a format compiles on a GPU, and the estimated time holds early.
    """
    have = {(s.layer, s.side, s.format, s.rotated) for s in known}
    every = ((layer, side, c) for side in SIDES for c in choices[side] for layer in range(layers))
    cases = ((layer, side, c) for layer, side, c in every if KV_FORMATS[c.format].is_quantized)
    return [(layer, side, c) for layer, side, c in cases if (layer, side, c.format, c.rotated) not in have]


def sensitivity(
    divergence: Divergence, choices: dict[str, list[Candidate]], layers: int, layer: int, side: str, candidate: Candidate
) -> Sensitivity:
    """Measure one: the layer's other side takes the largest of its choices, which is 16 bits where that is one."""
    pair = {name: max(choices[name], key=lambda c: (c.nbytes, c.rotated)) for name in SIDES} | {side: candidate}
    one = LayerFormats(pair["keys"].format, pair["values"].format, pair["keys"].rotated)
    blank = LayerFormats(divergence.plain, divergence.plain)
    kl = divergence.of([one if i == layer else blank for i in range(layers)])
    return Sensitivity(layer, side, candidate.format, candidate.rotated, kl)


# ------------------------------------------------------------------------------------------------------- the file of measurements


def fingerprint(
    model: Any, windows: torch.Tensor, chunk: int, exact: tuple[int, int] = (0, 0), calibration: str = ""
) -> dict[str, Any]:
    """What measurements depend on: sizes, weights and 16-bit type of the model, the text as it was cut, sink and recent tokens, the
    contents of the file of calibrated keys."""
    from halfbyte.hf.model_support import half_type

    weights, text = hashlib.sha256(), hashlib.sha256(windows.cpu().numpy().tobytes())
    for name, p in model.state_dict().items():
        some = p.flatten()[:: max(1, p.numel() // 64)].cpu().double()
        weights.update(f"{name} {list(p.shape)} {some.tolist()}".encode())
    cut: dict[str, Any] = {"windows": windows.shape[0], "length": windows.shape[1], "chunk": chunk, "exact": list(exact)}
    if (dtype := plain_format(half_type(model)).name) != HALVES[0]:  # which files that do not say so are of
        cut["dtype"] = dtype
    if calibration:
        cut["calibration"] = hashlib.sha256(Path(calibration).read_bytes()).hexdigest()[:16]
    return {"model": asdict(sizes_of(model)), "weights": weights.hexdigest()[:16], "text": text.hexdigest()[:16], **cut}


def sizes_of(model: Any) -> ModelSizes:
    """The sizes that a plan of this model names."""
    from halfbyte.hf.model_support import model_sizes, text_config

    return model_sizes(text_config(model))


class Measurements:
    """Sensitivities in a file, each written as soon as it is known. The first line says what they depend on."""

    def __init__(self, path: Path, depends_on: dict[str, Any]) -> None:
        self.path, self._head = path, json.dumps(depends_on)
        self.known: list[Sensitivity] = []
        if path.exists():
            self._read()
        lines = [self._head, *(json.dumps(asdict(s)) for s in self.known)]
        write_whole(path, "".join(f"{line}\n" for line in lines))

    def _read(self) -> None:
        head, *lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        if head != self._head:
            raise InvalidArgument(
                f"output: {self.path} holds measurements of another model, dtype, text or cut, or with other sink and recent "
                f"tokens; remove it, or give the plan another name"
            )
        for line in lines[:-1]:  # the last one is empty, or was cut off while it was written
            try:
                sensitivity = Sensitivity(**json.loads(line))
                check(math.isfinite(sensitivity.kl) and sensitivity.side in SIDES, "not a measurement")
            except (ValueError, TypeError) as error:
                raise InvalidArgument(f"output: {self.path} is damaged ({line[:60]!r}); remove it") from error
            self.known.append(sensitivity)

    def add(self, found: Sensitivity) -> None:
        """Keep one more."""
        self.known.append(found)
        append_line(self.path, json.dumps(asdict(found)))


def measurements_path(plan: Path) -> Path:
    """Where the measurements for a plan are: plan.json has plan.measured.jsonl next to it."""
    return plan.with_name(f"{plan.stem}.measured.jsonl")


# ----------------------------------------------------------------------------------------------------------------- the plans


@dataclass(frozen=True)
class Calibrated:
    """A plan, and every uniform choice that was run next to it, likewise."""

    plan: CachePlan
    uniform: tuple[CachePlan, ...]


def calibrate(
    divergence: Divergence,
    choices: dict[str, list[Candidate]],
    store: Measurements,
    bits: Sequence[float],
    on_step: Callable[[str], None] = lambda what: None,
) -> list[Calibrated]:
    """One plan for each size, in bits per element of the cache. `on_step` is called before every run, at most `runs(...)` times.

    Raises `InvalidArgument` for a size that no choice of formats is as small as, before anything is measured.
    """
    check_sizes(divergence.model, choices, bits)
    sizes, elements = sizes_of(divergence.model), elements_of(divergence.model)
    for layer, side, candidate in missing(choices, store.known, sizes.layers):
        on_step(f"layer {layer}, {side} {candidate.format}{' rotated' * candidate.rotated}")
        store.add(sensitivity(divergence, choices, sizes.layers, layer, side, candidate))
    options = Options(choices, store.known, sizes.layers)
    return [_plan(divergence, options, sizes, math.floor(size * elements / 8), elements, on_step) for size in bits]


def elements_of(model: Any) -> int:
    """Elements of `TOKENS` tokens in all layers."""
    sizes = sizes_of(model)
    return sizes.layers * sizes.kv_heads * TOKENS * (sizes.head_dim + sizes.value_dim)


def smallest(model: Any, choices: dict[str, list[Candidate]]) -> float:
    """Bits an element of the smallest cache there is."""
    return 8 * Options(choices, (), sizes_of(model).layers).smallest() / elements_of(model)


def check_sizes(model: Any, choices: dict[str, list[Candidate]], bits: Sequence[float]) -> None:
    """Raise for a size, in bits per element, that no choice of formats is as small as."""
    least = smallest(model, choices)
    for size in bits:
        check(least <= size <= 16, f"bits={size:g}; these formats take {least:g} to 16 bits an element of this model's cache")


def runs(choices: dict[str, list[Candidate]], store: Measurements, layers: int, bits: Sequence[float]) -> int:
    """How often `calibrate` runs the model, at most."""
    return len(missing(choices, store.known, layers)) + len(bits) * (1 + UNIFORM)


def _plan(
    divergence: Divergence, options: Options, sizes: ModelSizes, budget: int, elements: int, on_step: Callable[[str], None]
) -> Calibrated:
    """The best of the assignment and the uniform choices within `budget` bytes, each run as a whole."""
    best = options.best(budget)
    assert best is not None  # the budget was checked
    trials = []
    for choice in dict.fromkeys((best, *options.uniform(budget)[:UNIFORM])):
        on_step(f"{8 * choice.nbytes / elements:.2f} bits, {'all layers alike' if choice.is_uniform else 'by layer'}")
        trials.append((choice, divergence.of(choice.layers)))
    tokens = {"tokens": divergence.windows.numel(), "chunk": divergence.chunk, "dtype": divergence.plain}
    plans = [
        CachePlan(
            *(sizes, choice.layers, 8 * choice.nbytes / elements, *divergence.exact),
            {"kl": kl, "predicted_kl": choice.predicted_kl, **tokens},
            divergence.calibration,
        )
        for choice, kl in trials
    ]
    return _best(plans, [plan for plan, (choice, _) in zip(plans, trials, strict=True) if choice.is_uniform])


def _best(plans: Sequence[CachePlan], uniform: Sequence[CachePlan]) -> Calibrated:
    """The plan with the lowest divergence, which says what the best uniform choice has."""
    plan = min(plans, key=lambda plan: (plan.measured["kl"], plan.bits))
    facts = dict(plan.measured)
    if uniform:
        alike = min(uniform, key=lambda plan: (plan.measured["kl"], plan.bits))
        others = {"sink_tokens": alike.sink_tokens, "recent_tokens": alike.recent_tokens, "calibrated": bool(alike.calibration)}
        facts["best_uniform"] = {**asdict(alike.layers[0]), "bits": alike.bits, "kl": alike.measured["kl"], **others}
    return Calibrated(replace(plan, measured=facts), tuple(uniform))


# ----------------------------------------------------------------------------------------- sink and recent tokens, calibrated keys


@dataclass(frozen=True)
class Way:
    """Sink and recent tokens, the file of calibrated keys ("": keys as they come), and the formats that go with both."""

    exact: tuple[int, int]
    calibration: str
    choices: dict[str, list[Candidate]]

    @property
    def name(self) -> str:
        """What files are called by; "" where nothing is in 16 bits and keys are as they come."""
        return "-calibrated" * bool(self.calibration) + f"-{self.exact[0]}-{self.exact[1]}" * any(self.exact)


def ways(model: Any, formats: Sequence[str], calibration: str, tokens: int) -> list[Way]:
    """Each of `WINDOWS` that fits into so many tokens and, if there are calibrated keys, without and with them."""
    exact = [window for window in WINDOWS if sum(window) < tokens]
    return [
        Way(window, keys, candidates(model, formats, any(window), bool(keys)))
        for keys in dict.fromkeys(("", calibration))
        for window in exact
    ]


def search(
    divergence: Divergence,
    every: Sequence[tuple[Way, Measurements]],
    bits: Sequence[float],
    on_step: Callable[[str], None] = lambda what: None,
) -> list[Calibrated]:
    """The best of what `calibrate` finds in each way. Sizes count the tokens in 16 bits, in a cache as long as the windows."""
    model, tokens, found = divergence.model, divergence.windows.shape[1], list[list[Calibrated]](map(list, [()] * len(bits)))
    for way, store in every:
        share = sum(way.exact) / tokens
        left = [(size - 16 * share) / (1 - share) for size in bits]
        fitting = [i for i, size in enumerate(left) if smallest(model, way.choices) <= size]
        sizes, beside = [left[i] for i in fitting], divergence.beside(way.exact, way.calibration)
        for i, one in zip(fitting, calibrate(beside, way.choices, store, sizes, on_step) if fitting else (), strict=True):
            found[i].append(one)
    least = min(smallest(model, way.choices) for way, _ in every)
    for size, some in zip(bits, found, strict=True):
        check(bool(some), f"bits={size:g}; these formats take {least:g} to 16 bits an element of this model's cache")
    return [_best([one.plan for one in some], [plan for one in some for plan in one.uniform]) for some in found]


def counted_bits(plan: CachePlan, tokens: int) -> float:
    """Bits an element of a cache of so many tokens, those in 16 bits counted."""
    return plan.bits + (16 - plan.bits) * (plan.sink_tokens + plan.recent_tokens) / tokens
