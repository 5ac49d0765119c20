"""Cache plans: the formats of every layer's KV cache, as a file that halfbyte or an engine reads.

    {"format": "halfbyte cache plan", "version": 1,
     "model": {"model_type": "llama", "layers": 2, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "hidden_size": 4096},
     "layers": [{"keys": "int8_channel", "values": "int4", "rotate_keys": false},
                {"keys": "int4", "values": "int4", "rotate_keys": true}],
     "bits": 5.375, "sink_tokens": 0, "recent_tokens": 0, "measured": {...}}

`layers` has one entry per layer, in order; formats are those of `halfbyte.KV_FORMATS`. `model` holds the sizes of the model that
the plan is for; a reader must refuse any other. The first `sink_tokens` and the last `recent_tokens` of a sequence stay in 16 bits
in every quantized layer; a reader that does not support them must refuse a plan in which they are not 0. `calibration`, where a
plan has it, names the file of calibrated keys by which quantized keys are transformed, from the plan's folder; a reader that does
not support it must refuse the plan. `bits` is the size of the
cache per element, with scales and without these tokens. `measured` says how the plan was found; no reader needs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError, InvalidArgument, check
from halfbyte.formats import KV_FORMATS, check_window
from halfbyte.paths import write_whole

KIND, VERSION = "halfbyte cache plan", 1
#: Bytes of a plan file; a thousand layers take a tenth of it.
LONGEST = 1 << 20


@dataclass(frozen=True)
class LayerFormats:
    """Formats of one layer's keys and values, by name, and whether its keys are stored Hadamard-rotated."""

    keys: str
    values: str
    rotate_keys: bool = False


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that a model must have to use a plan. `head_dim`, `value_dim`: of one KV head."""

    model_type: str
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    hidden_size: int


@dataclass(frozen=True)
class CachePlan:
    """Formats of every layer for a model of these sizes, and how many tokens stay in 16 bits.

    bits         bits per element of the cache, scales included
    measured     how the plan was found, for people
    calibration  the file of calibrated keys; "": none
    """

    model: ModelSizes
    layers: tuple[LayerFormats, ...]
    bits: float
    sink_tokens: int = 0
    recent_tokens: int = 0
    measured: Mapping[str, Any] = field(default_factory=dict, hash=False)
    calibration: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The key format of each layer."""
        return tuple(layer.keys for layer in self.layers)

    @property
    def values(self) -> tuple[str, ...]:
        """The value format of each layer."""
        return tuple(layer.values for layer in self.layers)

    @property
    def rotate_keys(self) -> tuple[bool, ...]:
        """Whether the keys of each layer are rotated."""
        return tuple(layer.rotate_keys for layer in self.layers)

    def exact_tokens(self, given: tuple[int, int]) -> tuple[int, int]:
        """(sink tokens, recent tokens): the plan's, or those `given` if it has none. Raises `InvalidArgument` if both have some."""
        own = self.sink_tokens, self.recent_tokens
        check(
            not (any(own) and any(given)),
            f"plan has sink_tokens={own[0]} and recent_tokens={own[1]} itself; leave these options out",
        )
        return own if any(own) else given

    def check_model(self, sizes: ModelSizes) -> None:
        """Raise `InvalidArgument`, naming every difference, when this plan was made for another model."""
        ours, theirs = asdict(self.model), asdict(sizes)
        differ = [f"{name} {ours[name]} (this model: {theirs[name]})" for name in ours if ours[name] != theirs[name]]
        check(not differ, f"plan was made for another model: {', '.join(differ)}; calibrate this one: halfbyte calibrate MODEL")

    def write(self, path: Path | str) -> Path:
        """Write the file atomically."""
        data = {"format": KIND, "version": VERSION, **asdict(self)}
        if self.calibration:
            data["calibration"] = os.path.relpath(self.calibration, Path(path).parent)
        else:
            del data["calibration"]
        return write_whole(Path(path), json.dumps(data, indent=1) + "\n")


