"""What every kernel compiles to, recorded: the proof, without a GPU, that a change of code left the kernels as fast as they were.

One JSON line a variant, architecture and version of Triton: a digest of its PTX and what its machine code takes. The digest
leaves out what may change without any change of speed: names, numbers of registers and labels, and the order of parameters.
`make compile-check` compares; `scripts/compile_check.py --update` records a deliberate change and reports its size. Where all was
well, a line also holds digests of what was compiled (inputs.py): until both change, the variant need not be compiled again.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).with_name("manifest.jsonl")

_NAMES = (
    (re.compile(r"%[a-z]+\d+"), "%r"),  # registers
    (re.compile(r"\$L\w+"), "$L"),  # labels
    (re.compile(r"\w+_param_\d+"), "param"),
    (re.compile(r"(\.entry|\.func) \w+"), r"\1"),
)


@dataclass(frozen=True)
class Entry:
    """One variant on one architecture. `instructions`, `registers` and `spill` (bytes) of a thread, `shared` (bytes) of a block.
    `inputs`, `code`: the sources and the intermediate code that it was compiled from, by inputs.py, or ""."""

    triton: str
    target: str
    name: str
    ptx: str
    instructions: int
    registers: int
    shared: int
    spill: int
    inputs: str = ""
    code: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.triton, self.target, self.name


def digest(ptx: str) -> str:
    """A digest of PTX without names, numbers and debugging, and with its parameters in no order."""
    code: list[str] = []
    parameters: list[str] = []
    for raw in ptx.split("\n\t.section", 1)[0].splitlines():
        line = raw.split("//", 1)[0].strip()
        if not line or line.startswith((".reg", ".loc", ".file", ".version")):
            continue
        for pattern, name in _NAMES:
            line = pattern.sub(name, line)
        (parameters if ".param" in line else code).append(line.rstrip(","))
    return hashlib.sha256("\n".join(code + sorted(parameters)).encode()).hexdigest()[:16]


def instructions(cubin: bytes) -> int:
    """Machine instructions of all functions in a cubin, an ELF file: each takes 16 bytes of its .text sections."""
    at, size, count, names = (*struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<3H", cubin, 0x3A))
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(count)]
    strings = sections[names][4]
    return int(sum(s[5] for s in sections if cubin.startswith(b".text.", strings + s[0]))) // 16


def read() -> dict[tuple[str, str, str], Entry]:
    """What is recorded."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {entry.key: entry for entry in (Entry(**json.loads(line)) for line in lines)}


def write(found: Iterable[Entry], recorded: dict[tuple[str, str, str], Entry]) -> None:
    """Record `found` over what was recorded."""
    merged = recorded | {entry.key: entry for entry in found}
    lines = ({name: value for name, value in asdict(merged[key]).items() if value != ""} for key in sorted(merged))
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines))


def difference(old: Entry, new: Entry) -> str:
    """How a variant differs from what was recorded, in words; "" where it does not."""
    if old.ptx == new.ptx:
        return ""
    sizes = ((name, getattr(old, name), getattr(new, name)) for name in ("instructions", "registers", "shared", "spill"))
    return "PTX differs from the manifest: " + ", ".join(f"{name} {a} -> {b}" if a != b else f"{name} {a}" for name, a, b in sizes)


def within(old: Entry, new: Entry, share: float = 0.01) -> bool:
    """Whether machine code takes as much as it did, but for `share` of it."""
    names = ("instructions", "registers", "shared", "spill")
    return all(abs(getattr(new, n) - getattr(old, n)) <= share * getattr(old, n) for n in names)
