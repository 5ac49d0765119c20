"""Commands that run a model: eval, generate, quantize."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte import settings
from halfbyte.cli.options import CacheFormats, Dtype, EvalOptions, OfHalves, with_options
from halfbyte.cli.shared import (
    LmHead,
    Model,
    PlainModel,
    Source,
    Where,
    check_new_folder,
    check_page,
    check_writable,
    console,
    parse_layers,
    print_table,
    token_count,
    words,
)
from halfbyte.errors import InvalidArgument, check, laboratory

if TYPE_CHECKING:
    import torch

    from halfbyte.cache_plan import CachePlan
    from halfbyte.evals.quality import Setting

Weights = Annotated[str, typer.Option(help="Format of the linear layers' weights; bf16 leaves them unquantized.")]
RotateValues = Annotated[bool, typer.Option("--rotate-values", help="Fold a rotation of values into v_proj and o_proj.")]
Clip = Annotated[str | None, typer.Option(help="search: per group of up to 32, clip the range to the least squared error; slower.")]
Plan = Annotated[
    Path | None, typer.Option(help="A cache plan, as halfbyte calibrate writes it; replaces --keys, --values and their options.")
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
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text to evaluate on; default: the shipped held-out text.")] = None,
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
    from halfbyte.evals.choices import limit
    from halfbyte.evals.model import load
    from halfbyte.evals.own_attention import agreement
    from halfbyte.evals.present import HEADERS, records, rows, verdict
    from halfbyte.evals.quality import Setting, every_kv_setting, every_weight_setting, run_evaluation
    from halfbyte.evals.text import check_exact, read_text
    from halfbyte.evals.text import windows as cut
    from halfbyte.hf.model_support import head_dims, text_config

    check_page(results_to.html, "html")
    check_writable(results_to.output, "output")
    pages: Any = laboratory("evals.pages", "--html and --output") if results_to.html or results_to.output else None
    for name, value, least in (("windows", windows, 1), ("length", length, 2), ("chunk", chunk, 1)):
        check(value is None or value >= least, f"{name}={value}; expected at least {least}")
    check(results_to.suite or not (results_to.card or results_to.tasks), "--card and --tasks say something about --suite; add it")
    if results_to.suite:
        laboratory("evals.suite", "--suite").run(model, results_to, text, (windows, length, chunk, long), device, dtype)
        return
    contexts = None if long is None else laboratory("evals.long_context", "--long")
    check(clip is None or {weights, lm_head} != {"bf16"}, f"--clip {clip} is about weights; name --weights as well")
    content = read_text(text)
    head = None if lm_head == "bf16" else lm_head
    setting, config = _setting(model, cache, weights, plan, clip=clip, lm_head=head, dtype=dtype)
    check_exact(setting.exact, min(length, long or length))
    setting = replace(setting, rotate_values=rotate_values, lm_head=head)
    dim = head_dims(text_config(config))[0]
    choices = [*every_kv_setting(dim, dtype), *every_weight_setting(dtype)] if every else [setting]
    _warn_of_positions(config, max(length, long or 0))
    lm, tokenizer = load(model, device, dtype)
    ids = tokenizer.encode(content)
    tokens = cut(ids, length, windows, tokenizer.bos)
    tasks = contexts and contexts.Tasks(lm, tokenizer, ids, long)
    plain, own = Setting.plain(dtype), Setting.of_transformers(dtype)
    runs = [plain, *[s for s in choices if s != plain]]
    results = run_evaluation(lm, [plain, own, *runs[1:]], tokens, chunk, console(stderr=True))
    longer = contexts.run_long_context(lm, runs, tasks, console(stderr=True)) if contexts else []
    equal, total = agreement(lm, tokens[:2, : min(48, length)])
    if results_to.as_json:
        print(json.dumps({"results": records(results, longer), "equal_tokens": equal, "compared_tokens": total}))
    else:
        count = tokens.shape[0]
        title = f"{model}: {count} window{'s' * (count > 1)} of {length:,} tokens, {chunk} at a time"
        print_table(title, HEADERS, rows(results), text_columns=2, wide=results_to.wide)
        if contexts:
            print_table(f"Contexts of {long:,} tokens", contexts.LONG_HEADERS, contexts.long_rows(longer), text_columns=1)
        same = (
            f"16-bit keys and values: {equal} of {total} greedy tokens equal those of transformers' own attention, from which the "
            f"packed cache of 16 bits diverges by {results[0].floor:.1e} nats; safe: up to {limit(results[0].floor):.1e}"
        )
        console().print(f"{same}\n{verdict(results)}".strip(), markup=False, highlight=False)
    if results_to.output is not None:
        pages.append_records(results, results_to.output, longer, device=device)
    if results_to.html is not None:
        pages.write_report(results, f"{model}: what the bits cost", results_to.html, longer)


@with_options(CacheFormats)
def generate(
    cache: CacheFormats,
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; - reads it from standard input.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer line after line of standard input, by the chat template.")] = False,
    weights: Weights = "bf16",
    clip: Clip = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed of the sampling.")] = 0,
    dtype: Dtype = settings.HALVES[0],
    device: Where = None,
) -> None:
    """Generate text with a packed cache, printing tokens as they come: what continues --prompt, or the answers of a --chat."""
    from halfbyte.evals.model import load, write
    from halfbyte.evals.quality import with_weights
    from halfbyte.hf.progress_bar import show_progress

    check((prompt is None) == chat, "give --prompt with a text to continue, or --chat to write to the model line by line")
    text = _text(prompt or "")
    check(clip is None or weights != "bf16", f"--clip {clip} is about weights; name --weights as well")
    setting, _ = _setting(model, cache, weights, dtype=dtype, clip=clip)
    if chat:
        _chat(model, setting, tokens, (temperature, seed), device)
        return
    lm, tokenizer = load(model, device, dtype)
    with show_progress():
        quantized = with_weights(lm, *setting.in_weights)
    pieces = write(quantized, tokenizer, text, setting, tokens, temperature=temperature, seed=seed)
    print(text, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _chat(model: str, setting: Setting, tokens: int, sampling: tuple[float, int], device: str | None) -> None:
    """Answer each line of standard input until it ends; Ctrl-C ends an answer, or the conversation between two."""
    import torch
    from transformers import AutoTokenizer, TextStreamer

    from halfbyte.evals.model import load
    from halfbyte.evals.quality import cache_for, with_weights
    from halfbyte.hf import Chat
    from halfbyte.hf.progress_bar import show_progress
    from halfbyte.paths import resolve_model

    tokenizer, (temperature, seed) = AutoTokenizer.from_pretrained(resolve_model(model)), sampling
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0, "pad_token_id": 0}
    options |= {"temperature": temperature} if temperature else {}
    options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    conversation = Chat(None, tokenizer, None, **options)  # a model without a template is refused before it is loaded
    with show_progress():
        quantized = with_weights(load(model, device, setting.dtype)[0], *setting.in_weights)
    conversation.model, conversation.cache = quantized, cache_for(quantized, setting, 1024 + tokens)
    torch.manual_seed(seed)
    ask = console(stderr=True)
    while line := _line("> " if sys.stdin.isatty() else ""):
        try:
            conversation.answer(line.strip())
        except KeyboardInterrupt:
            print()
            continue
        rate = conversation.tokens / conversation.seconds
        ask.print(f"{conversation.tokens} tokens, {rate:.1f} tokens/s", style="dim", highlight=False)


def _line(prompt: str) -> str:
    """A line of standard input with its end; empty at the end of it and at Ctrl-C."""
    print(prompt, end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline()
    except KeyboardInterrupt:
        return ""


def _setting(
    model: str, cache: CacheFormats, weights: str, plan: Path | None = None, *, dtype: str, **of_weights: str | None
) -> tuple[Setting, Any]:
    """(formats, configuration): what was requested, checked by names and by the configuration before weights are loaded. A plan
    takes the place of the formats of `cache` and, where it has some, of its sink and recent tokens.
    """
    from halfbyte.calibrated_keys import read_calibration
    from halfbyte.evals.quality import Setting
    from halfbyte.formats import key_format
    from halfbyte.hf.model_support import head_dims, model_sizes, text_config
    from halfbyte.memory import load_config, packed_layers
    from halfbyte.paths import resolve_model
    from halfbyte.reference.hadamard import rotated

    keys, values, exact = cache.keys, cache.values, {"sink_tokens": cache.sink_tokens, "recent_tokens": cache.recent_tokens}
    packed = None if weights in ("bf16", dtype) else weights
    if plan is not None:
        check(cache.calibration is None, "--calibration goes with formats of all layers; leave it out, or --plan")
        config = load_config(resolve_model(model))
        setting = Setting.of_plan(read_plan_of(plan, config), packed, dtype, exact=(cache.sink_tokens, cache.recent_tokens))
        return replace(setting, **of_weights), config  # type: ignore[arg-type]
    setting = Setting(keys, values, packed, dtype=dtype, **exact, **of_weights)  # type: ignore[arg-type]
    config = load_config(resolve_model(model))
    if cache.calibration is not None:
        read_calibration(cache.calibration).of_model(model_sizes(text_config(config)), "")
        setting = replace(setting, calibration=str(cache.calibration))
    layers = parse_layers(cache.skip_layers, text_config(config).num_hidden_layers)
    packed_layers(config, keys, values, layers)
    rotate_keys = rotated(cache.rotate_keys, key_format(keys), head_dims(text_config(config))[0])
    return replace(setting, rotate_keys=rotate_keys, skip_layers=layers), config


def _warn_of_positions(config: Any, length: int) -> None:
    """Warn on stderr that a model was not trained for so many tokens: high perplexity there is not due to the formats."""
    from halfbyte.hf.model_support import text_config

    limit = getattr(text_config(config), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        message = (
            f"note: {length:,} tokens are more than the {limit:,} positions of this model, which it may not read well in 16 bits"
        )
        console(stderr=True).print(message, markup=False, highlight=False)


def read_plan_of(plan: Path, model: Any) -> CachePlan:
    """A plan from its file, for this model or configuration."""
    from halfbyte.cache_plan import read_plan
    from halfbyte.hf.model_support import model_sizes, text_config

    cache_plan = read_plan(plan)
    cache_plan.check_model(model_sizes(text_config(model)))
    return cache_plan


def _text(prompt: str) -> str:
    """The prompt itself, or standard input; bytes that are no text are refused before a model is loaded."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # a shell's bytes that are not UTF-8 come as lone surrogates
    except UnicodeError as error:
        raise InvalidArgument(f"prompt cannot be read as UTF-8 text: {error}") from error
    return text


