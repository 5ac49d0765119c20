"""Appends that every level is held to that runs without a GPU: it stores what the reference stores, and writes nothing else."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from gpu.gpu_cases import KEYS, VALUES, fits
from halfbyte.cache import KVCache
from halfbyte.formats import KV_FORMATS, key_format
from halfbyte.kv_buffer import KVBuffer, Rope
from halfbyte.ops.append import append_
from halfbyte.reference.rope import rope_tables

LAYOUTS = ("whole", "turned", "paged")
#: Every format of keys with two of values.
PAIRS = [(keys, VALUES[(i + shift) % len(VALUES)]) for i, keys in enumerate(KEYS) for shift in (0, 5)]
DIMS = (40, 59, 64, 80, 96, 128, 192)
WINDOWED = [name for name in VALUES if KV_FORMATS[name].is_quantized]
#: New tokens of three sequences, append by append: blocks of 32 that begin, end and are skipped; tokens that leave a window; the
#: last that there is room for.
COUNTS = ([1, 1, 1], [31, 30, 0], [0, 1, 2], [33, 2, 20], [1, 0, 9], [17, 40, 0], [13, 22, 64])


def tokens(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with outlier columns; in the keys a constant row, and zeros of both signs."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(shape, generator=g) * torch.logspace(-2, 1, shape[-1])
    rows = k.flatten(0, -2)
    rows[:1], rows[-1:, ::2] = 0.3, -0.0
    return k.to(dtype), torch.randn(shape, generator=g).to(dtype)


def poisoned(t: torch.Tensor | None, layout: str) -> torch.Tensor | None:
    """Memory of this shape in which reads and writes by mistake are seen."""
    if t is None or t.ndim == 1:
        return None if t is None else t.clone()
    is_turned = layout == "turned" and t.ndim > 2
    shape = (t.shape[0], t.shape[2], t.shape[1], *t.shape[3:]) if is_turned else t.shape
    raw = torch.full(shape, -1, dtype={1: torch.int8, 2: torch.int16}[t.element_size()]).view(t.dtype)  # 16 bits: NaN
    return raw.transpose(1, 2) if is_turned else raw


def new_cache(layout: str, heads: int, dim: int, **options: Any) -> KVCache:
    """Three sequences of 96 tokens: in one piece, as [B, T, H, D], or in pages out of order."""
    rows = (9, 32) if layout == "paged" else (3, 96)
    cache = KVCache(rows[0], heads, dim, rows[1], **options)
    for name in ("keys", "values"):
        side = getattr(cache, name)
        codes, scales, offsets, tail = (poisoned(t, layout) for t in side.tensors())
        tail = tail if tail is None else tail[:3]
        buffer = KVBuffer(side.format, codes, scales, offsets, tail, side.saturated, sink_tokens=side.sink_tokens)
        setattr(cache, name, buffer)
    cache.lengths = torch.zeros(3, dtype=torch.int32)
    if layout == "paged":
        cache.page_table = torch.tensor([[4, 0, 8], [2, 6, 1], [7, 3, 5]], dtype=torch.int32)
    return cache


def put(cache: KVCache, k: torch.Tensor, v: torch.Tensor, counts: list[int] | None, impl: str, **more: Any) -> torch.Tensor | None:
    new = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    places = {"page_table": cache.page_table, "rotate_keys": cache.rotate_keys}
    return append_(k, v, cache.keys, cache.values, cache.lengths, counts=new, impl=impl, **places, **more)


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def differences(a: KVCache, b: KVCache) -> list[str]:
    """The parts of two caches that are not the same bytes, written or not; of a tail those of its tokens."""
    names = [] if torch.equal(a.lengths, b.lengths) else ["lengths"]
    for side in ("keys", "values"):
        one, two = getattr(a, side), getattr(b, side)
        parts = [(name, getattr(one, name), getattr(two, name)) for name in ("codes", "scales", "offsets", "saturated")]
        if one.tail is not None:
            here = (one.tail_tokens(a.lengths) >= 0)[:, None, :, None]
            parts.append(("tail", *(t.tail.masked_fill(~here, 0) for t in (one, two))))
        names += [f"{side}.{name}" for name, x, y in parts if x is not None and not torch.equal(raw(x), raw(y))]
    return names


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    dim, is_windowed = draw(st.sampled_from(DIMS)), draw(st.booleans())
    keys, values = ([n for n in names if fits(key_format(n), dim, None)] for names in (KEYS, VALUES))
    options: dict[str, Any] = {"rotate_keys": dim % 16 == 0 and draw(st.booleans())}
    options["dtype"] = draw(st.sampled_from([torch.float16, torch.bfloat16]))  # of tails
    if is_windowed:
        keys = values = [name for name in values if name in WINDOWED]
        options |= {"sink_tokens": draw(st.integers(0, 5)), "recent_tokens": draw(st.sampled_from([0, 1, 7, 40]))}
    is_small = options.get("recent_tokens", 0) < 32
    return {
        "options": options | {"keys": draw(st.sampled_from(keys)), "values": draw(st.sampled_from(values))},
        "layout": draw(st.sampled_from(LAYOUTS if is_small else LAYOUTS[:2])),
        "heads": draw(st.integers(1, 3)),
        "dim": dim,
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        "rope": draw(st.sampled_from([None, "half", "pairs", "partial", "shared"])) if dim % 2 == 0 else None,
        "seed": draw(st.integers(0, 99)),
    }


def rope_of(kind: str | None, lengths: torch.Tensor, count: int, dim: int) -> Rope | None:
    if kind is None:
        return None
    positions = torch.arange(count) + (0 if kind == "shared" else lengths.unsqueeze(1))
    return Rope(*rope_tables(positions, dim // 4 * 2 if kind == "partial" else dim), kind == "pairs")


def check_bits(case: dict[str, Any], impl: str, appends: int = len(COUNTS)) -> None:
    """The same appends by the reference and by `impl`; tokens beyond counts hold NaN, and heads lie behind tokens."""
    heads, dim, dtype = case["heads"], case["dim"], case["dtype"]
    tail = torch.float16 if dtype is torch.float16 else torch.bfloat16
    expected, stored = (new_cache(case["layout"], heads, dim, **{"dtype": tail, **case["options"]}) for _ in range(2))
    for step, counts in enumerate(COUNTS[:appends]):
        shape = (3, heads, max(counts), dim)
        x = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tokens(shape, case["seed"] + step, dtype)]
        for t in x:
            t[torch.arange(max(counts)).expand(3, heads, -1) >= torch.tensor(counts)[:, None, None]] = torch.nan
        rope = rope_of(case["rope"], stored.lengths, max(counts), dim)
        q = None if rope is None else tokens((3, 2 * heads, *shape[2:]), step, dtype)[0]
        queries = [put(cache, *x, counts, level, rope=rope, q=q) for cache, level in ((expected, "reference"), (stored, impl))]
        assert not differences(expected, stored)
        assert rope is None or torch.equal(*queries)
