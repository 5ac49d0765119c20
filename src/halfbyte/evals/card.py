"""Evidence cards: the measured loss of formats on one model, as a file to share.

    {"format": "halfbyte evidence card", "version": 1, "model": "owner/name",
     "sizes": {"model_type": "llama", "layers": 2, ...},
     "text": "...", "windows": [8, 1024], "chunk": 16, "long": 1024, "tasks": ["arc_easy"],
     "results": [{"keys": "bf16", "values": "bf16", "weights": "bf16", "perplexity": 8.1, ...}, ...],
     "environment": {...}}

The first result is the 16-bit run, which the others are compared with. All run through a cache of their own formats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from halfbyte.cache_plan import ModelSizes
from halfbyte.device import describe
from halfbyte.errors import InvalidArgument, check, require
from halfbyte.evals.choices import WEIGHTS, caches, is_safe, limit
from halfbyte.evals.environment import environment
from halfbyte.evals.long_context import LongContext, Tasks, run_long_context
from halfbyte.evals.own_attention import agreement
from halfbyte.evals.quality import Quality, Setting, run_evaluation, with_weights
from halfbyte.evals.text import Tokenizer
from halfbyte.formats import key_format, plain_format
from halfbyte.memory import packed_layers, quantized_bytes, weight_or_plain
from halfbyte.nn import QuantLayer
from halfbyte.paths import SHIPPED, resolve_model, write_whole
from halfbyte.reference.hadamard import rotated
from halfbyte.settings import CLIP, HALVES
from halfbyte.settings import WEIGHTS as WEIGHTS_BY_DEFAULT

KIND, VERSION = "halfbyte evidence card", 1
#: Bytes of a card; twenty results take a hundredth of it.
LONGEST = 1 << 20
#: What every result says, and is a number.
#: `kl_noise` came later: cards without it are read.
_FIGURES = ("perplexity", "change", "noise", "kl_mean", "kl_p99", "top1", "kv_bytes_per_token", "weight_bytes")
_LONG = ("found", "written", "parted", "nll")


@dataclass(frozen=True)
class Evidence:
    """A card's result for one choice of formats: change of perplexity in % and its noise, mean KL divergence in nats.

    safe: whether that divergence is safe, noise included if the card has it; clip: of the weights.
    """

    change: float
    noise: float
    kl: float
    safe: bool = False
    clip: str | None = None


@dataclass(frozen=True)
class Card:
    """What `halfbyte eval MODEL --suite` measured.

    windows    (number, tokens of each); long: tokens of the long contexts, 0 for none
    agreement  (equal, compared) greedy tokens with 16-bit keys and values, ours and those of transformers' own attention
    floor      divergence of the packed 16-bit run from transformers' own, 0 where it was not measured
    """

    model: str
    sizes: ModelSizes
    text: str
    windows: tuple[int, int]
    chunk: int
    long: int
    tasks: tuple[str, ...]
    results: tuple[dict[str, Any], ...]
    agreement: tuple[int, int]
    environment: dict[str, Any]
    floor: float = 0.0

    def matches(self, config: Any) -> bool:
        """Whether a configuration, or a model, has the sizes of this card's model."""
        return self.sizes == _sizes(config)

    @property
    def dtype(self) -> str:
        """The 16-bit type of the model that was measured, by the first result that names one."""
        names = (r[part] for r in self.results for part in ("keys", "values", "weights"))
        return next((name for name in names if name in HALVES), HALVES[0])

    def evidence(self, keys: str, values: str, weights: str) -> Evidence | None:
        """The result of exactly these formats; 16 bits of either type are those of the card."""
        formats = tuple(self.dtype if name in HALVES else name for name in (keys, values, weights))
        for r in self.results:
            if (r["keys"], r["values"], r["weights"]) == formats:
                return Evidence(r["change"], r["noise"], r["kl_mean"], self.is_safe(r), r.get("clip"))
        return None

    def is_safe(self, r: dict[str, Any]) -> bool:
        """Whether a result's divergence is safe."""
        return is_safe(r["kl_mean"], r.get("kl_noise", 0.0), self.floor)

    def write(self, path: Path) -> tuple[Path, Path]:
        """Write the JSON file `path`, and a Markdown page next to it with the suffix .md."""
        return write_whole(path, self.to_json()), write_whole(path.with_suffix(".md"), self.markdown())

    def to_json(self) -> str:
        """What the file holds."""
        return json.dumps({"format": KIND, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    def markdown(self) -> str:
        """The card as a page of Markdown."""
        count, length = self.windows
        where = self.environment
        versions = ", ".join(f"{name} {v}" for name, v in where.get("versions", {}).items())
        lines = [
            f"# {self.model}",
            f"{self.sizes.model_type}: {self.sizes.layers} layers, {self.sizes.kv_heads} KV heads of {self.sizes.head_dim}. "
            f"{count} windows of {length:,} tokens of {self.text}, fed {self.chunk} at a time, so that older keys and values come "
            f"from the packed cache. Changes are against the 16-bit run, \u00b1 two standard errors over tokens; KL is in "
            f"nats, and safe up to {limit(self.floor):.2g}.",
            _table(QUALITY, quality_rows(self)),
        ]
        if self.long:
            lines += [
                f"Contexts of {self.long:,} tokens: retrieved tokens of hidden keys, tokens before greedy texts differ from the "
                "16-bit ones (median), nats a token of these texts by the 16-bit model.",
                _table(LONG, long_rows(self)),
            ]
        if self.tasks:
            rows = [(_name(r), *(_metrics(r["lm_eval"][t]) for t in self.tasks)) for r in self.results if "lm_eval" in r]
            lines += ["lm-eval:", _table(("formats", *self.tasks), rows)]
        equal, total = self.agreement
        floor = f", from which the packed cache diverges by {self.floor:.1e} nats" if self.floor else ""
        lines.append(f"16-bit keys and values: {equal} of {total} greedy tokens equal those of transformers' own attention{floor}.")
        lines.append(f"{where.get('device', '')}; {versions}; {str(where.get('date', ''))[:10]}. `{where.get('command', '')}`")
        return "\n\n".join(lines) + "\n"


def _sizes(model_or_config: Any) -> ModelSizes:
    from halfbyte.hf.model_support import card_sizes, text_config

    return card_sizes(text_config(model_or_config))


QUALITY = ("formats", "perplexity", "change %", "KL mean", "safe", "top-1 %", "KV B/token", "weights MB")
LONG = ("formats", "keys found %", "differs after", "nats a token")


def _name(r: dict[str, Any]) -> str:
    cache = r["keys"] if r["keys"] == r["values"] else f"{r['keys']} / {r['values']}"
    return f"{cache} + {r['weights']}" + ", clipped" * bool(r.get("clip"))


def quality_rows(card: Card) -> list[tuple[str, ...]]:
    """A row a result, under `QUALITY`."""
    return [
        (
            _name(r),
            f"{r['perplexity']:.4f}",
            f"{r['change']:+.2f} \u00b1 {r['noise']:.2f}",
            f"{r['kl_mean']:.1e}",
            "yes" if card.is_safe(r) else "no",
            f"{100 * r['top1']:.1f}",
            f"{r['kv_bytes_per_token']:,.0f}",
            f"{r['weight_bytes'] / 1e6:,.1f}",
        )
        for r in card.results
    ]


def long_rows(card: Card) -> list[tuple[str, ...]]:
    """A row a result that has long contexts, under `LONG`."""
    entries = [(_name(r), LongContext("", card.long, **r["long_context"])) for r in card.results if "long_context" in r]
    return [(name, f"{100 * r.found:.0f}", f"{r.median_parted:,.0f} of {r.written:,}", f"{r.nll:.3f}") for name, r in entries]


def _metrics(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _table(headers: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ------------------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Suite:
    """What a card is measured on: tokens of a text, cut into windows int64 [n, T], and lm-eval tasks."""

    model: str
    text: str
    ids: list[int]
    windows: torch.Tensor
    chunk: int
    long: int
    tasks: tuple[str, ...] = ()


def settings(model: Any) -> list[Setting]:
    """Every cache with every weight format that fits the model, rotated as `halfbyte.hf.quantize` does; the 16-bit run first."""
    from halfbyte.hf.model_support import half_type, head_dims, text_config

    dim, dtype = head_dims(text_config(model))[0], plain_format(half_type(model)).name
    quantized = any(isinstance(m, QuantLayer) for m in model.modules())
    weights = [] if quantized else [w for names in WEIGHTS if (w := first_fitting(model, names)) is not None]
    pairs = [(keys, values) for keys, values in caches(dtype).values() if fits(model.config, keys, values)]
    clips = {WEIGHTS_BY_DEFAULT: CLIP}
    return [
        Setting(k, v, w, rotated(None, key_format(k), dim), clip=clips.get(w or ""), dtype=dtype)
        for w in (None, *weights)
        for k, v in pairs
    ]


def first_fitting(model: Any, names: Sequence[str]) -> str | None:
    """The first of these weight formats that the model's layers divide by; None if there is none."""
    for name in names:
        try:
            quantized_bytes(model, weight_or_plain(name))
        except InvalidArgument:
            continue
        return name
    return None


def fits(config: Any, keys: str, values: str) -> bool:
    """Whether these formats divide the model's head dims."""
    try:
        packed_layers(config, keys, values, ())
    except InvalidArgument:
        return False
    return True


def measure(loaded: Any, tokenizer: Tokenizer, suite: Suite, console: Console) -> Card:
    """Perplexity and divergence of every setting; long contexts and tasks of those with 16-bit weights or the default cache."""
    if suite.tasks:
        require("lm_eval", "--tasks")
    choices = settings(loaded)
    tasks = Tasks(loaded, tokenizer, suite.ids, suite.long) if suite.long else None
    thorough = [s for s in choices if s.weights is None or (s.keys, s.values) == caches()["Default"]]
    runs = [choices[0], Setting.of_transformers(choices[0].dtype), *choices[1:]]
    qualities = run_evaluation(loaded, runs, suite.windows, suite.chunk, console)
    results = {r.setting: _plain(r) for r in qualities if not r.setting.own}
    if tasks is not None:
        for setting, outcome in zip(thorough, run_long_context(loaded, thorough, tasks, console), strict=True):
            results[setting]["long_context"] = {name: getattr(outcome, name) for name in _LONG}
    for setting in thorough if suite.tasks else ():
        results[setting]["lm_eval"] = lm_eval_results(loaded, suite.model, setting, suite.tasks)
    return Card(
        suite.model,
        _sizes(loaded),
        suite.text,
        (suite.windows.shape[0], suite.windows.shape[1]),
        suite.chunk,
        suite.long,
        tuple(map(task_name, suite.tasks)),
        tuple(results.values()),
        agreement(loaded, suite.windows[:2, : min(48, suite.windows.shape[1])]),
        asdict(environment(describe(loaded.device), torch.get_num_threads())),
        qualities[0].floor,
    )


def _plain(result: Quality) -> dict[str, Any]:
    """One result as the card has it."""
    s = result.setting
    weights = {"weights": s.weights or result.plain_weights, "clip": s.clip}
    formats = {"keys": s.keys, "values": s.values, "rotate_keys": s.rotate_keys} | weights
    return formats | {name: getattr(result, name) for name in (*_FIGURES, "kl_noise")}


def lm_eval_results(loaded: Any, model: str, setting: Setting, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
    """{task: {metric: value}} of lm-eval tasks, every log-likelihood and generation read from a cache of the setting's formats."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    from halfbyte import hf

    manager, names = TaskManager(include_path=sorted({str(Path(t).parent) for t in tasks if is_file(t)})), [*map(task_name, tasks)]
    unknown = [name for name in names if name not in manager.all_tasks]
    check(not unknown, f"tasks: lm-eval has no task {unknown[:1]}; of a local task, pass the file NAME.yaml that says `task: NAME`")
    lm = hf.quantize(with_weights(loaded, *setting.in_weights), **setting.cache_options())
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model), trust_remote_code=False)
    try:
        with hf.packed_forwards(lm):
            harness = HFLM(pretrained=lm, tokenizer=tokenizer)
            scores = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, bootstrap_iters=0)
    finally:
        hf.quantize(lm, keys=setting.dtype, values=setting.dtype)  # it may be `loaded` itself
    return {
        task: {name.removesuffix(",none"): value for name, value in scores["results"][task].items() if type(value) is float}
        for task in names
    }


def is_file(task: str) -> bool:
    """Whether a task is the file of a local one, not the name of one that lm-eval has."""
    return task.endswith(".yaml")


def task_name(task: str) -> str:
    """The name of a task, which a local file has, too."""
    return Path(task).stem if is_file(task) else task


# -------------------------------------------------------------------------------------------------------------------- reading


def shipped_cards() -> list[Card]:
    """The cards that come with the library."""
    return [read_card(path) for path in sorted((Path(__file__).parents[1] / "data" / "evidence").glob("*.json"))]


def card_of(config: Any) -> Card | None:
    """The shipped card of a model with these sizes."""
    return next((card for card in shipped_cards() if card.matches(config)), None)


def nearest_card(config: Any) -> Card | None:
    """The shipped card of the real model whose cache is nearest in size to that of this configuration."""
    mine = _sizes(config)
    real = [card for card in shipped_cards() if card.model not in SHIPPED]
    return min(real, key=lambda card: abs(math.log(_cached(card.sizes) / _cached(mine))), default=None)


def _cached(sizes: ModelSizes) -> int:
    """Elements that a token has in the cache."""
    return sizes.layers * sizes.kv_heads * sizes.head_dim


def read_card(path: Path) -> Card:
    """A card from its file, checked. Raises `InvalidArgument`, naming what is wrong."""
    what = f"card={str(path)!r}"
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
        data: Any = json.loads(text) if len(text) <= LONGEST else {}
    except OSError as error:
        raise InvalidArgument(f"{what} cannot be read ({error.strerror}); halfbyte eval MODEL --suite writes one") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what} is no JSON ({str(error)[:200]}); halfbyte eval MODEL --suite writes one") from error
    check(isinstance(data, dict) and data.get("format") == KIND, f'{what} is no card; expected "format": "{KIND}"')
    check(data.get("version") == VERSION, f"{what} has version {data.get('version')!r}; this halfbyte reads {VERSION}")
    try:
        values = {f.name: data[f.name] for f in fields(Card) if f.name != "floor"}
        values["floor"] = float(data.get("floor", 0.0))
        values |= {"sizes": ModelSizes(**values["sizes"]), "results": tuple(map(_checked, values["results"]))}
        values |= {name: tuple(values[name]) for name in ("windows", "tasks", "agreement")}
        return Card(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} is damaged ({type(error).__name__}: {str(error)[:200]}); write it again") from error


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    """A result whose formats are names and whose figures are finite numbers. Raises KeyError or ValueError."""
    odd = [name for name in ("keys", "values", "weights") if not isinstance(result[name], str)]
    odd += [
        name
        for name in (*_FIGURES, *({"kl_noise"} & result.keys()))
        if type(result[name]) not in (int, float) or not math.isfinite(result[name])
    ]
    if odd:
        raise ValueError(f"{odd[0]} is {result[odd[0]]!r}")
    return result
