"""The reference of attention against loops over queries and keys written here, and how its pieces fit together."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.cache import KVCache
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import AttentionOptions
from halfbyte.ops._decode_in_torch import QUERY_BLOCK
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.ops.merge_states import merge_states
from halfbyte.ops.prefill_attention import prefill_attention
from halfbyte.paging import PagedKVCache
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import block_size, rotate
from halfbyte.reference.rope import apply_rope, rope_tables
from halfbyte.tensors import LatentHeads
from sizes import head_dim

pytestmark = pytest.mark.usefixtures("poisoned_memory")
HEADS = [(1, 1), (8, 1), (8, 8), (4, 2), (6, 2), (7, 1), (12, 4)]


def by_loops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    query_start: list[int],
    *,
    sm_scale: float,
    softcap: float | None = None,
    slopes: list[float] | None = None,
    window: int | None = None,
    starts: list[int] | None = None,
    sinks: list[float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query, one key at a time, in Python floats; q, k, v in float64."""
    batch, q_heads, count, _ = q.shape
    group = q_heads // k.shape[1]
    out = torch.zeros(batch, q_heads, count, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, q_heads, count), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(q_heads):
            for i in range(count):
                at, scores, seen = query_start[b] + i, [], []
                for j in range(lengths[b]):
                    if j > at or (window is not None and j <= at - window) or (starts is not None and j < starts[b]):
                        continue
                    s = float(q[b, h, i] @ k[b, h // group, j]) * sm_scale
                    if softcap is not None:
                        s = softcap * math.tanh(s / softcap)
                    if slopes is not None:
                        s -= slopes[h] * (at - j)
                    scores.append(s)
                    seen.append(j)
                if not scores:
                    continue
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights)
                lse[b, h, i] = top + math.log(total)
                if sinks is not None:
                    total += math.exp(sinks[h] - top)
                out[b, h, i] = sum(w * v[b, h // group, j] for w, j in zip(weights, seen, strict=True)) / total
    return out, lse


def alibi_slopes(heads: int) -> list[float]:
    """Press et al.: a geometric sequence; for other head counts the odd terms of the next power of two follow."""

    def powers(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    whole = 2 ** int(math.log2(heads))
    return powers(whole) + powers(2 * whole)[0::2][: heads - whole]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    q_heads, kv_heads = draw(st.sampled_from(HEADS))
    batch, capacity = draw(st.integers(1, 3)), 24
    optional = st.one_of(st.none(), st.booleans())
    return {
        "heads": (q_heads, kv_heads),
        "batch": batch,
        "queries": draw(st.integers(1, 17)),
        "capacity": capacity,
        "lengths": draw(st.lists(st.sampled_from([0, 1, 2, 7, 17, 23, 24]), min_size=batch, max_size=batch)),
        "query_start": draw(st.none() | st.lists(st.integers(-3, 20), min_size=batch, max_size=batch)),
        "sm_scale": draw(st.sampled_from([None, 0.3, -1.0, 2.5])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 30.0])),
        "alibi": draw(optional) is True,
        "window": draw(st.sampled_from([None, None, 1, 2, 5, 24, 1000])),
        "starts": draw(st.none() | st.lists(st.integers(0, 24), min_size=batch, max_size=batch)),
        "sinks": draw(optional) is True,
        "rotate": draw(optional) is True,
        "value_dim": draw(st.sampled_from([16, 32])),
        "seed": draw(st.integers(0, 999)),
    }


def filled(lengths: list[int], heads: int, dim: int, capacity: int, seed: int = 0, **options: Any) -> KVCache:
    """A cache with so many random tokens in each sequence."""
    generator = torch.Generator().manual_seed(seed)
    options = {"keys": "fp16", "values": "fp16"} | options
    cache = KVCache(len(lengths), heads, dim, capacity, **options)
    k = torch.randn(len(lengths), heads, capacity, dim, generator=generator)
    v = torch.randn(len(lengths), heads, capacity, options.get("value_dim") or dim, generator=generator)
    cache.append(k, v, torch.tensor(lengths, dtype=torch.int32))
    return cache


def with_loops(q: torch.Tensor, cache: KVCache, p: dict[str, Any]) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """What the loops say, and the arguments that ask the library for the same."""
    q_heads, dim = q.shape[1], q.shape[3]
    k, v = cache.dequantized()  # rotated back: what attention is to compute, whatever is stored
    slopes = alibi_slopes(q_heads) if p["alibi"] else None
    sinks = [0.7 * h - 1 for h in range(q_heads)] if p["sinks"] else None
    lengths = cache.lengths.tolist()
    starts = p["query_start"] if p["query_start"] is not None else [n - q.shape[2] for n in lengths]
    expected = by_loops(
        *(q.double(), k.double(), v.double(), lengths, starts),
        sm_scale=p["sm_scale"] or dim**-0.5,
        softcap=p["softcap"],
        slopes=slopes,
        window=p["window"],
        starts=p["starts"],
        sinks=sinks,
    )
    arguments = {
        "sm_scale": p["sm_scale"],
        "softcap": p["softcap"],
        "alibi_slopes": None if slopes is None else torch.tensor(slopes),
        "window": p["window"],
        "starts": None if p["starts"] is None else torch.tensor(p["starts"], dtype=torch.int32),
        "query_start": None if p["query_start"] is None else torch.tensor(p["query_start"], dtype=torch.int32),
        "sinks": None if sinks is None else torch.tensor(sinks),
    }
    return expected, arguments


@settings(max_examples=40)
@given(p=problems())
def test_the_reference_is_the_formula(p: dict[str, Any]) -> None:
    q_heads, kv_heads = p["heads"]
    cache = filled(
        p["lengths"], kv_heads, 16, p["capacity"], p["seed"], rotate_keys=p["rotate"], keys="int8", value_dim=p["value_dim"]
    )
    q = torch.randn(p["batch"], q_heads, p["queries"], 16, generator=torch.Generator().manual_seed(p["seed"])).double()
    (out, lse), arguments = with_loops(q, cache, p)
    for impl, close in (("reference", 1e-5), ("cpu", 1e-4)):
        got, got_lse = decode_attention(q, cache, return_lse=True, impl=impl, **arguments)
        assert got.dtype is torch.float64
        assert torch.equal(got_lse == -math.inf, lse == -math.inf)
        assert not got[lse == -math.inf].any()
        torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=close)
        torch.testing.assert_close(got, out, rtol=close, atol=close)


BASE: dict[str, Any] = {
    "sm_scale": None,
    "softcap": None,
    "alibi": False,
    "window": None,
    "starts": None,
    "sinks": False,
    "query_start": None,
}


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_every_ratio_of_heads(group: int, kv_heads: int) -> None:
    cache = filled([5, 0, 1], kv_heads, 16, 8)
    q = torch.randn(3, group * kv_heads, 2, 16).double()
    (out, lse), arguments = with_loops(q, cache, BASE)
    got, got_lse = decode_attention(q, cache, return_lse=True, impl="reference", **arguments)
    torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-6, atol=1e-6)


