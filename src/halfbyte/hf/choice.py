"""The choice of a step's tokens from its logits: processors, argmax or a draw, stopping criteria. All of it stays on the device.

Where only logits decide (temperature, top-k, top-p, min-p, a least length, tokens that end a sequence), a choice is recorded in a
CUDA graph behind the forward's. It runs transformers' own processors, so tokens are the same. Others are called for each token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria

from halfbyte.hf.recorded_step import LookupForward, Recorded, Tokens
from halfbyte.ops.block import greedy
from halfbyte.reference.greedy import Ends, Held

#: Processors that read logits alone, with numbers as options.
_OF_LOGITS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
)


class Choice:
    """How one call of `generate()` chooses, over the tokens of a step.

    longest           tokens of prompt and answer at most
    padding           what ended sequences hold behind their end
    scores, logits    float32 [B, V] of each step, where the call collects them
    """

    def __init__(self, processor: Any, criteria: Any, config: Any, generator: torch.Generator | None) -> None:
        self.processor, self.config, self.generator = processor, config, generator
        self.criteria = stopping_criteria.StoppingCriteriaList(c for c in criteria if not _is_time(c))
        self.ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.longest = min((c.max_length for c in criteria if _is_length(c)), default=config.max_length)
        self.latest = min((c.initial_timestamp + c.max_time for c in criteria if _is_time(c)), default=None)
        self.padding = config._pad_token_tensor
        returns = bool(config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if returns and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if returns and config.output_logits else None

    @property
    def is_late(self) -> bool:
        return self.latest is not None and time.time() > self.latest

    def __call__(self, held: Tokens, logits: torch.Tensor, length: int, seen: torch.Tensor | None = None) -> None:
        """Choose the tokens behind the `length` that are held, from logits [B, V].

        seen [B, n] is what stopping criteria look at; its last column is chosen here. None: all tokens.
        """
        if (minimum := self._refused(length)) is not None:
            ends = Ends(self.config._eos_token_tensor, self.padding, minimum) if self.ends else None
            greedy(logits, Held(held.ids, held.last, held.lengths, held.unfinished), ends)
            return
        raw = logits.to(copy=True, dtype=torch.float32)
        scores = self.processor(held.ids[:, :length], raw)
        for outputs, what in ((self.scores, scores), (self.logits, raw)):
            if outputs is not None:
                outputs.append(what)
        tokens = self._drawn(scores, held)
        if self.ends:
            tokens = torch.where(held.unfinished, tokens, self.padding)
        held.last.copy_(tokens[:, None])
        held.ids.scatter_(1, held.lengths, held.last)
        held.lengths += held.unfinished[:, None] if self.ends else held.unfinished.any()
        seen = held.ids[:, : length + 1] if seen is None else seen
        held.unfinished &= ~(self.criteria(seen, None if self.scores is None else tuple(self.scores)) | held.undrawn)

    def of_drafts(self, forward: LookupForward, logits: torch.Tensor) -> None:
        """Choose tokens greedily behind the newest one and its drafts, from logits [B, L, V]; only for a choice that has a key."""
        behind = forward.tokens.lengths + torch.arange(logits.shape[1], device=logits.device)
        scores = logits.flatten(0, 1).float()
        for processor in self.processor:
            new_scores, least = processor(scores.new_empty(len(scores), 0, dtype=torch.long), scores), _least(processor)
            scores = new_scores if least is None else torch.where(behind.view(-1, 1) < least, new_scores, scores)
        tokens = scores.argmax(-1).view_as(behind)
        ends = torch.isin(tokens, self.config._eos_token_tensor) if self.ends else torch.zeros_like(tokens, dtype=torch.bool)
        forward.take(tokens, ends, 0 if self.padding is None else self.padding)

    def key(self, length: int | None) -> Hashable | None:
        """What a recorded choice depends on, at `length` tokens or, None, at any; None if it depends on more than logits."""
        config, ends = self.config, getattr(self.config, "eos_token_id", None)
        ends = tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        numbers = (*ends, config.pad_token_id)
        processors = [_processor_key(p, config, length) for p in self.processor]
        is_known = all(_is_known(criterion, config) for criterion in self.criteria) and None not in processors
        collects = self.scores is not None or self.logits is not None
        if collects or not is_known or not all(n is None or isinstance(n, int) for n in numbers):
            return None
        return bool(config.do_sample), self.ends, numbers, tuple(processors), self.generator

    def _refused(self, length: int) -> bool | None:
        """Of a choice that is `greedy`: whether tokens that end a sequence are refused at `length` tokens. None for others."""
        least = [_least(processor) for processor in self.processor]
        if self.config.do_sample or self.key(length) is None or None in least:
            return None
        return any(length < n for n in least if n is not None)

    def _drawn(self, scores: torch.Tensor, held: Tokens) -> torch.Tensor:
        """Tokens [B] by float32 scores [B, V]: the first of the largest, or draws.

        They are those of `torch.multinomial`. What its check would wait for the GPU for, `held` takes note of.
        """
        if not self.config.do_sample:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        held.undrawn |= held.unfinished & probabilities[:, 0].isnan()  # one NaN makes all of a row
        noise = torch.empty_like(probabilities).exponential_(1, generator=self.generator)
        return (probabilities / noise).argmax(-1)


class RecordedChoice:
    """A choice over logits that lie where they lay, recorded behind a forward whose graphs share a `pool` of memory."""

    def __init__(self, choice: Callable[[torch.Tensor], None], pool: Any, generator: torch.Generator | None = None) -> None:
        self.choice, self.graph = choice, Recorded(1, pool, generator)

    def __call__(self, logits: torch.Tensor) -> None:
        self.graph(lambda: self.choice(logits), logits.device)


def _processor_key(processor: Any, config: Any, length: int | None) -> Hashable | None:
    """What the result of a processor depends on besides logits; None if that is not known."""
    if type(processor) in _OF_LOGITS:
        return type(processor), tuple(vars(processor).items())
    least = _least(processor)
    if least is None or processor.eos_token_id is not config._eos_token_tensor:
        return None
    return type(processor), least if length is None else length < least


def _least(processor: Any) -> int | None:
    """How long a sequence must be before a processor lets it end; None for other processors."""
    if type(processor) is logits_process.MinLengthLogitsProcessor:
        return int(processor.min_length)
    if type(processor) is logits_process.MinNewTokensLengthLogitsProcessor:
        return int(processor.prompt_length_to_skip + processor.min_new_tokens)
    return None


def _is_length(criterion: Any) -> bool:
    return type(criterion) is stopping_criteria.MaxLengthCriteria


def _is_time(criterion: Any) -> bool:
    return type(criterion) is stopping_criteria.MaxTimeCriteria


def _is_known(criterion: Any, config: Any) -> bool:
    """Whether a stopping criterion reads the newest tokens only, or is the length at which the loop ends by itself."""
    ends = type(criterion) is stopping_criteria.EosTokenCriteria
    return _is_length(criterion) or (ends and criterion.eos_token_id is config._eos_token_tensor)