def quantize(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; it must not exist.")],
    model: PlainModel = None,
    weights: Annotated[
        str | None, typer.Option(help=f"Format of the linear layers' weights. Default: {settings.WEIGHTS}, --clip {settings.CLIP}.")
    ] = None,
    lm_head: LmHead = "bf16",
    skip: Annotated[str, typer.Option(help="Modules that keep their weights, separated by commas.")] = "",
    source: Source = None,
    rotate_values: RotateValues = False,
    clip: Clip = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text like the model's inputs: weights are rounded so that errors cancel for it; minutes."),
    ] = None,
    dtype: Annotated[str | None, OfHalves] = None,
    device: Annotated[
        str | None, typer.Option(help="With --calibrate: cpu, cuda or cuda:N. Default: the GPU if there is one.")
    ] = None,
) -> None:
    """Quantize a model's weights, save them as safetensors, and verify that they load again bit for bit.

    With MODEL, 16-bit weights are quantized to --weights, --lm-head or both; without either, as by hf.quantize(model) on a GPU.
    With --from DIR, a checkpoint of another library is converted (docs/guides/checkpoints.md); --lm-head may then quantize its
    output layer, and --dtype defaults to the type in the files. Otherwise it defaults to bf16.
    """
    check_new_folder(output)  # before the seconds that imports take
    import torch

    from halfbyte import hf
    from halfbyte.evals.quality import weight_bytes
    from halfbyte.hf.weights import packed_share
    from halfbyte.paths import resolve_model

    folder = resolve_model(model or source or "") if model or source else ""
    least = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) // 8 if folder else 0  # no format is smaller
    free = shutil.disk_usage(output.absolute().parent).free
    check(free > least, f"output={str(output)!r} cannot be written: it takes more than {least:,} bytes, and {free:,} are free")
    check(device is None or calibrate is not None, f"--device {device} is about --calibrate; name a text, or leave it out")
    options = {"clip": clip, "rotate_values": rotate_values, "lm_head": None if lm_head == "bf16" else lm_head, "dtype": dtype}
    quantized = _quantized(model, weights, source, skip_modules=tuple(words(skip)), calibration=(calibrate, device), **options)
    hf.save(quantized, output, tokenizer=resolve_model(model or source or ""))
    try:
        again, before = hf.load(output).state_dict(), quantized.state_dict()
    except BaseException:
        shutil.rmtree(output)
        raise
    same = again.keys() == before.keys() and all(torch.equal(_bits(again[name]), _bits(t)) for name, t in before.items())
    if not same:
        shutil.rmtree(output)
        raise InvalidArgument(f"output={str(output)!r} did not load again to the same bits and was removed; please report this")
    size, share = weight_bytes(quantized) / 1e6, packed_share(quantized)
    print(f"{output}: {size:.2f} MB, {share:.1%} of the weights quantized\nloaded again and equal bit for bit")