def test_a_decode_row_is_the_last_row_of_all_rows() -> None:
    """Query i alone, over a cache of i + 1 tokens, sees what it sees among all queries."""
    cache = filled([12], 2, 16, 12)
    q = torch.randn(1, 4, 12, 16).double()
    options = {"alibi_slopes": torch.tensor(alibi_slopes(4)), "window": 5, "softcap": 3.0, "sinks": torch.randn(4)}
    whole = decode_attention(q, cache, impl="reference", **options)
    for i in reversed(range(12)):
        cache.crop(i + 1)
        row = decode_attention(q[:, :, i : i + 1], cache, impl="reference", **options)
        torch.testing.assert_close(row, whole[:, :, i : i + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_very_low_scores_are_scores(impl: str) -> None:
    """Logits of -5e5 beat nothing, and are beaten by nothing that is masked."""
    cache = KVCache(1, 1, 16, 32, keys="fp16", values="fp16")
    cache.append(torch.full((1, 1, 4, 16), -100.0), torch.arange(64.0).view(1, 1, 4, 16))
    q = torch.full((1, 1, 1, 16), 312.5)
    out, lse = decode_attention(q, cache, sm_scale=1.0, return_lse=True, impl=impl)
    torch.testing.assert_close(out[0, 0, 0], torch.arange(64.0).view(4, 16).mean(0))
    assert lse.item() == pytest.approx(-5e5, rel=1e-5)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4), torch.full((4,), -math.inf)], ids=["plain", "sinks", "no sinks"])
def test_an_empty_sequence_gives_zero_and_minus_infinity(impl: str, sinks: torch.Tensor | None) -> None:
    cache = filled([0, 3], 2, 16, 8)
    out, lse = decode_attention(torch.randn(2, 4, 2, 16), cache, return_lse=True, sinks=sinks, impl=impl)
    assert torch.equal(out[0], torch.zeros_like(out[0]))  # not NaN, which any() would take for something
    assert (lse[0] == -math.inf).all()
    assert lse[1].isfinite().all()
    assert out[1].isfinite().all()
    assert out[1].any()


