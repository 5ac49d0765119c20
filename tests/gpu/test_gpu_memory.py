"""Where memory goes wrong: beyond 2^31 elements and bytes, unused memory, numbers at their limits, nonsense in lengths."""

from __future__ import annotations

import fcntl
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sanitize
import torch
from gpu_cases import Call, Case, Variant, build, junk, mapped, poisoned, simple, stored, token_axis, with_scale
from gpu_place import PLACE

import halfbyte as hb

PAIRS = [
    *(("int8", "int4_g32"), ("int4", "int4"), ("int4_channel", "int8")),
    *(("fp8", "fp8"), ("int8_token", "int8_token"), ("int4_g64", "int8_g64")),
]


@pytest.fixture
def free_memory() -> Iterator[None]:
    """A large test runs while no other process runs one, and gives its memory back before the next."""
    if PLACE.dry:
        yield
        return
    with (Path(tempfile.gettempdir()) / "halfbyte-large-test").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(PLACE.device).manual_seed(seed), device=PLACE.device)


def in_a_crowd(t: torch.Tensor, batch: int, tokens_first: bool) -> torch.Tensor:
    """t [1, H, T, ...] as the last of `batch` sequences, the others junk; `tokens_first`: as [B, T, H, ...] inside."""
    order = [0, 2, 1, *range(3, t.ndim)] if tokens_first and t.ndim > 2 else list(range(t.ndim))
    whole = junk(t.new_empty(1)).expand(batch, *t.permute(order).shape[1:]).clone().permute(order)
    whole[-1] = t[0]
    return whole


# int8: 17 x 8 x 131,072 x 128 elements are more than 2^31, and as many bytes; int4 takes twice as many sequences for the bytes.
@pytest.mark.parametrize(("keys", "values", "batch"), [("int8", "int8", 17), ("int4", "int4_g32", 33)])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_the_last_sequence_of_a_huge_cache(
    keys: str, values: str, batch: int, tokens_first: bool, impl: str, free_memory: None
) -> None:
    tokens, heads = PLACE.size(131_072, 256), PLACE.size(8, 2)
    k, v = normal(1, heads, tokens, 128), normal(1, heads, tokens, 128, seed=1)
    q = normal(1, 2 * heads, 1, 128).bfloat16()
    small = simple(k, v, q, keys, values, [tokens - 7])
    del k, v
    planes = (mapped(p, lambda t: in_a_crowd(t, batch, tokens_first)) for p in (small.cache.keys, small.cache.values))
    lengths = torch.tensor([0] * (batch - 1) + [tokens - 7], dtype=torch.int32, device=PLACE.device)
    large = Call(q.expand(batch, -1, -1, -1), hb.KVCache.from_buffers(*planes, lengths), {})
    assert PLACE.dry or large.cache.keys.codes.numel() > 2**31
    out, lse = large.run(impl)
    assert not small.wrong(out[-1:], lse[-1:])
    assert not out[:-1].any()
    assert bool((lse[:-1] == -torch.inf).all())


@pytest.mark.parametrize(("keys", "values"), [("int8", "int8"), ("int4", "int4")])
@pytest.mark.usefixtures("free_memory")
def test_the_last_pages_of_a_huge_pool(keys: str, values: str, impl: str) -> None:
    page, heads, count, pool = PLACE.size(256, 16), 8, PLACE.size(40, 4), PLACE.size(17_000, 20)
    tokens = page * count
    k, v, q = normal(1, heads, tokens, 128), normal(1, heads, tokens, 128, seed=1), normal(1, 32, 1, 128).bfloat16()
    small = simple(k, v, q, keys, values, [tokens - 3])
    used = torch.arange(pool - 1, pool - 1 - count, -1, device=PLACE.device)

    def spread(t: torch.Tensor) -> torch.Tensor:
        pages = t[0].unflatten(token_axis(t) - 1, (count, page)).movedim(token_axis(t) - 1, 0)
        whole = junk(t.new_empty(1)).expand(pool, *pages.shape[1:]).clone()
        whole[used] = pages
        return whole

    planes = (mapped(p, spread) for p in (small.cache.keys, small.cache.values))
    cache = hb.KVCache.from_buffers(*planes, small.cache.lengths, page_table=used.int().view(1, -1))
    assert PLACE.dry or cache.keys.codes.nbytes > 2**31
    assert not small.wrong(*Call(q, cache, {}).run(impl))


