"""Prompts over unpacked tokens, with plain torch in FlashAttention's place: what kernels that read codes make of them."""

from __future__ import annotations

import pytest
import torch

from halfbyte.vllm.prompts import FlashPromptsWithExactTokens, Ragged
from varlen_cases import WithExactTokens, flash_attention

#: (queries, length): from the first token on, shorter than sink and recent tokens, behind a past of any size.
SEQUENCES = [(40, 40), (3, 3), (33, 70), (8, 21), (16, 150), (9, 10)]


class InMemory(FlashPromptsWithExactTokens):
    """With scratch of its own, full of NaN."""

    def scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not hasattr(self, "memory"):
            rows = torch.full((2, self.tokens, *self.shape), torch.nan, dtype=self.dtype)
            object.__setattr__(self, "memory", (rows[0], rows[1]))
        memory: tuple[torch.Tensor, torch.Tensor] = self.memory  # type: ignore[attr-defined]
        return memory


@pytest.mark.parametrize("prefill", ["cache", "exact"])
@pytest.mark.parametrize(
    ("sinks", "recent", "window", "bound"),
    [(4, 12, None, 0), (0, 12, 30, 5), (20, 1, None, 5), (20, 1, 30, 0), (4, 0, 7, 0), (4, 40, 30, 5), (20, 200, None, 0)],
)
def test_sink_and_recent_tokens(sinks: int, recent: int, window: int | None, bound: int, prefill: str) -> None:
    """bound: how far lengths that the host knows are above the true ones."""
    batch = WithExactTokens.of(SEQUENCES, sinks, recent, rotate_keys=True, dtype=torch.bfloat16)
    codes, exact = batch.codes, batch.exact_tokens()
    host = tuple((count, length + bound) for count, length in SEQUENCES)
    part = Ragged(slice(0, 109), codes.bounds, 64, codes.view.lengths, codes.view.page_table, prefill == "exact", host)
    attention_sinks = None if window == 7 else torch.randn(4, generator=torch.Generator().manual_seed(1))
    options = {"softmax_scale": 0.125, "softcap": 20.0, "alibi_slopes": None, "fa_version": 3}
    tokens = sum(2 * length + count + 5 + sinks + recent for count, length in SEQUENCES)
    layer = InMemory(flash_attention, options, window, attention_sinks, (2, 64), torch.bfloat16, tokens, sinks, recent)
    out = torch.full_like(codes.q, torch.nan)
    layer.attend(part, codes.q, codes.view, (codes.k, codes.v) if part.exact else None, out, exact)
    others = {"window": window, "softcap": 20.0, "sinks": attention_sinks, "sm_scale": 0.125}
    if part.exact:
        others |= {"prefill": "exact", "k": codes.k, "v": codes.v}
    expected, _ = codes.attend(exact_tokens=exact, **others)
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * torch.finfo(out.dtype).eps * float(expected.abs().max()))