@pytest.mark.parametrize("keys", [k for k, f in KV_FORMATS.items() if f.is_quantized])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_nothing_behind_a_length_is_seen(keys: str, impl: str) -> None:
    dim = head_dim(keys)
    cache = filled([35, 0, 64], 2, dim, 64, keys=keys, values="int4")
    q = torch.randn(3, 4, 2, dim)
    before = decode_attention(q, cache, return_lse=True, impl=impl)
    block = cache.keys.format.token_block or 1
    for plane in (cache.keys, cache.values):
        every = plane.format.token_block or 1
        for t in (plane.codes, plane.scales, plane.offsets):
            if t is None or t.ndim == 1:
                continue
            step = t.shape[1 if t.ndim == 2 else 2] * every // 64  # rows of a token
            for b, n in ((0, 35), (1, 0)):
                first = n // every * every * step // every if t is plane.codes else n // every
                junk = t[b] if t.ndim == 2 else t[b].transpose(0, 1)
                junk[first:] = torch.nan if t.is_floating_point() else 0x7F
    if cache.keys.tail is not None:
        cache.keys.tail[0, :, 35 % block :] = torch.nan
        cache.keys.tail[1:] = torch.nan
    after = decode_attention(q, cache, return_lse=True, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_queries_by_blocks_are_queries_at_once(impl: str) -> None:
    count = 2 * QUERY_BLOCK + 3
    cache = filled([count + 10, count - 5], 1, 16, count + 10)
    q = torch.randn(2, 2, count, 16).double()
    slopes = torch.tensor([0.1, 0.02])
    got, lse = decode_attention(q, cache, window=40, alibi_slopes=slopes, return_lse=True, impl=impl)
    options = AttentionOptions(0.25, alibi_slopes=slopes, window=40)
    k, v = (x.double() for x in cache.dequantized())
    expected, expected_lse = reference.attend(q, k, v, cache.lengths, cache.lengths - count, options)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------- merging


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 20), max_size=4), seed=st.integers(0, 999), sinks=st.booleans(), length=st.integers(0, 20))
def test_parts_merge_to_the_whole(cuts: list[int], seed: int, sinks: bool, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, t, 16, generator=generator).double() for h, t in ((4, 3), (2, 20), (2, 20)))
    lengths, start = torch.tensor([length, 20]), torch.tensor([length - 3, 17])
    logits = torch.randn(4, generator=generator) if sinks else None
    whole, lse = reference.attend(q, k, v, lengths, start, AttentionOptions(0.25, sinks=logits))
    parts = []
    for lo, hi in zip([0, *sorted(cuts)], [*sorted(cuts), 20], strict=True):
        part = (lengths - lo).clamp(0, hi - lo)
        parts.append(reference.attend(q, k[:, :, lo:hi], v[:, :, lo:hi], part, start - lo, AttentionOptions(0.25)))
    got, got_lse = merge_states([o for o, _ in parts], [part.float() for _, part in parts], logits)
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_merging_one_part_changes_nothing() -> None:
    out, lse = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 1)
    got, got_lse = merge_states([out], [lse])
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)


