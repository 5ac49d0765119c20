"""Calls of decode attention without memory: the sample that `make compile-check` compiles, for each kernel that can run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from halfbyte.formats import KV_FORMATS
from halfbyte.kernels.compiling import empty, kv_buffer
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer

#: (keys, values, D, query heads on a KV head, new tokens, page, options). Every head size and option is in it, the order of tokens
#: and heads in memory, "many" sequences, more than there are multiprocessors, and sink and
#: "recent" tokens in 16 bits. `sample` adds the formats it leaves out.
_SAMPLE = (
    ("int4", "int4", 128, 8, 1, 0, ""),
    ("int8", "int8", 128, 8, 1, 0, ""),
    ("int8", "int4_g32", 128, 4, 1, 64, "rotate window"),
    ("fp8", "fp8", 128, 4, 1, 0, "sinks"),
    ("int4_g32", "int4_g32", 128, 4, 4, 0, "alibi"),
    ("int4_g64", "int8_g64", 128, 1, 16, 16, ""),
    ("int8_tensor", "fp8_tensor", 80, 7, 1, 0, "softcap"),
    ("int8_token", "int8_token", 96, 5, 2, 0, "starts"),
    ("int8_channel", "int4", 128, 4, 1, 0, ""),
    ("int4_channel", "int8_g32", 64, 8, 1, 64, "rotate"),
    ("fp8_tensor", "int8_tensor", 256, 2, 1, 0, ""),
    ("int8_g32", "int4_g64", 256, 2, 64, 0, ""),
    ("bf16", "bf16", 128, 4, 512, 0, "window"),
    ("bf16", "bf16", 128, 4, 1, 0, ""),
    ("int4", "int4", 128, 16, 1, 0, ""),
    ("int4", "int4", 128, 32, 1, 0, ""),
    ("int8", "int8", 64, 8, 1, 32, ""),
    ("fp16", "bf16", 192, 4, 3, 0, "alibi softcap sinks"),
    ("int8_g64", "fp16", 64, 4, 128, 0, ""),
    ("int4", "int4", 128, 8, 1, 0, "tokens-first"),
    ("int8", "int4_g32", 128, 16, 1, 64, "tokens-first"),
    ("int4", "int4", 128, 4, 1, 64, "tokens-first alibi sinks"),
    ("int8", "int8", 64, 8, 1, 16, "tokens-first window"),
    ("int8_tensor", "int4", 128, 32, 1, 0, "tokens-first"),
    ("int4", "int4", 128, 8, 1, 64, ""),
    ("int4", "int4", 128, 8, 1, 0, "many"),
    ("int8", "int8", 128, 8, 1, 0, "many"),
    ("int8", "int4", 128, 8, 1, 0, ""),
    ("int8", "int8", 128, 8, 1, 64, "sinks"),
    ("fp8", "fp8", 128, 8, 1, 0, "tokens-first"),
    ("int4", "int4", 256, 8, 1, 0, ""),
    ("int4", "int4", 128, 8, 8, 0, ""),
    ("int8", "int8", 128, 128, 1, 0, ""),
    ("int8", "int4_g32", 128, 8, 8, 64, "window alibi softcap"),
    ("int4_g64", "int8_g32", 128, 16, 8, 16, "tokens-first sinks"),
    ("int8_token", "int8_tensor", 96, 48, 1, 0, "starts"),
    ("int8", "fp8", 64, 16, 4, 64, "tokens-first"),
    ("int4_channel", "int4_g32", 128, 8, 1, 0, ""),
    ("int4_channel", "int4_g32", 128, 4, 4, 32, "window"),
    ("int8_channel", "int8", 128, 8, 1, 0, "tokens-first"),
    ("int8_g32", "int4_g64", 128, 8, 1, 0, ""),
    ("int8_g64", "int8_g64", 128, 4, 1, 64, ""),
    ("fp16", "fp16", 128, 4, 1, 0, ""),
    ("int4", "int4", 128, 8, 1, 0, "rotate"),
    ("int4", "int4", 96, 4, 1, 64, "rotate"),
    ("int4_g32", "int4_g32", 128, 8, 8, 0, "rotate"),
    ("int2", "int2", 128, 8, 1, 0, ""),
    ("int2", "int2", 128, 8, 1, 0, "many"),
    ("int4", "int2", 128, 8, 1, 64, ""),
    ("int2_g64", "int2_g64", 128, 4, 4, 0, "window alibi softcap"),
    ("int2_g32", "int2_g32", 128, 8, 1, 0, "rotate"),
    ("int2_g64", "int2", 128, 8, 1, 0, "tokens-first"),
    ("int2", "int2", 128, 4, 1, 64, "tokens-first"),
    ("int2_g32", "int2_g64", 128, 8, 8, 64, "rotate"),
    ("int4", "int4", 128, 8, 1, 0, "recent"),
    ("int8", "int4_g32", 128, 4, 4, 64, "rotate recent softcap"),
    ("int2", "int2_g64", 128, 4, 1, 64, "recent"),
    ("int2_g32", "int2_g32", 128, 8, 1, 0, "rotate recent"),
    ("int4", "int2", 128, 16, 1, 0, "recent"),
    ("int4", "int4", 256, 8, 1, 0, "recent"),
    ("int8", "int8", 512, 8, 1, 0, ""),
    ("int4", "int4", 512, 8, 1, 16, "rotate window"),
    ("bf16", "bf16", 512, 4, 2, 0, "softcap"),
    ("int8_channel", "int8", 512, 8, 1, 0, ""),
    ("int4_g32", "int4_g32", 512, 8, 1, 0, "rotate"),
    ("int8", "fp8", 64, 8, 1, 64, "tokens-first recent"),
)


class Sample(NamedTuple):
    """A call by its name, and the memory of its results. `of_batch`: int32 [B], for lengths and the like."""

    name: str
    call: DecodeCall
    out: torch.Tensor
    lse: torch.Tensor
    of_batch: torch.Tensor


def sample() -> Iterator[Sample]:
    """The calls, each named by what it is: those above, and one for each format that is not among their keys or values."""
    yield from (_call(*row) for row in _SAMPLE)
    for name, fmt in KV_FORMATS.items():
        values = fmt.code.name if fmt.token_block else name
        if name not in {row[0] for row in _SAMPLE} or values not in {row[1] for row in _SAMPLE}:
            yield _call(name, values, 128, 8, 1, 0, "")


def latents(keys: str, values: str, heads: int, queries: int = 1, page: int = 0) -> Sample:
    """Queries of so many heads over latents of 512 dims with rotary keys of 64 (MLA), of 16 sequences."""
    rows = (16 * 4096 // page, 1, page) if page else (16, 1, 4096)
    k, v = (kv_buffer(KV_FORMATS[name], (*rows, dim), 16, torch.bfloat16) for name, dim in ((keys, 64), (values, 512)))
    q, table = empty(16, heads, queries, 576, dtype=torch.bfloat16), empty(16, 4096 // page) if page else None
    call = DecodeCall(q, k, v, empty(16), None, table, AttentionOptions(0.1), latent=True)
    name = "-".join([keys, values, "latent", f"G{heads}", f"L{queries}", *([f"page{page}"] if page else [])])
    return Sample(name, call, *call.new_results(), call.lengths)


def _call(keys: str, values: str, dim: int, group: int, queries: int, page: int, options: str) -> Sample:
    dtype = torch.float16 if keys == values == "fp16" else torch.bfloat16
    batch, heads, capacity = 64 if "many" in options else 16, 8, 4096
    rows = (batch * capacity // page, heads, page, dim) if page else (batch, heads, capacity, dim)
    exact = (4, 128) if "recent" in options else (0, 0)
    k, v = (kv_buffer(KV_FORMATS[name], rows, batch, dtype, exact) for name in (keys, values))
    if "tokens-first" in options:
        k, v = (_tokens_first(buffer) for buffer in (k, v))
    q = empty(batch, heads * group, queries, dim, dtype=dtype)
    of_heads, of_batch = empty(heads * group, dtype=torch.float32), empty(batch)
    given = AttentionOptions(
        0.1,
        30.0 if "softcap" in options else None,
        of_heads if "alibi" in options else None,
        100 if "window" in options else None,
        of_batch if "starts" in options else None,
        None,
        of_heads if "sinks" in options else None,
        "rotate" in options,
    )
    name = "-".join([keys, values, f"D{dim}", f"G{group}", f"L{queries}", *([f"page{page}"] if page else []), *options.split()])
    table = empty(batch, capacity // page) if page else None
    lse = empty(*q.shape[:3], dtype=torch.float32)
    call = DecodeCall(q, k, v, of_batch, None, table, given)
    return Sample(name, call, empty(*q.shape, dtype=dtype), lse, of_batch)


def _tokens_first(buffer: KVBuffer) -> KVBuffer:
    """The same over memory in the order tokens, heads."""
    tensors = {name: getattr(buffer, name) for name in ("codes", "scales", "offsets")}
    return replace(
        buffer, **{n: t if t is None or t.ndim == 1 else t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in tensors.items()}
    )
