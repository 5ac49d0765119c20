"""Attention's tuned kernel, emulated: calls of the GPU's suite in small, against float64, with the same bits in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulation import EARLY, ORDERS, Refused, attend, run
from gpu_cases import Call, Case, Variant, build, same_bits, simple, some_of, with_scale

import halfbyte as hb
from accuracy import attention_errors, lse_bound
from halfbyte.kv_buffer import DecodeCall
from halfbyte.plans import decode_attention, decode_shapes
from halfbyte.reference.attention import read
from halfbyte.reference.hadamard import rotate
from varlen_cases import BAD_BOUNDS, MIXED, Batch, batch_of

LATENT: dict[str, Any] = {"dim": 64, "value_dim": 512, "latent": True}
ROTATED, STARTS, BIASED = frozenset({"rotate"}), frozenset({"starts"}), frozenset({"window", "alibi", "softcap"})
CASES = {
    "int4": Case(Variant("int4", "int4", group=8), 1, (300, 7)),
    "int4 groups, 5 heads": Case(Variant("int4_g32", "int4_g64", group=5, dim=64), 2, (150, 129), slack=7),
    "int2": Case(Variant("int2", "int2", group=8), 1, (300, 7)),
    "int2 groups, 5 heads": Case(Variant("int2_g32", "int2_g64", group=5, options=frozenset({"rotate"})), 2, (150, 129), slack=7),
    "int2 groups, pages, 4 queries": Case(Variant("int2_g64", "int2_g32", queries=4, page=16, options=BIASED), 1, (130, 47)),
    "int2 heads of 256": Case(Variant("int2_g32", "int2_g32", dim=256, group=2), 1, (100, 33)),
    "int4 over int2, 16 heads": Case(Variant("int4", "int2", group=16), 1, (200, 3)),
    "int2, tokens first, two heads": Case(Variant("int2", "int2", layout="BTHD", group=4), 2, (200, 64)),
    "int2 groups, 64 rows, pages": Case(Variant("int2_g32", "int2", group=8, queries=8, page=64), 1, (300, 7)),
    "int2 groups, 128 rows, tokens first": Case(Variant("int2", "int2_g32", group=16, queries=8, layout="BTHD"), 2, (200, 0)),
    "int8 over int4, pages": Case(Variant("int8", "int4", page=16), 2, (130, 0, 47)),
    "int8, 16 heads, sums in the ring": Case(Variant("int8", "int8", group=16), 1, (700, 3)),
    "fp8, 4 queries": Case(Variant("fp8", "fp8", queries=4), 1, (260, 40), early=True),
    "bf16, MHA, sinks": Case(Variant("bf16", "bf16", group=1, options=frozenset({"sinks"})), 3, (100, 65)),
    "tokens first, two heads": Case(Variant("int4", "int4", layout="BTHD", group=4), 2, (200, 64)),
    "window, alibi, softcap": Case(Variant("int8_g64", "int4_g32", group=2, options=BIASED), 1, (400,)),
    "192 wide, starts": Case(Variant("int8", "fp8", dim=192, group=3, options=STARTS), 1, (120, 31)),
    "one scale, 32 heads": Case(Variant("int8_tensor", "int8_tensor", group=32), 1, (200,)),
    "channels": Case(Variant("int4_channel", "int4_g32", group=8), 1, (300, 64)),
    "channels of bytes, pages": Case(Variant("int8_channel", "int4", page=64, group=3, queries=2), 2, (130, 0, 31)),
    "channels, 16 heads, starts": Case(Variant("int4_channel", "int8", dim=64, group=16, queries=2, options=STARTS), 1, (95, 33)),
    "channels, tokens first, window": Case(
        Variant("int8_channel", "fp8", dim=96, group=2, layout="BTHD", options=BIASED), 2, (200, 63)
    ),
    "a prompt over channels in pages": Case(Variant("int4_channel", "int4", group=4, queries=30, page=32), 1, (47, 130)),
    "64 rows": Case(Variant("int4", "int4", group=8, queries=8), 1, (300, 7)),
    "128 rows, tokens first, pages": Case(
        Variant("int4_g64", "int8_g32", group=16, queries=8, page=64, layout="BTHD"), 2, (290, 0)
    ),
    "48 heads, one scale, sinks": Case(Variant("fp8_tensor", "int8_tensor", group=48, options=frozenset({"sinks"})), 1, (200, 129)),
    "80 rows, window, alibi, softcap": Case(Variant("fp8", "int4_g32", group=5, queries=16, options=BIASED), 1, (400,)),
    "40 rows of 80, starts": Case(
        Variant("int8_token", "int8", dim=80, group=8, queries=5, options=STARTS), 1, (70, 300), early=True
    ),
    "a prompt, in blocks of 32 tokens": Case(
        Variant("int4_g32", "int8", group=4, queries=70, options=frozenset({"window", "starts"})), 1, (150, 90)
    ),
    "a prompt in pages, in blocks of 25 tokens": Case(Variant("int8", "int4", group=5, queries=30, page=16), 1, (47, 130)),
    "rotated int4": Case(Variant("int4", "int4", group=8, options=ROTATED), 1, (300, 7)),
    "rotated groups, 5 heads": Case(Variant("int4_g32", "int4", group=5, dim=64, options=ROTATED), 2, (150, 129)),
    "rotated in blocks of 32, pages": Case(Variant("int4", "int8", dim=96, page=16, queries=2, options=ROTATED), 2, (130, 0, 47)),
    "rotated in blocks of 16": Case(
        Variant("fp8", "int8", dim=80, group=7, options=frozenset({"rotate", "softcap"})), 1, (120, 31)
    ),
    "rotated, tokens first, two heads": Case(Variant("int4", "int4", layout="BTHD", group=4, options=ROTATED), 2, (200, 64)),
    "rotated, 256 wide": Case(Variant("int4", "int4", dim=256, group=16, options=ROTATED), 1, (120, 31)),
    "512 wide": Case(Variant("int8", "int8", dim=512, group=8), 1, (300, 7)),
    "512 wide, rotated, pages": Case(Variant("int4", "int4", dim=512, group=8, page=16, options=ROTATED), 2, (130, 0, 47)),
    "512 wide, window, softcap": Case(Variant("fp8", "int4", dim=512, group=4, queries=2, options=BIASED), 1, (130,)),
    "512 wide, channels": Case(Variant("int8_channel", "int8", dim=512, group=8), 1, (130, 31)),
    "512 wide, groups": Case(Variant("int4_g32", "int4_g32", dim=512, group=8), 1, (130, 31)),
    "512 wide, 16 bits": Case(Variant("bf16", "bf16", dim=512, group=8), 1, (70, 31)),
    "rotated 16 bits": Case(Variant("bf16", "bf16", group=2, options=ROTATED), 1, (100, 65)),
    "rotated channels": Case(Variant("int4_channel", "int4_g32", group=8, options=ROTATED), 1, (300, 64)),
    "rotated, 64 rows": Case(Variant("int4", "int4", group=8, queries=8, options=ROTATED), 1, (300, 7)),
    "rotated groups, 40 rows, pages": Case(
        Variant("int4_g32", "int8", dim=64, group=8, queries=5, page=64, options=ROTATED), 1, (70, 300)
    ),
    "rotated, 80 rows of bytes": Case(
        Variant("int8_token", "int8", dim=96, group=5, queries=16, options=frozenset({"rotate", "alibi"})), 1, (150,)
    ),
    "a prompt over rotated keys": Case(Variant("int4", "int8", group=5, queries=30, page=16, options=ROTATED), 1, (47, 130)),
    "sinks and recent tokens": Case(Variant("int4", "int4", group=8, exact=(4, 16), options=ROTATED), 1, (300, 7)),
    "recent tokens of short sequences": Case(Variant("int4", "int8", group=2, exact=(4, 8)), 1, (0, 3, 9, 12, 13, 1)),
    "sinks alone, int2, tokens first, two heads": Case(
        Variant("int2", "int2", layout="BTHD", group=4, exact=(70, 0)), 2, (200, 64), slack=7
    ),
    "recent tokens, groups of int2, pages": Case(
        Variant("int2_g32", "int2_g32", group=8, page=16, exact=(0, 33)), 1, (150, 40), v_scale=1e-3
    ),
    "sinks and recent tokens, every option": Case(
        Variant("int2_g64", "int4_g32", group=5, queries=2, page=16, exact=(3, 45), options=BIASED), 1, (330, 47)
    ),
    "sinks and recent tokens in fp16, one scale, starts": Case(
        Variant("fp8_tensor", "int8_tensor", dim=80, group=7, dtype="float16", exact=(16, 100), options=STARTS),
        *(2, (250, 33)),
        early=True,
        v_scale=100.0,
    ),
    "recent tokens in fp16, 32 rows": Case(
        Variant("int8_token", "int4", dim=96, group=16, queries=2, dtype="float16", exact=(1, 20)), 1, (130, 5)
    ),
    "sinks and recent tokens, 256 wide": Case(Variant("int4_g64", "int2", dim=256, group=16, exact=(2, 37)), 1, (120, 31)),
    "a prompt over sinks and recent tokens": Case(
        Variant("int4", "int8", dim=64, group=5, queries=30, exact=(4, 21), options=frozenset({"rotate", "starts"})), 1, (47, 130)
    ),
    "a prompt over recent tokens in pages": Case(
        Variant("int8", "int4_g32", group=4, queries=20, page=16, exact=(0, 37), options=frozenset({"window", "alibi"})),
        1,
        (70, 24),
    ),
    "a prompt of 16 bits": Case(Variant("bf16", "bf16", group=1, queries=70), 2, (70, 100)),
    "latents, 16 heads": Case(Variant("int8", "int8", group=16, **LATENT), 1, (1300, 7)),
    "latents in pages, rotary keys in 16 bits": Case(Variant("bf16", "int4", group=10, page=16, **LATENT), 1, (130, 0, 47)),
    "latents, 128 heads": Case(Variant("fp8", "int8_tensor", group=128, **LATENT), 1, (70, 9), early=True, v_scale=100.0),
    "latents, every option": Case(Variant("int8", "int4", group=8, queries=3, options=BIASED, **LATENT), 1, (140, 31)),
    "latents, rotated keys, starts": Case(
        Variant("int4", "int2", group=12, dtype="float16", options=frozenset({"rotate", "starts"}), **LATENT), 1, (100, 9), slack=7
    ),
    "latents of 256 dims": Case(Variant("int8", "fp8", group=5, dim=32, value_dim=256, latent=True), 1, (90, 64)),
    "40 rows, many sequences": Case(Variant("int4", "int4", group=8, queries=5, batch=32), 2, tuple(range(0, 160, 5))),
}


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", CASES)
def test_attention_keeps_its_promise(name: str) -> None:
    call = build(CASES[name], "cpu")
    first = _attend(call, ORDERS[0])
    assert not call.wrong(*first)
    assert not EARLY, "the kernel before may still write lengths, queries, pages and tokens"
    assert all(map(same_bits, first, attend(call, ORDERS[1], backwards=True)))


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("sm_scale", [-0.1, 0.0])
def test_scores_of_any_sign(sm_scale: float, queries: int) -> None:
    """Few query rows and many: what multiplies scores may be negative, and zero beside masked tokens."""
    call = build(Case(Variant("int8_tensor", "int4", group=8, queries=queries), 1, (200,)), "cpu")
    call.options["sm_scale"] = sm_scale
    assert not call.wrong(*_attend(call, ORDERS[0]))


@pytest.mark.parametrize("num_sms", [1, 5, 20])
def test_programs_share_a_tail(num_sms: int) -> None:
    """Few programs, of which some take whole tails and tiles of others, and more programs than there are chunks."""
    call = build(Case(Variant("int4", "int8", group=4, batch=2, exact=(30, 200)), 1, (260, 100)), "cpu")
    assert not call.wrong(*_attend(call, ORDERS[0], num_sms))


@pytest.mark.parametrize("wild", [-1, -(2**31), 10**6, 2**31 - 1])
def test_no_length_leads_outside_of_a_tail(wild: int) -> None:
    case = Case(Variant("int4", "int8", page=16, batch=2, exact=(4, 20)), 1, (90, 40))
    clean, call = (build(case, "cpu") for _ in range(2))
    expected, expected_lse = _attend(clean, ORDERS[0])
    call.cache.lengths[1] = wild
    out, lse = _attend(call, ORDERS[0])
    out[1], lse[1] = expected[1], expected_lse[1]
    assert not clean.wrong(out, lse)


@pytest.mark.parametrize("small", [1e-30, 1e-6])
def test_small_values_beside_large_ones_in_a_tail(small: float) -> None:
    """The token that decides is a sink of nearly no size: what is small beside it is not lost to a scale of others."""
    call = build(Case(Variant("int8_tensor", "int4", group=8, exact=(2, 20)), 1, (90,), v_scale=small), "cpu")
    tails = call.cache.keys.tail, call.cache.values.tail
    assert tails[0] is not None
    assert tails[1] is not None
    tails[0][:, :, 1] = 0
    tails[1][:, :, 3] = 1e4
    tails[0][:, :, 3] = -50 * call.q[:, :1, 0]
    assert not call.wrong(*_attend(call, ORDERS[0]))


@pytest.mark.parametrize("keys", ["int8_channel", "int4_channel"])
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-14, 65504.0])
def test_scales_of_channels_at_their_limits(keys: str, scale: float) -> None:
    """And no keys at all: blocks of zeros, whose scales are as small."""
    k, v = torch.randn(2, 1, 2, 70, 128, generator=torch.Generator().manual_seed(1))
    q = torch.randn(1, 16, 1, 128, generator=torch.Generator().manual_seed(2))
    call = simple(k, v, (q / (scale * 127)).bfloat16(), keys, "int4")
    call.cache = hb.KVCache.from_buffers(with_scale(call.cache.keys, scale), call.cache.values, call.cache.lengths)
    assert not call.wrong(*_attend(call, ORDERS[0]))
    zeros = simple(k * 0, v, q.bfloat16(), keys, "int4")
    assert not zeros.wrong(*_attend(zeros, ORDERS[0]))


@pytest.mark.parametrize(("offset", "peaked"), [(0.0, 60.0), (-300.0, 1.0)])
@pytest.mark.parametrize(("keys", "rotated"), [("int8", False), ("fp16", False), ("int4_channel", False), ("int4", True)])
def test_lse_is_within_its_stated_bound(keys: str, rotated: bool, offset: float, peaked: float) -> None:
    """One key far above the others, and a large common part of all scores."""
    k, v = torch.randn(2, 1, 1, 100, 128, generator=torch.Generator().manual_seed(1))
    q = torch.randn(1, 8, 1, 128, generator=torch.Generator().manual_seed(2))
    q[..., 0], k[..., 0] = 8.0, offset
    k[:, :, 17, 1:] *= peaked
    call = simple(k, v, q.half(), keys, "int8")
    call.cache.rotate_keys, call.options["sm_scale"] = rotated, 1.0
    _, lse = _attend(call, ORDERS[0])
    stored = read(call.cache.keys, call.cache.lengths, None)[:, :, :100].double()
    multiplied = rotate(call.q.double()) if rotated else call.q.double()
    error = (lse.double() - (multiplied @ stored.mT).logsumexp(-1)).abs()
    assert (error <= lse_bound(multiplied, stored, 2**-11 if rotated else 0)).all()


@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_lse_over_latents_is_within_its_stated_bound(outlier: float) -> None:
    """One number of a query far above the others, which bytes round to its size."""
    call = build(Case(Variant("int8", "int4", group=16, batch=1, **LATENT), 1, (100,)), "cpu")
    call.q[..., 7] *= outlier
    _, lse = _attend(call, ORDERS[0])
    stored = torch.cat([read(side, call.cache.lengths, None)[:, :, :100] for side in (call.cache.values, call.cache.keys)], -1)
    q, stored = call.q.double() * call.options["sm_scale"], stored.double()
    error = (lse.double() - (q @ stored.mT).logsumexp(-1)).abs()
    rounding = 2**-14 * q.abs().amax(-1) * stored.abs().sum(-1).max()
    assert (error <= lse_bound(q, stored) + rounding).all()


@pytest.mark.parametrize("heads", [16, 32])
def test_maxima_over_latents_move_behind_the_first_tile(heads: int) -> None:
    """Scores grow by far in later tiles: for some rows or for all, and back."""
    call = build(Case(Variant("int8", "int8", group=heads, batch=1, **LATENT), 1, (600,)), "cpu")
    scales = call.cache.keys.scales
    assert scales is not None
    scales[:, :, 200:210] *= 30
    scales[:, :, 400:] *= 90
    assert not call.wrong(*_attend(call, ORDERS[0], 1))


@pytest.mark.parametrize("hidden", [float("inf"), 1e30])
def test_a_token_of_a_tail_is_in_no_other_score(hidden: float) -> None:
    """Not of tokens behind it, where `starts` hides it, and not of those before, for a query that must not see it."""
    k, v = torch.randn(2, 1, 2, 40, 128, generator=torch.Generator().manual_seed(1))
    q = torch.randn(1, 16, 2, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    call = simple(k, v, q, "int8_channel", "int4", starts=torch.tensor([36], dtype=torch.int32))
    assert call.cache.keys.tail is not None
    call.cache.keys.tail[:, :, 34 % 32] = hidden
    assert not call.wrong(*_attend(call, ORDERS[0]))
    plain, other = (simple(k, v, q, "int8_channel", "int4") for _ in range(2))
    assert other.cache.keys.tail is not None
    other.cache.keys.tail[:, :, 39 % 32] = hidden
    first, second = _attend(plain, ORDERS[0]), _attend(other, ORDERS[0])
    assert all(same_bits(a[:, :, 0], b[:, :, 0]) for a, b in zip(first, second, strict=True))


INVARIANT = {
    "int8, pages": Case(Variant("int8", "int8", group=4, page=16), 2, (700, 7, 0, 1000)),
    "int4": Case(Variant("int4", "int4", group=8), 1, (900, 130)),
    "groups, 2 queries, every option": Case(
        Variant("int8", "int4_g32", group=5, queries=2, page=64, options=frozenset({"window", "alibi", "softcap"})), 1, (600, 77)
    ),
    "channels": Case(Variant("int4_channel", "int8", dim=64, group=4), 2, (500, 95)),
    "sinks and recent tokens": Case(Variant("int4", "int8", group=4, exact=(4, 64)), 2, (600, 3, 200)),
    "tokens first, two heads, starts, sinks": Case(
        Variant("int4", "int4", layout="BTHD", group=4, options=frozenset({"starts", "sinks"})), 2, (500, 64)
    ),
    "16 bits, rotated, 16 heads": Case(Variant("bf16", "bf16", group=16, options=ROTATED), 1, (400, 65)),
    "a prompt in blocks, one scale": Case(Variant("fp8_tensor", "int2", group=8, queries=9), 1, (300, 40)),
}


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a few hundred tokens have several splits, and groups of them."""
    monkeypatch.setattr(decode_shapes, "FIXED_SPLIT", 256)
    monkeypatch.setattr(decode_shapes, "FIXED_FANIN", 2)


