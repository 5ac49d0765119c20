"""The options that several commands have, written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from halfbyte import settings
from halfbyte.cli.shared import RecentTokens, SinkTokens, readable


def _known_half(dtype: str | None) -> str | None:
    return None if dtype is None else settings.check_half(dtype)


Keys = Annotated[str, typer.Option(help="Format of the cached keys.")]
Values = Annotated[str, typer.Option(help="Format of the cached values.")]
Rotate = Annotated[
    bool | None,
    typer.Option("--rotate-keys/--no-rotate-keys", help="Hadamard-rotate cached keys. Default: 4-bit and 2-bit, not per-channel."),
]
Calibration = Annotated[
    Path | None, typer.Option(help="Calibrated keys, as halfbyte calibrate writes them without --bits.", callback=readable)
]
Skip = Annotated[str, typer.Option(help="Layers whose cache stays in 16 bits, such as 0,1,-1.")]
OfHalves = typer.Option("--dtype", help="16-bit type of what is not quantized: bf16 or fp16.", callback=_known_half)
Dtype = Annotated[str, OfHalves]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Append records to this file, one JSON object a line.")]


@dataclass(frozen=True)
class CacheFormats:
    """What a command's packed cache is made of."""

    keys: Keys = settings.KEYS
    values: Values = settings.VALUES
    rotate_keys: Rotate = None
    calibration: Calibration = None
    skip_layers: Skip = ""
    sink_tokens: SinkTokens = 0
    recent_tokens: RecentTokens = 0


def with_options(*kinds: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes `command(options, ...)` a command whose options are its own and the fields of the dataclasses `kinds`, one object each.

    Those of the last kind stand behind the command's own, those of others before them.
    """

    def made(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[len(kinds) :]
        by_kind = [
            [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields(kind)] for kind in kinds
        ]
        hints = get_type_hints(command, include_extras=True)
        for kind in kinds:
            hints |= get_type_hints(kind, include_extras=True)
        order = [*(p for first in by_kind[:-1] for p in first), *own, *by_kind[-1]]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in order]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = [kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for kind in kinds]
            command(*options, **given)

        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return made
