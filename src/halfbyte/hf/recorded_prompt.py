"""Prompts recorded as CUDA graphs: launching them one by one takes the host longer than short ones take the GPU.

A prompt is padded on the right to a bucket of tokens, so that one graph serves several lengths. Padding is computed and not stored;
no token of the prompt sees it. A prompt whose bucket comes for the second time is recorded, and kept with its `Step`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from halfbyte.hf.attention import CACHE
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.cache_layers import Chunk
from halfbyte.hf.masks import starts_of
from halfbyte.hf.recorded_step import Forward, Recorded, Tokens

#: Tokens of a recorded prompt at most: more keep a GPU busy longer than the host takes to launch them.
MOST_PROMPT = 2048
#: Inputs of a recorded prompt that have a column for each token.
_BY_TOKEN = {"input_ids", "attention_mask", "position_ids"}


class PromptForward(Forward):
    """The forward of a whole prompt over static inputs, as `padded_prompt` makes them."""

    def __init__(self, kind: Hashable, inputs: dict[str, Any], recorded: Recorded, tokens: Tokens) -> None:
        super().__init__(kind, inputs, recorded, tokens)
        self.inputs = inputs
        self.cache: PackedCache = inputs[CACHE]
        self.chunk = Chunk(None, torch.zeros(len(tokens.ids), dtype=torch.int32, device=tokens.ids.device))

    def _run(self, forward: Callable[..., Any]) -> Any:
        """The model's output object, with logits [B, 1, V] behind the last token of the prompt."""
        self.chunk.counts.copy_(self.inputs["logits_to_keep"] + 1)
        self.cache.expect_chunk(self.chunk)
        try:
            return forward(**self.inputs, return_dict=True)
        finally:
            self.cache.expect_chunk(None)


def records_prompts(prompts: torch.Tensor) -> bool:
    """Whether prompts [B, T] there may be recorded: on a GPU, where replaying saves the host's launches."""
    return prompts.is_cuda


def padded_prompt(inputs: dict[str, Any], tokens: int) -> dict[str, Any] | None:
    """The inputs of a prompt's forward as a `PromptForward` takes them; None where it cannot, or the GPU is slower than the host.

    Padding repeats the last column. A window, a state or a measured scale would see it, and so would what else the inputs hold.
    """
    cache, ids = inputs.get(CACHE), inputs.get("input_ids")
    if not isinstance(cache, PackedCache) or cache.has_states or ids is None or len(ids) * tokens > MOST_PROMPT:
        return None
    formats = [fmt for layer in cache.packed for fmt in (layer.key_format, layer.value_format)]
    if any(fmt.granularity == "tensor" for fmt in formats) or any(layer.sliding is not None for layer in cache.packed):
        return None
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    if not tensors.keys() <= _BY_TOKEN or any(x.shape[-1] != tokens for x in tensors.values()) or inputs.get("logits_to_keep") != 1:
        return None
    if any(tuple(x.shape) != (len(ids), 1, 1, 1) for x in _ready_masks(inputs)):
        return None
    more = prompt_bucket(tokens) - tokens
    padded = {name: torch.cat([x, x[..., -1:].expand(*x.shape[:-1], more)], -1) for name, x in tensors.items()}
    return {**inputs, **padded, "logits_to_keep": torch.tensor([tokens - 1], device=ids.device)}


def _ready_masks(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Masks by type of layer, made before the forward: where texts start, unless tokens of an image see each other."""
    mask = inputs.get("attention_mask")
    return [x for x in mask.values() if isinstance(x, torch.Tensor)] if isinstance(mask, dict) else []


def starts_of_prompt(inputs: dict[str, Any]) -> torch.Tensor | None:
    """How many columns of each row of a `padded_prompt` are left padding, int32 [B]; None where none are. Waits for a GPU."""
    mask, ready = inputs.get("attention_mask"), _ready_masks(inputs)
    starts = starts_of(mask, mask.shape[-1], 0) if isinstance(mask, torch.Tensor) else next(iter(ready), None)
    return None if starts is None else starts.view(-1)


def prompt_bucket(tokens: int) -> int:
    """Tokens that a prompt is padded to: at least 16, and up to a quarter more than there are."""
    step = max(16, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step
