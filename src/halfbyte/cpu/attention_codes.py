"""Attention of few query rows over keys and values as they are stored, by one compiled loop."""

from __future__ import annotations

from typing import NamedTuple

import torch

from halfbyte.cpu.threads import compiler_works, over_rows
from halfbyte.kv_buffer import DecodeCall, KVBuffer

#: Most query rows of a KV head for which codes are decoded in registers; for more, a GEMM on decoded blocks is faster.
MOST_ROWS = 8


def reads_codes(rows: torch.Tensor, buffer: KVBuffer) -> bool:
    """Whether the loop multiplies `rows` [B, H, R, D] by this buffer."""
    code = buffer.format.code
    return (
        rows.is_cpu
        and rows.dtype is torch.float32
        and 0 < rows.shape[2] <= MOST_ROWS
        and code.kind == "affine"
        and code.bits in (4, 8)
        and not buffer.format.token_block
        and buffer.tail is None
        and buffer.dim % 32 == 0
        and buffer.codes.stride()[2:] == (buffer.codes.shape[3], 1)
        and compiler_works()
    )


class Tokens(NamedTuple):
    """Some tokens of a buffer: codes [B, H, n, D / codes per byte]; fp16 scales and offsets that broadcast to [B, H, n, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None

    def arrays(self, table: torch.Tensor | None) -> tuple[object, ...]:
        """As the loop takes them."""
        shape = (*self.codes.shape[:3], self.scales.shape[-1])
        scales, offsets = (None if t is None else _dense(t.expand(shape)).view(torch.uint16).numpy() for t in self[1:])
        return self.codes.numpy(), None if table is None else table.numpy(), scales, offsets


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t if t[0, 0].is_contiguous() else t.contiguous()


class Walk:
    """Attention of rows [B, H, R, D], scaled, so far: `state` [B, H, R, 2], peak and total, and `out` [B, H, R, Dv]."""

    def __init__(self, c: DecodeCall, rows: torch.Tensor) -> None:
        codes = [side.format.code for side in (c.keys, c.values)]
        self.tables = [code.codebook() if code.per_byte == 2 else None for code in codes]
        self.rows = torch.cat((rows[..., ::2], rows[..., 1::2]), -1) if codes[0].per_byte == 2 else rows.contiguous()
        self.state = torch.cat((rows.new_full((*rows.shape[:3], 1), -torch.inf), rows.new_zeros(*rows.shape[:3], 1)), -1)
        self.out = rows.new_zeros(*rows.shape[:3], c.values.dim)
        self.softcap, slopes = c.options.softcap or 0.0, c.options.alibi_slopes
        count, groups = c.q.shape[2], rows.shape[2] // c.q.shape[2]
        self.slopes = None if slopes is None else slopes.float().view(-1, groups, 1).expand(-1, -1, count).flatten(1)  # [H, R]
        # For each row the first key that it sees, the one after the last, and its position: [B, R, 3].
        place = c.first_query.long().view(-1, 1) + torch.arange(count)
        window = place.new_zeros(()) if c.options.window is None else place - c.options.window + 1
        starts = 0 if c.options.starts is None else c.options.starts.long().view(-1, 1)
        first = torch.maximum(window.clamp_min(0).expand(place.shape), place.new_zeros(place.shape) + starts)
        last = torch.minimum(place + 1, c.options.limit(c.lengths).long().view(-1, 1))
        self.spans = torch.stack((first, last, place), -1).repeat(1, groups, 1)

    def visit(self, keys: Tokens, values: Tokens, start: int) -> None:
        """Add the tokens from `start` on."""
        from halfbyte.cpu.compiled.attention import attend

        slopes = None if self.slopes is None else self.slopes.numpy()
        fixed = (self.rows.numpy(), self.spans.numpy(), slopes, self.softcap, start, self.state.numpy(), self.out.numpy())
        steps = self.rows.numel() * keys.codes.shape[2] * 2
        over_rows(attend, self.rows.shape[:2].numel(), steps, keys.arrays(self.tables[0]), values.arrays(self.tables[1]), *fixed)

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Out [B, H, R, Dv], not divided by the total; peak and total [B, H, R, 1]."""
        out = self.out if self.tables[1] is None else self.out.unflatten(-1, (2, -1)).mT.flatten(-2)
        return out, self.state[..., :1], self.state[..., 1:]
