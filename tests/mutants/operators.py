"""Mutation testing by operators: `python tests/mutants/operators.py [FILE ...] [--count N] [--seed S]` reports a score.

A mutant swaps one operator, one of a pair of functions, or a whole number with its successor, in the functions of a file; error
messages are left out. The tests named for the file must notice it; those run that call the function, the fastest first. Some change
nothing that can be seen, so that a score is no goal: mutants that survive are printed, and are worth a look.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edits import Change
from mutant import Mutant

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
RECORDS = Path(__file__).parents[2] / "results" / "trust.jsonl"
#: Files below src/halfbyte, with what must notice a fault in them.
TESTS = {
    "cpu/append.py": ("test_cpu_append.py",),
    "cpu/attention_codes.py": ("test_cpu_attention.py",),
    "cpu/block.py": ("test_block_ops.py",),
    "cpu/codes.py": ("test_cpu_attention.py", "test_cpu_linear.py"),
    "cpu/decode_attention.py": ("test_cpu_attention.py", "test_attention_varlen.py", "test_trust_determinism.py"),
    "cpu/experts.py": ("test_experts.py",),
    "cpu/linear.py": ("test_cpu_linear.py",),
    "cpu/sides.py": ("test_cpu_append.py", "test_cpu_attention.py"),
    "cpu/step.py": ("hf/test_hf_block_loops.py",),
    "cpu/threads.py": ("test_cpu_linear.py",),
    "cpu/compiled/amx.py": ("test_cpu_linear.py",),
    "cpu/compiled/amx_large.py": ("test_cpu_linear.py",),
    "cpu/compiled/append.py": ("test_cpu_append.py",),
    "cpu/compiled/attention.py": ("test_cpu_attention.py",),
    "cpu/compiled/block.py": ("test_block_ops.py", "hf/test_hf_block_loops.py"),
    "cpu/compiled/blocks.py": ("test_cpu_attention.py",),
    "cpu/compiled/bound.py": ("test_cpu_linear.py", "hf/test_hf_block_loops.py"),
    "cpu/compiled/linear.py": ("test_cpu_linear.py",),
    "cpu/compiled/tiles.py": ("test_cpu_linear.py",),
    "formats.py": ("test_formats.py", "test_quantize.py"),
    "kv_buffer.py": ("test_cache.py", "test_window.py", "test_launch_cache.py", "test_bad_input.py", "test_trust_copies.py"),
    "nn.py": ("hf/test_hf_nn.py", "test_trust_copies.py"),
    "cache.py": ("test_cache.py", "test_window.py", "test_bad_input.py"),
    "threads.py": ("test_threads.py",),
    "paging.py": ("test_window_cache.py", "test_paging.py", "test_cache.py"),
    **{
        f"checkpoints/{name}.py": ("test_checkpoints.py",)
        for name in ("awq", "bitsandbytes", "compressed_tensors", "gptq", "int8", "integers", "layer", "overrides")
    },
    "checkpoints/experts.py": ("hf/test_hf_expert_files.py",),
    "checkpoints/fp4.py": (
        "test_checkpoints.py",
        *(f"hf/test_hf_external.py::test_{of}" for of in ("experts_of_gpt_oss", "damaged_experts")),
    ),
    "checkpoints/fp8.py": ("hf/test_hf_fp8.py",),
    "checkpoints/kv_scales.py": ("hf/test_hf_external.py",),
    "checkpoints/safetensors_files.py": (
        *(f"hf/test_hf_checkpoint.py::test_{name}" for name in ("damaged_files", "good_files", "shard_names", "indexes")),
        *("test_checkpoints.py", "hf/test_hf_hostile_folders.py"),
    ),
    "checkpoints/folder_guard.py": ("hf/test_hf_hostile_folders.py",),  # others load the shipped model, here by links
}
_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift), (ast.Mod, ast.FloorDiv)),
]
SWAPPED = dict(_PAIRS) | {b: a for a, b in _PAIRS[:-1]}
NAMES = {a: b for pair in (("min", "max"), ("amin", "amax"), ("any", "all"), ("minimum", "maximum")) for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Operator:
    """The edit of this number among those of a function."""

    number: int

    def changes(self, target: ast.AST, source: str) -> list[Change]:
        return list(operations(target))[self.number : self.number + 1]


def operations(target: ast.AST) -> Iterator[Change]:
    """Every mutation of a function, in the order of its text."""
    for node in _computing(target):
        if (made := _changed(node)) is not None:
            yield Change(node, f"({ast.unparse(made)})")


def _computing(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that are computed: no annotation, decorator, pattern, string, or what is raised."""
    if isinstance(node, ast.expr):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "format_spec") or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.pattern):
                yield from _computing(child)