def read_plan(plan: CachePlan | str | os.PathLike[str]) -> CachePlan:
    """Read and check a plan file; a `CachePlan` is returned unchanged. Raises `InvalidArgument`, naming what is wrong."""
    if isinstance(plan, CachePlan):
        return plan
    check(isinstance(plan, str | os.PathLike), f"plan is a {type(plan).__name__}; pass a file, or a CachePlan")
    what = f"plan={os.fspath(plan)!r}"
    try:
        with open(plan, encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
        check(len(text) <= LONGEST, f"{what}: the file is longer than {LONGEST:,} characters; it is no plan")
        data = json.loads(text)
    except OSError as error:
        raise InvalidArgument(f"{what}: cannot be read ({error.strerror}); halfbyte calibrate writes one") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{what}: it is no JSON ({str(error)[:200]}); halfbyte calibrate writes one") from error
    result = _parsed(data, what)
    return replace(result, calibration=str(Path(plan).parent / result.calibration)) if result.calibration else result


def _parsed(data: Any, what: str) -> CachePlan:
    check(isinstance(data, dict) and data.get("format") == KIND, f'{what}: it is no plan; expected "format": "{KIND}"')
    check(data.get("version") == VERSION, f"{what}: it has version {data.get('version')!r}; this halfbyte reads {VERSION}")
    sizes, layers, bits = data.get("model"), data.get("layers"), data.get("bits")
    kinds = {f.name: str if f.name == "model_type" else int for f in fields(ModelSizes)}
    fits = isinstance(sizes, dict) and sizes.keys() == kinds.keys() and all(type(sizes[n]) is kind for n, kind in kinds.items())
    fits = fits and all(kind is str or 0 <= sizes[n] < 2**31 for n, kind in kinds.items())
    check(fits, f"{what}: model={str(sizes)[:300]}; expected {', '.join(kinds)}, sizes of 0 to 2^31 - 1")
    check(isinstance(layers, list), f"{what}: layers is a {type(layers).__name__}; expected a list with one entry for each layer")
    count = sizes["layers"]
    if len(layers) != count:
        numbers = range(min(len(layers), count), max(len(layers), count))
        raise InvalidArgument(
            f"{what}: the model has {count} layers, and layers has {len(layers)} entries: "
            f"{'unknown' if len(layers) > count else 'missing'} {_numbers(numbers)}"
        )
    check(
        type(bits) in (int, float) and 0 < bits <= 64 and isinstance(data.get("measured", {}), dict),
        f"{what}: bits={bits!r}, measured={type(data.get('measured')).__name__}; expected a number of bits and an object",
    )
    formats, window = _layers(layers, what), (data.get("sink_tokens", 0), data.get("recent_tokens", 0))
    _check_windows(window, formats, what)
    calibration = data.get("calibration", "")
    check(isinstance(calibration, str), f"{what}: calibration={calibration!r}; expected the name of a file")
    return CachePlan(ModelSizes(**sizes), formats, float(bits), *window, data.get("measured", {}), calibration)


def _layers(entries: list[Any], what: str) -> tuple[LayerFormats, ...]:
    """The layers' formats. Errors name every malformed entry and every unknown format."""
    names = {f.name for f in fields(LayerFormats)}
    odd = [i for i, e in enumerate(entries) if not isinstance(e, dict) or e.keys() != names or type(e["rotate_keys"]) is not bool]
    if odd:
        raise InvalidArgument(f"{what}: {_numbers(odd)} of layers must have exactly {', '.join(sorted(names))} (true or false)")
    unknown: dict[str, list[int]] = {}
    for side in ("keys", "values"):
        for i, entry in enumerate(entries):
            fmt = KV_FORMATS.get(entry[side]) if isinstance(entry[side], str) else None
            if fmt is None or (side == "values" and fmt.token_block):
                unknown.setdefault(f"{side} {str(entry[side])[:40]!r}", []).append(i)
    text = "; ".join(f"{name} ({_numbers(where)})" for name, where in unknown.items())
    check(not unknown, f"{what}: unknown formats: {text}; choose from {', '.join(KV_FORMATS)}, per-channel ones for keys only")
    return tuple(LayerFormats(**entry) for entry in entries)


def _check_windows(window: tuple[Any, Any], layers: Sequence[LayerFormats], what: str) -> None:
    """Raise unless the formats of every quantized layer allow these sink and recent tokens."""
    formats = [(KV_FORMATS[layer.keys], KV_FORMATS[layer.values]) for layer in layers]
    nothing = not any(k.is_quantized or v.is_quantized for k, v in formats)
    reasons: dict[str, list[int]] = {}
    for i, (keys, values) in enumerate(formats):
        if keys.is_quantized or values.is_quantized or nothing:
            try:
                check_window(*window, keys, values)
            except HalfbyteError as error:
                reasons.setdefault(str(error), []).append(i)
    text = "; ".join(f"{reason} ({_numbers(where)})" for reason, where in reasons.items())
    check(not reasons, f"{what}: {text}")


def _numbers(layers: Sequence[int]) -> str:
    """ "layer 3", "layers 0, 1 and 5"; of many, the first ten."""
    numbers = [str(i) for i in layers[:10]] + ["more"] * (len(layers) > 10)
    return f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {', '.join(numbers[:-1])} and {numbers[-1]}"
