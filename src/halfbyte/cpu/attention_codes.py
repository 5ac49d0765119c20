"""Products of few query rows with keys and values as they are stored, by compiled loops."""

from __future__ import annotations

import torch

from halfbyte.cpu.threads import compiler_works, over_rows
from halfbyte.kv_buffer import KVBuffer

#: Most query rows of a KV head for which codes are decoded in registers; for more, a GEMM on decoded blocks is faster.
MOST_ROWS = 8


def reads_codes(rows: torch.Tensor, buffer: KVBuffer, *, shared: bool) -> bool:
    """Whether the loops multiply `rows` [B, H, R, D] by this buffer. shared: all of the batch attend to one sequence."""
    code = buffer.format.code
    return (
        rows.is_cpu
        and rows.dtype is torch.float32
        and 0 < rows.shape[2] <= MOST_ROWS
        and not shared
        and code.kind == "affine"
        and code.bits in (4, 8)
        and buffer.tail is None
        and buffer.dim % 32 == 0
        and buffer.codes.stride()[2:] == (buffer.codes.shape[3], 1)
        and compiler_works()
    )


class Codes:
    """Some tokens of a buffer: codes [B, H, n, D / codes per byte]; scales and offsets as they broadcast to [B, H, n, groups]."""

    def __init__(self, buffer: KVBuffer, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> None:
        self.nibbles, self.dim = buffer.format.code.per_byte == 2, buffer.dim
        shape = (*codes.shape[:3], scales.shape[-1])
        parts = (None if part is None else part.float().expand(shape).contiguous() for part in (scales, offsets))
        table = buffer.format.code.codebook() if self.nibbles else None
        self.arrays = [None if part is None else part.numpy() for part in (codes, table, *parts)]
        self.pairs, self.tokens = codes.shape[0] * codes.shape[1], codes.shape[2]

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [B, H, R, D] times the keys: [B, H, R, n]."""
        from halfbyte.cpu.compiled.attention import scores

        q = torch.cat((rows[..., ::2], rows[..., 1::2]), -1) if self.nibbles else rows.contiguous()
        out = rows.new_empty(*rows.shape[:2], self.tokens, rows.shape[2])
        over_rows(scores, self.pairs, out.numel() * self.dim, *self.arrays, q.numpy(), out.numpy())
        return out.mT.contiguous()

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """weights [B, H, R, n] times the values: [B, H, R, D]."""
        from halfbyte.cpu.compiled.attention import weighted_sum

        by_token = weights.mT.contiguous()
        out = weights.new_zeros(*weights.shape[:3], self.dim)
        over_rows(weighted_sum, self.pairs, weights.numel() * self.dim, *self.arrays, by_token.numpy(), out.numpy())
        return out.unflatten(-1, (2, -1)).mT.flatten(-2) if self.nibbles else out
