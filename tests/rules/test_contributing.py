"""The worked examples of CONTRIBUTING.md are true: so many files, and no other."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte
from halfbyte import formats
from halfbyte.formats import KV_FORMATS, Format

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sample: Any = importlib.import_module("variants.decode_sample").sample
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## (Add a [\w ]+):.*?\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE))
SOURCES = [path for folder in ("scripts", "src", "tests") for path in (ROOT / folder).rglob("*.py")]


def steps(section: str) -> list[str]:
    """The file of each numbered step of a section."""
    return re.findall(r"^\d\. `([\w./]+)`", SECTIONS[section], re.MULTILINE)


def test_a_format_takes_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's line in formats.py is all that the library needs: the format is stored, attended to and compiled."""
    assert len(steps("Add a KV or weight format")) == 2
    (line,) = re.findall(r"`(_kv\(.*?\))`", SECTIONS["Add a KV or weight format"])
    fmt = eval(line, vars(formats))
    assert isinstance(fmt, Format)
    assert fmt.name not in KV_FORMATS
    monkeypatch.setitem(KV_FORMATS, fmt.name, fmt)
    cache = halfbyte.KVCache(2, 2, 64, 64, keys=fmt.name, values=fmt.name)
    k, v = torch.randn(2, 2, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    cache.append(k, v)
    keys, values = cache.dequantized()
    assert 0 < float((keys[:, :, :40] - k).abs().max()) < 0.3
    q = torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.scaled_dot_product_attention(q, keys[:, :, :40], values[:, :, :40], enable_gqa=True)
    torch.testing.assert_close(halfbyte.decode_attention(q, cache), exact, atol=1e-5, rtol=1e-5)
    assert any(one.call.keys.format == one.call.values.format == fmt for one in sample())


def test_a_checkpoint_kind_takes_three_files() -> None:
    """No other file knows the example by the name of its adapter, of its files or of the function that draws them."""
    named = steps("Add a checkpoint kind")
    assert len(named) == 3
    known = {str(p.relative_to(ROOT)) for p in SOURCES if re.search("int-quantized|CompressedInt8|compressed_int8", p.read_text())}
    assert known - {str(Path(__file__).relative_to(ROOT))} == set(named)


def test_a_family_takes_one_file() -> None:
    """It is found by structure; what the section names is there."""
    assert len(steps("Add a model family")) == 1
    assert all((ROOT / name).exists() for name in re.findall(r"`((?:src|tests|results)/[\w./]+)`", SECTIONS["Add a model family"]))


def test_a_kernel_takes_at_most_six_files() -> None:
    """Nothing but the example's files imports the kernel or its plan."""
    named = steps("Add a kernel")
    assert len(named) <= 6
    modules = {f"halfbyte.{'.'.join(Path(p).with_suffix('').parts[2:])}" for p in named[:2]}
    stems = [Path(p).stem for p in named[:2]]  # most files need no parsing
    mentioning = [path for path in SOURCES if any(stem in path.read_text() for stem in stems)]
    importers = {str(path.relative_to(ROOT)) for path in mentioning if modules & imported(path)}
    assert importers
    assert importers <= set(named)


def imported(path: Path) -> set[str]:
    """The modules of `from ... import` statements."""
    return {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
