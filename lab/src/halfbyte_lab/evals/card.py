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
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import halfbyte
from halfbyte.cache_plan import ModelSizes
from halfbyte.errors import InvalidArgument, check
from halfbyte.memory import packed_layers, quantized_bytes, weight_or_plain
from halfbyte.paths import SHIPPED
from halfbyte.settings import HALVES
from halfbyte_lab.evals.choices import is_safe

#: Largest change of perplexity with its noise, in %, that is recommended where there is evidence.
TOLERATED = 1.0
#: Weight formats from the most bits on, behind 16 bits; of several in one entry the first that the model's sizes divide by.
WEIGHTS = (("int8_col",), ("nvfp4",), ("int4_g128", "int4_g64", "int4_g32"))

KIND, VERSION = "halfbyte evidence card", 1
#: Bytes of a card; twenty results take a hundredth of it.
LONGEST = 1 << 20
#: The numbers of every result. `kl_noise` came later: cards without it are read.
FIGURES = ("perplexity", "change", "noise", "kl_mean", "kl_p99", "top1", "kv_bytes_per_token", "weight_bytes")


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
    floor      what 16-bit arithmetic costs by itself, as of `Quality`, 0 where it was not measured: nothing is then safe
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
        return self.sizes == sizes_of(config)

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


def sizes_of(model_or_config: Any) -> ModelSizes:
    """The sizes by which a card names a model."""
    from halfbyte.hf.model_support import card_sizes, text_config

    return card_sizes(text_config(model_or_config))


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


def shipped_cards() -> list[Card]:
    """The cards that come with the library."""
    return [read_card(path) for path in sorted((Path(halfbyte.__file__).parent / "data" / "evidence").glob("*.json"))]


def card_of(config: Any) -> Card | None:
    """The shipped card of a model with these sizes."""
    return next((card for card in shipped_cards() if card.matches(config)), None)


def nearest_card(config: Any) -> Card | None:
    """The shipped card of the real model whose cache is nearest in size to that of this configuration."""
    mine = sizes_of(config)
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
        for name in (*FIGURES, *({"kl_noise"} & result.keys()))
        if type(result[name]) not in (int, float) or not math.isfinite(result[name])
    ]
    if odd:
        raise ValueError(f"{odd[0]} is {result[odd[0]]!r}")
    return result
