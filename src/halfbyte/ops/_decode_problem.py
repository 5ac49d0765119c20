"""From the tensors of a decode call to a `DecodeProblem`, all that its plan may depend on."""

from __future__ import annotations

import torch

from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.plans.decode_attention import DecodeProblem

#: Names of dtypes in plans.
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def problem_of(call: DecodeCall) -> DecodeProblem:
    """The problem of a call, for its plan."""
    q, keys, values, options = call.q, call.keys, call.values, call.options
    return DecodeProblem(
        DTYPES.get(q.dtype, str(q.dtype)),
        len(call.lengths),
        keys.heads,
        q.shape[1] // keys.heads,
        q.shape[2],
        keys.dim,
        values.dim,
        call.capacity,
        keys.format.name,
        values.format.name,
        0 if call.page_table is None else keys.codes.shape[2],
        aligned(q, keys.codes) and aligned(q, values.codes) and _dense_tail(keys.tail) and _dense_tail(values.tail),
        options.window is not None,
        options.alibi_slopes is not None,
        options.softcap is not None,
        call.deterministic_batch,
        _token_stride(keys),
        _token_stride(values),
        _scale_stride(keys),
        _scale_stride(values),
        options.rotate_keys,
        call.cu_seqlens_q is not None,
        keys.sink_tokens,
        keys.recent_tokens,
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
