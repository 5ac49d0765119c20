"""The architecture, kept by reading the source: where imports point, what importing costs, what is public, how long a file is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import halfbyte

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "halfbyte"
FILES = sorted(SOURCE.rglob("*.py"))

#: Layers from the top; a module may import its own layer and those below. A name stands for the file or the folder.
LAYERS = (
    {"cli"},
    {"hf", "vllm", "doctor", "memory", "terminal", "text"},
    {"engine", "calibrated_keys"},
    {"checkpoints"},
    {"cache", "cache_pickle", "paging", "nn", "experts"},
    {"ops"},
    {"kernels", "cpu"},
    {"plans", "settings", "device"},
    {"reference"},
    {"kv_buffer"},
    {"tensors"},
    {"packing"},
    {"cache_plan", "cache_options"},
    {"formats"},
    {"arguments", "modules", "transforms", "threads"},
    {"errors", "paths"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
#: The heavy or optional packages, and who may import them.
ONLY = {
    "transformers": {"hf", "cli", "memory", "text"},
    "matplotlib": set(),
    "triton": {"kernels", "device"},
    "numba": {"cpu"},
    "llvmlite": {"cpu"},
    "typer": {"cli"},
    "vllm": {"vllm"},
    "huggingface_hub": {"paths", "hf", "cli", "memory", "checkpoints"},
}


def unit(path: Path) -> str:
    """The first part of a module's name below halfbyte: its file or its folder."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed once for all rules."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """(dotted name, whether it runs when the module is imported) of every import in a file, `TYPE_CHECKING` blocks left out."""

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: a relative import"
                yield from ((f"{child.module}.{alias.name}", top) for alias in child.names)
            yield from walk(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return tuple(walk(tree(path), True))


def inner(path: Path) -> Iterator[str]:
    """The units of halfbyte that a file imports, at the top or inside functions."""
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "halfbyte" and len(parts) > 1:
            yield parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    here = unit(path)
    if path == SOURCE / "__init__.py":
        assert not {"hf", "cli"} & set(inner(path))
        return
    if here == "__main__":
        return
    assert here in RANK, f"{here} has no layer: give it one in LAYERS"
    for name in inner(path):
        if name not in RANK:  # `from halfbyte import X`: the face, which only the top may use
            assert RANK[here] <= 1, f"{path.name} imports halfbyte.{name} from the package itself"
            continue
        # The one place where an object offers an operation of the next layer: QuantTensor.dequantize (reference/dequantize.py).
        if (here, name) == ("tensors", "reference"):
            continue
        assert RANK[name] >= RANK[here], f"{path.relative_to(SOURCE)} imports {name}, which lies above it"


LABORATORY = sorted((ROOT / "lab" / "src" / "halfbyte_lab").rglob("*.py"))


def test_the_library_imports_nothing_of_its_laboratory() -> None:
    """Neither by a statement nor by a name in a string, but for `errors.laboratory`, which says what to install."""
    for path in FILES:
        assert not any(name.split(".")[0] == "halfbyte_lab" for name, _ in imports(path)), path
        assert path == SOURCE / "errors.py" or not re.search(r"import_module\(.*halfbyte_lab", path.read_text()), path


def test_the_levels_keep_to_themselves() -> None:
    """The reference and the cpu level know nothing of what calls them, and neither knows Triton."""
    for path in FILES:
        if unit(path) in ("reference", "cpu"):
            assert not {"ops", "cache", "paging", "nn", "kernels"} & set(inner(path)), path
        if unit(path) == "reference":
            assert "cpu" not in set(inner(path)), path
        if unit(path) == "kernels":
            assert not {"ops", "cache"} & set(inner(path)), path  # of plans they take what a plan says, and choose nothing
        if unit(path) not in ("hf", "cli"):
            top = [name for name, at_top in imports(path) if at_top and name.startswith("halfbyte.hf")]
            assert not top, f"{path}: only the command line imports hf"


@pytest.mark.parametrize("package", ONLY)
def test_optional_packages_stay_where_they_belong(package: str) -> None:
    for path in FILES:
        if any(name.split(".")[0] == package for name, _ in imports(path)):
            assert unit(path) in ONLY[package], f"{path.relative_to(SOURCE)} imports {package}"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_light() -> None:
    code = """
import sys, torch
before = set(sys.modules)
torch.cuda.is_available = lambda: (_ for _ in ()).throw(AssertionError("asked for a GPU"))
import halfbyte
heavy = {"triton", "transformers", "matplotlib", "typer", "rich", "halfbyte.hf", "halfbyte.cli"}
print(sorted((set(sys.modules) - before) & heavy), torch.cuda.is_initialized())
"""
    assert run(code).split("\n")[0] == "[] False"


def test_the_public_face_is_small_and_complete() -> None:
    assert len(halfbyte.__all__) <= 16
    assert len(set(halfbyte.__all__)) == len(halfbyte.__all__)
    for name in halfbyte.__all__:
        assert hasattr(halfbyte, name)
    assert all(name in halfbyte.__all__ for name in re.findall(r"halfbyte\.([a-z_]+)\(", halfbyte.__doc__ or ""))


def test_the_laboratory_is_in_the_sdist_and_not_in_the_wheel() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["src/halfbyte"]
    assert "lab" in targets["sdist"]["include"]


def test_the_version_is_said_twice_alike() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == halfbyte.__version__
    assert project["requires-python"] == ">=3.11"


@pytest.mark.parametrize("path", [*FILES, *LABORATORY], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_documented(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert not text.strip() or ast.get_docstring(tree(path)), f"{path}: no docstring"
    missing = [
        node.name
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not missing, f"{path}: without a docstring: {missing}"


def kernels_of(path: Path) -> set[str]:
    """The functions of a file that Triton compiles, whose arguments are a kernel's own: decorated with jit, or given to it."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef) and any(re.search(r"\bjit\b", ast.unparse(d)) for d in node.decorator_list):
            found.add(node.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".jit"):
            found |= {ast.unparse(argument) for argument in node.args}
    return found


def test_no_signature_is_long() -> None:
    long = set()
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                a = node.args
                if len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) > 20 and node.name not in kernels_of(path):
                    long.add((path.relative_to(SOURCE).as_posix(), node.name))
    assert not long


def test_kernels_have_seven_rooms_at_most() -> None:
    rooms = {p.relative_to(SOURCE / "kernels").parts[0] for p in (SOURCE / "kernels").rglob("*.py")} - {"__init__.py"}
    assert len(rooms) <= 7, rooms


def test_facts_about_gpus_are_in_one_place() -> None:
    """Shared memory by compute capability, and the limits of an SM."""
    fact = re.compile(r"\b(?:99|100|163|164|227|228) ?(?:<< ?10|\* ?1024)")
    capability = re.compile(r"\((?:8, [0679]|9, 0|1[012], \d)\): ")  # a table
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if unit(path) != "device" and (fact.search(text := path.read_text()) or capability.search(text))
    }
    assert not found, "take them from halfbyte.device"


@pytest.mark.parametrize("name", [n for n in halfbyte.__all__ if callable(getattr(halfbyte, n))])
def test_public_objects_say_what_they_do(name: str) -> None:
    found = getattr(halfbyte, name)
    assert len((found.__doc__ or "").strip()) > 20
    if isinstance(found, type):
        methods = [m for m, f in vars(found).items() if not m.startswith("_") and callable(getattr(f, "__func__", f))]
        undocumented = [m for m in methods if not (getattr(found, m).__doc__ or "").strip()]
        assert not undocumented


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines()]


def test_nothing_of_a_machine_is_in_the_repository() -> None:
    """No path of somebody's machine, no package index of somebody's company."""
    home = re.compile(r"(?<![\w.])/(?:work|home|Users|root|mnt)/\w+")
    hosts = re.compile(r"https?://[\w.-]*(?:artifactory|nexus|jfrog|\.internal|\.corp|localhost|127\.0\.0\.1)[\w./:-]*")
    index = re.compile(r"--?(?:extra-)?index-url\s+(?!https://(?:pypi\.org|download\.pytorch\.org))\S+")
    found = []
    for path in tracked():
        if not path.is_file() or path.stat().st_size > 1_000_000 or path == Path(__file__):
            continue
        if SOURCE / "data" in path.parents or path.suffix in (".safetensors", ".png"):  # a shipped text may quote any path
            continue
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
            if any(pattern.search(line) for pattern in (home, hosts, index)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_only_registries_name_formats() -> None:
    """No code below the top asks for a format by its name: what it needs is a property of the Format."""
    names = {*halfbyte.KV_FORMATS, *halfbyte.WEIGHT_FORMATS} - {"fp16", "bf16"}
    for path in FILES:
        if unit(path) not in ("reference", "cpu", "ops", "kernels", "tensors", "packing", "paging"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Compare):
                literals = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                assert not names & set(literals), f"{path}:{node.lineno} compares with a format's name"
