"""A conversation with a model over one packed cache: each turn reads the new tokens only."""

from __future__ import annotations

import time
from typing import Any

import torch

from halfbyte.errors import check

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
