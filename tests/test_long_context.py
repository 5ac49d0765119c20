"""Long contexts in an evaluation: how the texts are cut, retrieval and continuations against full forward passes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from command_line import run
from halfbyte.errors import InvalidArgument
from halfbyte.text import ByteTokenizer, _FromTransformers, heldout_text
from halfbyte_lab.evals import model as models
from halfbyte_lab.evals.long_context import CHARACTERS, KEYS, TEXTS, Tasks, long_context, run_long_context
from halfbyte_lab.evals.outliers import PROFILES, with_outliers
from halfbyte_lab.evals.own_attention import own_attention
from halfbyte_lab.evals.quality import Setting

QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def shipped() -> Any:
    torch.set_num_threads(1)
    return models.load("demo")[0]


def tasks(model: Any, context: int = 240) -> Tasks:
    return Tasks(model, ByteTokenizer(), list(heldout_text().encode()), context)


def test_a_key_stands_at_every_depth_and_at_the_end(shipped: Any) -> None:
    made = tasks(shipped)
    texts = [bytes(row).decode() for row in made.keyed.tolist()]
    assert {len(text) for text in texts} == {240}
    depths = []
    for text in texts:
        (key, again) = re.findall(r'\nSECRET_KEY = "([a-z0-9]{16})', text)
        assert text.endswith(key)
        assert key == again
        depths.append(text.index(key))
    assert depths == sorted(set(depths))
    assert made.key_tokens == [CHARACTERS] * KEYS
    assert made.prompts.shape == (TEXTS, 12)
    assert made.written == 228


class Chat:
    """A tokenizer of transformers, as far as it is used: bytes, a bos token and a chat template."""

    chat_template, bos_token_id = "some", 1

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *text.encode()] if options == {} else list(text.encode())}

    def apply_chat_template(self, said: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"<user>{said[0]['content']}</user><assistant>"


def test_a_chat_template_frames_the_text_and_the_answer(shipped: Any) -> None:
    made = Tasks(shipped, _FromTransformers(Chat()), list(heldout_text().encode()), 300)
    text = bytes(made.keyed[3].tolist()).decode()
    (key, again) = re.findall(r'SECRET_KEY = "([a-z0-9]{16})', text)
    assert text.startswith("<user>")
    assert text.endswith(f'\nWhat is the value of SECRET_KEY?</user><assistant>\nSECRET_KEY = "{key}')
    assert again == key
    base = _FromTransformers(Base())
    assert base.frame == ("", "")
    assert Tasks(shipped, base, list(heldout_text().encode()), 300).keyed[:, 0].tolist() == [1] * KEYS


class Base(Chat):
    chat_template = None  # type: ignore[assignment]


@pytest.mark.slow
def test_figures_against_full_forward_passes(shipped: Any) -> None:
    made = tasks(shipped)
    result, text = long_context(shipped, Setting(), made, None, shipped)
    assert result.parted == [made.written] * TEXTS
    with torch.no_grad(), own_attention(shipped):
        best = shipped(input_ids=made.keyed, use_cache=False).logits.argmax(-1)
        logs = shipped(input_ids=torch.cat([made.prompts, text], 1), use_cache=False).logits.log_softmax(-1)
    key = slice(240 - CHARACTERS, 240)
    hits = (best[:, 240 - CHARACTERS - 1 : -1] == made.keyed[:, key]).float().mean()
    assert result.found == pytest.approx(float(hits), abs=0.03)  # the cache rounds to bf16
    assert result.found > 0.8
    judged = logs[:, 11:-1].gather(-1, text[..., None])
    assert result.nll == pytest.approx(-float(judged.mean()), rel=0.02)


@pytest.mark.slow
def test_what_ruins_a_cache_is_seen(shipped: Any) -> None:
    """INT8 finds what 16 bits find; token-wise INT4 keys of a model with outliers find little, and their text parts at once."""
    model = with_outliers(shipped, next(p for p in PROFILES if p.name == "Qwen3"))
    seen = []
    settings = [Setting(), Setting("int8_channel", "int8"), Setting("int4", "int4"), Setting("int4", "int4", rotate_keys=True)]
    made = tasks(model, 128)
    base, int8, int4, rotated = run_long_context(model, settings, made, QUIET)
    assert [r.formats for r in (base, int4)] == ["bf16", "int4"]
    assert int8.found == pytest.approx(base.found, abs=0.03)
    assert int4.found < 0.5 * base.found
    assert int4.found < rotated.found
    assert int4.median_parted < 20 < int8.median_parted
    _, text = long_context(model, settings[0], made, None, model, lambda: seen.append(0))
    assert len(seen) == made.steps
    assert long_context(model, settings[0], made, text, model)[0].parted == base.parted


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = tmp_path / "r.html", tmp_path / "r.jsonl"
    options = ["--windows", "1", "--length", "32", "--long", "120", "--html", str(page), "--output", str(out)]
    assert run("eval", "demo", "--keys", "int8", "--values", "int8", *options) == 0
    assert "Contexts of 120 tokens" in capsys.readouterr().out
    assert "Where greedy texts diverge from those of the 16-bit run" in page.read_text()
    results = [json.loads(line) for line in out.read_text().splitlines()]
    base, int8 = (r["long_context"] for r in results if not r["own"])
    assert base["parted"] == [114] * TEXTS
    assert (int8["context"], int8["written"], int8["formats"]) == (120, 114, "int8")
    for wrong, says in (("4000", "at most 2,048 tokens"), ("60", "long=60; a key, its text and the question need")):
        assert run("eval", "demo", "--windows", "1", "--length", "32", "--long", wrong) == 1
        assert says in capsys.readouterr().err


def test_texts_too_short(shipped: Any) -> None:
    with pytest.raises(InvalidArgument, match="fewer than one window of 240"):
        Tasks(shipped, ByteTokenizer(), list(b"x" * 200), 240)
    with pytest.raises(InvalidArgument, match="needs 8 windows"):
        Tasks(shipped, ByteTokenizer(), list(b"x" * 500), 240)
