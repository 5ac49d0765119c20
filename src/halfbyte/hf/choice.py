"""The choice of a step's tokens from its logits: processors, argmax or a draw, stopping criteria. All of it stays on the device.

Where only logits decide (temperature, top-k, top-p, min-p, a least length, tokens that end a sequence), a choice is recorded in a
CUDA graph behind the forward's. It runs transformers' own processors, so tokens are the same. Others are called for each token.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria

from halfbyte.hf.recorded_step import Recorded, Tokens

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
    scores, logits    float32 [B, V] of each step, where the call collects them
    """

    def __init__(self, processor: Any, criteria: Any, config: Any, generator: torch.Generator | None) -> None:
        self.processor, self.criteria, self.config, self.generator = processor, criteria, config, generator
        self.ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.longest = min((c.max_length for c in criteria if _is_length(c)), default=config.max_length)
        returns = bool(config.return_dict_in_generate)
        self.scores: list[torch.Tensor] | None = [] if returns and config.output_scores else None
        self.logits: list[torch.Tensor] | None = [] if returns and config.output_logits else None

    def __call__(self, held: Tokens, logits: torch.Tensor, length: int, seen: torch.Tensor | None = None) -> None:
        """Choose the tokens behind the `length` that are held, from logits [B, V].

        seen [B, n] is what stopping criteria look at; its last column is chosen here. None: all tokens.
        """
        raw = logits.to(copy=True, dtype=torch.float32)
        scores = self.processor(held.ids[:, :length], raw)
        for collected, what in ((self.scores, scores), (self.logits, raw)):
            if collected is not None:
                collected.append(what)
        tokens = self._drawn(scores)
        if self.ends:
            tokens = torch.where(held.unfinished, tokens, self.config._pad_token_tensor)
        held.last.copy_(tokens[:, None])
        held.ids.index_copy_(1, held.length, held.last)
        held.length += 1
        held.taken += held.unfinished.any()
        seen = held.ids[:, : length + 1] if seen is None else seen
        held.unfinished &= ~self.criteria(seen, None if self.scores is None else tuple(self.scores))

    def key(self, length: int) -> Hashable | None:
        """What a recorded choice depends on, at `length` tokens; None if it depends on more than logits."""
        config, ends = self.config, getattr(self.config, "eos_token_id", None)
        ends = tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        numbers = (*ends, config.pad_token_id)
        processors = [_processor_key(p, config, length) for p in self.processor]
        known = all(_is_known(criterion, config) for criterion in self.criteria) and None not in processors
        collects = self.scores is not None or self.logits is not None
        if collects or not known or not all(n is None or isinstance(n, int) for n in numbers):
            return None
        return bool(config.do_sample), self.ends, numbers, tuple(processors), self.generator

    def _drawn(self, scores: torch.Tensor) -> torch.Tensor:
        """Tokens [B]: the likeliest, or drawn as `torch.multinomial` draws them, without its check that waits for the GPU."""
        if not self.config.do_sample:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        noise = torch.empty_like(probabilities).exponential_(1, generator=self.generator)
        return (probabilities / noise).argmax(-1)


class RecordedChoice:
    """A choice as it was at one length. Stopping criteria see the newest tokens only, which those that are known read."""

    def __init__(self, choice: Choice, held: Tokens, length: int, pool: Any) -> None:
        self.choice, self.held, self.length, self.graph = choice, held, length, Recorded(1, pool, choice.generator)

    def __call__(self, logits: torch.Tensor) -> None:
        """As the choice itself, at any length of the same key; logits lie where they lay."""
        self.graph(lambda: self.choice(self.held, logits, self.length, self.held.last), logits.device)


def _processor_key(processor: Any, config: Any, length: int) -> Hashable | None:
    """What the result of a processor depends on besides logits; None if that is not known."""
    if type(processor) in _OF_LOGITS:
        return type(processor), tuple(vars(processor).items())
    if getattr(processor, "eos_token_id", None) is not config._eos_token_tensor:
        return None
    if type(processor) is logits_process.MinLengthLogitsProcessor:
        return type(processor), length < processor.min_length
    if type(processor) is logits_process.MinNewTokensLengthLogitsProcessor:
        return type(processor), length - processor.prompt_length_to_skip < processor.min_new_tokens
    return None


def _is_length(criterion: Any) -> bool:
    return type(criterion) is stopping_criteria.MaxLengthCriteria


def _is_known(criterion: Any, config: Any) -> bool:
    """Whether a stopping criterion reads the newest tokens only, or is the length at which the loop ends by itself."""
    ends = type(criterion) is stopping_criteria.EosTokenCriteria
    return _is_length(criterion) or (ends and criterion.eos_token_id is config._eos_token_tensor)
