"""Damage to files, drawn from a seed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

from halfbyte.errors import HalfbyteError


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat or insert a few bytes; digits, quotes and brackets more often than the rest."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(6):
            case 0 if out:
                out[at] = rng.randrange(256)
            case 1 if out:
                out[at] = rng.choice(b'0123456789-.eE"[]{},:/\\ ')
            case 2:
                del out[at : at + rng.choice([1, 1, 2, 8, len(out)])]
            case 3:
                out[at:at] = out[at : at + rng.randrange(1, 40)]
            case 4:
                out[at:at] = rng.choice([b"9" * 30, b"null", b"NaN", b"1e400", b"-1", b"[[[[", b'"../x"', b"\x00", b"\\ud800"])
            case 5 if len(out) >= 8:
                out[:8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1, len(out), len(out) - 8]))
    return bytes(out)


JUNK = (None, True, False, 0, -1, 3, 2**31, 2**63, 1e308, 0.5, "", "x", "gptq", [], [1], {}, {"a": 1}, {"bits": 4})


def damage_config(config: object, rng: random.Random) -> object:
    """A configuration with one of its values, at any depth, replaced or taken out."""
    if not isinstance(config, dict) or not config or rng.random() < 0.1:
        return rng.choice(JUNK)
    name = rng.choice(sorted(config))
    if rng.random() < 0.2:
        return {key: value for key, value in config.items() if key != name}
    return {**config, name: damage_config(config[name], rng)}


def load_damaged(folder: Path, load: Callable[[Path], object], rounds: int, rng: random.Random) -> None:
    """Damage a folder in its quantization_config, config.json and safetensors in turn: only the library's own errors come out."""
    good = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    for number in range(rounds):
        name = ("config.json", "config.json", "model.safetensors")[number % 3]
        data = mutate(good[name][:6000], rng) + good[name][6000:]
        if number % 3 == 0:
            config = json.loads(good[name])
            config["quantization_config"] = damage_config(config["quantization_config"], rng)
            data = json.dumps(config).encode()
        (folder / name).write_bytes(data)
        try:
            load(folder)
        except HalfbyteError:
            pass
        except Exception as error:
            raise AssertionError(f"round {number}, {name}") from error
        (folder / name).write_bytes(good[name])
