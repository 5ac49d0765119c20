"""Settings of single layers, which go before those of the whole model: by the name of a layer, or by a regular expression.

A configuration is untrusted: an expression that could take unbounded time on the names in the files is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.errors import CheckpointError, Unsupported

Settings = Mapping[str, Any]

#: Characters and repeats of one expression, which takes less than (length of a name) to the power of its repeats, times the ways in
#: which its `?` and `|` can be chosen.
MAX_PATTERN, MAX_REPEATS, MAX_CHOICES = 1000, 4, 4096
#: Characters of a name that are looked at.
MAX_NAME = 300
_REPEAT = re.compile(r"[*+{]")


@dataclass(frozen=True)
class Overrides:
    """Settings by the name of a layer, and by expressions, which are searched for in the name; the first one counts."""

    names: Mapping[str, Settings]
    expressions: tuple[tuple[re.Pattern[str], Settings], ...]

    def of(self, name: str) -> Settings:
        """The settings of a layer; empty for a layer without any of its own."""
        matches = (settings for pattern, settings in self.expressions if pattern.search(name[:MAX_NAME]))
        return self.names[name] if name in self.names else next(matches, {})


def expression(pattern: str, *, anchored: bool = False) -> re.Pattern[str]:
    """A compiled expression; `anchored`: it must match the beginning of a name.

    Raises `CheckpointError` for one that is none, `Unsupported` for one that could take too long.
    """
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)
    slow = len(pattern) > MAX_PATTERN or len(_REPEAT.findall(plain)) > MAX_REPEATS
    choices = 2 ** len(re.findall(r"(?<![(*+?}])\?", plain))
    while not slow and (group := re.search(r"\([^()]*\)", plain)) is not None:
        choices *= (1 + group[0].count("|")) ** plain.count(group[0])
        inside = group[0].removeprefix("(?:")
        plain = plain.replace(group[0], "\0" if re.search("[*+{|?\0]", inside) else "x")  # a NUL for a group that is no fixed text
        slow = re.search("\0[*+{]", plain) is not None
    if slow or choices > MAX_CHOICES:
        raise Unsupported(
            f"quantization_config has the pattern {pattern[:80]!r}; at most {MAX_REPEATS} repeats, none of a group "
            f"with repeats or alternatives, and {MAX_CHOICES:,} choices are read"
        )
    try:
        return re.compile(rf"\A(?:{pattern})" if anchored else pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"quantization_config has the pattern {pattern[:80]!r}: {error}") from error


def settings(entry: object, name: str) -> Settings:
    """The settings under a name, which must be an object."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"quantization_config has {name[:80]!r}: {repr(entry)[:80]}; expected an object of settings")
    return entry
