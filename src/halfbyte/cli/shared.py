"""What the commands share: printing, and reading lists from options."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import textwrap
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import CallbackParam
from typer.core import TyperCommand, TyperGroup

from halfbyte.errors import InvalidArgument, check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console


_Function = TypeVar("_Function", bound="Callable[..., Any]")


def _without_types(parameters: list[Any]) -> list[Any]:
    """Options of a command; a switch takes no value, but from 0.29 on typer shows <bool> behind it."""
    for switch in (p for p in parameters if getattr(p, "is_flag", False)):
        switch.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class App(typer.Typer):
    """A group of commands; their help shows switches as switches, and errors keep a plain traceback."""

    def __init__(self, **options: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=names, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        return super().command(name, cls=_Command, **options)


def _answered_at_once(model: str | None) -> str | None:
    """Refuse what is no model here. Where the Hub cannot be reached, its client retries for half a minute; in offline mode it
    answers at once, from its cache.
    """
    from halfbyte.paths import is_hub_id, resolve_model

    if model is not None:
        resolve_model(model)
    if model is None or not is_hub_id(model) or urllib.request.getproxies():
        return model
    with contextlib.suppress(ImportError):  # without transformers the command says so
        from huggingface_hub import constants

        try:
            socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    return model


def readable(parameter: CallbackParam, path: Path | None) -> Path | None:
    """A callback of options that name a file to read: refuse one that cannot be read before the seconds that imports take."""
    if path is not None and (path.is_dir() or not os.access(path, os.R_OK)):  # a pipe is not opened: it would end
        reason = "it is a folder" if path.is_dir() else "it may not be read" if path.exists() else "no such file"
        raise InvalidArgument(f"{parameter.name}={str(path)!r} cannot be read ({reason})")
    return path


Model = Annotated[
    str,
    typer.Argument(help="A model folder, a Hub id, or 'demo' for the model that ships with halfbyte.", callback=_answered_at_once),
]
PlainModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="16-bit or FP8 weights: a folder, a Hub id, or 'demo'.", callback=_answered_at_once),
]
Source = Annotated[
    str | None,
    typer.Option("--from", help="A quantized model (GPTQ, AWQ, ...): converted, code for code.", callback=_answered_at_once),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]
Where = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: the GPU if there is one.")]
LmHead = Annotated[str, typer.Option(help="Format of the output layer's weights; bf16 leaves them unquantized.")]
SinkTokens = Annotated[int, typer.Option(help="Tokens at the start of a sequence that stay in 16 bits.")]
RecentTokens = Annotated[int, typer.Option(help="Tokens at the end of a sequence that stay in 16 bits.")]
Wide = Annotated[bool, typer.Option("--wide", help="Tables with all columns, on lines of any length.")]


def human_bytes(value: float) -> str:
    """1.5e9 as "1.50 GB"; powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def console(stderr: bool = False) -> Console:
    """A rich console; in a file or a pipe without color and 80 columns wide, or as wide as COLUMNS says."""
    from rich.console import Console

    return Console(stderr=stderr)


def print_facts(facts: Mapping[str, object], indent: str, width: int) -> None:
    """One fact under another behind its name, which takes `width` characters; long ones go on below, within the terminal."""
    columns = console().width
    for name, fact in facts.items():
        first, rest = f"{indent}{name:<{width}}" + " " * bool(width), " " * (len(indent) + width + bool(width))
        print(
            textwrap.fill(
                str(fact), columns, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
            )
        )


def print_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int, wide: bool | None = None
) -> None:
    """A table on stdout, as `halfbyte.terminal.show_table` lays it out."""
    from halfbyte.terminal import show_table

    show_table(console(), title, headers, rows, text_columns, wide)


def check_new_folder(path: Path) -> None:
    """Refuse a folder that exists or could not be made, before what is to be in it is made."""
    if path.exists() or path.is_symlink():
        raise InvalidArgument(f"output={str(path)!r} exists; pass a new name, or remove it first")
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"output={str(path)!r}: the folder it would lie in does not exist; make it first")
    try:
        tempfile.TemporaryDirectory(dir=path.absolute().parent).cleanup()
    except OSError as error:
        raise InvalidArgument(f"output={str(path)!r} cannot be written: {error.strerror}") from error


def words(text: str) -> list[str]:
    """The parts of a list between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def integers(text: str, option: str) -> list[int]:
    """Whole numbers between commas."""
    try:
        return [whole_number(word) for word in words(text)]
    except ValueError:
        raise InvalidArgument(f"--{option} {short(text)}; give whole numbers below 2^31, separated by commas") from None


def token_count(text: str | int) -> int:
    """Tokens of "8192", "16k", "128K" or "1M"; k is 1,024 and M 1,024 k, as in the names of context lengths."""
    match = re.fullmatch(r"\s*(-?\d{1,12})\s*([kKmM]?)\s*", str(text))
    if match is None:
        raise typer.BadParameter(f"{short(str(text))} is no number of tokens, such as 8192, 16k, 128K or 1M.")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def parse_layers(text: str, layers: int) -> tuple[int, ...]:
    """ "0,1,-1" -> (0, 1, layers - 1). Raises on what is not a layer."""
    try:
        indices = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidArgument(f"skip_layers={text!r}; expected layer numbers separated by commas, such as 0,1,-1") from None
    bad = [i for i in indices if not -layers <= i < layers]
    check(not bad, f"skip_layers={text!r} names layer {bad and bad[0]}; this model has layers 0 to {layers - 1}")
    return tuple(sorted({i % layers for i in indices}))


def whole_number(word: str) -> int:
    """A whole number that a size can be; what it may be in its place is checked there. Raises ValueError."""
    if not -(2**31) <= (value := int(word)) < 2**31:
        raise ValueError(word)
    return value


def short(text: str) -> str:
    """A text as a message shows it, its first 77 characters where it is long."""
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}..."


def load_model(name: str, device: Any = None, dtype: str = "bf16", *, exact: bool = True) -> Any:
    """The model of a folder, a Hub id or `demo` on a device, None: the GPU if there is one.

    dtype: the 16-bit type of weights that are not quantized, one of `settings.HALVES`
    exact: on a CPU arithmetic is in fp32, to compare formats; else in whatever is fastest there
    """
    from halfbyte.errors import require

    require("transformers", "halfbyte.hf")
    import torch
    from transformers.utils import logging

    from halfbyte import hf
    from halfbyte.device import describe, fastest_type
    from halfbyte.formats import plain_format
    from halfbyte.paths import resolve_model
    from halfbyte.settings import check_half

    logging.disable_progress_bar()  # the caller shows its own progress
    half, where = plain_format(check_half(dtype)).code.dtype, describe(device).torch
    model = hf.load(resolve_model(name), dtype=half)
    if where.type == "cuda":
        return model.to(where).eval()
    wanted = torch.float32 if exact else fastest_type(half, where)
    # transformers refuses to cast quantized models; QuantLinear keeps its codes and scales when it is cast
    return torch.nn.Module.to(model, wanted).eval()
