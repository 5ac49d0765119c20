"""What is released: wheels from one checkout, of the library, its laboratory and the demo model."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import halfbyte.vllm
from command_line import refusal
from halfbyte import errors, paths
from halfbyte.errors import MissingPackage
from halfbyte.vllm import names

ROOT = Path(__file__).parents[1]
LIBRARY, LABORATORY, DEMO = (
    tomllib.loads((ROOT / name).read_text()) for name in ("pyproject.toml", "lab/pyproject.toml", "demo/pyproject.toml")
)


def test_the_wheel_is_small_and_the_model_is_in_the_other_one() -> None:
    wheel = LIBRARY["tool"]["hatch"]["build"]["targets"]["wheel"]
    left_out = [ROOT / folder for folder in wheel["exclude"]]
    files = [path for path in (ROOT / "src/halfbyte").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    kept = [path for path in files if not any(path.is_relative_to(folder) for folder in left_out)]
    assert sum(path.stat().st_size for path in kept) < 3_000_000
    ((source, to),) = DEMO["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items()
    assert [(ROOT / "demo" / source).resolve()] == left_out == [paths.shipped_model()]
    assert to == "halfbyte_demo/tiny"


@pytest.mark.parametrize("address", ["", "https://forge.example/team/halfbyte/"])
def test_a_release_says_where_the_project_lives(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)  # type: ignore[arg-type]
    monkeypatch.setenv("HALFBYTE_ADDRESS", address)
    hook: Any = object.__new__(runpy.run_path(str(ROOT / "hatch_build.py"))["Address"])
    hook.root, made = str(ROOT), {"version": "1.2.3"}
    hook.update(made)
    text, own = made["readme"]["text"], (ROOT / "README.md").read_text()  # type: ignore[index]
    assert set(made) - {"version", "readme"} == ({"urls"} if address else set())
    if not address:
        assert text == own
        return
    assert all(url.startswith(address.rstrip("/")) for url in made["urls"].values())  # type: ignore[attr-defined]
    links = re.findall(r"\]\(([^)#][^)]*)\)|(?:src|srcset)=\"([^\"]*)\"", text)
    assert len(links) > 20
    assert all(one.startswith("https://") for pair in links for one in pair if one)
    for place in re.findall(r"/(?:blob|raw)/v1\.2\.3/([^)\"#]*)", text):
        assert (ROOT / place).exists()


ALONE = """
import shlex, sys, torch, transformers
sys.modules["halfbyte_lab"] = None  # as where it is not installed
import halfbyte
from halfbyte.cli import main

config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64
)
model = halfbyte.hf.quantize(transformers.LlamaForCausalLM(config).eval(), weights="int4_g32", keys="int8", values="int8")
halfbyte.hf.save(model, "saved")
for model in (model, halfbyte.hf.load("saved")):
    print(model.generate(torch.arange(8).reshape(1, 8), min_new_tokens=4, max_new_tokens=4).shape[1])
for command in (
    "bench linear --quick", "demo", "advise demo", "calibrate demo -o keys.safetensors",
    "eval demo", "eval demo --suite", "extract demo -o layer", "explain --compile",
):
    try:
        main(shlex.split(command))
    except SystemExit as left:
        print(left.code)
print([name for name in sys.modules if name.startswith("halfbyte_lab.")])
"""


def test_the_library_alone_quantizes_generates_and_says_what_the_laboratory_is_for(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["12", "12", *["1"] * 8, "[]"], done.stderr
    assert len(re.findall(r"^halfbyte: .* needs halfbyte's laboratory; .*: pip install \./lab$", done.stderr, re.MULTILINE)) == 8


def test_versions_agree() -> None:
    version = LIBRARY["project"]["version"]
    assert DEMO["project"]["version"] == LABORATORY["project"]["version"] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_extra_installs_the_vllm_that_the_plugin_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of that range vLLM stays as it is, with one sentence that says which to install."""
    first, end = (".".join(map(str, version)) for version in names.VERSIONS)
    assert LIBRARY["project"]["optional-dependencies"]["vllm"] == [f"vllm>={first},<{end}"]
    assert [names.refusal(version) for version in ("0.32.0", "0.33.1+cpu", "0.33.2rc1")] == [""] * 3
    monkeypatch.setattr(errors, "_WARNED", set())
    for version in ("0.31.9", "0.34.0", "1.32.0", "dev"):
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        with pytest.warns(UserWarning, match=rf"^halfbyte: this is vLLM {version}, .*: pip install 'vllm>={first},<{end}'$"):
            halfbyte.vllm.register()
    assert not [name for name in sys.modules if name.startswith("vllm.")]


def test_an_installed_library_finds_the_installed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "halfbyte" / "paths.py"))
    with pytest.raises(MissingPackage, match=r"the demo model is not installed; in a checkout of halfbyte: pip install \./demo"):
        paths.shipped_model()
    package = tmp_path / "halfbyte_demo"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert paths.shipped_model() == package / "tiny"


def test_without_the_model_the_demo_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paths, "__file__", "/nowhere/halfbyte/paths.py")
    refusal(capsys, "memory", "demo")
