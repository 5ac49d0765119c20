"""Which formats a cache may have, layer by layer, and which of them fit best into a number of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.cache_plan import LayerFormats
from halfbyte.errors import InvalidArgument, check
from halfbyte.formats import KV_FORMATS, Format, key_format, plain_format

#: Tokens that sizes are counted for: whole blocks of every per-channel format.
TOKENS = 64
SIDES = ("keys", "values")


@dataclass(frozen=True)
class Candidate:
    """A format that one side of a layer may take; `nbytes` of `TOKENS` tokens in one layer."""

    format: str
    rotated: bool
    nbytes: int


@dataclass(frozen=True)
class Sensitivity:
    """`kl`, in nats a token, when `side` of `layer` takes `format` and all else stays in 16 bits."""

    layer: int
    side: str
    format: str
    rotated: bool
    kl: float


@dataclass(frozen=True)
class Choice:
    """Formats by layer, bytes of `TOKENS` tokens in all layers, and the sum of their sensitivities."""

    layers: tuple[LayerFormats, ...]
    nbytes: int
    predicted_kl: float

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        return len(set(self.layers)) == 1


def candidates(
    model: Any, formats: Sequence[str] = (), windowed: bool = False, calibrated: bool = False
) -> dict[str, list[Candidate]]:
    """The formats that each side may take, the 16-bit one first: all that fit the model, or those of `formats`.

    Per-tensor formats are left out: their scale is measured on whatever is appended first. So are formats that differ by name only,
    such as groups as wide as a head. Keys come with and without rotation where they can be rotated. `windowed`: only formats that
    go with sink and recent tokens, which are neither 16 bits nor per-channel ones. `calibrated`: keys are, in place of a rotation.
    """
    from halfbyte.hf.model_support import half_type, model_sizes, text_config

    for name in formats:
        key_format(name, "formats")
    sizes = model_sizes(text_config(model))
    plain = [] if windowed else [plain_format(half_type(model)).name]
    quantized = [name for name, fmt in KV_FORMATS.items() if fmt.is_quantized and name in (formats or KV_FORMATS)]
    quantized = [name for name in quantized if not (windowed and KV_FORMATS[name].token_block)]
    by_side: dict[str, list[Candidate]] = {}
    for side, dim in zip(SIDES, (sizes.head_dim, sizes.value_dim), strict=True):
        groups: dict[object, list[Candidate]] = {}
        for name in (*plain, *quantized):
            fmt = KV_FORMATS[name]
            if fmt.granularity != "tensor" and not (side == "values" and fmt.token_block) and _fits(fmt, dim):
                nbytes = fmt.nbytes((1, sizes.kv_heads, TOKENS, dim))
                rotatable = side == "keys" and fmt.is_quantized and not fmt.token_block and dim % 16 == 0 and not calibrated
                alike = (fmt.code, nbytes, fmt.token_block, fmt.group_size(dim))
                groups.setdefault(alike, [Candidate(name, rotated, nbytes) for rotated in (False, True)[: 1 + rotatable]])
        by_side[side] = [c for group in groups.values() for c in group]
    fits = all(by_side.values()) and any(KV_FORMATS[c.format].is_quantized for group in by_side.values() for c in group)
    along = " with sink and recent tokens" * windowed
    names = ", ".join(formats) or "all formats"
    check(fits, f"formats: none of {names} can be chosen for heads of {sizes.head_dim} and {sizes.value_dim}{along}")
    return by_side


def _fits(fmt: Format, dim: int) -> bool:
    try:
        fmt.check_shape((1, 1, TOKENS, dim))
    except InvalidArgument:
        return False
    return True


def assign(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int] | None:
    """One choice in each group, so that the losses' sum is least and the sizes' sum at most `budget`; None when none fits.

    Exact: least[b] is the least loss of the groups so far in b units above their smallest sizes, a unit being the largest number
    that divides every difference of sizes. Ties go to the earlier choice.
    """
    lows = [min(group) for group in sizes]
    unit = math.gcd(*(size - low for group, low in zip(sizes, lows, strict=True) for size in group)) or 1
    extras = [[(size - low) // unit for size in group] for group, low in zip(sizes, lows, strict=True)]
    spare = min((budget - sum(lows)) // unit, sum(map(max, extras)))
    if spare < 0:
        return None
    least, picks = torch.zeros(spare + 1, dtype=torch.float64), []
    for extra, loss in zip(extras, losses, strict=True):
        options = torch.full((len(extra), spare + 1), torch.inf, dtype=torch.float64)
        for i, units in enumerate(extra):
            if units <= spare:
                options[i, units:] = least[: spare + 1 - units] + loss[i]
        picks.append(options.argmin(0))
        least = options.amin(0)
    indices: list[int] = []
    for pick, extra in zip(reversed(picks), reversed(extras), strict=True):
        indices.append(int(pick[spare]))
        spare -= extra[indices[-1]]
    return indices[::-1]


class Options:
    """All that may be chosen, with its size and its sensitivity: one group of candidates for each side of each layer."""

    def __init__(self, choices: dict[str, list[Candidate]], measured: Sequence[Sensitivity], layers: int) -> None:
        kl = {(s.layer, s.side, s.format, s.rotated): s.kl for s in measured}
        self._choices, self._layers = choices, layers
        self._groups = [choices[side] for _ in range(layers) for side in SIDES]
        self._losses = [  # the 16-bit formats, which are not measured, diverge by nothing
            [kl.get((layer, side, c.format, c.rotated), 0.0) for c in choices[side]] for layer in range(layers) for side in SIDES
        ]

    def best(self, budget: int) -> Choice | None:
        """The formats by layer with the least sum of sensitivities within `budget` bytes; None when nothing is as small."""
        indices = assign([[c.nbytes for c in group] for group in self._groups], self._losses, budget)
        return None if indices is None else self._choice(indices)

    def uniform(self, budget: int) -> list[Choice]:
        """What fits into `budget` and is the same in all layers, the least sum of sensitivities first."""
        pairs = [(k, v) for k in range(len(self._choices["keys"])) for v in range(len(self._choices["values"]))]
        choices = [self._choice([*pair] * self._layers) for pair in pairs]
        return sorted((c for c in choices if c.nbytes <= budget), key=lambda c: (c.predicted_kl, c.nbytes))

    def smallest(self) -> int:
        """Bytes of the smallest cache there is."""
        return sum(min(c.nbytes for c in group) for group in self._groups)

    def _choice(self, picked: Sequence[int]) -> Choice:
        selection = [group[i] for group, i in zip(self._groups, picked, strict=True)]
        layers = tuple(LayerFormats(k.format, v.format, k.rotated) for k, v in zip(selection[::2], selection[1::2], strict=True))
        return Choice(layers, sum(c.nbytes for c in selection), sum(loss[i] for loss, i in zip(self._losses, picked, strict=True)))
