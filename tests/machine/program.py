"""PTX as a list of instructions, with registers by name and labels by number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Bits of a register by its declared type.
WIDTHS = {
    "pred": 1,
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
}
WIDTHS |= {"b64": 64, "u64": 64, "s64": 64, "f64": 64}


@dataclass(frozen=True)
class Instruction:
    """`@guard name operands`; `unless`: the guard must be false. An operand {a, b} is a tuple."""

    name: str
    operands: tuple[str | tuple[str, ...], ...]
    guard: str
    unless: bool
    text: str


@dataclass(frozen=True)
class Program:
    """A kernel. registers: their width in bits. labels: the number of the instruction behind each."""

    name: str
    parameters: tuple[tuple[str, int], ...]  # name, bits
    threads: int
    registers: dict[str, int]
    labels: dict[str, int]
    instructions: tuple[Instruction, ...]
    tables: dict[str, list[str]] = field(default_factory=dict)  # labels that a branch chooses from by their number


class _Scopes:
    """Names that a block in braces declares are its own: they get a number."""

    def __init__(self) -> None:
        self.open: list[dict[str, str]] = [{}]
        self.count = 0

    def enter(self) -> None:
        self.open.append({})
        self.count += 1

    def leave(self) -> None:
        self.open.pop()

    def declare(self, name: str) -> str:
        own = name if len(self.open) <= 2 else f"{name}#{self.count}"
        self.open[-1][name] = own
        return own

    def rename(self, text: str) -> str:
        if len(self.open) <= 2:
            return text
        return re.sub(r"(?<![\w.%$])[A-Za-z_]\w*(?![\w.(])", lambda found: self._own(found[0]), text)

    def _own(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.open) if name in scope), name)


def _statements(body: str) -> Iterator[str]:
    """Statements, labels ("name:") and the braces of blocks; those around operands stay in their statement."""
    at = 0
    while at < len(body):
        if body[at].isspace() or body[at] == ";":
            at += 1
        elif body[at] in "{}":
            yield body[at]
            at += 1
        elif label := re.compile(r"[$\w]+:(?!:)").match(body, at):
            yield label[0]
            at = label.end()
        else:
            end = body.find(";", at)
            line = body.find("\n", at)
            if body.startswith((".loc", ".file", ".section"), at):
                end = line
            yield " ".join(body[at:end].split())
            at = end + 1


def parse(text: str) -> Program:
    """The one kernel in what Triton made."""
    text = re.sub(r"//[^\n]*", "", text)
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{", text, re.DOTALL)
    assert head
    listed = re.findall(r"\.param (?:\.align 64 )?\.(\w+)[^,]*?(\w+)(?:\[\d+\])?\s*(?:,|$)", head[2].strip())
    parameters = tuple((name, WIDTHS[kind]) for kind, name in listed)
    threads = re.search(r"\.reqntid (\d+)", head[3])
    assert threads
    tables = {name: re.findall(r"[$\w]+", labels) for name, labels in re.findall(r"([$\w]+): \.branchtargets\s([^;]*);", text)}
    registers, labels, instructions = _body(text[head.end() - 1 :])
    return Program(head[1], parameters, int(threads[1]), registers, labels, instructions, tables)


def parse_inline(text: str, operands: dict[int, int], threads: int) -> Program:
    """Inline PTX as a program of its own. operands: bits of each `$i`, which become registers `%operand<i>`."""
    text = re.sub(r"\$(\d+)", r"%operand\1", re.sub(r"//[^\n]*", "", text))
    registers, labels, instructions = _body(f"{{ {text} ; ret; }}")
    registers |= {f"%operand{i}": bits for i, bits in operands.items()}
    return Program("inline", (), threads, registers, labels, instructions)


def _body(text: str) -> tuple[dict[str, int], dict[str, int], tuple[Instruction, ...]]:
    """Registers, labels and instructions of what is in braces."""
    scopes, registers, labels, instructions = _Scopes(), dict[str, int](), dict[str, int](), list[Instruction]()
    for statement in _statements(text):
        if statement == "{":
            scopes.enter()
        elif statement == "}":
            scopes.leave()
            if len(scopes.open) == 1:
                break
        elif statement.startswith(".reg"):
            _declare(statement, scopes, registers)
        elif statement.endswith(":"):
            labels[scopes.declare(statement[:-1])] = len(instructions)
        elif not statement.startswith("."):
            instructions.append(_instruction(scopes.rename(statement)))
    return registers, labels, tuple(instructions)


def _declare(statement: str, scopes: _Scopes, registers: dict[str, int]) -> None:
    _, kind, names = statement.split(maxsplit=2)
    for name in names.split(","):
        stem, _, count = name.strip().partition("<")
        for one in [stem] if not count else [f"{stem}{i}" for i in range(int(count[:-1]))]:
            registers[scopes.declare(one)] = WIDTHS[kind[1:]]


def _instruction(text: str) -> Instruction:
    guard, rest = "", text
    if text.startswith("@"):
        guard, rest = text[1:].split(maxsplit=1)
    name, _, operands = rest.partition(" ")
    found = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", operands)
    parts = [tuple(p.strip() for p in one[1:-1].split(",")) if one.startswith("{") else one.strip() for one in found]
    return Instruction(name.replace("shared::cta", "shared"), tuple(parts), guard.lstrip("!"), guard.startswith("!"), text)
