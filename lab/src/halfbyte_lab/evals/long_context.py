"""Long contexts: retrieval of a key, and where greedy texts diverge from those of the 16-bit run.

Retrieval. A random key is hidden in a long text, whose end requests it. Given the first tokens of the key, is the next one the
likeliest? With teacher forcing this also works for base models, which follow no instructions; a tokenizer with a chat template
frames text and answer by it.

Continuations. Greedy tokens after short prompts: how many equal those of the 16-bit run before the first that differs, and their
likelihood under the 16-bit model. A text that breaks down is unlikely; one that repeats itself is very likely.

The prompt is read as `generate()` reads it, in one piece, and all tokens after it come one at a time from the packed cache.
"""

from __future__ import annotations

import random
import statistics
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from rich.console import Console

from halfbyte.errors import check
from halfbyte.text import Tokenizer, windows
from halfbyte_lab.evals.quality import Setting, cache_for, check_exact, with_weights
from halfbyte_lab.progress import progress

#: Keys that are looked for, and their characters; texts that are continued; the prompt's share of the context.
KEYS, CHARACTERS, TEXTS, PROMPT = 8, 16, 4, 1 / 20
NAME = '\nSECRET_KEY = "'
QUESTION = "\nWhat is the value of SECRET_KEY?"


@dataclass
class LongContext:
    """What one setting, named `formats`, did with contexts of `context` tokens.

    found   share of the keys' tokens that were the likeliest ones
    parted  for each continuation, of `written` tokens, how many equal the 16-bit run's before the first that differs
    nll     mean negative log-likelihood of the continuations under the 16-bit run, nats a token
    """

    formats: str
    context: int
    found: float
    written: int
    parted: list[int] = field(default_factory=list)
    nll: float = 0.0
    seconds: float = 0.0

    @property
    def median_parted(self) -> float:
        """The median of `parted`."""
        return statistics.median(self.parted)


class Tasks:
    """Texts with keys and beginnings of texts, cut for one model from `ids`, the tokens of a text. Raises for texts too short."""

    def __init__(self, model: Any, tokenizer: Tokenizer, ids: list[int], context: int) -> None:
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or context
        check(context <= most, f"long={context}; this model is made for at most {most:,} tokens")
        bodies = windows(ids, context, KEYS).tolist()
        check(len(bodies) == KEYS, f"long={context} needs {KEYS} windows of text, this one has {len(bodies)}; use a longer text")
        prompts = [_with_key(tokenizer, body, i, context) for i, body in enumerate(bodies)]
        self.keyed = torch.tensor([tokens for tokens, _ in prompts], device=model.device)  # [keys, context]
        self.key_tokens = [count for _, count in prompts]
        self.prompts = windows(ids, max(2, int(context * PROMPT)), TEXTS, tokenizer.bos).to(model.device)
        self.written = context - self.prompts.shape[1]

    @property
    def steps(self) -> int:
        """How many times a run of one setting calls `on_step`."""
        return max(self.key_tokens) + self.written


def _with_key(tokenizer: Tokenizer, body: list[int], number: int, context: int) -> tuple[list[int], int]:
    """(tokens of a text that ends with its key, `context` in all; how many of them are the key). Key `number` lies at its depth."""
    characters = "".join(random.Random(number).choices(string.ascii_lowercase + string.digits, k=CHARACTERS))
    before, after = tokenizer.frame
    key, name = tokenizer.encode(characters), tokenizer.encode(NAME)
    head = tokenizer.encode(before) if before else [] if tokenizer.bos is None else [tokenizer.bos]
    needle = [*name, *key, *tokenizer.encode('"\n')]
    tail = [*tokenizer.encode(QUESTION + after if after else ""), *name, *key]
    room = context - len(head) - len(needle) - len(tail)
    check(room >= KEYS, f"long={context}; a key, its text and the question need {context - room + KEYS} tokens and more")
    at = int(room * (number + 0.5) / KEYS)
    return [*head, *body[:at], *needle, *body[at:room], *tail], len(key)


