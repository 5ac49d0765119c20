"""Which requests of a batch are attended over unpacked tokens, and in which groups: pure functions of what the host knows.

A request's stored tokens can be read as they are (the decode kernels), or dequantized once into 16-bit scratch and read by an
attention kernel for 16 bits (FlashAttention). For each token and KV head unpacking moves 4 (D + Dv) bytes more: it writes 16-bit
numbers, which are then read. Each query row saves part of its 2 (D + Dv) FLOPs: 1 / rate of the decode kernels - 1 / rate of the
other. So it pays from

    rows = 2 / (bandwidth (1 / F_decode - 1 / F_attention))

query rows on a KV head, whatever the format, the size of heads and the length. On an H200 4.2 TB/s, 270 and 600 TFLOPS give 233.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Query rows per KV head (new tokens times query heads) from which on unpacking pays.
ROWS = 256

#: Tokens that scratch holds at most: 1 GiB for 8 KV heads of 128. Longer requests read codes.
MOST_SCRATCH = 1 << 18


class Group(NamedTuple):
    """Neighboring requests of a batch, first .. last - 1, that one call attends to.

    unpacked  over 16-bit scratch
    decodes   no request has more new tokens than a decode with its drafts
    """

    first: int
    last: int
    unpacked: bool
    decodes: bool


def scratch_tokens(count: int, length: int, exact_tokens: int) -> int:
    """What a request with `count` new tokens among `length` takes of the scratch: those in 16 bits are put together there first."""
    return length + (count + exact_tokens if exact_tokens else 0)


def groups(
    queries: Sequence[int], lengths: Sequence[int], *, query_heads: int, scratch: int, exact_tokens: int = 0, drafts: int = 1
) -> list[Group]:
    """Requests in groups, in their order.

    queries      new tokens of each request
    lengths      of each an upper bound of its tokens, new ones included
    query_heads  per KV head
    scratch      tokens that the scratch holds: those of all requests of a group. A request with more is not unpacked
    exact_tokens tokens in 16 bits of each request, which take scratch with its new ones (`scratch_tokens`)
    drafts       tokens of a decode with its drafts
    """
    result: list[Group] = []
    room = 0
    for i, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        tokens = scratch_tokens(count, length, exact_tokens)
        unpacked = count * query_heads >= ROWS and tokens <= scratch
        decodes = count <= drafts
        if result and result[-1][2:] == (unpacked, decodes) and (not unpacked or tokens <= room):
            result[-1] = result[-1]._replace(last=i + 1)
        else:
            result.append(Group(i, i + 1, unpacked, decodes))
            room = scratch
        room -= tokens
    return result


def bucket(most: int, drafts: int = 1) -> int:
    """`max_query_len` for requests with at most so many new tokens, of few values, so that few kernels are compiled.

    `drafts` for decodes with fewer drafts than others, else a power of two from 8 on.
    """
    return drafts if most <= drafts else max(8, 1 << (most - 1).bit_length())
