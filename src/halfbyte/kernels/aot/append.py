"""The variants of the append kernels: every format of keys with one of values, the options in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from halfbyte.formats import KV_FORMATS
from halfbyte.kernels.aot.compiling import Configuration, empty, kv_buffer, recorded
from halfbyte.kernels.append.launch import launches
from halfbyte.kv_buffer import AppendCall


def configurations() -> list[Configuration]:
    """Every format of keys: decoding over contiguous memory, and a prompt over pages with rotation."""
    return [c for i, keys in enumerate(KV_FORMATS) for prompt in (False, True) for c in _variant(keys, i, prompt)]


def _variant(keys: str, i: int, prompt: bool) -> Iterator[Configuration]:
    """The launches of one append. Every prompt and every second decoding have rotary embedding of keys and queries."""
    whole = [name for name, f in KV_FORMATS.items() if not f.token_block]
    formats = KV_FORMATS[keys], KV_FORMATS[whole[i % len(whole)]]
    dtype, tokens = (torch.float16, torch.bfloat16)[i % 2], 48 if prompt else 1
    buffers = [kv_buffer(fmt, (64, 8, 64, 128), 16, dtype) for fmt in formats]
    k, rotary = empty(16, 8, tokens, 128, dtype=dtype), prompt or i % 2
    call = AppendCall(k, k, *buffers, lengths=empty(16), rotate_keys=prompt)
    q_out = None
    if prompt:
        call = call._replace(counts=empty(16), page_table=empty(16, 4))
    if rotary:
        table = empty(tokens, 64, dtype=torch.float32)
        call = call._replace(rope=(table, table), q=empty(16, tokens, 32, 128, dtype=dtype).transpose(1, 2))
        q_out = empty(16, 32, tokens, 128, dtype=dtype)
    amax = empty(2) if "tensor" in (f.granularity for f in formats) else None
    name = f"{formats[0]}-{formats[1]}-{'prompt' if prompt else 'decode'}"
    for launch in launches(call, q_out, amax, advance=True, use_pdl=False):
        for found in recorded(name, launch):
            yield replace(found, name=found.name.replace(" ", "-"))