@torch.no_grad()
def long_context(
    model: Any, setting: Setting, tasks: Tasks, base: torch.Tensor | None, plain: Any, on_step: Callable[[], None] = lambda: None
) -> tuple[LongContext, torch.Tensor]:
    """(what the setting did, its continuations int64 [n, written]); `base` are those of the 16-bit run, None: this is it.

    model has the setting's weights, `plain` is the 16-bit one, which judges what was written.
    """
    start = time.perf_counter()
    recall = found(model, setting, tasks, on_step)
    text = torch.cat(list(_written(model, setting, tasks, on_step)), 1)
    seconds = time.perf_counter() - start
    theirs = text if base is None else base
    equal = (text == theirs).tolist()
    prefixes = [sum(1 for _ in takewhile(bool, row)) for row in equal]
    nll = _nll(plain, setting.dtype, tasks.prompts, text)
    return LongContext(setting.name, tasks.keyed.shape[1], recall, tasks.written, prefixes, nll, seconds), text


def found(model: Any, setting: Setting, tasks: Tasks, on_step: Callable[[], None]) -> float:
    """Share of the tokens of all keys that are the likeliest, given those before them."""
    from halfbyte.hf.model_support import CACHE

    longest, cache = max(tasks.key_tokens), cache_for(model, setting, tasks.keyed.shape[1])
    end = tasks.keyed.shape[1] - longest
    hits = []
    for i in range(longest):
        step = tasks.keyed[:, :end] if i == 0 else tasks.keyed[:, end + i - 1 : end + i]
        best = model(input_ids=step, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        hits.append(best == tasks.keyed[:, end + i])
        on_step()
    by_key = torch.stack(hits, 1)
    return float(torch.cat([row[longest - n :] for row, n in zip(by_key, tasks.key_tokens, strict=True)]).float().mean())


def _written(model: Any, setting: Setting, tasks: Tasks, on_step: Callable[[], None]) -> Iterator[torch.Tensor]:
    """Greedy tokens [n, 1], one after the other."""
    from halfbyte.hf.model_support import CACHE

    cache, step = cache_for(model, setting, tasks.prompts.shape[1] + tasks.written), tasks.prompts
    for _ in range(tasks.written):
        step = model(input_ids=step, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        yield step
        on_step()


def _nll(plain: Any, dtype: str, prompts: torch.Tensor, text: torch.Tensor) -> float:
    """Mean nats a token of `text` [n, written] after `prompts` by the 16-bit model."""
    from halfbyte.hf.model_support import CACHE

    total, whole = 0.0, torch.cat([prompts, text], 1)
    cache = cache_for(plain, Setting.plain(dtype), whole.shape[1])
    for first in range(0, whole.shape[1] - 1, 256):
        piece, following = whole[:, first : first + 256], whole[:, first + 1 : first + 257]
        logs = plain(input_ids=piece, **{CACHE: cache}, use_cache=True).logits[:, : following.shape[1]].float().log_softmax(-1)
        log_probs = logs.gather(-1, following[..., None])[:, max(prompts.shape[1] - 1 - first, 0) :]
        total -= float(log_probs.sum(dtype=torch.float64))
    return total / text.numel()


def run_long_context(model: Any, settings: Sequence[Setting], tasks: Tasks, console: Console) -> list[LongContext]:
    """`long_context` of every setting behind a progress bar; the first one must be the 16-bit run."""
    for setting in settings:
        check_exact(setting.exact, tasks.keyed.shape[1])
    results, base = list[LongContext](), None
    with progress(console) as bar:
        task = bar.add_task("", total=len(settings) * tasks.steps)
        for setting in settings:
            bar.update(task, description=f"long context, {setting.name}")
            variant = with_weights(model, *setting.in_weights)
            result, text = long_context(variant, setting, tasks, base, model, lambda: bar.advance(task))
            results.append(result)
            base = text if base is None else base
    return results


LONG_HEADERS = ("formats", "key found, %", "differs after", "of tokens", "first", "nats a token", "seconds")


def long_rows(results: Sequence[LongContext]) -> list[tuple[str, ...]]:
    """One result a row in the order of `LONG_HEADERS`: the median token that parts from the 16-bit text, and the first."""
    return [
        (
            r.formats,
            f"{100 * r.found:.0f}",
            f"{r.median_parted:,.0f}",
            f"{r.written:,}",
            f"{min(r.parted):,}",
            f"{r.nll:.3f}",
            f"{r.seconds:.1f}",
        )
        for r in results
    ]
