"""A conversation over one cache: `hf.Chat`, and `halfbyte generate --chat`."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from halfbyte import cli, hf
from halfbyte.errors import InvalidArgument
from halfbyte.paths import shipped_model
from watched import watched

FORMATS = {"keys": "int8", "values": "int4_g32"}
QUESTIONS = ("def main():", "class Queue:", "import os")


def new_chat(folder: Path, **options: Any) -> hf.Chat:
    model = hf.quantize(hf.load(folder, dtype=torch.float32), **FORMATS)
    chat = hf.Chat(model, AutoTokenizer.from_pretrained(folder), None, do_sample=False, max_new_tokens=12, **options)
    chat.cache = hf.PackedCache(model, 64, **FORMATS)
    return chat


def counted(chat: hf.Chat, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward reads."""
    return watched(monkeypatch, chat.model, "forward", lambda input_ids, **options: input_ids.shape[1])


def test_a_turn_reads_new_tokens_only_and_all_turns_are_one_text(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = new_chat(chat_folder)
    counts, read = counted(chat, monkeypatch), []
    for question in QUESTIONS:
        before, counts[:] = chat.ids.shape[1], []
        chat.answer(question)
        read.append((counts[0], chat.ids.shape[1] - chat.tokens - before))
    assert all(first <= new + 1 for first, new in read)  # with the last token of the answer before, which no forward has read
    text = chat.tokenizer.decode(chat.ids[0])
    places = [text.index(question) for question in QUESTIONS]
    assert places == sorted(places)
    assert text.count("<user>") == len(QUESTIONS)
    assert int(chat.cache.get_seq_length()) == chat.ids.shape[1] - 1


def test_an_interrupted_answer_is_forgotten(chat_folder: Path) -> None:
    chat, other = new_chat(chat_folder), new_chat(chat_folder)
    for one in (chat, other):
        one.answer(QUESTIONS[0])

    class Interrupts:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    ids = chat.ids
    chat.options["streamer"] = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        chat.answer(QUESTIONS[1])
    del chat.options["streamer"]
    assert chat.ids is ids
    chat.answer(QUESTIONS[2])
    other.answer(QUESTIONS[2])
    whole = chat.tokenizer.decode(chat.ids[0])
    assert QUESTIONS[1] not in whole
    assert whole[: whole.rindex("<user>")] == chat.tokenizer.decode(other.ids[0])[: whole.rindex("<user>")]


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="has no chat template"):
        hf.Chat(None, AutoTokenizer.from_pretrained(shipped_model()), None)


def run(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as left:
        cli.main(["generate", *arguments])
    return int(left.value.code or 0)


def test_the_command_answers_line_after_line(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(f"{question}\n" for question in QUESTIONS[:2])
    assert run(monkeypatch, lines, str(chat_folder), "--chat", "--tokens", "12", "--device", "cpu") == 0
    said = capsys.readouterr()
    assert len(said.out.strip().splitlines()) >= 2
    assert said.err.count("tokens/s") == 2
    assert run(monkeypatch, "", str(chat_folder), "--chat", "--prompt", "x") != 0
    assert "--chat" in capsys.readouterr().err
    assert run(monkeypatch, lines, "demo", "--chat") != 0
    assert "has no chat template" in capsys.readouterr().err


def test_a_text_that_a_chat_model_does_not_continue(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token ends its answers: it is told where to write, unless no more was asked for."""
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(256))}), encoding="utf-8")
    for tokens, told in (("5", True), ("1", False)):
        assert run(monkeypatch, "", str(folder), "--prompt", "What is it?", "--tokens", tokens, "--device", "cpu") == 0
        assert ("answers questions with --chat" in capsys.readouterr().err) == told