def _changed(node: ast.expr) -> ast.expr | None:
    """The expression with one thing swapped; None where there is nothing to swap."""
    made = copy.copy(node)
    match made:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            made.ops = [SWAPPED[type(op)]()]  # type: ignore[list-item]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            made.op = SWAPPED[type(op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            made.value = value + 1
        case ast.Name(id=name) if name in NAMES:
            made.id = NAMES[name]
        case ast.Attribute(attr=name) if name in NAMES:
            made.attr = NAMES[name]
        case _:
            return None
    return made


def functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Qualified names of functions and methods that are defined once."""
    owners = [("", module)] + [(f"{node.name}.", node) for node in module.body if isinstance(node, ast.ClassDef)]
    found = [(prefix + node.name, node) for prefix, owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)]
    names = [name for name, _ in found]
    return ((name, node) for name, node in found if names.count(name) == 1)


def every(file: str, source: str) -> list[Mutant]:
    """All mutants of a file."""
    made = []
    for function, node in functions(ast.parse(source)):
        for number, change in enumerate(operations(node)):
            old = ast.unparse(change.node)
            name = f"{file}:{change.node.lineno} {function}: {old[:60]} -> {change.text[:60]}"
            made.append(Mutant(name, file, function, Operator(number), TESTS[file]))
    return made


def useful(function: str, reached: dict[str, tuple[float, list[str]]]) -> list[str]:
    """Tests that call a function, the fastest first; all where hardly any does, as of what is compiled, or called once.

    reached: by test, seconds and functions, as run_mutants.py wrote them.
    """
    fastest = sorted(reached, key=lambda test: reached[test][0])
    own = [test for test in fastest if function in reached[test][1]]
    return [str(Path(__file__).parents[2] / test) for test in (own if len(own) > 2 else fastest)]


def main() -> int:
    import test_mutants as seeded

    from halfbyte import __version__
    from halfbyte.device import describe
    from halfbyte_lab.measure.environment import environment as where_and_how

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"default: {', '.join(TESTS)}")
    parser.add_argument("--count", type=int, default=20, help="mutants of a file, drawn from all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RECORDS)
    given = parser.parse_args()
    environment = asdict(where_and_how(describe("cpu"), 1))
    environment["command"] = environment["command"].replace(str(given.output), given.output.name)
    for file in given.files or TESTS:
        mutants = every(file, (seeded.SOURCES["halfbyte"] / file).read_text())
        drawn = random.Random(given.seed).sample(mutants, min(given.count, len(mutants)))
        start, tests = time.monotonic(), [str(seeded.TESTS / test) for test in TESTS[file]]
        with tempfile.TemporaryDirectory() as folder:
            control = [(seeded.copy_with(None, Path(folder) / "control"), tests)]
            ((status, log),) = seeded.run(control, Path(folder) / "control-logs", False, 5000, watched=f"halfbyte/{file}")
            if status:
                parser.exit(1, f"{file}: its tests fail without a fault (status {status})\n{log}")
            reached = json.loads((Path(folder) / "control-logs" / "0.json").read_text())
            jobs = [
                (seeded.copy_with(mutant, Path(folder) / str(i)), useful(mutant.function, reached))
                for i, mutant in enumerate(drawn)
            ]
            outcomes = seeded.run(jobs, Path(folder) / "logs", False, 600 * len(jobs))
        survived = [mutant.name for mutant, (status, _) in zip(drawn, outcomes, strict=True) if status == 0]
        print(f"{file}: {len(drawn) - len(survived)} of {len(drawn)} noticed, of {len(mutants)} there are")
        print("".join(f"  survived: {name}\n" for name in survived), end="", flush=True)
        record = {"row": f"operators: {file}", "count": len(drawn), "of": len(mutants), "seed": given.seed, "survived": survived}
        record |= {"seconds": round(time.monotonic() - start, 1), "version": __version__, "environment": environment}
        with given.output.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
