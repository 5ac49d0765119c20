"""Appending on the GPU stores the bytes that the reference stores on a CPU, in every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import KEYS, VALUES, poisoned, same_bits, same_stores
from gpu_place import PLACE
from test_gpu_graphs import Captured

import halfbyte as hb
from halfbyte.kv_buffer import HeadNorms, KVBuffer, Rope
from halfbyte.reference.rope import apply_rope
from halfbyte_lab.measure.cupti import names_of
from pretended_gpu import watch_launches

pytestmark = pytest.mark.compile_first

#: Tokens of each append, and how many of them are real in each sequence (None: all).
STEPS: list[tuple[int, list[int] | None]] = [
    *((1, None), (5, [5, 0, 3]), (31, None), (1, [0, 0, 0])),
    *((40, [40, 1, 33]), (64, None), (1, None)),
]
PAIRS = [(key, VALUES[i % len(VALUES)]) for i, key in enumerate(KEYS)]


def numbers(count: int, dim: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as models have them, and worse: each token of another magnitude, zeros, equal ones, ties."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, count, dim, generator=rng) * 10 ** (torch.rand(3, 2, count, 1, generator=rng) * 7 - 4)
    x[0, :, ::5] = x[0, :, ::5].round()
    x[1, 0, ::7] = 0
    x[2, 1, ::6] = 0.7
    return x.to(dtype)


def append_everywhere(dtype: torch.dtype, dim: int, make: Any) -> None:
    there, here = make(PLACE.device), make("cpu")
    for i, (count, real) in enumerate(STEPS):
        k, v = numbers(count, dim, 2 * i, dtype), numbers(count, dim, 2 * i + 1, dtype)
        counts = None if real is None else torch.tensor(real)
        with poisoned():
            there.append(k.to(PLACE.device), v.to(PLACE.device), None if counts is None else counts.to(PLACE.device))
        here.append(k, v, counts)
        assert same_stores(there, here)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("keys", "values"), PAIRS, ids="-".join)
@pytest.mark.parametrize("page", [None, 32, 128])
def test_every_format(keys: str, values: str, dtype: torch.dtype, page: int | None) -> None:
    options: dict[str, Any] = {"keys": keys, "values": values, "k_scale": None, "v_scale": None}

    def make(device: str) -> hb.KVCache:
        if page is None:
            return hb.KVCache(3, 2, 64, 256, device=device, **options)
        return hb.PagedKVCache(3, 2, 64, 256, page_size=page, device=device, **options)

    append_everywhere(dtype, 64, make)


@pytest.mark.parametrize("dim", [80, 96, 128, 192, 256])
@pytest.mark.parametrize("keys", ["int8", "int4", "int4_channel", "fp8", "int8_token"])
def test_every_head_size(keys: str, dim: int) -> None:
    append_everywhere(torch.bfloat16, dim, lambda device: hb.KVCache(3, 2, dim, 256, keys=keys, values="int4", device=device))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", ["int8", "int4_g32", "int4_channel"])
def test_rotated_keys(keys: str, dim: int) -> None:
    append_everywhere(
        torch.bfloat16, dim, lambda device: hb.KVCache(3, 2, dim, 256, keys=keys, values="int8", rotate_keys=True, device=device)
    )


@pytest.mark.parametrize(("keys", "values"), PAIRS, ids="-".join)
def test_memory_with_tokens_before_heads(keys: str, values: str) -> None:
    """An engine's [B, T, H, D] buffers, wrapped."""

    def turned(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.ndim < 3 else t.transpose(1, 2).contiguous().transpose(1, 2)

    def make(device: str) -> hb.KVCache:
        cache = hb.KVCache(3, 2, 64, 256, keys=keys, values=values, device=device)
        planes = (KVBuffer(p.format, *map(turned, p.tensors()[:3]), p.tail, p.saturated) for p in (cache.keys, cache.values))  # type: ignore[arg-type]
        return hb.KVCache.from_buffers(*planes, cache.lengths)

    append_everywhere(torch.bfloat16, 64, make)


@pytest.mark.parametrize("keys", ["int8", "int4", "int4_channel", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_rotated_by_position_on_the_way(keys: str, dtype: torch.dtype) -> None:
    """Rotary embedding inside of the append, by tables of one sequence or of each, of heads or of parts; of queries, too."""
    for shape, interleaved in (((50, 32), False), ((3, 50, 32), False), ((50, 24), False), ((50, 32), True), ((3, 50, 8), True)):
        angle = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 100
        k, v = numbers(50, 64, 0, dtype), numbers(50, 64, 1, dtype)
        q = torch.cat([k, k * 3, v], 1).transpose(1, 2).contiguous().transpose(1, 2)  # as a projection leaves it
        wanted = apply_rope(q, angle.cos().unsqueeze(-3), angle.sin().unsqueeze(-3), interleaved)
        caches = [hb.KVCache(3, 2, 64, 64, keys=keys, values="int8", device=device) for device in (PLACE.device, "cpu")]
        for cache in caches:
            rope = Rope(angle.cos().to(cache.device), angle.sin().to(cache.device), interleaved)
            with poisoned():
                rotated = cache.append(k.to(cache.device), v.to(cache.device), rope=rope, q=q.to(cache.device))
            assert same_bits(rotated.cpu(), wanted)
        assert same_stores(*caches)


@pytest.mark.parametrize("keys", ["int8", "int4_channel"])
@pytest.mark.parametrize("kind", ["rounded", "exact", "offset"])
def test_heads_are_normalized_on_the_way(keys: str, kind: str) -> None:
    """Queries as the reference makes them, but for the order of a sum; again by a call that is launched like the first."""
    angle, (k, v) = torch.rand(3, 1, 32) * 100, (numbers(1, 64, seed, torch.bfloat16) for seed in (0, 1))
    weights, made = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).bfloat16(), []
    for device in (PLACE.device, "cpu"):
        cache = hb.KVCache(3, 2, 64, 64, keys=keys, values="int8", device=device)
        here = [t.to(device) for t in (k, v, angle.cos(), angle.sin(), torch.cat([k, k * 3], 1), *weights)]
        for _ in range(3):
            norms = HeadNorms(here[5], here[6], 1e-6, kind)
            made.append(cache.append(here[0], here[1], rope=(here[2], here[3]), q=here[4], norms=norms).cpu())
        assert cache.lengths.tolist() == [3] * 3
    assert all(same_bits(q, made[0]) for q in made[1:3])
    torch.testing.assert_close(made[0], made[-1], rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("keys", ["int8", "int4_channel"])
@pytest.mark.parametrize("how", ["graph", "compiled"])
def test_queries_are_rotated_in_graphs_and_in_compiled_code(keys: str, how: str) -> None:
    """As an eager call rotates them; the tables are made of the lengths on the device."""
    caches = [hb.KVCache(3, 2, 64, 64, keys=keys, values="int4_g32", device=PLACE.device) for _ in range(2)]
    hidden = torch.zeros(3, 8, 1, 64, dtype=torch.bfloat16, device=PLACE.device)
    frequencies = 10000.0 ** -torch.linspace(0, 1, 32, device=PLACE.device)

    def step(cache: hb.KVCache) -> Any:
        angle = cache.lengths.view(-1, 1, 1) * frequencies
        q, k, v = hidden.split((4, 2, 2), 1)
        return cache.append(k, v, rope=(angle.cos(), angle.sin()), q=q)

    torch._dynamo.reset()
    step(caches[1])
    caches[1].reset()
    fast = torch.compile(lambda: step(caches[1]), fullgraph=True, backend="aot_eager" if PLACE.dry else "inductor")
    call = Captured(lambda: step(caches[1])).replay if how == "graph" else fast
    caches[1].reset()
    for i in range(40):
        hidden.copy_(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(i)))
        expected, got = step(caches[0]), call()
        if how == "compiled" and not PLACE.dry:  # Inductor's cos and sin are not those of torch
            assert (got.float() - expected.float()).abs().max() <= 0.02 * expected.abs().max()
        else:
            assert same_bits(got, expected)
    assert torch.equal(caches[0].lengths, caches[1].lengths)


@pytest.mark.parametrize("keys", ["int8", "fp8"])
def test_a_layer_up_to_its_attention_is_two_kernels(keys: str) -> None:
    """One product for q, k and v, one kernel that rotates q and k and appends."""
    weights = [hb.quantize(torch.randn(n, 512, device=PLACE.device), "int4_g64") for n in (512, 128, 128)]
    cache = hb.KVCache(2, 2, 64, 32, keys=keys, values="int4_g32", device=PLACE.device)
    x = torch.randn(2, 1, 512, device=PLACE.device).bfloat16()
    angle = torch.rand(2, 1, 32, device=PLACE.device)
    rope = angle.cos(), angle.sin()

    def layer() -> Any:
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in hb.qkv_projection(x, weights))  # type: ignore[arg-type]
        return cache.append(k, v, rope=rope, q=q)

    assert layer().shape == (2, 8, 1, 64)
    if not PLACE.dry:
        names_of(layer)  # the profiler may miss what comes while it starts
        names = names_of(layer)
        assert len(names) == 2, names
    layer()
    assert cache.lengths.tolist() == [2 if PLACE.dry else 4] * 2


@pytest.mark.parametrize(("fmt", "reach", "ties"), [
    ("int8", 127, torch.arange(-126, 126) + 0.5),
    ("fp8", 448, torch.arange(17, 64, 2) / 2),
])  # fmt: skip
def test_quotients_beside_the_middle_between_two_codes(fmt: str, reach: int, ties: torch.Tensor) -> None:
    """Under fp16 scales of all sizes: fp32 numbers at a tie of codes and the nearest ones beside it. The GPU does not divide."""
    rng = torch.Generator().manual_seed(0)
    scale = torch.arange(64, 0x7800, PLACE.size(1, 241), dtype=torch.int16).view(torch.float16).float()[:, None]
    tie = ties[torch.randint(len(ties), (len(scale), 128), generator=rng)] * scale
    x = (tie.view(torch.int32) + torch.randint(-2, 3, tie.shape, generator=rng).int()).view(torch.float32)
    x[:, 0] = reach * scale[:, 0]  # so that this is the scale
    here, there = (hb.KVCache(1, 1, 128, len(scale), keys=fmt, values=fmt, device=place) for place in ("cpu", PLACE.device))
    for cache in (here, there):
        cache.append(*(2 * [x[None, None].to(cache.device)]))
    assert here.keys.scales is not None
    assert torch.equal(here.keys.scales[0, 0].float(), scale[:, 0])
    assert same_stores(there, here)


def test_more_than_fits_is_refused_and_changes_nothing() -> None:
    cache = hb.KVCache(3, 2, 64, 40, keys="int8", values="int4_g32", device=PLACE.device)
    k, v = (numbers(30, 64, seed, torch.bfloat16).to(PLACE.device) for seed in (0, 1))
    cache.append(k, v)
    before = [t.clone() for t in cache.tensors()]
    with pytest.raises(hb.HalfbyteError, match="do not fit"):
        cache.append(k, v)
    PLACE.sync()
    assert all(same_bits(a, b) for a, b in zip(before, cache.tensors(), strict=True))


@pytest.mark.skipif(PLACE.dry, reason="a CPU refuses NaN")
@pytest.mark.parametrize("keys", ["bf16", "int8", "int4_g32", "int8_token", "fp8"])
@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_block_and_no_other(keys: str, spoil: float) -> None:
    """Nobody waits for the GPU to look, so it must show: what shares a scale or a rotation with it is not finite afterwards."""
    k, v = (numbers(5, 64, seed, torch.bfloat16).to(PLACE.device) for seed in (0, 1))
    spoiled = k.clone()
    spoiled[2, 1, 3, 7] = spoil
    clean, dirty = (hb.KVCache(3, 2, 64, 40, keys=keys, values="int8", device=PLACE.device) for _ in range(2))
    clean.append(k, v)
    dirty.append(spoiled, v)
    (wanted, wanted_v), (found, found_v) = clean.dequantized(), dirty.dequantized()
    assert same_bits(wanted_v, found_v)
    assert not found[2, 1, 3, 7].isfinite()
    fmt = hb.KV_FORMATS[keys]
    heads = slice(None) if fmt.granularity == "token" else slice(1, 2)
    width = fmt.group_size(64) if fmt.is_quantized else 1
    width = 64 if clean.rotate_keys else width  # rotation spreads it over the head
    block = (2, heads, 3, slice(7 // width * width, 7 // width * width + width))
    wanted[block] = found[block] = 0
    assert same_bits(wanted, found)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("rotary", [False, True])
def test_appends_like_earlier_ones_store_the_same(rotary: bool, page: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token after token into two caches in turn, as layers do: all but the first are launched without a look at their tensors."""
    launches = watch_launches(monkeypatch)

    def make(device: str) -> list[hb.KVCache]:
        if page is None:
            return [hb.KVCache(3, 2, 64, 64, device=device) for _ in range(2)]
        return [hb.PagedKVCache(3, 2, 64, 64, page_size=page, device=device) for _ in range(2)]

    there, here = make(PLACE.device), make("cpu")
    for i in range(40):
        k, v, q = (numbers(1, 64, 3 * i + j, torch.bfloat16) for j in range(3))
        counts = torch.tensor([1, i % 2, 1]).int() if i % 3 == 0 else None
        angles = torch.rand(1, 32, generator=torch.Generator().manual_seed(i))
        rope: dict[str, Any] = {"rope": (angles.cos(), angles.sin()), "q": q} if rotary else {}
        rotated = here[i % 2].append(k, v, counts, **rope)
        moved = {"rope": tuple(t.to(PLACE.device) for t in rope["rope"]), "q": q.to(PLACE.device)} if rotary else {}
        with poisoned():
            got = there[i % 2].append(
                k.to(PLACE.device), v.to(PLACE.device), None if counts is None else counts.to(PLACE.device), **moved
            )
        if rotated is not None:
            assert got is not None
            assert same_bits(got.cpu(), rotated)
    for a, b in zip(there, here, strict=True):
        assert same_stores(a, b)
    assert PLACE.dry or len(launches.results) == 38
