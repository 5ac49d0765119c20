"""First tokens by the user's clock, on a model that a CPU computes in no time."""

from __future__ import annotations

import json

import pytest
import transformers as tf

from halfbyte.device import describe
from halfbyte_lab import first_token


@pytest.fixture
def tiny(monkeypatch):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 101}
    monkeypatch.setitem(first_token.SIZES, "qwen3-0.6b", tf.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=64))
    monkeypatch.setattr(first_token, "REPEATS", 1)


def test_both_sides_have_a_line_for_each_prompt(tiny, tmp_path):
    out = tmp_path / "first.jsonl"
    first_token.main(["--sizes", "qwen3-0.6b", "--batches", "1", "2", "--tokens", "5", "--out", str(out), "--no-cold"])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    cases = [(line["side"], line["batch"], line["tokens"]) for line in lines]
    assert cases == [(side, batch, 5) for side in ("bf16", "halfbyte") for batch in (1, 2)]
    assert all(line["what"] == "first_token" and line["ms"] > 0 and line["environment"]["device"] for line in lines)


def test_linear_layers_of_blocks_are_timed_on_both_sides():
    config = tf.LlamaConfig(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    times = first_token.linear_layers(config, describe("cpu"), "int4_g32", 3)
    assert times.keys() == {"bf16_ms", "packed_ms"}
    assert min(times.values()) > 0


def test_a_fresh_process_says_how_long_it_took(tiny, capsys):
    first_token.start("qwen3-0.6b")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]).keys() == {"first_s", "next_16_s"}
