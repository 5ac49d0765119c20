"""Looking at memory that an engine hands in: every tensor of its planes in the shape and dtype that the formats store."""

from __future__ import annotations

import torch

from halfbyte.errors import check
from halfbyte.formats import key_format, value_format
from halfbyte.kv_buffer import KVBuffer
from halfbyte.tensors import expected_parts


def check_buffers(keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor, page_table: torch.Tensor | None) -> None:
    """What `KVCache.from_buffers` may be given."""
    for name, given in (("keys", keys), ("values", values)):
        check(isinstance(given, KVBuffer), f"{name} is a {type(given).__name__}; expected a KVBuffer")
    check(isinstance(lengths, torch.Tensor), f"lengths is a {type(lengths).__name__}; expected a tensor int32 [B]")
    check(
        lengths.dtype is torch.int32 and lengths.ndim == 1, f"lengths is {lengths.dtype} {list(lengths.shape)}; expected int32 [B]"
    )
    batch = lengths.shape[0]
    for name, t in (("keys", keys.codes), ("values", values.codes), ("page_table", lengths if page_table is None else page_table)):
        check(t.device == lengths.device, f"{name} is on {t.device} and lengths on {lengths.device}; move one of them")
    if page_table is not None:
        check(
            page_table.dtype is torch.int32 and page_table.ndim == 2 and page_table.shape[0] == batch,
            f"page_table is {page_table.dtype} {list(page_table.shape)}; expected int32 [{batch}, pages]",
        )
    key_format(keys.format), value_format(values.format)
    for name, buffer in (("keys", keys), ("values", values)):
        _check_buffer(name, buffer, batch)
        rows = buffer.codes.shape[0]
        check(page_table is not None or rows == batch, f"{name}.codes holds {rows} sequences and lengths {batch}")
    check(keys.codes.shape[:3] == values.codes.shape[:3], "keys and values differ in batch (or pages), heads or tokens")


def _check_buffer(name: str, buffer: KVBuffer, batch: int) -> None:
    """Every tensor that the format stores, in its shape and dtype, and no other."""
    fmt = buffer.format
    check(
        buffer.codes.ndim == 4,
        f"{name}.codes has shape {list(buffer.codes.shape)}; expected [B or pages, H, tokens, D / codes per byte]",
    )
    shape = (*buffer.codes.shape[:3], buffer.dim)
    fmt.check_shape(shape, name)
    expected = dict(expected_parts(fmt, shape))
    if fmt.token_block:
        tail_type = buffer.tail.dtype if buffer.tail is not None and buffer.tail.dtype is torch.float16 else torch.bfloat16
        expected["tail"] = ((batch, buffer.heads, fmt.token_block, buffer.dim), tail_type)
    for part in ("codes", "scales", "offsets", "tail"):
        t = getattr(buffer, part)
        found = "missing" if t is None else f"{t.dtype} {list(t.shape)}"
        if part not in expected:
            check(t is None, f"{name}.{part} was given, but {fmt} stores none")
            continue
        want, dtype = expected[part]
        check(
            t is not None and tuple(t.shape) == want and t.dtype is dtype and t.device == buffer.codes.device,
            f"{name}.{part} is {found}; {fmt} needs {dtype} {list(want)} on {buffer.codes.device}",
        )


def expanded(keys: KVBuffer, values: KVBuffer, lengths: torch.Tensor) -> str:
    """The name of a tensor that holds several of its elements in one place (a stride of 0), which can be read only; "" for none."""
    named = {"lengths": lengths} | {
        f"{name}.{part}": t
        for name, buffer in (("keys", keys), ("values", values))
        for part, t in zip(("codes", "scales", "offsets", "tail"), buffer.tensors(), strict=True)
        if t is not None
    }
    return next((name for name, t in named.items() if any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True))), "")
