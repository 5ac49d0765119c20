"""What attention reads: one plane of keys, one of values, and the options of a call. Plain data, shared by every level of an op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from halfbyte.formats import Format


@dataclass(frozen=True)
class Plane:
    """The stored keys (or values) of one layer.

    Contiguous: codes [B, H, T, D / codes per byte]; scales and offsets as `format.scale_shape([B, H, T, D])` says.
    Paged: the same with the batch axis replaced by pages and T by the tokens of a page: codes [P, H, page, ...]; token p*page + j
    of sequence b lives in page `page_table[b, p]`, row j. Any strides.
    `tail`, only for per-channel formats: [B, H, block, D] in 16 bits. It holds the last `length % block` tokens, which are not
    quantised yet; codes and scales cover whole blocks only. It belongs to a sequence, so it is never paged.
    Per-tensor scales are [1] and shared by everything; 0 means not calibrated yet. `saturated`, int64 [1], counts what exceeded
    them.
    """

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    tail: torch.Tensor | None = None
    saturated: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        return self.codes.shape[1]

    @property
    def dim(self) -> int:
        """Logical size of one head."""
        return self.codes.shape[-1] * self.format.code.per_byte

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What attention reads: (codes, scales, offsets, tail), in the order in which the flat ops take them."""
        return self.codes, self.scales, self.offsets, self.tail

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors() if t is not None)


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention call, in the order they act on a score: scale, softcap, ALiBi, mask.

    sm_scale      multiplies q . k
    softcap       s -> softcap * tanh(s / softcap); None: off
    alibi_slopes  float32 [Hq]; adds slope * (j - i) for key position j and query position i
    window        keeps keys j with i - window < j <= i; None: all j <= i
    starts        int32 [B]; keys before starts[b] are padding and are never seen; None: 0
    ends          int32 [B]; keys from ends[b] on are not seen; None: all the cache holds. The lengths cannot say this: they also
                  say which tokens of per-channel keys are in the tail
    sinks         float32 [Hq]; one more logit a head in the softmax's denominator, with no value, not part of lse (GPT-OSS)
    rotate_keys   the cached keys are Hadamard-rotated: the query is rotated the same way before the product
    """

    sm_scale: float
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    window: int | None = None
    starts: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    rotate_keys: bool = False

    def limit(self, lengths: torch.Tensor) -> torch.Tensor:
        """Keys that may be seen lie before this position, [B]."""
        return lengths if self.ends is None else torch.minimum(lengths, self.ends)


class Cache(Protocol):
    """What the attention ops need of a cache: two planes, int32 [B] lengths, and a page table when the planes are paged.

    `page_table`, int32 [B, pages]: the page that holds tokens p*page .. of each sequence. `rotate_keys`: keys are stored rotated.
    """

    @property
    def keys(self) -> Plane: ...
    @property
    def values(self) -> Plane: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def page_table(self) -> torch.Tensor | None: ...
    @property
    def rotate_keys(self) -> bool: ...
