"""Prompt lookup in a recorded step: `generate(..., custom_generate=halfbyte.hf.generate, prompt_lookup_num_tokens=n)`.

    tokens -> drafts -> [newest token, drafts] -> model.forward -> logits -> tokens that the model itself would have chosen

The tokens that followed an earlier occurrence of the newest tokens are drafts of what follows now (prompt lookup decoding, Saxena
2023). One forward verifies all drafts, and a draft is accepted if the model chooses the same token. All of it runs on the device,
for each sequence separately, so it is recorded like any other step. The tokens are those of single steps, up to rounding that
depends on M of a GEMM.

The cache stores all drafts and drops rejected ones by its lengths alone, which are set before the next forward. So no draft may
finish a block of per-channel keys: such a block is quantized at once, and cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from halfbyte.hf.attention import CACHE, DECODE_QUERIES
from halfbyte.hf.cache import PackedCache
from halfbyte.hf.drafts import Chunk
from halfbyte.hf.recorded_step import Forward, Recorded, Tokens

#: Drafts of one step: with the newest token they are the queries that attention answers in one pass.
MOST_DRAFTS = DECODE_QUERIES - 1


class LookupForward(Forward):
    """The forward of the newest token of each sequence and the drafts behind it.

    ngram     the longest suffix to match
    chunk     tokens in the cache before it, and how many of its own are real
    """

    def __init__(self, kind: Hashable, inputs: dict[str, Any], recorded: Recorded, tokens: Tokens, ngram: int) -> None:
        super().__init__(kind, inputs, recorded, tokens)
        self.ids, self.positions, self.ngram = inputs["input_ids"], inputs["position_ids"], ngram
        self.inputs = inputs
        self.cache: PackedCache = inputs[CACHE]
        blocks = [layer.key_format.token_block for layer in self.cache.packed if layer.key_format.token_block]
        self.block = min(blocks, default=None)
        self.chunk = Chunk(*(torch.zeros(len(self.ids), dtype=torch.int32, device=self.ids.device) for _ in Chunk._fields))

    def _run(self, forward: Callable[..., Any]) -> torch.Tensor:
        """Logits [B, L, V] behind the newest tokens and their drafts."""
        self._draft()
        self.cache.expect_chunk(self.chunk)
        self.cache.set_lengths(self.chunk.held)
        logits: torch.Tensor = forward(**self.inputs, return_dict=True).logits
        return logits

    def _draft(self) -> None:
        """Set tokens, positions and the chunk."""
        tokens, width = self.tokens, self.ids.shape[1]
        held = tokens.lengths - 1
        drafts, found = drafted(tokens.ids, tokens.lengths, width - 1, self.ngram)
        count = torch.where(found, width, 1).minimum(tokens.longest - tokens.lengths)
        if self.block is not None:
            count = count.minimum((self.block - 1 - held % self.block).clamp_min(1))
        count = count * tokens.unfinished[:, None]
        column = torch.arange(width, device=held.device)
        self.ids.copy_(torch.cat([tokens.last, drafts], 1))
        self.positions.copy_(held - tokens.left_padding + column.minimum((count - 1).clamp_min(0)))
        for mine, new in zip(self.chunk, (held, count), strict=True):
            mine.copy_(new[:, 0])

    def take(self, chosen: torch.Tensor, ends: torch.Tensor, padding: torch.Tensor | int) -> None:
        """Keep the tokens [B, L] chosen after accepted drafts, up to one that `ends` its sequence."""
        tokens, column, count = self.tokens, torch.arange(chosen.shape[1], device=chosen.device), self.chunk.counts[:, None]
        stands = (chosen[:, :-1] == self.ids[:, 1:]) & (column[1:] < count) & ~ends[:, :-1]
        new = (1 + stands.long().cumprod(1).sum(1, keepdim=True)).minimum(count)
        tokens.ids.scatter_(1, tokens.lengths + column, torch.where(column < new, chosen, padding))
        tokens.lengths += new
        newest = (new - 1).clamp_min(0)
        tokens.last.copy_(chosen.gather(1, newest))
        tokens.unfinished &= (~ends.gather(1, newest) & (tokens.lengths < tokens.longest))[:, 0]


def drafted(ids: torch.Tensor, lengths: torch.Tensor, count: int, ngram: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [B, count] behind the first `lengths` [B, 1] tokens of ids [B, columns], and whether there are any, bool [B, 1].

    They follow the latest earlier occurrence of the longest suffix of up to `ngram` tokens. Drafts beyond the end of the text
    repeat the occurrence.
    """
    column = torch.arange(ids.shape[1], device=ids.device)
    alike = column < lengths - 1
    matched = torch.zeros_like(ids)  # tokens of the suffix that end in a column
    for back in range(ngram):
        wanted = ids.gather(1, (lengths - 1 - back).clamp_min(0))
        alike = alike & (ids.roll(back, 1) == wanted) & (column >= back)
        matched += alike
    best = (matched * ids.shape[1] + column).masked_fill(matched == 0, -1).amax(1, keepdim=True)
    start = best % ids.shape[1] + 1
    ahead = torch.arange(count, device=ids.device) % (lengths - start).clamp_min(1)
    return ids.gather(1, (start + ahead).clamp_max(ids.shape[1] - 1)), best >= 0