@pytest.mark.usefixtures("free_memory")
def test_the_last_tokens_of_one_huge_head(impl: str) -> None:
    """Offsets inside one sequence beyond 2^31; the window keeps the reference small."""
    tokens, window = PLACE.size(2**24 + 4096, 512), 100
    recent = simple(
        normal(1, 1, 256, 128), normal(1, 1, 256, 128, seed=1), normal(1, 8, 1, 128).bfloat16(), "int8", "int8", window=window
    )

    def at_the_end(t: torch.Tensor) -> torch.Tensor:
        whole = junk(t.new_empty(1)).expand(*t.shape[:2], tokens, *t.shape[3:]).clone()
        whole[:, :, -256:] = t
        return whole

    planes = (mapped(p, at_the_end) for p in (recent.cache.keys, recent.cache.values))
    lengths = torch.tensor([tokens], dtype=torch.int32, device=PLACE.device)
    assert not recent.wrong(*Call(recent.q, hb.KVCache.from_buffers(*planes, lengths), recent.options).run(impl))


@pytest.mark.parametrize(("keys", "values", "batch"), [("int8", "int8", 17), ("int4", "int4_g32", 33)])
@pytest.mark.usefixtures("free_memory")
def test_appending_at_the_end_of_a_huge_cache(keys: str, values: str, batch: int) -> None:
    tokens, heads = PLACE.size(131_072, 64), PLACE.size(8, 2)
    options: Any = {"keys": keys, "values": values, "device": PLACE.device}
    large, small = hb.KVCache(batch, heads, 128, tokens, **options), hb.KVCache(1, heads, 128, 3, **options)
    k, v = normal(batch, heads, 3, 128), normal(batch, heads, 3, 128, seed=1)
    large.lengths[-1] = tokens - 3
    large.append(k, v, torch.tensor([0] * (batch - 1) + [3], device=PLACE.device))
    small.append(k[-1:], v[-1:])
    for whole, part in zip(
        (*large.keys.tensors(), *large.values.tensors()), (*small.keys.tensors(), *small.values.tensors()), strict=True
    ):
        if whole is not None and part is not None:
            assert torch.equal(whole[-1:, :, -3:], part)
            assert not whole[:-1].any()


# ------------------------------------------------------------------------------------------------------- hard numbers


def alternating(t: torch.Tensor, even: float, odd: float) -> torch.Tensor:
    """t [B, H, T, D] with every other token times another number."""
    return t * torch.tensor([even, odd], device=t.device)[torch.arange(t.shape[2], device=t.device) % 2, None]


@dataclass(frozen=True)
class Hard:
    """How to make a call hard: what happens to k, v, q, and options."""

    k: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
    v: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
    q: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
    sinks: float | None = None
    alibi: float | None = None


