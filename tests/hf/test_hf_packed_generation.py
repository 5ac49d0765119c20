"""The judge of transformers' own generation tests, on a checkout of the same layout. `make hf-suite` runs it on the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import packed_generation
import pytest

MIXIN = """
import pytest, torch
from transformers import AutoModelForCausalLM

class GenerationTesterMixin:
    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        raise AssertionError("transformers' own check")

    def _check_attentions_for_generate(self, attentions, decoder_past_key_values):
        raise AssertionError("transformers' own check")

    def generate(self, **options):
        model = AutoModelForCausalLM.from_config(self.config)
        ids = torch.ones(2, 5, dtype=torch.long)
        options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0, **options}
        return model, model.generate(ids, **options)

    @pytest.mark.generate
    def test_greedy(self):
        model, out = self.generate(output_attentions=True)
        self._check_past_key_values_for_generate(2, out.past_key_values, 7, config=model.config)
        self._check_attentions_for_generate(out.attentions, decoder_past_key_values=out.past_key_values)
"""
FAMILY = """
import unittest
import pytest
from transformers import LlamaConfig
from ...generation.test_utils import GenerationTesterMixin

class LlamaTest(GenerationTesterMixin, unittest.TestCase):
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, eos_token_id=None
    )
"""
TEST = """
    @pytest.mark.generate
    def test_{name}(self):
        {body}
"""


@pytest.fixture
def run(tmp_path):
    """run(tests): exit status and output for a checkout where one family has these tests besides."""
    for family in packed_generation.FAMILIES:
        folder = tmp_path / "tests" / "models" / family
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / f"test_modeling_{family}.py").write_text("from ...generation import test_utils\n")
    for folder in ("", "models", "generation"):
        (tmp_path / "tests" / folder / "__init__.py").parent.mkdir(exist_ok=True)
        (tmp_path / "tests" / folder / "__init__.py").touch()
    (tmp_path / "tests/generation/test_utils.py").write_text(MIXIN)
    (tmp_path / "pytest.ini").touch()

    def run(tests: dict[str, str]) -> tuple[int, str]:
        written = FAMILY + "".join(TEST.format(name=name, body=body) for name, body in tests.items())
        (tmp_path / "tests/models/llama/test_modeling_llama.py").write_text(written)
        command = [sys.executable, "-W", "ignore", packed_generation.__file__, str(tmp_path), "-rA", "-p", "no:cacheprovider"]
        made = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTEST_ADDOPTS": ""})
        return made.returncode, made.stdout + made.stderr

    return run


@pytest.mark.slow
def test_what_passes(run) -> None:
    status, output = run(
        {
            "beams": "self.generate(num_beams=2)",
            "inherits_generation_mixin": "pass",
            "generate_with_static_cache": "assert not self.generate(cache_implementation='static')",
        }
    )
    assert "2 passed, 2 xfailed" in output, output
    assert status == 0


@pytest.mark.slow
def test_what_fails(run) -> None:
    status, output = run(
        {
            "length": "assert self.generate()[1].sequences.shape == (2, 9)",
            "long_cache": "self._check_past_key_values_for_generate(2, self.generate()[1].past_key_values, 8, self.config)",
            "static_by_default": "self.generate(cache_implementation='static')",
            "generate_with_static_cache": "self.generate()",
        }
    )
    assert "3 failed, 1 passed, 1 xfailed" in output, output
    assert "no packed cache was made; give the reason in LEFT_OUT" in output
    assert "LEFT_OUT has what every family passes: test_generate_with_static_cache\n" in output
    assert status == 1


@pytest.mark.slow
def test_an_entry_that_nobody_needs_fails_a_run(run) -> None:
    assert run({"generate_with_static_cache": "self.generate()"})[0] == 1


def test_another_folder_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of transformers"):
        packed_generation.main(str(tmp_path))


def test_reasons_point_to_tests_that_exist() -> None:
    for name, reason in packed_generation.LEFT_OUT.items():
        named = [word for word in reason.split() if word.startswith("tests/")]
        assert all(Path(word).is_file() for word in named), name
