"""Commands that run a model: generate, quantize."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte import settings
from halfbyte.cli.options import CacheFormats, Dtype, OfHalves, with_options
from halfbyte.cli.shared import (
    LmHead,
    Model,
    PlainModel,
    Source,
    Where,
    check_new_folder,
    console,
    load_model,
    parse_layers,
    readable,
    words,
)
from halfbyte.errors import InvalidArgument, check

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import TextStreamer

    from halfbyte.text import Tokenizer

Weights = Annotated[str, typer.Option(help="Format of the linear layers' weights; bf16 leaves them unquantized.")]
RotateValues = Annotated[bool, typer.Option("--rotate-values", help="Fold a rotation of values into v_proj and o_proj.")]
Clip = Annotated[str | None, typer.Option(help="search: per group of up to 32, clip the range to the least squared error; slower.")]


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
    """Generate text with a packed cache, printing words as they come: what continues --prompt, or the answers of a --chat."""
    from halfbyte import hf
    from halfbyte.device import describe
    from halfbyte.formats import weight_format
    from halfbyte.hf.model_support import BUCKET
    from halfbyte.hf.weights import show_progress
    from halfbyte.memory import packed_layers
    from halfbyte.paths import resolve_model
    from halfbyte.reference.quantize import check_clip
    from halfbyte.text import load_tokenizer

    check((prompt is None) == chat, "give --prompt with a text to continue, or --chat to write to the model line by line")
    text = _text(prompt or "")
    check(clip is None or weights != "bf16", f"--clip {clip} is about weights; name --weights as well")
    check(temperature == 0 or 1e-3 <= temperature <= 1e3, f"temperature={temperature}; expected 0, or 0.001 to 1000")
    config, options = cache_options(model, cache)
    options |= {"weights": None if weights in ("bf16", dtype) else weights, "clip": clip}
    if options["weights"] is not None:
        check_clip(clip, weight_format(options["weights"]))
    ask: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0, "pad_token_id": 0}
    ask |= {"temperature": temperature} if temperature else {}

    def load() -> Any:
        with show_progress():
            return hf.quantize(load_model(model, device, dtype, exact=False), **options)

    if chat:
        _chat(model, load, ask, seed)
        return
    layers = packed_layers(config, cache.keys, cache.values, options["skip_layers"])
    tokenizer = load_tokenizer(resolve_model(model), config.get_text_config(decoder=True).vocab_size)
    ids = tokenizer.encode(text)
    check(bool(ids), "prompt is empty; give at least one token of text to continue")
    ids = ids if tokenizer.bos is None else [tokenizer.bos, *ids]
    check(0 < tokens < 2**31 - len(ids) - BUCKET, f"tokens={tokens}; expected at least 1, with the prompt's {len(ids)} below 2^31")
    nbytes, memory = layers.nbytes(1, len(ids) + tokens), describe(device).memory_bytes
    size = f"{nbytes / 1e9:,.1f} GB"
    check(nbytes < memory, f"tokens={tokens}: their cache of {size} is larger than this device's memory, {memory / 1e9:,.1f} GB")
    _continue(load(), tokenizer, text, ids, ask, seed)


def _continue(model: Any, tokenizer: Tokenizer, text: str, ids: list[int], options: dict[str, Any], seed: int) -> None:
    """Print a text, whose tokens are `ids`, and what `generate()` continues it with, word by word."""
    import torch

    prompt = torch.tensor([ids], device=model.device)
    torch.manual_seed(seed)
    print(text, end="", flush=True)
    start = time.perf_counter()
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=_streamer(tokenizer), **options)
    count = tokens.shape[1] - len(ids)
    _say_rate(count, time.perf_counter() - start)
    if count <= 1 < options["max_new_tokens"] and any(tokenizer.frame):
        console(stderr=True).print("The model ended the text there; it answers questions with --chat.")


def _streamer(tokenizer: Any) -> TextStreamer:
    """Prints what comes behind a prompt."""
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _say_rate(tokens: int, seconds: float) -> None:
    """What an answer took, the prompt included, next to it."""
    console(stderr=True).print(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s", style="dim", highlight=False)


def _chat(model: str, load: Callable[[], Any], options: dict[str, Any], seed: int) -> None:
    """Answer each line of standard input until it ends; Ctrl-C ends an answer, or the conversation between two."""
    import torch
    from transformers import AutoTokenizer

    from halfbyte.hf import Chat
    from halfbyte.hf.default_cache import cache_settings, new_cache
    from halfbyte.paths import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    # Made before the model is loaded, which takes longer than to refuse a tokenizer without a chat template.
    conversation = Chat(None, tokenizer, None, streamer=_streamer(tokenizer), **options)
    conversation.model = lm = load()
    formats = cache_settings(lm)
    assert formats is not None
    conversation.cache = new_cache(lm, formats, 1024 + options["max_new_tokens"])
    torch.manual_seed(seed)
    while line := _line("> " if sys.stdin.isatty() else ""):
        try:
            conversation.answer(line.strip())
        except KeyboardInterrupt:
            print()
            continue
        _say_rate(conversation.tokens, conversation.seconds)


def _line(prompt: str) -> str:
    """A line of standard input with its end; empty at the end of it and at Ctrl-C."""
    print(prompt, end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline()
    except KeyboardInterrupt:
        return ""


def cache_options(model: str, cache: CacheFormats) -> tuple[Any, dict[str, Any]]:
    """(configuration, options of `hf.quantize`): a cache, checked by names and by the configuration before weights are loaded."""
    from halfbyte.calibrated_keys import read_calibration
    from halfbyte.formats import check_window, key_format, value_format
    from halfbyte.hf.model_support import head_dims, model_sizes, text_config
    from halfbyte.memory import load_config, packed_layers
    from halfbyte.paths import resolve_model
    from halfbyte.reference.hadamard import rotated

    keys, values = key_format(cache.keys), value_format(cache.values)
    check_window(cache.sink_tokens, cache.recent_tokens, keys, values)
    config = load_config(resolve_model(model))
    decoder = text_config(config)
    if cache.calibration is not None:
        read_calibration(cache.calibration).of_model(model_sizes(decoder), "")
    layers = parse_layers(cache.skip_layers, decoder.num_hidden_layers)
    packed_layers(config, cache.keys, cache.values, layers)
    return config, {
        **asdict(cache),
        "calibration": None if cache.calibration is None else str(cache.calibration),
        "rotate_keys": rotated(cache.rotate_keys, keys, head_dims(decoder)[0]),
        "skip_layers": layers,
    }


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
        typer.Option(
            help="A UTF-8 text like the model's inputs: weights are rounded so that errors cancel for it; minutes.",
            callback=readable,
        ),
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
    from halfbyte.hf.weights import packed_share, weight_bytes
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
    from halfbyte.formats import plain_format, weight_format
    from halfbyte.nn import QuantLayer
    from halfbyte.paths import resolve_model
    from halfbyte.reference.quantize import check_clip
    from halfbyte.text import read_text

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
    content, where = read_text(text), describe(device).torch
    quantized = hf.load(folder, dtype=half).to(where)
    return hf.quantize(quantized, weights, calibrate=content, **options).cpu()  # type: ignore[no-any-return]


def _bits(t: torch.Tensor) -> torch.Tensor:
    import torch

    return t.contiguous().flatten().view(torch.uint8)
