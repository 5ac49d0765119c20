"""`halfbyte eval`: what formats cost a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte import settings
from halfbyte.cli.models import Clip, Weights, cache_options
from halfbyte.cli.options import CacheFormats, Dtype, with_options
from halfbyte.cli.shared import LmHead, Model, Where, console, print_table, readable, token_count
from halfbyte.errors import check
from halfbyte_lab.options import EvalOptions, check_page, check_writable

if TYPE_CHECKING:
    from halfbyte_lab.evals.quality import Setting

Plan = Annotated[
    Path | None,
    typer.Option(
        help="A cache plan, as halfbyte calibrate writes it; replaces --keys, --values and their options.", callback=readable
    ),
]


@with_options(CacheFormats, EvalOptions)
def evaluate(
    cache: CacheFormats,
    results_to: EvalOptions,
    model: Model,
    weights: Weights = "bf16",
    lm_head: LmHead = "bf16",
    rotate_values: Annotated[
        bool,
        typer.Option("--rotate-values", help="Hadamard-rotate values: folded into v_proj and o_proj, or else in the cache."),
    ] = False,
    clip: Clip = None,
    plan: Plan = None,
    every: Annotated[bool, typer.Option("--every", help="Evaluate every KV and weight format.")] = False,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text to evaluate on; default: the shipped held-out text.", callback=readable)
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Maximum number of windows, spread over the text; default: all.")] = None,
    length: Annotated[int, typer.Option(help="Tokens in a window.")] = 1024,
    chunk: Annotated[int, typer.Option(help="Tokens fed at a time.")] = 16,
    long: Annotated[
        int | None,
        typer.Option(
            parser=token_count,
            metavar="TOKENS",
            help="Also evaluate contexts of this many tokens: retrieval, and how long texts equal the 16-bit ones.",
        ),
    ] = None,
    dtype: Dtype = settings.HALVES[0],
    device: Where = None,
) -> None:
    """Perplexity, KL divergence and top-1 agreement of a quantized model with the 16-bit model; checked against transformers."""
    check_page(results_to.html, "html")
    check_writable(results_to.output, "output")
    for name, value, least in (("windows", windows, 1), ("length", length, 2), ("chunk", chunk, 1)):
        check(value is None or value >= least, f"{name}={value}; expected at least {least}")
    card = results_to.card_of(model)
    from halfbyte.hf.model_support import head_dims, text_config
    from halfbyte.text import read_text
    from halfbyte.text import windows as cut
    from halfbyte_lab.evals import long_context, pages, suite
    from halfbyte_lab.evals.choices import limit
    from halfbyte_lab.evals.model import model_of, tokenizer_of
    from halfbyte_lab.evals.own_attention import agreement
    from halfbyte_lab.evals.present import HEADERS, records, rows, verdict
    from halfbyte_lab.evals.quality import Setting, check_exact, every_kv_setting, every_weight_setting, run_evaluation

    if card is not None:
        suite.run(model, results_to, card, text, (windows, length, chunk, long), device, dtype)
        return
    check(clip is None or {weights, lm_head} != {"bf16"}, f"--clip {clip} is about weights; name --weights as well")
    content = read_text(text)
    config, setting = _setting(model, cache, plan, dtype)
    packed, head = (None if name in ("bf16", dtype) else name for name in (weights, lm_head))
    setting = replace(setting, weights=packed, clip=clip, rotate_values=rotate_values, lm_head=head)
    check_exact(setting.exact, min(length, long or length))
    dim = head_dims(text_config(config))[0]
    choices = [*every_kv_setting(dim, dtype), *every_weight_setting(dtype)] if every else [setting]
    _warn_of_positions(config, max(length, long or 0))
    tokenizer = tokenizer_of(model)
    ids = tokenizer.encode(content)
    tokens = cut(ids, length, windows, tokenizer.bos)
    lm = model_of(model, device, dtype)
    tasks = None if long is None else long_context.Tasks(lm, tokenizer, ids, long)
    plain, own = Setting.plain(dtype), Setting.of_transformers(dtype)
    runs = [plain, *[s for s in choices if s != plain]]
    results = run_evaluation(lm, [plain, own, *runs[1:]], tokens, chunk, console(stderr=True))
    longer = [] if tasks is None else long_context.run_long_context(lm, runs, tasks, console(stderr=True))
    equal, total = agreement(lm, tokens[:2, : min(48, length)])
    if results_to.as_json:
        print(json.dumps({"results": records(results, longer), "equal_tokens": equal, "compared_tokens": total}))
    else:
        count = tokens.shape[0]
        title = f"{model}: {count} window{'s' * (count > 1)} of {length:,} tokens, {chunk} at a time"
        print_table(title, HEADERS, rows(results), text_columns=2, wide=results_to.wide)
        if tasks is not None:
            print_table(f"Contexts of {long:,} tokens", long_context.LONG_HEADERS, long_context.long_rows(longer), text_columns=1)
        same = (
            f"16-bit keys and values: {equal} of {total} greedy tokens equal those of transformers' own attention, from which the "
            f"packed cache of 16 bits diverges by {results[0].floor:.1e} nats; safe: up to {limit(results[0].floor):.1e}"
        )
        console().print(f"{same}\n{verdict(results)}".strip(), markup=False, highlight=False)
    if results_to.output is not None:
        pages.append_records(results, results_to.output, longer, device=device)
    if results_to.html is not None:
        pages.write_report(results, f"{model}: what the bits cost", results_to.html, longer)


def _setting(model: str, cache: CacheFormats, plan: Path | None, dtype: str) -> tuple[Any, Setting]:
    """(configuration, the cache that was requested), checked before weights are loaded. A plan takes the place of the formats of
    `cache` and, where it has some, of its sink and recent tokens.
    """
    from halfbyte.cache_plan import read_plan
    from halfbyte.hf.model_support import model_sizes, text_config
    from halfbyte.memory import load_config
    from halfbyte.paths import resolve_model
    from halfbyte_lab.evals.quality import Setting

    if plan is None:
        config, options = cache_options(model, cache)
        return config, Setting(**options, dtype=dtype)
    check(cache.calibration is None, "--calibration goes with formats of all layers; leave it out, or --plan")
    config, cache_plan = load_config(resolve_model(model)), read_plan(plan)
    cache_plan.check_model(model_sizes(text_config(config)))
    return config, Setting.of_plan(cache_plan, dtype=dtype, exact=(cache.sink_tokens, cache.recent_tokens))


def _warn_of_positions(config: Any, length: int) -> None:
    """Warn on stderr that a model was not trained for so many tokens: high perplexity there is not due to the formats."""
    from halfbyte.hf.model_support import text_config

    limit = getattr(text_config(config), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        message = (
            f"note: {length:,} tokens are more than the {limit:,} positions of this model, which it may not read well in 16 bits"
        )
        console(stderr=True).print(message, markup=False, highlight=False)
