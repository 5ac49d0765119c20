"""Texts as windows of tokens, bytes for models without a tokenizer, and conversations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch

from halfbyte.errors import CheckpointError, InvalidArgument, check


class Tokenizer(Protocol):
    """What is needed of a tokenizer.

    bos    the token every text begins with, None if the model knows none
    frame  what a chat template puts before and after a user's text, the beginning of the answer included; empty for base models
    """

    @property
    def bos(self) -> int | None: ...
    @property
    def frame(self) -> tuple[str, str]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str: ...


class ByteTokenizer:
    """One token a byte, for models without a tokenizer of their own."""

    bos: int | None = None
    frame = ("", "")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class _FromTransformers:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        probe = tokenizer("a")["input_ids"]  # some have a bos token and never use it
        self.bos: int | None = tokenizer.bos_token_id if probe[:1] == [tokenizer.bos_token_id] else None

    @property
    def frame(self) -> tuple[str, str]:
        if not self._tokenizer.chat_template:
            return "", ""
        mark = "<the text>"
        messages = [{"role": "user", "content": mark}]
        before, _, after = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).partition(mark)
        return before, after

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def load_tokenizer(model: str, vocab_size: int) -> Tokenizer:
    """The model's own tokenizer; bytes when the folder holds none and the vocabulary is that of bytes."""
    if not _has_tokenizer(model):
        check(
            vocab_size == 256,
            f"model={model!r} has no tokenizer, and its vocabulary of {vocab_size} is not that of bytes, which has 256; copy the "
            f"model's tokenizer files into the folder",
        )
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        return _FromTransformers(AutoTokenizer.from_pretrained(model, trust_remote_code=False))
    except Exception as error:  # whatever a damaged tokenizer file provokes inside transformers
        raise CheckpointError(f"model={model!r}: its tokenizer does not load: {error}") from error


def _has_tokenizer(model: str) -> bool:
    folder = Path(model)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
    return not folder.is_dir() or any((folder / name).exists() for name in names)


def heldout_text() -> str:
    """The held-out text that comes with the library: modules of CPython's standard library that the shipped model never saw."""
    return (Path(__file__).parent / "data" / "heldout.txt").read_text(encoding="utf-8")


def read_text(path: Path | None) -> str:
    """The text of a UTF-8 file, or the shipped held-out text."""
    if path is None:
        return heldout_text()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"text={str(path)!r} cannot be read as UTF-8 text: {error}") from error
    check(bool(text.strip()), f"text={str(path)!r} holds no text; give a file with some thousand tokens")
    return text


def windows(ids: list[int], length: int, count: int | None = None, bos: int | None = None) -> torch.Tensor:
    """Cut tokens into windows of `length`, int64 [n, length], spread evenly over the text; all of them unless `count` says less.

    `bos` is put in front of each window, as its first token. The last tokens that fill no window are left out.
    """
    if bos is not None:
        inner = windows(ids, length - 1, count)
        return torch.cat([torch.full_like(inner[:, :1], bos), inner], 1)
    check(length >= 2, f"length={length}; a window needs at least 2 tokens to predict anything")
    check(count is None or count >= 1, f"count={count}; expected at least one window")
    whole = len(ids) // length
    check(whole >= 1, f"the text has {len(ids)} tokens, fewer than one window of {length}; use a longer text or a shorter window")
    cut = torch.tensor(ids[: whole * length], device="cpu").view(whole, length)
    if count is None or count >= whole:
        return cut
    return cut[torch.arange(count, device="cpu") * whole // count]


_MARKS = {"first text": "user", "answer": "assistant", "second text": "user"}


class Chat:
    """A conversation: `answer` says what the model answers to the next text, and reads new tokens only.

    model       a transformers model with the "halfbyte" attention
    tokenizer   its tokenizer, with a chat template
    cache       an empty `PackedCache` of the model, which holds the conversation from then on; `generate()` enlarges it
    options     of every `model.generate()`, such as max_new_tokens and streamer

    ids         what has been said, templates included, int64 [1, T]
    tokens, seconds  of the last answer: how many tokens, and the time they took, with that of reading the question

    Raises `InvalidArgument` if the tokenizer has no chat template.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: Any, **options: Any) -> None:
        name = tokenizer.name_or_path
        check(bool(tokenizer.chat_template), f"model={name!r} has no chat template; it continues texts: model.generate(), --prompt")
        self.model, self.tokenizer, self.cache, self.options = model, tokenizer, cache, options
        self.ids = torch.zeros(1, 0, dtype=torch.int64)
        self.tokens, self.seconds = 0, 0.0
        messages = [{"role": role, "content": text} for text, role in _MARKS.items()]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first, answer, second = _MARKS
        self._before, rest = whole.split(first, 1)
        self._between, self._after = rest.split(answer, 1)[1].split(second, 1)

    def answer(self, text: str) -> str:
        """The answer to `text`. One that is interrupted is forgotten with its question, and the next turn reads all anew."""
        question = self._encode((self._between if self.ids.numel() else self._before) + text + self._after)
        past = self.ids
        if past.numel() and question[0, 0] == past[0, -1]:  # the token that ends an answer begins what the template puts behind it
            past = past[:, :-1]
        prompt = torch.cat([past, question], 1).to(self.model.device)
        began = time.perf_counter()
        try:
            ids = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=self.cache, **self.options)
        except BaseException:
            self.cache.reset()
            raise
        self.tokens, self.seconds = ids.shape[1] - prompt.shape[1], time.perf_counter() - began
        self.ids = ids.cpu()
        return str(self.tokenizer.decode(self.ids[0, prompt.shape[1] :], skip_special_tokens=True))

    def _encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
