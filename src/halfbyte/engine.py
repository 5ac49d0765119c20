"""For inference engines: packed pages in the engine's own memory, append by slot, and attention over mixed batches.

The engine owns memory and page tables, and decides which token goes where. Nothing here keeps state.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from halfbyte.arguments import check_sizes
from halfbyte.cache_plan import CachePlan, read_plan
from halfbyte.calibrated_keys import read_calibration
from halfbyte.checkpoints.adapters import weight_from_tensors
from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.formats import KV_FORMATS, Format, key_format, value_format
from halfbyte.kv_buffer import KVBuffer, PagedView
from halfbyte.ops.append import append_slots
from halfbyte.ops.attention_varlen import ExactTokens, attention_varlen
from halfbyte.ops.linear import linear_of_parts
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.ops.unpack_pages import unpack_pages
from halfbyte.tensors import KeyTransform, expected_parts

__all__ = [
    "PAGE_FORMATS",
    "ExactTokens",
    "KeyTransform",
    "LayerPages",
    "PageLayout",
    "PagedView",
    "append_slots",
    "attention_varlen",
    "linear_of_parts",
    "page_layouts",
    "read_calibration",
    "transform_heads",
    "unpack_pages",
    "weight_from_tensors",
]

#: Why a format with scales of this granularity cannot be stored in pages.
_NOT_PAGED = {
    "tensor": "one scale for all pages lies in none of them",
    "token": "one scale for all heads of a token takes a fraction of a byte a head, and changes when heads are sharded",
    "channel": "the 16-bit tail of unfinished blocks belongs to a sequence, not to a page",
}
#: Formats of keys and values that can be stored in pages: the scales of a token lie in its page.
PAGE_FORMATS: dict[str, Format] = {name: fmt for name, fmt in KV_FORMATS.items() if fmt.granularity not in _NOT_PAGED}


@dataclass(frozen=True)
class PageLayout:
    """The layout of packed keys and values in a page: contiguous bytes [H, N, C] of H KV heads and N tokens.

    An engine like vLLM allocates opaque uint8 [pages, H, N, C]. A page holds one array after another, each [H, N, ...]: codes of
    keys, codes of values, scales and offsets of keys, scales and offsets of values. N is a multiple of 16, so every array of an
    aligned page is aligned to 16 bytes, as the tuned kernels need it.

    keys, values   names of `PAGE_FORMATS`; Unsupported for those whose scales do not belong to one head of one token
    value_dim      size of a value head, if it differs from head_dim
    """

    keys: Format
    values: Format
    head_dim: int
    value_dim: int

    def __init__(self, keys: str | Format, values: str | Format, head_dim: int, value_dim: int | None = None) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes(head_dim=head_dim, value_dim=value_dim)
        for name, fmt, dim in (("keys", key_format(keys), head_dim), ("values", value_format(values), value_dim)):
            if fmt.granularity in _NOT_PAGED:
                why, fits = _NOT_PAGED[fmt.granularity], ", ".join(PAGE_FORMATS)
                raise Unsupported(f"{name}={fmt.name!r} cannot be stored in pages: {why}; choose one of: {fits}")
            _check_groups(name, fmt, dim)
            fmt.check_shape((1, dim), name)
            object.__setattr__(self, name, fmt)
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "value_dim", value_dim)

    @property
    def token_head_bytes(self) -> int:
        """C: bytes of one token of one KV head, keys and values together."""
        return self.keys.nbytes((1, self.head_dim)) + self.values.nbytes((1, self.value_dim))

    def buffers(self, memory: torch.Tensor) -> tuple[KVBuffer, KVBuffer]:
        """Keys and values in an engine's `memory`, without a copy.

        memory: int8 or uint8 [pages, H, N, C], each page H * N * C contiguous bytes, heads and tokens in either order. Pages start
        at multiples of 16 bytes; there may be gaps between them, as in a block that holds all layers.
        """
        pages = self._pages(memory)
        heads, tokens = memory.shape[1:3]
        parts: dict[str, dict[str, Any]] = {"keys": {}, "values": {}}
        at = 0
        for side, name, shape, dtype in self._arrays(heads, tokens):
            size = math.prod(shape) * dtype.itemsize
            parts[side][name] = pages[:, at : at + size].view(dtype).unflatten(1, shape)
            at += size
        return KVBuffer(self.keys, **parts["keys"]), KVBuffer(self.values, **parts["values"])

    def _arrays(self, heads: int, tokens: int) -> list[tuple[str, str, tuple[int, ...], torch.dtype]]:
        """(keys or values, part, shape, dtype) of each array of a page, in the order of memory: codes first."""
        sides = (("keys", self.keys, self.head_dim), ("values", self.values, self.value_dim))
        arrays = [
            (side, name, *part) for side, fmt, dim in sides for name, part in expected_parts(fmt, (heads, tokens, dim)).items()
        ]
        return sorted(arrays, key=lambda array: array[1] != "codes")

    def _pages(self, memory: torch.Tensor) -> torch.Tensor:
        if not isinstance(memory, torch.Tensor) or memory.dtype not in (torch.int8, torch.uint8) or memory.ndim != 4:
            actual = f"{memory.dtype} {list(memory.shape)}" if isinstance(memory, torch.Tensor) else f"a {type(memory).__name__}"
            raise InvalidArgument(f"memory is {actual}; expected uint8 [pages, H, N, {self.token_head_bytes}]")
        pages, heads, tokens, content = memory.shape
        pair = f"{self.keys} keys of {self.head_dim} and {self.values} values of {self.value_dim}"
        check(
            content == self.token_head_bytes,
            f"memory has {content} bytes a token and head; {pair} take {self.token_head_bytes} (token_head_bytes)",
        )
        check(
            tokens > 0 and tokens % 16 == 0,
            f"memory has pages of {tokens} tokens; expected a multiple of 16",
        )
        step, size = memory.stride(), heads * tokens * content
        in_order = [(tokens * content, content, 1), (content, heads * content, 1)]
        if heads == 1:
            in_order = [(step[1], content, 1)]
        dense = step[1:] in in_order and (pages <= 1 or step[0] >= size)
        check(dense, f"memory has strides {list(step)}; a page must be one piece of {size} bytes, heads and tokens in either order")
        on_16_bytes = memory.data_ptr() % 16 == 0 and (pages <= 1 or step[0] % 16 == 0)
        check(on_16_bytes, "memory is not aligned to 16 bytes; start it, and each page, at a multiple of 16")
        return memory.view(torch.uint8).as_strided((pages, size), (step[0], 1))


def _check_groups(name: str, fmt: Format, dim: int) -> None:
    """Raise where groups do not divide a head, naming formats of the same codes that pages can hold."""
    if fmt.granularity == "group" and dim % fmt.group_size(dim):
        fits = [other for other, f in PAGE_FORMATS.items() if f.code == fmt.code and dim % f.group_size(dim) == 0]
        raise InvalidArgument(
            f"{name} has a last axis of {dim}, which groups of {fmt.group_size(dim)} ({fmt.name}) do not divide; "
            f"{', '.join(fits)} would fit"
        )


class LayerPages(NamedTuple):
    """The pages of a layer, and what `append_slots` does to its keys. transform: of calibrated keys; queries take its other half,
    `transform_heads(q, transform.queries)`, or `append_slots(q=)`."""

    layout: PageLayout
    rotate_keys: bool = False
    transform: KeyTransform | None = None


def page_layouts(plan: CachePlan | str | os.PathLike[str]) -> list[LayerPages]:
    """The pages of each layer of a cache plan or plan file.

    Raises `Unsupported`, naming the layer, for formats that cannot be stored in pages, and for sink and recent tokens, which belong
    to a sequence. `plan.check_model` checks that the plan is for the engine's model.
    """
    plan = read_plan(plan)
    if any(plan.exact_tokens((0, 0))):
        raise Unsupported(
            f"plan has sink_tokens={plan.sink_tokens}, recent_tokens={plan.recent_tokens}, which belong to a sequence, and pages "
            f"hold codes alone; calibrate without them, or keep them in pages of their own (ExactTokens)"
        )
    transforms: Sequence[KeyTransform | None] = (None,) * len(plan.layers)
    if plan.calibration:
        transforms = read_calibration(plan.calibration).of_model(plan.model, "")
    layouts = []
    for number, (layer, transform) in enumerate(zip(plan.layers, transforms, strict=True)):
        try:
            layout = PageLayout(layer.keys, layer.values, plan.model.head_dim, plan.model.value_dim)
        except Unsupported as error:
            raise Unsupported(f"plan, layer {number}: {error}") from None
        transform = transform if layout.keys.is_quantized else None
        layouts.append(LayerPages(layout, layer.rotate_keys and transform is None, transform))
    return layouts