def test_a_sink_is_applied_once_and_is_not_part_of_lse() -> None:
    out, lse = torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1)
    got, got_lse = merge_states([out, out], [lse, lse], torch.tensor([math.log(2), -math.inf]))
    torch.testing.assert_close(got[0, :, 0, 0], torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(got_lse, lse + math.log(2))


def test_parts_without_keys_count_for_nothing() -> None:
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    got, got_lse = merge_states([nothing[0], out, nothing[0]], [nothing[1], lse, nothing[1]])
    torch.testing.assert_close(got, out)
    torch.testing.assert_close(got_lse, lse)
    empty, empty_lse = merge_states([nothing[0]] * 2, [nothing[1]] * 2, torch.zeros(2))
    assert not empty.any()
    assert (empty_lse == -math.inf).all()


def test_the_output_of_a_part_without_keys_is_not_read() -> None:
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    got, _ = merge_states([out, torch.full_like(out, torch.nan)], [lse, torch.full_like(lse, -math.inf)])
    torch.testing.assert_close(got, out)


# ---------------------------------------------------------------------------------------------------------------- prefill

PREFILL: list[dict[str, Any]] = [
    {},
    {"softcap": 2.0},
    {"alibi_slopes": torch.tensor(alibi_slopes(6))},
    {"window": 1},
    {"window": 7},
    {"window": 500},
    {"sinks": torch.linspace(-2, 2, 6)},
    {"starts": torch.tensor([0, 3, 9], dtype=torch.int32)},
    {"starts": torch.tensor([0, 19, 30], dtype=torch.int32), "window": 9, "sinks": torch.linspace(-2, 2, 6), "softcap": 5.0},
]


@pytest.mark.parametrize("options", PREFILL, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("count", [1, 5, 16, 17])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_prefill_is_decode_when_the_cache_is_exact(options: dict[str, Any], count: int, impl: str) -> None:
    """fp16 keys and values in an fp16 cache: the exact chunk and the packed past together are the whole cache."""
    generator = torch.Generator().manual_seed(count)
    past = [0, 20, 33]
    cache = KVCache(3, 2, 16, 33 + count, keys="fp16", values="fp16")
    k, v = (torch.randn(3, 2, 33, 16, generator=generator).half() for _ in range(2))
    cache.append(k, v, torch.tensor(past))
    new_k, new_v = (torch.randn(3, 2, count, 16, generator=generator).half() for _ in range(2))
    cache.append(new_k, new_v)
    q = torch.randn(3, 6, count, 16, generator=generator).double()
    a = prefill_attention(q, new_k, new_v, cache, return_lse=True, impl=impl, **options)
    b = decode_attention(q, cache, return_lse=True, impl="reference", **options)
    for got, expected in zip(a, b, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_latents_are_keys_and_values_of_every_head(impl: str) -> None:
    """MLA: a step and a prompt over latents, against the formula over keys and values that all heads have expanded."""
    rank, rotary, own, value_dim = 32, 16, 24, 20
    cache = KVCache(2, 1, rotary, 64, keys="int4", values="int8_g32", value_dim=rank)
    keys, values = torch.randn(6, rank, own).double(), torch.randn(6, rank, value_dim).double()
    heads, starts, new = LatentHeads(keys, values), torch.tensor([0, 3]), torch.randn(2, 1, 7, rank + rotary)
    cache.append(torch.randn(2, 1, 30, rotary), torch.randn(2, 1, 30, rank))
    past = [x[:, :, :30].double() for x in cache.dequantized()]
    q, options = torch.randn(2, 6, 7, own + rotary).double(), {"sm_scale": 0.2, "starts": starts, "impl": impl}

    def expanded(rotary_keys: torch.Tensor, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([latents @ keys, rotary_keys.expand(-1, 6, -1, -1)], -1), latents @ values

    latents, rotary_keys = new.double().split([rank, rotary], -1)
    cache.append(rotary_keys, latents)
    prompt = prefill_attention(q, *expanded(rotary_keys, latents), cache, latent_heads=heads, **options)
    step = heads.expanded(decode_attention(heads.absorbed(q), cache, latent=True, **options))
    exact = [torch.cat(pair, 2) for pair in zip(past, (rotary_keys, latents), strict=True)]
    stored = [x[:, :, :37].double() for x in cache.dequantized()]
    for result, sides in ((prompt, exact), (step, stored)):
        where = torch.tensor([37, 37]), torch.tensor([30, 30]), AttentionOptions(0.2, starts=starts)
        torch.testing.assert_close(result, reference.attend(q, *expanded(*sides), *where)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_long_chunk_is_attended_by_blocks_of_queries(impl: str) -> None:
    assert QUERY_BLOCK < 150
    test_prefill_is_decode_when_the_cache_is_exact(PREFILL[-1], 150, impl)


@pytest.mark.parametrize("keys", ["int8", "int4_channel", "int4"])
def test_prefill_over_an_empty_past_is_exact(keys: str) -> None:
    cache = KVCache(2, 2, 64, 64, keys=keys, values="int4", rotate_keys=True)
    k, v = torch.randn(2, 2, 40, 64), torch.randn(2, 2, 40, 64)
    cache.append(k, v)
    q = torch.randn(2, 4, 40, 64).double()
    got = prefill_attention(q, k, v, cache)
    mask = torch.ones(40, 40).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1), attn_mask=mask
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_prefill_reads_the_past_as_it_is_stored() -> None:
    cache = KVCache(1, 1, 64, 64, keys="int4", values="int4")
    past, new = torch.randn(1, 1, 20, 64), torch.randn(1, 1, 6, 64)
    cache.append(past, past)
    held = [x[:, :, :20] for x in cache.dequantized()]
    cache.append(new, new)
    q = torch.randn(1, 1, 6, 64).double()
    k, v = (torch.cat([x, new], 2).double() for x in held)
    expected, _ = reference.attend(q, k, v, torch.tensor([26]), torch.tensor([20]), AttentionOptions(0.125))
    torch.testing.assert_close(prefill_attention(q, new, new, cache), expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- rotation and RoPE


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (80, 16), (96, 32), (128, 128), (256, 256), (48, 16)])
def test_rotation_is_its_own_inverse_and_keeps_products(dim: int, size: int) -> None:
    assert block_size(dim) == size
    a, b = torch.randn(2, 5, dim).double()
    torch.testing.assert_close(rotate(rotate(a)), a)
    torch.testing.assert_close(rotate(a) @ rotate(b).mT, a @ b.mT)
    h = rotate(torch.eye(size, dtype=torch.float64))
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)], dtype=torch.float64)
    torch.testing.assert_close(h, signs / math.sqrt(size))


