"""`DecodeProblem`: all of a call of decode attention that its plan may depend on, and how it is found out from the tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.reference.hadamard import rotated

#: Names of dtypes in plans.
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class DecodeProblem:
    """One call of decode attention, without its tensors: everything that the choice of a kernel may depend on.

    group           query heads per KV head
    keys, values    format names
    aligned         codes lie in whole 16-byte pieces
    page            tokens of a page; 0: contiguous
    sink_tokens, recent_tokens      tokens that are read in 16 bits
    k_token_stride, v_token_stride  rows from a token's codes to the next one's: 1, `heads` with tokens first, 0 otherwise
    k_scale_stride, v_scale_stride  the same for scales; 0, too, where they are not aligned for cp.async
    rotate_keys     keys are stored rotated; the kernel rotates queries
    ragged          `queries` counts those of all sequences
    latent          values are latents, and part of the keys (MLA)
    """

    dtype: str
    batch: int
    heads: int
    group: int
    queries: int
    dim: int
    value_dim: int
    capacity: int
    keys: str
    values: str
    page: int
    aligned: bool
    window: bool
    alibi: bool
    softcap: bool
    deterministic_batch: bool
    k_token_stride: int = 1
    v_token_stride: int = 1
    k_scale_stride: int = 1
    v_scale_stride: int = 1
    rotate_keys: bool = False
    ragged: bool = False
    sink_tokens: int = 0
    recent_tokens: int = 0
    latent: bool = False

    @property
    def rows(self) -> int:
        """Query rows that share one KV head."""
        return self.group * self.queries

    @property
    def lean(self) -> bool:
        """Whether scores need no more than a mask."""
        return (self.queries == 1 or self.deterministic_batch) and not self.alibi and not self.softcap


def dense_problem(
    dtype: str,
    batch: int,
    heads: int,
    group: int,
    queries: int,
    dim: int,
    capacity: int,
    keys: str,
    values: str,
    page: int = 0,
    deterministic_batch: bool = False,
) -> DecodeProblem:
    """A call without options on a cache as `KVCache` allocates it: aligned, with dense strides."""
    return DecodeProblem(
        dtype,
        batch,
        heads,
        group,
        queries,
        dim=dim,
        value_dim=dim,
        capacity=capacity,
        keys=keys,
        values=values,
        page=page,
        aligned=True,
        window=False,
        alibi=False,
        softcap=False,
        deterministic_batch=deterministic_batch,
        rotate_keys=rotated(None, KV_FORMATS[keys], dim),
    )


def problem_of(call: DecodeCall) -> DecodeProblem:
    """The problem of a call, for its plan."""
    q, keys, values, options = call.q, call.keys, call.values, call.options
    return DecodeProblem(
        dtype=DTYPES.get(q.dtype, str(q.dtype)),
        batch=len(call.lengths),
        heads=keys.heads,
        group=q.shape[1] // keys.heads,
        queries=q.shape[2],
        dim=keys.dim,
        value_dim=values.dim,
        capacity=call.capacity,
        keys=keys.format.name,
        values=values.format.name,
        page=0 if call.page_table is None else keys.codes.shape[2],
        aligned=aligned(q, keys.codes) and aligned(q, values.codes) and _dense_tail(keys.tail) and _dense_tail(values.tail),
        window=options.window is not None,
        alibi=options.alibi_slopes is not None,
        softcap=options.softcap is not None,
        deterministic_batch=call.deterministic_batch,
        k_token_stride=_token_stride(keys),
        v_token_stride=_token_stride(values),
        k_scale_stride=_scale_stride(keys),
        v_scale_stride=_scale_stride(values),
        rotate_keys=options.rotate_keys,
        ragged=call.cu_seqlens_q is not None,
        sink_tokens=keys.sink_tokens,
        recent_tokens=keys.recent_tokens,
        latent=call.latent,
    )


def aligned(q: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether codes can be copied in 16-byte pieces, by addresses that the compiler can see are multiples of 32 bytes."""
    b, h, t, d = codes.stride()
    size = codes.element_size()
    pieces = (b * size | h * size) % 32 == 0 and t * size % 16 == 0
    near = q.shape[1] * q.stride(1) < 2**31  # where a head's queries lie is a product in 32 bits
    return d == 1 and pieces and codes.data_ptr() % 16 == 0 and q.stride(3) == 1 and near and codes.shape[0] > 0


def _dense_tail(tail: torch.Tensor | None) -> bool:
    """Whether a tail, if there is one, is [B, H, block, D] without gaps: a head's part is found by that."""
    return tail is None or (tail.is_contiguous() and tail.data_ptr() % 16 == 0)


def _token_stride(buffer: KVBuffer) -> int:
    """Rows from a token's codes to the next one's, if that is what a kernel is compiled for; else 0."""
    row, (_, head, token, _) = buffer.codes.shape[3], buffer.codes.stride()
    if token == row:
        return 1
    return buffer.heads if token == buffer.heads * row and head == row else 0


def _scale_stride(buffer: KVBuffer) -> int:
    """The same of scales, where cp.async can copy them: those of several tokens at once, or two of one token in 4 bytes."""
    s, o = buffer.scales, buffer.offsets
    if s is None or s.ndim == 1:
        return 1
    stride, groups = s.stride(), s.shape[3] if s.ndim == 4 else 1
    token = stride[1] if s.ndim == 2 else stride[2]
    head = 0 if s.ndim == 2 else stride[1]
    addresses = s.data_ptr() | (0 if o is None else o.data_ptr())
    if (groups > 1 and stride[3] != 1) or (o is not None and o.stride() != stride):
        return 0
    even = (stride[0] | head) % 16 == 0 and addresses % 16 == 0
    if token == groups and even:
        return 1
    tokens_first = buffer.heads > 1 and head == groups and token == buffer.heads * groups
    if buffer.format.token_block:  # copied 16 bytes at a time
        return buffer.heads if tokens_first and even else 0
    return buffer.heads if tokens_first and (token | stride[0]) % 2 == 0 and addresses % 4 == 0 else 0
