"""Quantize-and-append by compiled loops: the `cpu` level of `append`, which stores the bits of `reference.append`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfbyte.cpu.sides import is_readable, sides_of
from halfbyte.cpu.threads import compiler_works, over_rows
from halfbyte.formats import Format, plain_format
from halfbyte.kv_buffer import AppendCall, KVBuffer, Rope
from halfbyte.reference.append import slots_as_pages
from halfbyte.reference.hadamard import block_size

if TYPE_CHECKING:
    from halfbyte.cpu.compiled.append import Rule

#: A scale of all numbers, of a token, of a head, and of parts of a head or of tokens.
_SCALES = {None: 0, "tensor": 1, "token": 2, "head": 3, "group": 3, "channel": 3}
_NO_PAGES, _NO_ANGLES = np.empty((0, 0), np.int32), np.empty((0, 0, 0), np.float32)

Array = np.ndarray[Any, Any]
#: The last angles, and their arrays.
_newest: tuple[Rope, tuple[Array, Array, bool]] | None = None


def append_(c: AppendCall) -> bool:
    """Store what the loops take, and rotate q; else, or where something is wrong with it, change nothing and return False."""
    if not (c.k.shape[2] and _is_taken(c.keys, c.k) and _is_taken(c.values, c.v) and compiler_works()):
        return False
    from halfbyte.cpu.compiled.append import loops

    fits, prepare, store = loops()
    lengths, counts, table = (c.lengths, c.counts, c.page_table) if not c.by_slot else slots_as_pages(c.keys, c.lengths)
    before = lengths.numpy().astype(np.int64)
    new = np.full(len(before), c.k.shape[2], np.int64) if counts is None else counts.numpy().astype(np.int64)
    pages = _NO_PAGES if table is None else table.numpy()
    count, _, size, _ = c.keys.codes.shape
    if not fits(before, new, c.k.shape[2], pages, max(c.keys.ring, c.values.ring), count, size):
        return False
    k, v, q = (_numbers(x) for x in (c.k, c.v, c.k[:, :0] if c.q is None else c.q))
    rotation, code = block_size(c.keys.dim) if c.rotate_keys else 0, code_of(c.k.dtype)
    rows = [np.empty(x.shape, np.float32) for x in (k, v, q)]
    if not prepare(k, v, q, *angles(c.rope), code, rotation, new, *rows):
        return False
    if c.rotated_q is not None:
        c.rotated_q.copy_(torch.from_numpy(rows[2]))
    beyond = np.zeros((2, c.k.shape[0] * c.k.shape[1]), np.int64)
    rules, sides = (rule(c.keys.format), rule(c.values.format)), (sides_of(c.keys), sides_of(c.values))
    over_rows(store, beyond.shape[1], 8 * rows[0].size, *rows[:2], *sides, *rules, before, new, pages, beyond)
    for buffer, numbers in zip((c.keys, c.values), beyond, strict=True):
        if buffer.saturated is not None:
            buffer.saturated.add_(int(numbers.sum()))
    return True


def _is_taken(buffer: KVBuffer, x: torch.Tensor) -> bool:
    """Whether loops store x in this buffer."""
    return x.is_cpu and x.element_size() <= 4 and takes(buffer)


def takes(buffer: KVBuffer) -> bool:
    """Whether loops store in this buffer. A scale for all numbers that is yet to be measured is left to the reference."""
    if not is_readable(buffer):
        return False
    scale = buffer.scales if buffer.format.granularity == "tensor" else None
    return scale is None or 0 < float(scale) < torch.inf


def _numbers(x: torch.Tensor) -> Array:
    return x.detach().float().numpy()


def angles(rope: Rope | None) -> tuple[Array, Array, bool]:
    """cos and sin [B or 1, L, R / 2], and the order of pairs. The layers of a step pass the same object."""
    global _newest
    if rope is None:
        return _NO_ANGLES, _NO_ANGLES, False
    if (entry := _newest) is not None and entry[0] is rope:
        return entry[1]
    cos, sin = (t.detach().numpy().reshape(-1, *t.shape[-2:]) for t in rope[:2])
    arrays = cos, sin, rope.interleaved
    _newest = rope, arrays
    return arrays  # of this call: another thread may have set others meanwhile


@functools.cache
def code_of(dtype: torch.dtype) -> int:
    """The place of a type in `blocks.READERS`."""
    from halfbyte.cpu.compiled.blocks import READERS

    return list(READERS).index(plain_format(dtype).code.name)


@functools.cache
def rule(fmt: Format) -> Rule:
    """How numbers become codes of a format."""
    from halfbyte.cpu.compiled.append import Rule

    return Rule(_SCALES[fmt.granularity], fmt.offset == "float", float(fmt.code.reach), float(fmt.clip))