@pytest.mark.slow(sample=4)
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("name", INVARIANT)
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    """By any number of programs, alone, in another order, with more capacity: the same bits."""
    call = build(INVARIANT[name], "cpu")
    whole = attend(call, ORDERS[0], deterministic_batch=True)
    assert not call.wrong(*whole)
    assert all(map(same_bits, attend(call, ORDERS[1], 7, True, True), whole))
    rows = list(range(len(call.cache.lengths)))
    for some in (rows[::-1], *([row] for row in rows)):
        found = attend(some_of(call, some, slack=300), ORDERS[1], 2 + len(some), deterministic_batch=True)
        assert all(same_bits(a, b[some]) for a, b in zip(found, whole, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    ("keys", "values", "given"),
    [
        ("int8", "int4_g32", {}),
        ("int4", "int4", {"window": 300}),
        ("int8", "fp8", {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    ],
    ids=["plain", "window", "softcap"],
)
def test_a_token_does_not_depend_on_its_chunk(keys: str, values: str, given: dict[str, Any]) -> None:
    """A prompt's last tokens, in one chunk with others, next to a decode, and alone, in other pages: the same bits."""
    prompt, decode = (6, 515), (1, 300)

    def attended(sequences: list[tuple[int, int]], num_sms: int, page: int = 16, cut: slice = slice(None), most: int = 0) -> Any:
        batch = batch_of(sequences, keys, values, dtype=torch.bfloat16, page=page, cut=cut)
        call = batch.call("gluon")._replace(deterministic_batch=True, max_query_len=max(most, batch.most))
        call = call._replace(options=call.options._replace(**given))
        return [x[0].transpose(0, 1) for x in run(call, ORDERS[0], num_sms)]

    whole = attended([prompt, decode], 3)
    for part, rows in ((slice(0, 1), slice(0, 6)), (slice(1, 2), slice(6, 7))):
        for most in (1, 2):  # a decode as such, and as a block
            found = attended([prompt, decode], 5, 64, part, most)
            assert all(same_bits(a, b[rows]) for a, b in zip(found, whole, strict=True))
    batch = batch_of([prompt], keys, values, dtype=torch.bfloat16)
    for last in (511, 512, 513):
        at, call = last - 510, batch.call("gluon")
        call = call._replace(
            q=call.q[:, :, at : at + 1],
            lengths=torch.tensor([last], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            max_query_len=1,
            deterministic_batch=True,
            options=call.options._replace(**given),
        )
        alone = run(call, ORDERS[1], 4)
        assert all(same_bits(a[0, :, 0], b[at]) for a, b in zip(alone, whole, strict=True))


def ragged_call(deterministic_batch: bool = False, **options: Any) -> tuple[Batch, DecodeCall]:
    """Prompts, decodes and padding, over 8 query heads."""
    batch = batch_of(MIXED, dtype=torch.bfloat16, heads=(8, 2), padding=21)
    call = batch.call("gluon")._replace(deterministic_batch=deterministic_batch)
    return batch, call._replace(options=call.options._replace(**options))


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("name", ["plain", "window, sinks", "starts, ends", "decodes"])
def test_ragged_queries(name: str) -> None:
    """Within the promise and with the same bits in any order, in blocks of 32, 16 or one token."""
    sinks, lengths = torch.linspace(-1, 1, 8), torch.tensor([n for _, n in MIXED])
    given: dict[str, Any] = {
        "window, sinks": {"window": 33, "sinks": sinks},
        "starts, ends": {"starts": (lengths // 3).int(), "ends": (lengths - 1).int()},
    }.get(name, {})
    batch, call = ragged_call(**given)
    if name == "decodes":  # of which the host knows that there are no others, and not how many
        batch = batch_of([(1, 40), (0, 0), (1, 200), (1, 1)], dtype=torch.bfloat16, heads=(8, 2), padding=2)
        call = batch.call("gluon")
    results = [run(call, order, num_sms, num_sms == 2) for order, num_sms in ((ORDERS[0], 2), (ORDERS[1], 2), (ORDERS[1], 11))]
    assert all(map(same_bits, *results[:2]))
    truth, base = (batch.truth(dtype, **given) for dtype in (torch.float64, torch.bfloat16))
    for out, lse in results:
        assert not attention_errors(out[0].transpose(0, 1), lse[0].t(), truth, base)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic_batch", [False, True])
def test_blocks_in_several_launches(deterministic_batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four blocks each, in place of 4,096; with `deterministic_batch` the bits do not depend on it."""
    batch, call = ragged_call(deterministic_batch)
    whole = run(call, ORDERS[0])
    monkeypatch.setattr(decode_attention, "MOST_SEQUENCES", 4)
    parts = run(call, ORDERS[1])
    if deterministic_batch:
        assert all(map(same_bits, whole, parts))
    truth, base = batch.truth(torch.float64), batch.truth(torch.bfloat16)
    assert not attention_errors(parts[0][0].transpose(0, 1), parts[1][0].t(), truth, base)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("bounds", BAD_BOUNDS, ids=str)
def test_bounds_that_no_engine_makes_reach_no_other_memory(bounds: list[int]) -> None:
    """The machine stops at an address outside of a tensor."""
    _, call = ragged_call()
    out, _ = run(call._replace(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32)), ORDERS[0])
    assert out.shape == (1, 8, 82, 64)


def _attend(call: Call, order: object, num_sms: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        return attend(call, order, num_sms)  # type: ignore[arg-type]
    except Refused as why:
        pytest.fail(f"the tuned kernel does not take this case: {why}")
