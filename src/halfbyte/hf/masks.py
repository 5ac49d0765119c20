"""The mask function that transformers calls under the name "halfbyte"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, chunked_overlay, sdpa_mask, sliding_window_overlay

from halfbyte.errors import InvalidArgument, Unsupported

#: The key offset that a packed cache reports to mask functions. Real offsets are never negative.
PACKED = -1

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