HARD = {
    "huge queries": Hard(q=lambda t: t * 3000),  # up to 1e4
    "one huge query channel": Hard(q=lambda t: torch.cat([t[..., :1] * 1e4, t[..., 1:]], -1)),
    "tiny queries": Hard(q=lambda t: t * 1e-6),
    "very low scores": Hard(k=lambda t: t * 0.01 - 21, q=lambda t: t * 0.01 + 2100),  # about -5e5
    "equal keys": Hard(k=lambda t: t[:, :, :1].expand_as(t).contiguous()),
    "equal values": Hard(v=lambda t: t[:, :, :1].expand_as(t).contiguous()),
    "zero keys and values": Hard(k=torch.zeros_like, v=torch.zeros_like),
    "constant blocks": Hard(k=lambda t: torch.full_like(t, -3.0), v=lambda t: torch.full_like(t, 700.0)),
    "a key bias": Hard(k=lambda t: t + 300 * (torch.arange(t.shape[3], device=t.device) % 7 == 0)),
    "a value bias": Hard(v=lambda t: t + 1000),
    "values of both magnitudes": Hard(v=lambda t: alternating(t, 1e-6, 1e4)),
    "large sinks": Hard(sinks=200.0),
    "sinks beyond exp": Hard(sinks=1e4),
    "no sinks at all": Hard(sinks=-torch.inf),
    "one score beats all": Hard(k=lambda t: torch.cat([t[:, :, :-9], t[:, :, -9:-8] * 60, t[:, :, -8:]], 2), q=lambda t: t * 10),
    "rising scores": Hard(k=lambda t: t.abs() * torch.linspace(0, 50, t.shape[2], device=t.device)[:, None], q=torch.abs),
    "steep slopes": Hard(alibi=100.0),
}


@pytest.mark.compile_first
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("heads", [8, 40])
def test_hard_numbers(name: str, dtype: torch.dtype, heads: int, impl: str) -> None:
    hard, tokens, ran = HARD[name], PLACE.size(1500, 96), 0
    for keys, values in PAIRS:
        k, v, q = (
            hard.k(normal(2, 2, tokens, 128)),
            hard.v(normal(2, 2, tokens, 128, seed=1)),
            hard.q(normal(2, heads, 2, 128, seed=2)),
        )
        if q.abs().max() > 60000 or not k.half().isfinite().all():
            pytest.skip("beyond fp16")
        options: dict[str, Any] = {}
        if hard.sinks is not None:
            options["sinks"] = torch.full((heads,), hard.sinks, device=PLACE.device)
        if hard.alibi is not None:
            options["alibi_slopes"] = torch.full((heads,), hard.alibi, device=PLACE.device)
        call = simple(k, v, q.to(dtype), keys, values, [tokens, tokens - 29], **options)
        ran += call.check(impl)
    assert ran, "every pair of formats was refused"


@pytest.mark.compile_first
@pytest.mark.parametrize("k_scale", [2.0**-24, 2.0**-14, 65504.0])
@pytest.mark.parametrize("v_scale", [2.0**-24, 65504.0])
@pytest.mark.parametrize("heads", [8, 80])
def test_scales_at_their_limits(k_scale: float, v_scale: float, heads: int, impl: str) -> None:
    """The smallest and the largest scale that fp16 holds, subnormal ones too, with queries that keep the scores sane."""
    for keys, values in PAIRS:
        q = normal(2, heads, 1, 128, seed=2) / (k_scale * 127)
        call = simple(normal(2, 2, 200, 128), normal(2, 2, 200, 128, seed=1), q.bfloat16(), keys, values)
        planes = (with_scale(p, s) for p, s in ((call.cache.keys, k_scale), (call.cache.values, v_scale)))
        call.cache = hb.KVCache.from_buffers(*planes, call.cache.lengths)
        call.check(impl)


# ------------------------------------------------------------------------------------------------- nonsense in the data


@pytest.mark.compile_first
def test_nan_in_a_query_stays_in_its_row(impl: str) -> None:
    k, v, q = normal(2, 2, 200, 64), normal(2, 2, 200, 64, seed=1), normal(2, 8, 2, 64, seed=2).half()
    clean = simple(k, v, q, "int8", "int4_g32")
    expected, expected_lse = clean.run(impl)
    spoiled = q.clone()
    spoiled[1, 5, 0, 3] = torch.nan
    out, lse = Call(spoiled, clean.cache, {}).run(impl)
    assert bool(out[1, 5, 0].isnan().all())
    assert bool(lse[1, 5, 0].isnan())
    out[1, 5, 0], lse[1, 5, 0] = expected[1, 5, 0], expected_lse[1, 5, 0]
    assert not clean.wrong(out, lse)


