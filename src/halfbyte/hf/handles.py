"""What a model carries from a packed cache to attention: masks, by the function that transformers calls under the name "halfbyte",
handles in place of keys and values, or latents, and drafts.

Multi-head latent attention (MLA): transformers caches latents and rotary keys, one KV head of them, and expands what the cache's
`update` returns (`expand_kv`) before it calls the attention function. A packed layer returns the newest tokens alone, so the
function gets their keys and values expanded: a prompt's own, exact. What reads the rest is the layer, which the function finds by
`newest_layer`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, chunked_overlay, sdpa_mask, sliding_window_overlay

from halfbyte.cache import KVCache
from halfbyte.errors import InvalidArgument, Unsupported

#: The key offset that a packed cache reports to mask functions. Real offsets are never negative.
PACKED = -1

#: The method of an attention module that expands latents [B, 1, T, R] and rotary keys [B, 1, T, rotary dims].
EXPANDS = "expand_kv"

#: The functions of which a causal mask with a window or chunks is made, and the one by which tokens of a block see each other.
_CAUSAL = {part.__code__ for part in (causal_mask_function, sliding_window_overlay(1), chunked_overlay(1, torch.empty(0)))}
_overlay: Any = getattr(masking_utils, "blockwise_overlay", None)
_BLOCKS = set() if _overlay is None else {_overlay(torch.empty(0)).__code__}


def mask(
    batch_size: int,
    q_length: int = 1,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of a forward. For a packed cache: int32 [B, 1, 1, 1], the first real token of each sequence; None without padding.

    Causality, windows and chunks are left to the attention function. A 4-D tensor passes the later stages of transformers
    untouched, and its shape never changes, so a compiled decode step stays one graph. A prompt in which tokens of a block, such as
    an image, see each other has a mask of all that its queries see, bool [B, 1, L, T]. Any other cache gets transformers' own mask.
    """
    if kv_offset != PACKED:
        arguments = {**kwargs, "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
        plain: torch.Tensor | None = sdpa_mask(**arguments, kv_offset=kv_offset, attention_mask=attention_mask, use_vmap=use_vmap)
        return plain
    function = None if torch.compiler.is_compiling() else kwargs.get("mask_function")
    parts = {getattr(part, "__code__", part) for part in _parts(function)}
    if parts - _CAUSAL - _BLOCKS or (use_vmap and not parts):
        raise Unsupported(
            "this model adds its own pattern to the causal mask (or_mask_function, and_mask_function), which is not implemented "
            "over a packed cache; use transformers' own cache (keys=None, values=None)"
        )
    starts = None if attention_mask is None else starts_of(attention_mask, q_length, q_offset)
    if q_length == 1 or not parts & _BLOCKS:
        return starts
    past = int(q_offset)
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": past + q_length, "q_offset": past}
    options = {**kwargs, "allow_is_causal_skip": False, "allow_torch_fix": False}
    visible = sdpa_mask(**sizes, attention_mask=attention_mask, use_vmap=use_vmap, **options)
    is_causal = not bool(visible[..., past:].triu(1).any())
    return starts if is_causal else visible | ~visible.any(-1, keepdim=True)  # padding sees nothing, and must stay finite


def _parts(function: Callable[..., Any] | None) -> Iterator[Any]:
    """The functions of which a mask function is made by `and_masks` and `or_masks`."""
    if function is None:
        return
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [x for cell in cells for x in (cell if isinstance(cell, tuple) else (cell,)) if callable(x)]
    for part in inner:
        yield from _parts(part)
    if not inner:
        yield function


def starts_of(attention_mask: torch.Tensor, q_length: int, q_offset: int | torch.Tensor) -> torch.Tensor | None:
    """Left padding as int32 [B, 1, 1, 1]: how many tokens at the front of each sequence are padding; None when there are none.

    The pattern is always checked on a CPU, on a GPU only for chunks that no CUDA graph captures: the check synchronizes, and a
    decode step follows a prefill that was checked, as the recording of a prompt does.
    """
    padding = ~attention_mask.bool()
    starts = padding.sum(-1, dtype=torch.int32).view(-1, 1, 1, 1)
    if torch.compiler.is_compiling() or (attention_mask.is_cuda and (q_length == 1 or torch.cuda.is_current_stream_capturing())):
        return starts
    if attention_mask.shape[-1] != int(q_offset) + q_length:
        raise InvalidArgument(
            f"attention_mask has {attention_mask.shape[-1]} columns; the cache holds {int(q_offset)} tokens and {q_length} are "
            f"new: pass one column for each of the {int(q_offset) + q_length}"
        )
    if bool((padding[:, 1:] & ~padding[:, :-1]).any()):
        raise Unsupported(
            "attention_mask has padding after a token (right padding, or a hole); a packed cache serves left padding only: "
            'tokenise with padding_side="left", or run these sequences one by one'
        )
    return starts if bool(padding.any()) else None


def check_one_text(positions: torch.Tensor | None, starts: torch.Tensor | None, lengths: torch.Tensor) -> None:
    """Raise for rows that hold several texts, each with positions from 0 on, as batches without padding have them.

    positions [B or 1, L] of the newest of `lengths` [B] tokens; those of padding, before `starts`, do not count. Waits for a GPU.
    """
    if positions is None or positions.ndim != 2:
        return
    column = lengths[:, None] - positions.shape[1] + torch.arange(1, positions.shape[1], device=lengths.device)
    back = positions.diff() <= 0
    if starts is not None:
        back = back & (column > starts[:, None])
    if bool(back.any()):
        raise Unsupported(
            "position_ids start again within a row, which thus holds several texts; over a packed cache these would see each "
            "other: pass one text a row, or read them within halfbyte.hf.packed_forwards, without a mask"
        )


class Handle:
    """What a packed layer's `update()` returns in place of keys or values. What raises is listed: Dynamo fails on `__getattr__`."""

    __slots__ = ("before", "layer", "new", "rotated", "which")

    def __init__(
        self,
        layer: Any,  # `PackedLayer`
        new: torch.Tensor,
        which: str,
        rotated: torch.Tensor | None = None,
        before: KVCache | None = None,
    ) -> None:
        """rotated: queries that were rotated by position, and transformed, along with new keys; before: the cache without `new`,
        where its past is gone by now."""
        self.layer, self.new, self.which, self.rotated, self.before = layer, new, which, rotated, before

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        raise Unsupported(
            f"this model works on the cached {self.which} itself before attention, and a packed cache has no {self.which} to hand "
            f"out; use transformers' own cache for it (keys=None, values=None)"
        )

    shape = dtype = device = ndim = T = mT = size = dim = to = float = view = reshape = property(_refuse)
    repeat = expand = transpose = permute = repeat_interleave = unsqueeze = squeeze = contiguous = property(_refuse)
    split = chunk = index_select = gather = masked_fill = clone = property(_refuse)
    __getitem__ = __len__ = __iter__ = __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __add__ = __radd__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch.cat([handle, ...]) and the like."""
        raise Unsupported(
            f"this model calls {getattr(func, '__name__', func)} on cached keys or values before attention, and a packed cache has "
            f"none to hand out; use transformers' own cache for it (keys=None, values=None)"
        )


# ------------------------------------------------------------------------------------------------------------------- latents


class _Newest(threading.local):
    """The layer whose `update` was called last in this thread, and what that returned, as long as the model's forward has it."""

    layer: Any = None
    latents: weakref.ref[torch.Tensor] | None = None


_newest = _Newest()


def announce(layer: Any, latents: torch.Tensor) -> torch.Tensor:
    """Let the next attention in this thread read `layer`; returns a view of the latents, for the model that calls it."""
    view = latents.view_as(latents)
    _newest.layer, _newest.latents = layer, weakref.ref(view)
    return view


def newest_layer(module: Any) -> Any:
    """The layer that this module's forward has just updated, or None. `Unsupported` for a module that expands latents by itself."""
    layer, latents, _newest.layer, _newest.latents = _newest.layer, _newest.latents, None, None
    if latents is None or latents() is None:
        return None
    if not hasattr(module, EXPANDS):
        raise Unsupported(
            f"{type(module).__name__} has no method {EXPANDS}, by which latents (MLA) are expanded; use transformers' own cache "
            f"for it (keys=None, values=None)"
        )
    return layer


# -------------------------------------------------------------------------------------------------------------------- drafts

# Drafts of assisted decoding are verified as greedy decoding would read them, and undone exactly. With a 16-bit tail (the last
# block of per-channel keys, or recent tokens) a query's result depends on how many tokens the cache holds. So drafts are appended
# and verified up to the token that finishes a block, or one by one with recent tokens, as each pushes another out of the window;
# else 16 at once. The tail is copied before drafts, so that `take_back` restores it: cropping alone would leave dequantized keys in
# it, with scales that include rejected tokens.

NO_DRAFTS = (
    "drafts of assisted decoding over images, latents (MLA), or layers that share keys and values, are not implemented; leave "
    "assistant_model out, or pass prompt_lookup_num_tokens to recorded steps"
)

#: read(q, k, v, is_step): attention of the newest tokens, which the cache holds already; those of a prompt read k and v.
Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


class _Before(NamedTuple):
    """A cache before its last drafts, and their keys and values [B, H, L, D]."""

    tails: list[torch.Tensor]
    lengths: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Drafts:
    """The state of one layer in a call of `generate()` with drafts."""

    def __init__(self, prompt: int, at_once: int) -> None:
        """`prompt`: tokens that come before the first draft. `at_once`: drafts that one launch may read."""
        self.prompt, self.at_once = prompt, at_once
        self.before: _Before | None = None
        self.newest: torch.Tensor | None = None

    def attend(self, kv: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: Read) -> torch.Tensor:
        """Append k, v [B, H, L, D] and answer q [B, Hq, L, D]: the rest of the prompt as one chunk, then the drafts."""
        if k is self.newest:
            raise Unsupported(NO_DRAFTS)
        self.newest, count = k, q.shape[2]
        first = min(self.prompt, count)
        self.prompt -= first
        starts = [*([0] if first else []), *self._starts(kv, first, count)]
        parts = []
        for start, stop in zip(starts, [*starts[1:], count], strict=True):
            if start == first:
                self._remember(kv, k[:, :, first:], v[:, :, first:], 0 if first else 1)
            new_q, new_k, new_v = (t[:, :, start:stop] for t in (q, k, v))
            kv.append(new_k, new_v)
            parts.append(read(new_q, new_k, new_v, start >= first))
        return torch.cat(parts, 2)

    def _starts(self, kv: KVCache, first: int, count: int) -> list[int]:
        """Where the parts begin into which drafts `first` to `count` - 1 are cut."""
        block = kv.keys.format.token_block
        if block is None:
            return list(range(first, count, 1 if _tails(kv) else self.at_once))
        held = int(kv.lengths[0])  # waits for a GPU; drafts come for one sequence only
        starts = [first] if first < count else []
        for i in range(first + 1, count):
            if (held + i + 1) % block == 0 or i - starts[-1] == self.at_once:
                starts.append(i)
        return starts

    def _remember(self, kv: KVCache, k: torch.Tensor, v: torch.Tensor, chosen: int) -> None:
        """The first `chosen` of the tokens, 1 behind the prompt's forward, are no drafts: they stay."""
        tails = _tails(kv) if k.shape[2] > chosen else []
        self.before = _Before([t.clone() for t in tails], kv.lengths.clone(), k, v) if tails else None

    def take_back(self, kv: KVCache, count: int) -> bool:
        """Undo the last `count` tokens exactly, if they are drafts of the last forward; returns whether they were."""
        before, self.before = self.before, None
        if before is None or count > before.k.shape[2]:
            return False
        kv.crop(before.lengths)
        for tail, snapshot in zip(_tails(kv), before.tails, strict=True):
            tail.copy_(snapshot)
        rest = before.k.shape[2] - count
        if rest:
            kv.append(before.k[:, :, :rest], before.v[:, :, :rest])
        return True


def _tails(kv: KVCache) -> list[torch.Tensor]:
    return [t for t in (kv.keys.tail, kv.values.tail) if t is not None]
