"""The cpu level of decode attention against float64, within the error of eager PyTorch in the query's dtype."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accuracy import attention_errors
from allocated import Allocated
from halfbyte.cpu import attention_codes, threads
from halfbyte.cpu import decode_attention as cpu
from halfbyte.formats import KV_FORMATS, key_format
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.quantize import quantize
from sizes import head_dim

HEADS = [(1, 1), (8, 1), (8, 8), (32, 8), (6, 2), (7, 1)]
VALUE_FORMATS = [name for name, f in KV_FORMATS.items() if not f.token_block]
QUANTIZED = [name for name in VALUE_FORMATS if KV_FORMATS[name].is_quantized]
_TOKEN_AXIS = {"token": 1, "head": 2, "group": 2}


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loops of `compiled` do not apply, both are torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(attention_codes, "compiler_works", lambda: False)
    else:
        pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")


@dataclass
class Case:
    """One call, and what built it."""

    q: torch.Tensor
    keys: KVBuffer
    values: KVBuffer
    lengths: torch.Tensor
    query_start: torch.Tensor
    options: AttentionOptions
    page_table: torch.Tensor | None = None
    latent: bool = False

    def run(self, block: int = cpu.BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
        with mock.patch.object(cpu, "BLOCK", block):
            return cpu.decode_attention(self.call())

    def call(self) -> DecodeCall:
        memory = self.keys, self.values, self.lengths, self.query_start, self.page_table
        return DecodeCall(self.q, *memory, self.options, latent=self.latent)

    def attend(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The formula in one dtype over the dequantized cache: the truth in float64, eager PyTorch's answer otherwise.

        Rotated keys are rotated back: both know of no rotation.
        """
        k, v = (reference.read(side, self.lengths, self.page_table) for side in (self.keys, self.values))
        k = rotate(k.double()) if self.options.rotate_keys else k
        k = torch.cat([v, k], -1) if self.latent else k
        return reference.attend(self.q.to(dtype), k.to(dtype), v.to(dtype), self.lengths, self.query_start, self.options)

    def check(self, block: int = cpu.BLOCK) -> None:
        """Within the promise."""
        out, lse = self.run(block)
        assert out.dtype is self.q.dtype
        assert not attention_errors(out, lse, self.attend(torch.float64), self.attend(self.q.dtype))


def in_window(lengths: torch.Tensor, capacity: int, sinks: int, recent: int) -> torch.Tensor:
    """Whether tokens are among the first or the last of their sequence, [B, T]."""
    token, end = torch.arange(capacity), lengths.view(-1, 1)
    return (token < end) & ((token < sinks) | (token >= end - recent))


