"""What of a model folder is looked at before transformers sees any of it: kinds of files, and the size of its configuration.

transformers builds lists and tables from numbers of config.json while it reads it, so a small file can take unbounded time and
memory. Real configurations are far inside these budgets.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError

#: Bytes of one configuration file. The largest real ones list the format of every expert's projections.
MAX_BYTES = 8 << 20
MAX_DEPTH = 24
#: Objects and lists in one configuration, and values.
MAX_CONTAINERS, MAX_VALUES = 10_000, 300_000
#: Integers that count modules (layers, labels, experts), of which transformers makes as many; all others (sizes, ids, keys).
MAX_COUNT, MAX_SIZE = 1 << 16, 1 << 40

_COUNTS = re.compile(r"layer|depth|block|expert|head|stage|tower|repeat|n(um)?_(labels|codebooks)")
#: Names of numbers of layers. A default that nothing uses, as of another modality, may be so large.
_DEPTHS, _LAYERS = re.compile(r"layers?$|depths?$|blocks?$"), 256
_READ = (".json", ".safetensors", ".model", ".txt", ".jinja")
_CONFIGURATIONS = ("config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json", "adapter_config.json")


def check_folder(folder: Path) -> None:
    """Raise `CheckpointError` unless every file that may be read is a regular one in the folder, its configurations in budget."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(_READ))
        for name in names:
            _check_kind(folder, folder / name)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        raise CheckpointError(f"{folder}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    for name in _CONFIGURATIONS:
        if name in names:
            check_configuration(folder / name)


def check_configuration(file: Path) -> None:
    """Raise `CheckpointError` unless a JSON file is in every budget."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise CheckpointError(f"{file}: not a regular file")
        with open(file, "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise CheckpointError(f"{file}: more than {MAX_BYTES} bytes, which no configuration is")
        # Before they are made; strings may hold some too.
        if raw.count(b"{") + raw.count(b"[") > 4 * MAX_CONTAINERS or raw.count(b",") > MAX_VALUES:
            raise _too_much(file)
        data = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: no valid JSON ({str(error)[:200]}); download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: it is no JSON object; download it again")
    _check_values(file, data)


def check_layers(file: Path, tensors: int) -> None:
    """Raise `CheckpointError` if a part of a configuration names more layers than there are tensors in the files."""
    most = max(tensors, _LAYERS)
    waiting: list[Any] = [json.loads(file.read_bytes())]
    while waiting:
        value = waiting.pop()
        waiting += value if isinstance(value, list) else [*value.values()] if isinstance(value, dict) else []
        for name, number in value.items() if isinstance(value, dict) else ():
            if _DEPTHS.search(name) and isinstance(number, int) and number > most:
                raise CheckpointError(f"{file}: {name[:80]!r} describes {number} layers, the files hold {tensors} tensors")


def _check_values(file: Path, data: dict[str, Any]) -> None:
    """Walk without recursion: depth, numbers of objects and values, integers."""
    waiting: list[tuple[str, Any, int]] = [("", data, 1)]
    containers = values = 0
    while waiting:
        name, value, depth = waiting.pop()
        values += 1
        if isinstance(value, dict | list):
            containers += 1
            inside = [*value.items()] if isinstance(value, dict) else [(name, each) for each in value]
            waiting += [(key, each, depth + 1) for key, each in inside]
        elif isinstance(value, int):
            _check_integer(file, name, value)
        if depth > MAX_DEPTH or containers > MAX_CONTAINERS or values > MAX_VALUES:
            raise _too_much(file)


def _too_much(file: Path) -> CheckpointError:
    limits = f"{MAX_DEPTH} levels, {MAX_CONTAINERS} objects and lists, or {MAX_VALUES} values"
    return CheckpointError(f"{file}: more than {limits}, which no configuration has")


def _check_integer(file: Path, name: str, value: int) -> None:
    limit = MAX_COUNT if _COUNTS.search(name) else MAX_SIZE
    if abs(value) > limit:
        digits = str(value) if abs(value) < 1 << 64 else f"an integer of {value.bit_length()} bits"
        raise CheckpointError(f"{file}: {name[:80]!r} is {digits}; at most {limit} is believed")


def _check_kind(folder: Path, file: Path) -> None:
    """A regular file; a link must lead to one that the folder may use.

    Those are the files below the folder that this one is in; of the Hub's cache, which links from snapshots/ID to blobs next to
    snapshots, those blobs; and files of the user, unless that is the system's own.
    """
    if file.is_symlink():
        root, target = folder.resolve(), file.resolve()
        snapshots = [parent for parent in root.parents if parent.name == "snapshots"]
        roots = [root, *((parent.parent / "blobs").resolve() for parent in snapshots[:1])]
        roots += [root.parent] if root.parent != Path(root.anchor) else []
        user = os.getuid() if hasattr(os, "getuid") else 0
        if not any(target.is_relative_to(each) for each in roots) and not (user and os.stat(target).st_uid == user):
            raise CheckpointError(
                f"{file}: a link to {target}, which is neither below {root.parent}, nor in the Hub's cache, nor a file of yours; "
                f"copy it there"
            )
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise CheckpointError(f"{file}: not a regular file")