def test_rotation_spreads_an_outlier() -> None:
    x = torch.zeros(64)
    x[3] = 8.0
    torch.testing.assert_close(rotate(x).abs(), torch.ones(64))


def test_rope_turns_pairs_by_an_angle() -> None:
    x, positions = torch.randn(2, 3, 7, 16).double(), torch.tensor([0, 1, 2, 5, 100, 1000, 8191])
    cos, sin = rope_tables(positions, 16, 500.0)
    got = apply_rope(x, cos.double(), sin.double())
    for t, p in enumerate(positions.tolist()):
        for i in range(8):
            angle = p * 500.0 ** (-2 * i / 16)
            pair = torch.complex(x[:, :, t, i], x[:, :, t, i + 8]) * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(got[:, :, t, i], pair.real, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[:, :, t, i + 8], pair.imag, rtol=1e-5, atol=1e-5)


def test_rope_of_neighbors_and_of_a_part() -> None:
    """The same pairs in another order; elements behind them stay."""
    x = torch.randn(2, 3, 7, 20).double()
    by = tuple(t.double() for t in rope_tables(torch.arange(7), 12))
    order = torch.tensor([*range(0, 12, 2), *range(1, 12, 2), *range(12, 20)])
    for got, at in ((apply_rope(x, *by, interleaved=True), order), (apply_rope(x, *by), torch.arange(20))):
        assert torch.equal(got[..., at[:12]], apply_rope(x[..., at[:12]], *by))
        assert torch.equal(got[..., 12:], x[..., 12:])


PAST, CHUNK = (0, 1, 20, 31, 32, 33), (17, 32, 100)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("keys", [name for name, fmt in KV_FORMATS.items() if fmt.granularity != "tensor"])
def test_prefill_after_any_past(keys: str, impl: str, paged: bool, window: int | None) -> None:
    """The past as it is stored, whatever the chunk's append has done to a tail or a block since; the chunk exactly."""
    dim = head_dim(keys)
    fmt = KV_FORMATS[keys]
    values = "int4" if fmt.token_block else keys
    kind: type[KVCache] = PagedKVCache if paged else KVCache
    for past, count in itertools.product(PAST, CHUNK):
        k, v = torch.randn(2, 1, 2, past + count, dim)
        q = torch.randn(1, 4, count, dim)
        cache = kind(1, 2, dim, 160, keys=keys, values=values)
        cache.append(k[:, :, :past], v[:, :, :past])
        cache.append(k[:, :, past:], v[:, :, past:])
        stored_k, stored_v = cache.dequantized()
        exact_k = torch.cat([stored_k[:, :, :past], k[:, :, past:]], 2).double()
        exact_v = torch.cat([stored_v[:, :, :past], v[:, :, past:]], 2).double()
        whole = torch.tensor([past + count], dtype=torch.int32)
        start = torch.tensor([past], dtype=torch.int32)
        expected, _ = reference.attend(q.double(), exact_k, exact_v, whole, start, AttentionOptions(0.125, window=window))
        out = prefill_attention(q, k[:, :, past:], v[:, :, past:], cache, sm_scale=0.125, window=window, impl=impl)
        assert isinstance(out, torch.Tensor)
        assert float((out - expected).abs().max()) < 1e-5, (past, count)


def test_sinks_of_minus_infinity_over_nothing() -> None:
    out = torch.randn(1, 2, 1, 8)
    lse = torch.tensor([[[-torch.inf], [0.0]]])
    merged, _ = merge_states([out], [lse], torch.full((2,), -torch.inf))
    assert not merged[:, 0].any()
    torch.testing.assert_close(merged[:, 1], out[:, 1])
