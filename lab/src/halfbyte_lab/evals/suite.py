"""`halfbyte eval MODEL --suite`: an evidence card (`card.py`), for `halfbyte advise` and for others to read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from halfbyte.cli.shared import console, print_table, words
from halfbyte.device import describe
from halfbyte.errors import check, require
from halfbyte.formats import key_format, plain_format
from halfbyte.nn import QuantLayer
from halfbyte.paths import resolve_model, write_whole
from halfbyte.reference.hadamard import rotated
from halfbyte.settings import CLIP
from halfbyte.settings import WEIGHTS as WEIGHTS_BY_DEFAULT
from halfbyte.text import Tokenizer, heldout_text, read_text
from halfbyte.text import windows as cut
from halfbyte_lab.evals.card import FIGURES, KIND, VERSION, WEIGHTS, Card, first_fitting, fits, sizes_of
from halfbyte_lab.evals.choices import caches, limit
from halfbyte_lab.evals.long_context import LongContext, Tasks, run_long_context
from halfbyte_lab.evals.model import load, model_of, tokenizer_of
from halfbyte_lab.evals.own_attention import agreement
from halfbyte_lab.evals.quality import Quality, Setting, run_evaluation, with_weights
from halfbyte_lab.measure.environment import environment
from halfbyte_lab.options import EvalOptions

#: Windows and tokens of the long contexts where no option says otherwise.
DEFAULT_WINDOWS, DEFAULT_LONG = 8, 1024
_LONG = ("found", "written", "parted", "nll")
#: What the text of a card is called where it is the one that ships with halfbyte.
SHIPPED_TEXT = "the shipped held-out text"


def run(
    model: str,
    options: EvalOptions,
    path: Path,
    text: Path | None,
    sizes: tuple[int | None, int, int, int | None],
    device: str | None,
    dtype: str,
) -> None:
    """Measure, write the card to `path`, show it. sizes: windows, tokens of each, tokens fed at a time, tokens of long contexts."""
    content, tokenizer = read_text(text), tokenizer_of(model)
    (count, length, chunk, long), ids = sizes, tokenizer.encode(content)
    parts, long = cut(ids, length, count or DEFAULT_WINDOWS, tokenizer.bos), DEFAULT_LONG if long is None else long
    suite = Suite(model, _text_name(text, content), ids, parts, chunk, long, tuple(words(options.tasks)))
    card = measure(model_of(model, device, dtype), tokenizer, suite, console(stderr=True))
    _show(card, options)
    message = f"card: {' and '.join(map(str, write(card, path)))}. Use it: halfbyte advise {model} --card {path}"
    console(stderr=options.as_json).print(message, markup=False, highlight=False)


def short_card(model: str, device: str | None, dtype: str) -> Card:
    """The card of `halfbyte advise --measure`: few windows, and no long contexts."""
    lm, tokenizer = load(model, device, dtype)
    ids = tokenizer.encode(heldout_text())
    suite = Suite(model, SHIPPED_TEXT, ids, cut(ids, 512, 8, tokenizer.bos), chunk=16, long=0)
    return measure(lm, tokenizer, suite, console(stderr=True))


def _text_name(path: Path | None, text: str) -> str:
    """What a card calls the text it was measured on: a file by its name and the beginning of its SHA-256."""
    if path is None:
        return SHIPPED_TEXT
    return f"{path.name} (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _show(card: Card, options: EvalOptions) -> None:
    count, length = card.windows
    if options.as_json:
        print(to_json(card))
        return
    print_table(
        f"{card.model}: {count} window{'s' * (count > 1)} of {length:,} tokens", QUALITY, quality_rows(card), 1, options.wide
    )
    if card.long:
        print_table(f"Contexts of {card.long:,} tokens", LONG, long_rows(card), 1, options.wide)


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
        Setting(k, v, rotated(None, key_format(k), dim), weights=w, clip=clips.get(w or ""), dtype=dtype)
        for w in (None, *weights)
        for k, v in pairs
    ]


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
        sizes_of(loaded),
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
    return formats | {name: getattr(result, name) for name in (*FIGURES, "kl_noise")}


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


# ---------------------------------------------------------------------------------------------------------------------- pages


def write(card: Card, path: Path) -> tuple[Path, Path]:
    """Write the JSON file `path`, and a Markdown page next to it with the suffix .md."""
    return write_whole(path, to_json(card)), write_whole(path.with_suffix(".md"), markdown(card))


def to_json(card: Card) -> str:
    """What the file holds."""
    return json.dumps({"format": KIND, "version": VERSION, **asdict(card)}, indent=1) + "\n"


def markdown(card: Card) -> str:
    """The card as a page of Markdown."""
    count, length = card.windows
    where = card.environment
    versions = ", ".join(f"{name} {v}" for name, v in where.get("versions", {}).items())
    lines = [
        f"# {card.model}",
        f"{card.sizes.model_type}: {card.sizes.layers} layers, {card.sizes.kv_heads} KV heads of {card.sizes.head_dim}. "
        f"{count} windows of {length:,} tokens of {card.text}, fed {card.chunk} at a time, so that older keys and values come "
        f"from the packed cache. Changes are against the 16-bit run, \u00b1 two standard errors over tokens; KL is in "
        f"nats, and safe up to {limit(card.floor):.2g}.",
        _table(QUALITY, quality_rows(card)),
    ]
    if card.long:
        lines += [
            f"Contexts of {card.long:,} tokens: retrieved tokens of hidden keys, tokens before greedy texts differ from the "
            "16-bit ones (median), nats a token of these texts by the 16-bit model.",
            _table(LONG, long_rows(card)),
        ]
    if card.tasks:
        rows = [(_name(r), *(_metrics(r["lm_eval"][t]) for t in card.tasks)) for r in card.results if "lm_eval" in r]
        lines += ["lm-eval:", _table(("formats", *card.tasks), rows)]
    equal, total = card.agreement
    floor = f", from which the packed cache diverges by {card.floor:.1e} nats" if card.floor else ""
    lines.append(f"16-bit keys and values: {equal} of {total} greedy tokens equal those of transformers' own attention{floor}.")
    lines.append(f"{where.get('device', '')}; {versions}; {str(where.get('date', ''))[:10]}. `{where.get('command', '')}`")
    return "\n\n".join(lines) + "\n"


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