def _quantized(
    model: str | None, weights: str | None, source: str | None, calibration: tuple[Path | None, str | None], **options: Any
) -> torch.nn.Module:
    """A model with quantized weights: rounded here, or as another library rounded them. Options are those of `hf.quantize`.

    calibration: a text, and the device that reads it.
    """
    from halfbyte import hf
    from halfbyte.device import describe
    from halfbyte.evals.text import read_text
    from halfbyte.formats import plain_format, weight_format
    from halfbyte.nn import QuantLayer
    from halfbyte.paths import resolve_model
    from halfbyte.reference.quantize import check_clip

    clip, lm_head = options["clip"], options["lm_head"]
    if (model is None) == (source is None) or bool(source and weights):
        raise InvalidArgument(
            "give a MODEL, with its --weights if they are not to be the default, or --from with a quantized model"
        )
    check(clip is None or source is None, "--clip is about rounding 16-bit weights; --from takes codes over as they are")
    check(
        not (options["skip_modules"] and source),
        "--skip names modules that keep 16-bit weights; --from takes codes over as they are",
    )
    check(not (options["rotate_values"] and source), "--rotate-values changes 16-bit weights; --from takes codes over as they are")
    text, device = calibration
    check(text is None or source is None, "--calibrate is about rounding 16-bit weights; --from takes codes over as they are")
    quantized: torch.nn.Module
    dtype = options.pop("dtype")
    if source is not None:
        quantized = hf.load(resolve_model(source), dtype="auto" if dtype is None else plain_format(dtype).code.dtype)
        if not any(isinstance(m, QuantLayer) for m in quantized.modules()):
            raise InvalidArgument(
                f"--from {source!r} is not quantized; quantize it: halfbyte quantize {source} --weights nf4 -o DIR"
            )
        return quantized if lm_head is None else hf.quantize(quantized, lm_head=lm_head)
    if weights is lm_head is None:
        weights, options["clip"] = settings.WEIGHTS, settings.CLIP
    check_clip(options["clip"], weight_format(weights or lm_head or ""))
    folder, half = resolve_model(model or ""), plain_format(dtype or settings.HALVES[0]).code.dtype
    if text is None:
        quantized = hf.load(folder, weights=weights, dtype=half, **options)
        return quantized
    content = read_text(text)
    quantized = hf.load(folder, dtype=half).to(describe(device).torch)
    return hf.quantize(quantized, weights, calibrate=content, **options).cpu()  # type: ignore[no-any-return]


def _bits(t: torch.Tensor) -> torch.Tensor:
    import torch

    return t.contiguous().flatten().view(torch.uint8)