@pytest.mark.compile_first
@pytest.mark.parametrize("page", [None, 16, 64, 128])
@pytest.mark.parametrize(("keys", "values", "heads"), [("int4", "int4", 2), ("int8", "int4_g32", 3), ("int4", "int8", 3)])
def test_tokens_before_heads(keys: str, values: str, heads: int, page: int | None, impl: str) -> None:
    """Scales in words of two heads, of two groups, and alone (3 heads, one group); pages below and above a warp's tokens."""
    for options in (frozenset[str](), frozenset({"window", "starts"})):
        variant = Variant(keys, values, group=8, page=page, layout="BTHD", options=options)
        call = build(Case(variant, heads, (1025, 0, 63, 640), slack=page or 1, seed=heads), PLACE.device)
        assert not call.wrong(*call.run(impl)), options


@pytest.mark.skipif(PLACE.dry, reason="where lengths are on the host they are checked there")
@pytest.mark.parametrize("keys", ["int8", "int4_channel"])
@pytest.mark.parametrize("page", [None, 32, 64])
def test_nonsense_in_lengths_and_tables_reads_nothing_it_should_not(page: int | None, keys: str, impl: str) -> None:
    """No length or page number leaves the cache, and the sequences that make sense keep the promise."""
    case = Case(Variant(keys, "int4_g32", page=page), 2, (300, 64, 200, 17))
    for wild in (-1, -(2**31), 10**6, 2**31 - 1):
        call = build(case, PLACE.device)
        call.cache.lengths[1] = wild
        if call.cache.page_table is not None:
            call.cache.page_table[1] = wild
        out, lse = call.run(impl)
        keep = [0, 2, 3]
        assert not call_of(call, keep).wrong(out[keep], lse[keep])


def call_of(call: Call, rows: list[int]) -> Call:
    """Some sequences of a call."""
    lengths, table = call.cache.lengths[rows], call.cache.page_table
    planes = (p if table is not None else mapped(p, lambda t: t[rows]) for p in (call.cache.keys, call.cache.values))
    planes = (p if p.tail is None else replace(p, tail=p.tail[rows]) for p in planes)
    return Call(call.q[rows], hb.KVCache.from_buffers(*planes, lengths, page_table=None if table is None else table[rows]), {})


@pytest.mark.compile_first
@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_views_at_any_offset_and_stride(shift: int, impl: str) -> None:
    """Addresses and strides that no vector load likes: a right answer or a refusal that says why."""
    for keys, values in itertools.islice(PAIRS, 3):
        call = simple(normal(2, 2, 130, 64), normal(2, 2, 130, 64, seed=1), normal(2, 8, 1, 64, seed=2).bfloat16(), keys, values)

        def moved(t: torch.Tensor) -> torch.Tensor:
            wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1] + shift)
            return wide[..., shift::2].copy_(t)

        planes = (mapped(p, moved) for p in (call.cache.keys, call.cache.values))
        other = Call(moved(call.q), hb.KVCache.from_buffers(*planes, call.cache.lengths), {})
        assert other.check(impl) or impl != "auto"


@pytest.mark.compile_first
def test_a_prompt_does_not_read_what_is_not_written(impl: str) -> None:
    """A fresh cache whose memory is junk, appended to and read: nothing but what was appended is seen."""
    for keys, values in PAIRS:
        lengths = torch.tensor([0, 0], dtype=torch.int32, device=PLACE.device)
        empty = [stored(normal(2, 2, 128, 64), name, lengths, torch.bfloat16) for name in (keys, values)]
        cache = hb.KVCache.from_buffers(*empty, lengths)
        with poisoned():
            cache.append(normal(2, 2, 37, 64), normal(2, 2, 37, 64, seed=1), torch.tensor([37, 5], device=PLACE.device))
        Call(normal(2, 4, 1, 64).bfloat16(), cache, {}).check(impl)


def test_what_compute_sanitizer_watches_runs() -> None:
    assert sanitize.main() == 0
