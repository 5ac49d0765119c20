"""`packed_forwards`: a packed cache for loops that call `model(tokens)` without one (perplexity, lm-eval)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.hf.default_cache import cache_settings, new_cache
from halfbyte.hf.model_support import CACHE, DECODE_QUERIES, check_continues, inner_model
from halfbyte.hf.structure import rotations_by_length

#: Outputs of a forward that hold one entry a token, along axis 1.
_BY_TOKEN = ("logits", "last_hidden_state")
#: What a forward takes with one entry a token, along its last axis.
_INPUTS_BY_TOKEN = ("position_ids", "token_type_ids")
#: How trainers tell FlashAttention where the texts of a row begin; `position_ids` say the same.
_TEXT_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: Arguments of a forward that are about its loss.
_OF_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")


@contextmanager
def packed_forwards(model: Any, chunk: int = DECODE_QUERIES) -> Iterator[Any]:
    """Context manager: every forward of `model` without a cache runs through a packed one, chunk by chunk.

    model   a transformers model with KV formats (halfbyte.hf.quantize with keys= or values=)
    chunk   tokens at once. Up to 16 are read as steps: all tokens from the packed cache, their own included; longer chunks attend
            to themselves in 16 bits, as a prompt

    Without it such a forward attends in 16 bits, so the perplexity of `model(window).logits` says nothing about a KV format.
    Inference only. Right padding works. Several texts in one row are separated as in transformers: without a mask, wherever
    `position_ids` do not go on by 1; each is read through a cache of its own. Outputs other than logits, last_hidden_state and the
    loss are those of the last chunk.
    """
    inner = inner_model(model)
    check_continues(inner)
    settings = cache_settings(inner)
    if settings is None:
        raise InvalidArgument("model has no KV formats; call halfbyte.hf.quantize(model, keys=..., values=...) first")
    check(isinstance(chunk, int) and chunk > 0, f"chunk={chunk!r}; pass the number of tokens a step, at least 1")
    before = inner.__dict__.get("forward")
    inner.forward = _Forward(inner, settings, chunk, inner.forward)
    try:
        yield model
    finally:
        if before is None:
            del inner.forward
        else:
            inner.forward = before


@contextmanager
def part_of_text(model: Any, last: int) -> Iterator[None]:
    """Context manager: forwards read a part of a text that ends at position `last`, on which longrope and dynamic RoPE depend."""

    def longer(positions: torch.Tensor) -> torch.Tensor:
        return torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], -1)

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer(kwargs["position_ids"])}
        return (args[0], longer(args[1]), *args[2:]), kwargs

    def after(module: torch.nn.Module, args: tuple[Any, ...], made: Any) -> Any:
        return pytree.tree_map(lambda t: t[..., :-1, :], made)

    hooks: list[Any] = []
    try:
        for module in rotations_by_length(model):
            hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Forward:
    def __init__(self, model: Any, settings: Any, chunk: int, forward: Any) -> None:
        self.model, self.settings, self.chunk, self.forward = model, settings, chunk, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:  # in an order of the family's own
            kwargs = dict(**inspect.signature(self.forward).bind_partial(*args).arguments, **kwargs)
        if any(kwargs.get(name) is not None for name in (CACHE, "past_key_values")):
            return self.forward(**kwargs)
        input_ids, attention_mask, labels = (kwargs.pop(name, None) for name in ("input_ids", "attention_mask", "labels"))
        if input_ids is None or (attention_mask is not None and attention_mask.ndim != 2):
            raise Unsupported("packed_forwards cuts input_ids and a 2-D attention_mask into chunks; pass these two, by name")
        keep = kwargs.pop("logits_to_keep", 0)
        if not isinstance(keep, int):
            raise Unsupported("logits_to_keep is a tensor; within packed_forwards pass a number, or take these rows of all logits")
        if kwargs.get("output_router_logits", getattr(self.model.config.get_text_config(), "output_router_logits", False)):
            raise Unsupported("packed_forwards collects no router logits, nor their loss; pass output_router_logits=False")
        options = {**kwargs, "use_cache": True, "return_dict": True}
        texts = _texts(input_ids, kwargs.get("position_ids")) if attention_mask is None else None
        if texts is None:
            if bounds := [name for name in _TEXT_BOUNDS if kwargs.get(name) is not None]:
                raise Unsupported(
                    f"{', '.join(bounds)}: packed_forwards separates the texts of a row by position_ids that start again; "
                    f"pass those, and no attention_mask"
                )
            last = _joined(self._chunks(input_ids, _left(attention_mask), keep, **options), 1)
        else:
            last = self._each(texts, input_ids, {name: x for name, x in options.items() if name not in _TEXT_BOUNDS})
        if keep:
            last["logits"] = last.logits[:, -keep:]
        if labels is not None:
            options = {name: kwargs[name] for name in _OF_LOSS if name in kwargs}
            vocab_size = self.model.config.get_text_config().vocab_size
            last["loss"] = self.model.loss_function(logits=last.logits, labels=labels, vocab_size=vocab_size, **options)
        return last if kwargs.get("return_dict", True) is not False else last.to_tuple()

    def _each(self, texts: list[list[slice]], input_ids: torch.Tensor, options: dict[str, Any]) -> Any:
        """The outputs of rows that hold several texts, each text read alone. texts: by row, which tokens each text is."""
        rows = []
        for row, bounds in enumerate(texts):
            outputs = []
            for text in bounds:
                inputs = {name: options[name] for name in _INPUTS_BY_TOKEN if options.get(name) is not None}
                cut = {name: (x if x.shape[-2] == 1 else x[..., row : row + 1, :])[..., text] for name, x in inputs.items()}
                outputs += self._chunks(input_ids[row : row + 1, text], None, 0, **{**options, **cut})
            rows.append(_joined(outputs, 1))
        return _joined(rows, 0)

    @torch.no_grad()
    def _chunks(self, input_ids: torch.Tensor, mask: torch.Tensor | None, keep: int, **kwargs: Any) -> list[Any]:
        """The outputs of all chunks, of which the last `keep` logits count; 0: all of them."""
        tokens, outputs = input_ids.shape[1], []
        cache = new_cache(self.model, self.settings, tokens)
        cache.expect_steps(self.chunk)
        if cache.has_states and mask is not None and self.chunk == 1:
            raise Unsupported("chunk=1: transformers does not mask the padding of one token from recurrent states; pass 2 or more")
        positions = kwargs.get("position_ids")
        last = tokens - 1 if positions is None else int(positions.max())
        by_token = {name: x for name, x in kwargs.items() if name in _INPUTS_BY_TOKEN and x is not None}
        with part_of_text(self.model, last):
            for start in range(0, tokens, self.chunk):
                part = slice(start, start + self.chunk)
                cut: dict[str, Any] = {name: x[..., part].contiguous() for name, x in by_token.items()}  # as Kosmos-2.5 wants them
                if keep:  # at least one, as 0 stands for all
                    cut["logits_to_keep"] = max(1, min(part.stop, tokens) - max(start, tokens - keep))
                cut |= {} if mask is None else {"attention_mask": mask[:, : part.stop]}
                outputs.append(self.forward(input_ids=input_ids[:, part], **{**kwargs, **cut, CACHE: cache}))
        return outputs


def _joined(outputs: list[Any], axis: int) -> Any:
    """The last of `outputs`, with the entries by token of all of them, joined along an axis."""
    last = outputs[-1]
    for name in _BY_TOKEN:
        if getattr(last, name, None) is not None:
            last[name] = torch.cat([getattr(out, name) for out in outputs], axis)
    return last


def _texts(input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> list[list[slice]] | None:
    """By row, which tokens each of its texts is; None where rows are one text. Of position_ids [4, B, L] the first counts."""
    if position_ids is not None and position_ids.ndim == 3:
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None
    if position_ids is None:
        return None
    starts = torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True).expand_as(input_ids)
    if int(starts.sum()) == len(input_ids):
        return None
    bounds = [[*row.nonzero().flatten().tolist(), len(row)] for row in starts]
    return [[slice(first, end) for first, end in pairwise(row)] for row in bounds]


def _left(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask without its right padding, which no token sees; None when nothing is left to mask."""
    if mask is None:
        return None
    after = mask.flip(1).cummax(1).values.flip(1) == 0  # no token from here on
    left = mask.masked_fill(after, 1)
    return None if bool(left.all()) else left
