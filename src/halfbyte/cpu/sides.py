"""Stored keys and values as compiled loops take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfbyte.cpu.derived import Derived
from halfbyte.formats import Code, Format, plain_format
from halfbyte.kv_buffer import KVBuffer

if TYPE_CHECKING:
    from halfbyte.cpu.compiled.attention import Side

#: A scale and an offset of what has none.
_ONE, _ZERO = torch.ones(1, 1, 1, 1, dtype=torch.float16), torch.zeros(1, 1, 1, 1, dtype=torch.float16)


def is_readable(buffer: KVBuffer) -> bool:
    """Whether loops read a buffer: on a CPU, codes and scales whose rows lie in one piece."""
    code = buffer.format.code
    if not buffer.codes.is_cpu or code.values is not None or code.bias or not buffer.codes.numel():
        return False
    return all(t is None or t.ndim < 4 or t.shape[3] < 2 or t.stride(3) == 1 for t in buffer.tensors())


def sides_of(buffer: KVBuffer) -> tuple[Side, Side]:
    """What is quantized, and the tail. Views of the buffer's memory, if it `is_readable`."""
    return _sides_of(buffer, [t for t in buffer.tensors() if t is not None], copies=False)


def _sides(buffer: KVBuffer) -> tuple[Side, Side]:
    fmt, tail = buffer.format, buffer.tail
    scales, offsets = (None if t is None else broadcast_scales(t, fmt) for t in (buffer.scales, buffer.offsets))
    rows = _side(buffer.codes, fmt.code, scales, offsets, fmt.token_block or 0, buffer.sink_tokens, buffer.ring)
    if tail is None:
        return rows, _side(buffer.codes[:0], fmt.code)
    return rows, _side(tail, plain_format(tail.dtype).code)


def _side(
    codes: torch.Tensor,
    code: Code,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    every: int = 0,
    sinks: int = 0,
    ring: int = 0,
) -> Side:
    """Rows of codes [.., n]. Scales that there are not are 1, and offsets 0."""
    from halfbyte.cpu.compiled.attention import Facts
    from halfbyte.cpu.compiled.blocks import READERS

    groups = 1 if scales is None else scales.shape[3]
    facts = Facts(list(READERS).index(code.name), codes.shape[3], code.per_byte, groups, every, sinks, ring)
    shape = scales.shape if every and scales is not None else (*codes.shape[:3], groups)
    halves = ((one if t is None else t).expand(shape) for t, one in ((scales, _ONE), (offsets, _ZERO)))
    scale, offset = (t.detach().view(torch.uint16).numpy() for t in halves)
    return codes.detach().view(torch.uint8).numpy(), scale, offset, facts


def broadcast_scales(t: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Scales or offsets as [B|1, H|1, n|1, groups]; per channel: [B, H, n / every, D]."""
    match fmt.granularity:
        case "tensor":
            return t.view(1, 1, 1, 1)
        case "token":
            return t[:, None, :, None]
        case "head":
            return t.unsqueeze(-1)
    return t


_sides_of = Derived(_sides)