def store(
    x: torch.Tensor,
    name: str,
    lengths: torch.Tensor,
    *,
    poison: bool = True,
    strided: bool = False,
    exact: tuple[int, int] = (0, 0),
) -> KVBuffer:
    """A plane of x [B, H, T, D]; everything that no token owns holds NaN, or any code. `strided`: as [B, T, H, D] inside.

    exact: sink tokens and recent tokens in 16 bits.
    """
    fmt = key_format(name)
    stored = quantize(x, fmt)
    codes, scales, offsets, tail = stored.codes, stored.scales, stored.offsets, None
    beyond = torch.arange(x.shape[2]) >= lengths.view(-1, 1)  # [B, T]
    if fmt.token_block:
        block = fmt.token_block
        flushed = (lengths // block * block).view(-1, 1, 1, 1)
        rows = flushed + torch.arange(block).view(1, 1, -1, 1)
        tail = x.half().gather(2, rows.clamp_max(x.shape[2] - 1).expand(-1, x.shape[1], -1, x.shape[3]))
        tail = tail.masked_fill(rows >= lengths.view(-1, 1, 1, 1), torch.nan) if poison else tail
        beyond = (torch.arange(x.shape[2]) // block * block + block > lengths.view(-1, 1)) & poison
        unfinished = beyond[:, ::block, None].unsqueeze(1)
        scales, offsets = (None if t is None else t.masked_fill(unfinished, torch.nan) for t in (scales, offsets))
    if sum(exact):
        tail = torch.full((*x.shape[:2], sum(exact), x.shape[3]), torch.nan, dtype=torch.half)
        held = in_window(lengths, x.shape[2], *exact)
        for b, t in held.nonzero().tolist():
            tail[b, :, t if t < exact[0] else exact[0] + t % exact[1]] = x[b, :, t].half()
        beyond = beyond | held
    if poison:
        rows = beyond[:, None, :, None]
        junk = torch.full_like(codes, torch.nan) if codes.is_floating_point() else torch.full_like(codes, 127)
        codes = torch.where(rows, junk, codes)
        axis = _TOKEN_AXIS.get(str(fmt.granularity))
        if axis is not None:
            spread = {1: beyond, 2: beyond[:, None, :]}[axis]
            spread = spread.unsqueeze(-1) if fmt.granularity == "group" else spread
            scales, offsets = (None if t is None else t.masked_fill(spread, torch.nan) for t in (scales, offsets))
    if strided:
        codes, scales, offsets = (
            t if t is None or t.ndim < 3 else t.transpose(1, 2).contiguous().transpose(1, 2) for t in (codes, scales, offsets)
        )
    return KVBuffer(fmt, codes, scales, offsets, tail, sink_tokens=exact[0])


def case(
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    queries: int = 1,
    lengths: list[int] | None = None,
    keys: str = "int8",
    values: str = "int4_g32",
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    q_scale: float = 1.0,
    k_bias: float = 0.0,
    v_scale: float = 1.0,
    value_dim: int | None = None,
    seed: int = 0,
    exact: tuple[int, int] = (0, 0),
    latent: bool = False,
    **options: Any,
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    lengths = [37, 64][:batch] if lengths is None else lengths
    stored = torch.tensor(lengths, dtype=torch.int32)
    capacity = max([1, *lengths]) // 32 * 32 + 32
    k = torch.randn(len(lengths), heads[1], capacity, dim, generator=rng)
    k[..., ::7] += k_bias
    v = torch.randn(len(lengths), heads[1], capacity, value_dim or dim, generator=rng) * v_scale
    query_dim = dim + v.shape[-1] * latent
    q = (torch.randn(len(lengths), heads[0], queries, query_dim, generator=rng) * q_scale).to(dtype)
    return Case(
        q,
        store(k, keys, stored, strided=strided, exact=exact),
        store(v, values, stored, strided=strided, exact=exact),
        stored,
        (stored - queries).clamp_min(0),
        AttentionOptions(**{"sm_scale": dim**-0.5, **options}),
        latent=latent,
    )


def paged(plane: KVBuffer, page: int, order: torch.Tensor) -> KVBuffer:
    """The same plane in pages: page `order[b, p]` holds tokens [p * page, (p + 1) * page) of sequence b."""

    def scatter(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or t.ndim == 1:
            return t
        axis = 1 if t.ndim == 2 else 2
        rows = t.unflatten(axis, (order.shape[1], -1)).movedim(axis, 1).flatten(0, 1)
        pool = torch.zeros((int(order.max()) + 1, *rows.shape[1:]), dtype=t.dtype)
        pool[order.flatten().long()] = rows
        return pool

    return replace(plane, **{name: scatter(getattr(plane, name)) for name in ("codes", "scales", "offsets")})


def shuffled(batch: int, pages: int) -> torch.Tensor:
    numbers = torch.randperm(batch * pages + 3, generator=torch.Generator().manual_seed(1))
    return numbers[: batch * pages].view(batch, pages).int()


# --------------------------------------------------------------------------------------------------------------- formats


#: A latent and a rotary key in every format, of a head or of several, with and without tails.
LATENTS: list[dict[str, Any]] = [
    *({"keys": keys, "values": VALUE_FORMATS[i % len(VALUE_FORMATS)], "queries": 1 + i % 3} for i, keys in enumerate(KV_FORMATS)),
    {"keys": "bf16", "values": "int8", "softcap": 5.0, "heads": (16, 1), "lengths": [70, 33]},
    {"keys": "int8", "values": "int4_g32", "rotate_keys": True, "starts": torch.tensor([3, 0], dtype=torch.int32), "queries": 2},
    {"keys": "int8_channel", "values": "int4", "rotate_keys": True, "window": 9, "lengths": [70, 33]},
    {"keys": "int8", "values": "int8_tensor", "exact": (3, 20), "queries": 2},
    {"keys": "fp8", "values": "fp8", "heads": (4, 2), "strided": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize("options", LATENTS, ids=str)
def test_latents_are_values_and_most_of_the_keys(options: dict[str, Any]) -> None:
    for dtype, block in ((torch.float32, cpu.BLOCK), (torch.bfloat16, 1)):
        case(**{"dim": 128, "value_dim": 256, "heads": (4, 1), "latent": True, "dtype": dtype, **options}).check(block)


def test_latents_in_pages() -> None:
    c, order = case(dim=64, value_dim=128, heads=(4, 1), latent=True), shuffled(2, 6)
    dense = c.run()
    c.keys, c.values, c.page_table = paged(c.keys, 16, order), paged(c.values, 16, order), order
    for ours, theirs in zip(c.run(), dense, strict=True):
        torch.testing.assert_close(ours, theirs)
    c.check()


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("exact", "queries"), [((0, 20), 1), ((3, 0), 2), ((5, 7), 3), ((40, 9), 1)])
def test_sink_and_recent_tokens(name: str, exact: tuple[int, int], queries: int) -> None:
    """Whose codes hold anything, as does what no token owns in the tail. Of shorter sequences all tokens are in 16 bits."""
    values = QUANTIZED[QUANTIZED.index(name) - 3]
    for block in (1, cpu.BLOCK):
        case(keys=name, values=values, queries=queries, lengths=[37, 64, 31, 0, 12], exact=exact).check(block)
        case(keys=name, values=values, queries=queries, lengths=[37, 64], exact=exact, window=11, dtype=torch.bfloat16).check(block)


@pytest.mark.parametrize("keys", KV_FORMATS)
@pytest.mark.parametrize("block", [1, cpu.BLOCK])
def test_every_key_format(keys: str, block: int) -> None:
    case(dim=head_dim(keys), keys=keys, values="fp16", queries=3, lengths=[37, 64, 31, 0]).check(block)


@pytest.mark.parametrize("values", VALUE_FORMATS)
@pytest.mark.parametrize("block", [1, cpu.BLOCK])
def test_every_value_format(values: str, block: int) -> None:
    case(dim=head_dim(values), keys="bf16", values=values, queries=3, lengths=[37, 64, 31, 0]).check(block)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", ["int8", "int4_channel", "fp8"])
@pytest.mark.parametrize("values", ["int4_g32", "int8_token"])
def test_every_query_dtype(dtype: torch.dtype, keys: str, values: str) -> None:
    case(keys=keys, values=values, dtype=dtype, queries=2, lengths=[200, 7]).check(4096)


def test_float64_queries_are_computed_in_float64() -> None:
    c = case(keys="int8", values="int8_g32", queries=2, dtype=torch.float64)
    out, _ = c.run(512)
    truth, _ = c.attend(torch.float64)
    # Only the order of sums differs: so many roundings of terms no larger than the largest value.
    assert (out - truth).abs().max() <= 64 * torch.finfo(torch.float64).eps * truth.abs().max()


def test_values_may_have_their_own_head_size() -> None:
    case(keys="int4_g32", values="int8", dim=64, value_dim=96).check()
    case(keys="int8", values="int4", dim=96, value_dim=40).check()


# --------------------------------------------------------------------------------------------------------------- options

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": SLOPES},
    "window": {"window": 9},
    "window 1": {"window": 1},
    "starts": {"starts": torch.tensor([5, 40], dtype=torch.int32)},
    "starts beyond the length": {"starts": torch.tensor([5, 4000], dtype=torch.int32)},
    "sinks": {"sinks": torch.tensor([0.0, 3.0, -torch.inf, 200.0])},
    "rotate_keys": {"rotate_keys": True},
    "all": {
        "softcap": 3.0,
        "alibi_slopes": SLOPES,
        "window": 20,
        "starts": torch.tensor([30, 50], dtype=torch.int32),
        "sinks": torch.randn(4, generator=torch.Generator().manual_seed(0)),
        "rotate_keys": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("block", [1, 2048, cpu.BLOCK])
def test_every_option(name: str, queries: int, block: int) -> None:
    case(queries=queries, dtype=torch.float32, **OPTIONS[name]).check(block)


def test_a_window_reads_only_the_blocks_it_can_see() -> None:
    c = case(lengths=[4096], batch=1, window=16, heads=(1, 1))
    with mock.patch.object(cpu, "_load", wraps=cpu._load) as load:
        c.check(64 * 64)
    assert load.call_count == (0 if attention_codes.compiler_works() else 2)  # one block of keys, one of values


@pytest.mark.parametrize("window", [None, 7])
def test_queries_before_the_end_of_the_cache_see_the_past_only(window: int | None) -> None:
    c = case(queries=5, lengths=[90, 90], window=window, keys="int4_channel")
    c.query_start = torch.tensor([0, 61], dtype=torch.int32)
    for block in (1, 2048, cpu.BLOCK):
        c.check(block)


# ------------------------------------------------------------------------------------------------- lengths, memory, pages


def test_lengths_around_blocks() -> None:
    for keys in ("int8", "int8_channel"):
        case(keys=keys, lengths=[0, 1, 31, 32, 33, 63, 64, 65, 101, 127], heads=(2, 2), queries=3).check(32 * 10 * 2 * 64)
        case(keys=keys, lengths=[0, 0], sinks=torch.ones(4)).check()


def test_no_sequences_and_no_capacity() -> None:
    case(lengths=[]).check()
    c = case(lengths=[0, 0])
    for name in ("keys", "values"):
        p = getattr(c, name)
        cut = (None if t is None else t[:, :, :0] for t in (p.codes, p.scales, p.offsets))
        setattr(c, name, KVBuffer(p.format, *cut))  # type: ignore[arg-type]
    c.check()


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("page", [None, 32])
def test_memory_is_that_of_a_block_however_long_the_cache_is(name: str, page: int | None) -> None:
    """One decoded block, its scores, and what unpacking and gathering make on the way; compiled loops decode less."""
    block = 1 << 14
    c = case(keys=name, values=name if name in VALUE_FORMATS else "int8", lengths=[8000, 5000], heads=(4, 2), dim=head_dim(name))
    if page is not None:
        order = shuffled(2, c.keys.codes.shape[2] // page)
        c = Case(**{**c.__dict__, "keys": paged(c.keys, page, order), "values": paged(c.values, page, order), "page_table": order})
    with Allocated() as allocated:
        c.run(block)
    least = 0 if attention_codes.compiler_works() else 1
    assert least <= allocated.most / (8 * block) <= 3  # in numbers of 8 bytes, as float64 has them


@pytest.mark.parametrize("keys", ["fp16", "int8", "int8_token", "int8_tensor", "fp8", "int4_g32", "int4_channel"])
@pytest.mark.parametrize("values", ["bf16", "fp8_tensor", "int4_g32", "int8_token"])
def test_pages_give_the_same_bits(keys: str, values: str) -> None:
    c = case(keys=keys, values=values, lengths=[70, 3, 33], queries=2)
    order = shuffled(3, 3)
    pages = Case(**{**c.__dict__, "keys": paged(c.keys, 32, order), "values": paged(c.values, 32, order)})
    beyond = torch.arange(3) >= (c.lengths.view(-1, 1) + 31) // 32
    pages.page_table = torch.where(beyond, torch.tensor([[-1, 10**6, -(10**6)]]), order).int()
    for ours, theirs in zip(pages.run(), c.run(), strict=True):
        assert torch.equal(ours, theirs)
    pages.check(1)


@pytest.mark.parametrize("keys", ["bf16", "int8", "int4", "int4_g32", "int4_channel"])
def test_both_layouts_give_the_same_bits(keys: str) -> None:
    ours, theirs = (case(keys=keys, values="int4_g32", strided=s, queries=2) for s in (True, False))
    assert not ours.keys.codes.is_contiguous()
    for a, b in zip(ours.run(), theirs.run(), strict=True):
        assert torch.equal(a, b)
    ours.check()


@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_views_at_any_offset_and_stride(shift: int) -> None:
    c = case(keys="int4_g32", values="int8", queries=2)

    def moved(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + shift, dtype=t.dtype)
        view = wide[..., shift::2]
        return view.copy_(t)

    moved_planes = (KVBuffer(p.format, *(moved(t) for t in p.tensors())) for p in (c.keys, c.values))  # type: ignore[arg-type]
    other = Case(moved(c.q), *moved_planes, c.lengths, c.query_start, c.options)  # type: ignore[arg-type]
    for a, b in zip(other.run(), c.run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keys", ["bf16", "int8_token", "int4_channel"])
@pytest.mark.parametrize("values", ["fp16", "int4_g32"])
def test_lengths_need_not_be_read(keys: str, values: str) -> None:
    """What a GPU does, where reading them would make it stop: visit and mask everything."""
    c = case(keys=keys, values=values, lengths=[90, 33, 0], queries=3, window=40)
    capacity = c.keys.codes.shape[2]
    with mock.patch.object(cpu, "_span", return_value=cpu._Span(0, capacity, 32)):
        c.check(1)
        c.check()


def test_nothing_given_is_changed() -> None:
    c = case(keys="int4_channel", values="bf16", dtype=torch.float32, starts=torch.tensor([1, 2], dtype=torch.int32))
    given = [c.q, *c.keys.tensors(), *c.values.tensors(), c.lengths, c.query_start]
    before = [None if t is None else t.clone() for t in given]
    c.run(1)
    for t, old in zip(given, before, strict=True):
        assert t is None or old is None or t.equal(old) or t.isnan().equal(old.isnan())


# --------------------------------------------------------------------------------------------------------- hard numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", ["int8", "int4", "int4_g32", "int4_channel", "fp8"])
@pytest.mark.parametrize(
    "hard", [{"q_scale": 40.0}, {"k_bias": 300.0}, {"v_scale": 1e-5}, {"v_scale": 1e3}, {"q_scale": 1e-3, "k_bias": -200.0}]
)
def test_outliers(dtype: torch.dtype, keys: str, hard: dict[str, float]) -> None:
    case(keys=keys, values="int4_g32", dtype=dtype, queries=2, lengths=[257], batch=1, **hard).check(64 * 64)


def test_many_tokens() -> None:
    case(lengths=[8111], batch=1, dtype=torch.bfloat16, heads=(4, 1)).check(1 << 17)
    case(lengths=[8111], batch=1, keys="int4_channel", heads=(4, 1)).check(1 << 17)


def test_very_low_scores_are_not_mistaken_for_masked_ones() -> None:
    c = case(keys="fp16", values="fp16", sm_scale=-5e4, queries=2)
    c.check(1)
    c.check()


# ------------------------------------------------------------------------------------------------------- awkward shapes


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    heads = draw(st.sampled_from(HEADS))
    dim = draw(st.sampled_from([40, 64, 80, 96, 128, 256]))
    length = st.sampled_from([0, 1, 2, 31, 32, 33, 47, 63, 64, 65, 97])
    lengths = draw(st.lists(length, max_size=4))
    fits = [n for n, f in KV_FORMATS.items() if dim % f.group_size(dim) == 0]
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 30.0]))
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 2, 31, 32, 33, 1000]))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.arange(heads[0]) / 8
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, 70), min_size=len(lengths), max_size=len(lengths)))
        options["starts"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["sinks"] = torch.arange(heads[0]) - 3.0
    if dim != 40 and draw(st.booleans()):  # 40 has 8 as its largest power of two: too little to rotate
        options["rotate_keys"] = True
    built = case(
        heads=heads,
        dim=dim,
        lengths=lengths,
        queries=draw(st.sampled_from([*range(1, 17), 33])),
        keys=draw(st.sampled_from(fits)),
        values=draw(st.sampled_from([n for n in fits if n in VALUE_FORMATS])),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        **options,
    )
    tokens = draw(st.sampled_from([1, 32, 33, 1 << 20]))
    return built, tokens * max(1, len(lengths)) * heads[1] * dim


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(cases())
def test_awkward_shapes(drawn: tuple[Case, int]) -> None:
    built, block = drawn
    built.check(block)


@pytest.mark.parametrize(("lengths", "queries"), [([100, 1100], 1), ([62], 8), ([257, 1024, 3], 5)])
@pytest.mark.parametrize("name", ["int8", "int4_g32", "int4_channel"])
def test_loops_read_nothing_behind_a_length(name: str, lengths: list[int], queries: int) -> None:
    """Where a block or a split of tokens begins behind the end of a sequence, or behind what its first queries see."""
    options = {"keys": name, "values": "int4", "dtype": torch.bfloat16, "queries": queries, "heads": (1, 1)}
    case(batch=len(lengths), lengths=lengths, **options).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", KV_FORMATS)
@pytest.mark.parametrize("options", [{}, {"window": 700, "softcap": 5.0, "alibi_slopes": SLOPES.repeat(2)}], ids=["plain", "all"])
def test_loops_take_every_call(keys: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits on any number of threads, for a sequence alone and among others, and for any chunk of its queries."""
    loops = mock.Mock(wraps=attention_codes.decode_attention)
    monkeypatch.setattr(attention_codes, "decode_attention", loops)
    values = keys if keys in VALUE_FORMATS else "int8"
    whole = case(keys=keys, values=values, heads=(8, 2), queries=5, lengths=[1300, 40, 0], dtype=torch.bfloat16, **options)
    out, lse = whole.run()
    assert loops.called == attention_codes.compiler_works()
    if not loops.called:
        return
    monkeypatch.setattr(threads, "STEPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as `over_rows` reads it
    assert all(torch.equal(a, b) for a, b in zip(whole.run(), (out, lse), strict=True))
    for b, i in itertools.product(range(2), range(0, 5, 2)):
        alone = DecodeCall(
            whole.q[b : b + 1, :, i : i + 2],
            whole.keys.select(torch.tensor([b])),
            whole.values.select(torch.tensor([b])),
            whole.lengths[b : b + 1],
            whole.query_start[b : b + 1] + i,
            None,
            whole.options,
        )
        part = out[b : b + 1, :, i : i + 2], lse[b : b + 1, :, i : i + 2]
        for results in (cpu.decode_attention(alone), cpu.chunk_attention(alone, int(whole.query_start[b]) + i)):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, part, strict=True))


@pytest.mark.slow
def test_cpus_without_avx512(tmp_path: Path) -> None:
    """The same promise of the code that they run."""
    if not attention_codes.compiler_works() or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("loops that are compiled for another x86 CPU")
    script = "import torch; from test_cpu_attention import case\n"
    script += "for keys, values in (('int8', 'int4_g32'), ('int4_channel', 'fp8'), ('int2_g32', 'bf16')):\n"
    script += "    for dtype in (torch.float32, torch.bfloat16):\n"
    script += "        case(keys=keys, values=values, queries=3, lengths=[37, 300, 0], dtype=dtype).check()\n"
    features = "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+sse4.2"
    machine = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **machine, "PYTHONPATH": folders}, check=True)
