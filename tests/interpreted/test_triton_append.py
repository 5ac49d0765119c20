"""The append kernels, interpreted: what they write equals what the reference writes, bit for bit, and they write nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from append_levels import LAYOUTS, PAIRS, WINDOWED, cases, check_bits, differences, new_cache, put, tokens
from halfbyte.cache import KVCache
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported
from halfbyte.formats import key_format
from halfbyte.kernels.append.rotation import launch, launch_product
from halfbyte.kv_buffer import AppendCall, HeadNorms, Rope
from halfbyte.ops.append import APPEND
from halfbyte.ops.block import norm_rows
from halfbyte.ops.linear import qkv_projection
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.reference.append import check_capacity
from halfbyte.reference.block import Norm
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.quantize import quantize
from halfbyte.reference.rope import apply_rope, rope_tables
from halfbyte.reference.transform import TransformCall, transformed
from sizes import head_dim
from watched import watched

#: One append after the other, in the interpreter: the first tokens, the end of a block, and one that leaves it.
APPENDS = 4


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_every_format_is_the_reference_bit_for_bit(keys: str, values: str) -> None:
    i = PAIRS.index((keys, values))
    dtype = (torch.float16, torch.bfloat16, torch.float32)[i % 3]
    case = {"dim": head_dim(keys, values), "heads": 2, "dtype": dtype, "layout": LAYOUTS[i % 3], "seed": i}
    rope = (None, "half", "pairs", "partial", "shared")[i % 5]
    check_bits({**case, "rope": rope, "options": {"keys": keys, "values": values, "rotate_keys": i % 2 == 0}}, "triton", APPENDS)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("keys", WINDOWED)
def test_sink_and_recent_tokens_in_every_format(keys: str) -> None:
    i = WINDOWED.index(keys)
    values, (sinks, recent) = WINDOWED[i - 3], ((3, 7), (0, 16), (5, 0), (2, 1), (0, 33))[i % 5]
    case = {"dim": head_dim(keys, values), "heads": 2, "dtype": (torch.float16, torch.bfloat16, torch.float32)[i % 3], "seed": i}
    options = {"keys": keys, "values": values, "sink_tokens": sinks, "recent_tokens": recent, "rotate_keys": i % 2 == 1}
    layout = LAYOUTS[i % 3] if recent < 32 else "turned"
    check_bits({**case, "rope": (None, "half")[i % 2], "layout": layout, "options": options}, "triton", APPENDS)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_drawn_appends_are_the_reference_bit_for_bit(case: dict[str, Any]) -> None:
    """Also of heads of any size."""
    check_bits(case, "triton", APPENDS)


def test_more_heads_than_a_tile_holds() -> None:
    k, v = tokens((1, 70, 2, 128))
    for keys in ("int8_token", "int4"):
        a, b = (KVCache(1, 70, 128, 4, keys=keys, values="int8_token") for _ in range(2))
        put(a, k, v, None, "reference")
        put(b, k, v, None, "triton")
        assert not differences(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_strides_and_types_of_the_input_do_not_matter(dtype: torch.dtype) -> None:
    base = tokens((5, 2, 3, 130), dtype=dtype)[0]
    k = base.permute(2, 1, 0, 3)[..., 1:129]
    v = k[:1].expand(3, -1, -1, -1)[..., ::2]
    for keys in ("int8", "int4_channel", "bf16"):
        a, b = (KVCache(3, 2, 128, 64, keys=keys, values="int4", value_dim=64) for _ in range(2))
        put(a, k, v, None, "reference")
        put(b, k, v, None, "triton")
        assert not differences(a, b)


class Computing(TorchDispatchMode):
    """Names of torch's operators that do more than name memory; what the interpreter itself calls is left out."""

    def __init__(self, executor: Any) -> None:
        super().__init__()
        self.names: list[str] = []
        self._executor, self._call = executor, executor.__call__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func.overloadpacket.__name__ not in (
            "empty",
            "new_empty",
            "view",
            "_unsafe_view",
            "transpose",
        ):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        def unseen(executor: Any, *args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return self._call(executor, *args, **options)

        self._executor.__call__ = unseen
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._executor.__call__ = self._call
        super().__exit__(*error)


@pytest.mark.parametrize(("dtype", "how", "keys", "heads", "count", "dim"), [
    (torch.float16, "whole", "int8", 8, 1, 64),
    (torch.bfloat16, "paged", "int4_channel", 6, 7, 64),
    (torch.float32, "turned", "int8_token", 2, 5, 40),
    (torch.float64, "paged", "int8_tensor", 14, 9, 128),
])  # fmt: skip
def test_queries_are_rotated_in_the_same_launch(
    dtype: torch.dtype, how: str, keys: str, heads: int, count: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference rotates them, in memory as a projection leaves it; the cache is as without them, and so are the launches."""
    launches = watched(monkeypatch, GridExecutor, "__call__")
    k, v = tokens((3, 2, count, dim), dtype=dtype)
    q = tokens((3, count, heads + 1, dim + 2), 1, dtype)[0][:, :, 1:, 2:].transpose(1, 2)
    each = rope_tables(torch.arange(3 * count).reshape(3, count) + 7, dim // 2 if count == 7 else dim)
    for rope in (each, (each[0][1], each[1][1])):
        caches = [new_cache(how, 2, dim, keys=keys, values="int8") for _ in range(3)]
        assert put(caches[0], k, v, [count, 1, 0], "triton", rope=rope) is None
        alone = len(launches)
        for cache, impl in ((caches[1], "triton"), (caches[2], "reference")):
            got = put(cache, k, v, [count, 1, 0], impl, rope=rope, q=q)
            assert got is not None
            assert got.is_contiguous()
            assert torch.equal(got, apply_rope(q, *(t.unsqueeze(-3) for t in rope)))
        assert not differences(caches[0], caches[1])
        assert not differences(caches[0], caches[2])
        assert len(launches) == 2 * alone == (4 if keys in ("int4_channel", "int8_tensor") else 2)
        launches.clear()


@pytest.mark.parametrize(("dtype", "how", "kind", "options", "dim"), [
    (torch.bfloat16, "whole", "rounded", {"keys": "int8", "rotate_keys": True}, 64),
    (torch.float16, "turned", "exact", {"keys": "int8_token"}, 40),
    (torch.bfloat16, "paged", "offset", {"keys": "int8_channel"}, 64),
    (torch.bfloat16, "paged", "rounded", {"keys": "int8_tensor"}, 80),
])  # fmt: skip
def test_heads_are_normalized_before_they_are_rotated(
    dtype: torch.dtype, how: str, kind: str, options: dict[str, Any], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the two launches, norms and append, and the reference but for the order of a sum; in no more launches."""
    launches = watched(monkeypatch, GridExecutor, "__call__")
    count = 5
    k, v = tokens((3, 3, count, dim), dtype=dtype)
    q = tokens((3, count, 6, dim), 1, dtype)[0].transpose(1, 2)
    weights = tokens((2, dim), 2, dtype)[1]
    rope = rope_tables(torch.arange(3 * count).reshape(3, count) + 7, dim // 2 if kind == "exact" else dim)
    norms = HeadNorms(*weights, 1e-5, kind)
    first, second, third, alone = (new_cache(how, 3, dim, values="int8", dtype=dtype, **options) for _ in range(4))
    put(alone, k, v, [count, 1, 0], "triton", rope=rope, q=q)
    before = len(launches)
    got = put(first, k, v, [count, 1, 0], "triton", rope=rope, q=q, norms=norms)
    assert len(launches) == 2 * before
    normed = norm_rows([q, k], [Norm(weight, 1e-5, kind) for weight in weights], impl="triton")
    expected = put(second, normed[1], v, [count, 1, 0], "triton", rope=rope, q=normed[0])
    assert not differences(first, second)
    assert got is not None
    assert expected is not None
    assert torch.equal(got, expected)
    plain = put(third, k, v, [count, 1, 0], "reference", rope=rope, q=q, norms=norms)
    torch.testing.assert_close(got, plain, rtol=2**-6 if dtype is torch.bfloat16 else 2**-9, atol=1e-3)
    for a, b in zip(first.dequantized(), third.dequantized(), strict=True):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()  # a code beside it


def test_norms_are_looked_at() -> None:
    k, v = tokens((3, 2, 2, 64))
    rope, weight, cache = rope_tables(torch.arange(2), 64), torch.ones(64), KVCache(3, 2, 64, 8)
    for norms, q, says in (
        ((weight, weight), k, "norms is a tuple; expected a halfbyte.kv_buffer.HeadNorms"),
        (HeadNorms(weight, weight, 1e-6, "rounded"), None, "norms was given without q"),
        (HeadNorms(weight, weight[:8], 1e-6, "rounded"), k, r"norms.k has shape \[8\]; expected \[64\]"),
        (HeadNorms(weight, weight, 1e-6, "layer"), k, "norms.kind='layer'; choose one of: rounded"),
        (HeadNorms(weight, weight, 0.0, "exact"), k, "norms.eps=0.0; expected a positive"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            cache.append(k, v, rope=rope if q is not None else None, q=q, norms=norms)  # type: ignore[call-overload]
    with pytest.raises(Unsupported, match="append has no gradient, and norms requires one"):
        cache.append(k, v, rope=rope, q=k, norms=HeadNorms(weight.clone().requires_grad_(), weight, 1e-6, "exact"))
    assert not cache.lengths.any()


def test_a_layer_up_to_its_attention_is_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for q, k and v, one that rotates, quantizes and appends; no operation of torch that computes lies between."""
    monkeypatch.setenv("HALFBYTE_IMPL", "triton")
    launches = watched(monkeypatch, GridExecutor, "__call__")
    weights = tuple(quantize(torch.randn(n, 128), name) for n, name in ((256, "nf4"), (128, "int4_g32"), (128, "int4_g32")))
    cache, x, rope = KVCache(2, 2, 64, 8), torch.randn(2, 1, 128).half(), rope_tables(torch.zeros(2, 1), 64)

    def step() -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in qkv_projection(x, weights))  # type: ignore[arg-type]
        return cache.append(k, v, rope=rope, q=q)

    assert step().shape == (2, 4, 1, 64)
    assert len(launches) == 2
    with Computing(GridExecutor) as seen:
        step()
    assert not seen.names
    assert cache.lengths.tolist() == [2, 2]


def test_nothing_new_changes_nothing() -> None:
    a, b = new_cache("whole", 2, 64), new_cache("whole", 2, 64)
    put(a, *tokens((3, 2, 0, 64)), None, "triton")
    put(a, *tokens((3, 2, 2, 64)), [0, 0, 0], "triton")
    assert not differences(a, b)


# --------------------------------------------------------------------------------------------------- what cannot be raised


@pytest.mark.parametrize("keys", ["int8_g32", "int4_channel", "int8_tensor"])
@pytest.mark.parametrize("how", ["whole", "paged"])
def test_what_does_not_fit_is_not_written(how: str, keys: str) -> None:
    """The length says so: it counts every token."""
    k, v = tokens((3, 2, 7, 64))
    a, b = (new_cache(how, 2, 64, keys=keys, **({"k_scale": 0.25} if keys == "int8_tensor" else {})) for _ in range(2))
    start = torch.tensor([93, 96, 2**31 - 9], dtype=torch.int32)
    for cache, impl, counts in ((a, "reference", [3, 0, 0]), (b, "triton", None)):
        if cache.keys.tail is not None:
            cache.keys.tail.zero_()
        cache.lengths.copy_(start.clamp_max(96) if impl == "reference" else start)
        put(cache, k, v, counts, impl)
    assert b.lengths.tolist() == [100, 103, 2**31 - 2]
    b.lengths.copy_(a.lengths)
    assert not differences(a, b)


def test_lengths_and_counts_that_make_no_sense() -> None:
    k, v = tokens((3, 2, 2, 64))
    a, b = new_cache("whole", 2, 64), new_cache("whole", 2, 64)
    b.lengths.copy_(torch.tensor([-3, 5, 5]))
    a.lengths.copy_(torch.tensor([0, 5, 5]))
    put(a, k, v, [0, 0, 2], "reference")
    put(b, k, v, [2, -1, 9], "triton")
    assert b.lengths.tolist() == [-1, 5, 7]
    b.lengths[0] = 0
    assert not differences(a, b)


@pytest.mark.parametrize("keys", ["int8", "int8_channel"])
def test_pages_that_are_not_there(keys: str) -> None:
    k, v = tokens((3, 2, 40, 64))
    a, b = new_cache("paged", 2, 64, keys=keys), new_cache("paged", 2, 64, keys=keys)
    put(a, k, v, [32, 0, 40], "reference")
    assert b.page_table is not None
    b.page_table.copy_(torch.tensor([[4, -1, 8], [9, 2**30, -(2**31)], [7, 3, 5]]))
    put(b, k, v, None, "triton")
    assert b.lengths.tolist() == [40, 40, 40]
    assert torch.equal(a.keys.codes, b.keys.codes)
    assert torch.equal(a.values.codes, b.values.codes)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", ["int8", "int8_g32", "int8_token", "fp8", "int4", "int4_g32"])
def test_a_block_with_nan_or_infinity_is_nan(fmt: str, bad: float) -> None:
    k, v = tokens((1, 2, 2, 64))
    k[0, 1, 1, 40] = v[0, 1, 1, 40] = bad
    cache = KVCache(1, 2, 64, 4, keys=fmt, values=fmt, rotate_keys=False)
    put(cache, k, v, None, "triton")
    for got in cache.dequantized():
        wrong = got.isnan()
        broken = {"group": (0, 1, 1, slice(32, 64)), "token": (0, slice(None), 1)}.get(str(key_format(fmt).granularity), (0, 1, 1))
        assert wrong[broken].all()
        assert int(wrong.sum()) == wrong[broken].numel()


def test_a_rotated_key_with_nan_is_nan_as_far_as_rotation_mixes() -> None:
    k, v = tokens((1, 1, 2, 96))
    k[0, 0, 1, 40] = torch.nan
    cache = KVCache(1, 1, 96, 4, keys="int4_g32", values="int4_g32")
    put(cache, k, v, None, "triton")
    wrong = cache.dequantized()[0].isnan()
    assert wrong[0, 0, 1, 32:64].all()
    assert int(wrong.sum()) == 32


@pytest.mark.parametrize("keys", ["int8_channel", "int4_channel"])
def test_a_channel_with_nan_is_nan(keys: str) -> None:
    k, v = tokens((1, 1, 33, 64))
    k[0, 0, 9, 5] = k[0, 0, 32, 7] = torch.nan
    cache = KVCache(1, 1, 64, 64, keys=keys)
    put(cache, k, v, None, "triton")
    wrong = cache.dequantized()[0].isnan()
    assert wrong[0, 0, :32, 5].all()
    assert wrong[0, 0, 32, 7]
    assert int(wrong.sum()) == 33


def test_under_a_scale_for_everything_nan_is_counted() -> None:
    x = torch.ones(1, 1, 2, 64)
    x[0, 0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e9])
    for fmt, codes in (("int8_tensor", [0, 127, -127, 127]), ("fp8_tensor", [0x7F, 0x7F, 0xFF, 0x7E])):
        cache = KVCache(1, 1, 64, 4, keys=fmt, values=fmt, k_scale=1.0, v_scale=1.0)
        put(cache, x, x, None, "triton")
        for plane in (cache.keys, cache.values):
            assert plane.codes[0, 0, 0, :4].tolist() == codes
            assert int(plane.saturated or 0) == 4


def test_nan_does_not_measure_a_scale() -> None:
    x = torch.ones(1, 1, 2, 64)
    x[0, 0, 0, :2] = torch.tensor([torch.nan, torch.inf])
    cache = KVCache(1, 1, 64, 4, keys="int8_tensor", values="int8_tensor")
    put(cache, x * 0, x * 0, None, "triton")
    put(cache, x, x, None, "triton")
    assert cache.keys.scales is not None
    assert float(cache.keys.scales) == float(torch.tensor(1 / 127).half())


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_scale_beyond_fp16_saturates() -> None:
    x = torch.zeros(1, 1, 1, 64)
    x[..., 0], x[..., 1] = 3e38, -3e38
    for fmt, codes in (("int8", [127, -127, 0]), ("int4", [15, 0])):
        cache = KVCache(1, 1, 64, 4, keys=fmt, values=fmt, rotate_keys=False)
        put(cache, x, x, None, "triton")
        assert cache.keys.scales is not None
        assert float(cache.keys.scales[0, 0, 0]) == 65504
        assert cache.dequantized()[0].isfinite().all()
        first = cache.keys.codes[0, 0, 0]
        assert (first[:3].tolist() if fmt == "int8" else [int(first[0]) & 15, int(first[0]) >> 4]) == codes


# ------------------------------------------------------------------------------------------------------- rounding, all of it


def test_every_half_to_e4m3_and_to_integers() -> None:
    """All finite fp16 numbers under a scale of 1, ties and subnormals among them; then counted as the reference counts."""
    x = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.float16)
    x = torch.cat([x[x.isfinite()], torch.zeros(2**11, dtype=torch.float16)]).reshape(1, 1, -1, 256)
    for fmt in ("fp8_tensor", "int8_tensor"):
        a, b = (KVCache(1, 1, 256, x.shape[2], keys=fmt, values="fp16", k_scale=1.0) for _ in range(2))
        put(a, x, x, None, "reference")
        put(b, x, x, None, "triton")
        assert not differences(a, b)


@pytest.mark.parametrize("spread", [2.0**-30, 2.0**-14, 1e-3, 1.0, 1e4])
def test_scales_of_all_sizes(spread: float) -> None:
    """Tiny ones are floored, and a constant block has code 0."""
    x = tokens((1, 2, 4, 64), dtype=torch.float32)[1] * spread
    x[:, :, 1] = spread
    x[:, :, 2] = 0
    for keys, values in (("int8", "int4"), ("fp8", "int4_g32")):
        a, b = (KVCache(1, 2, 64, 4, keys=keys, values=values) for _ in range(2))
        put(a, x, x, None, "reference")
        put(b, x, x, None, "triton")
        assert not differences(a, b)


def test_quotients_beside_the_middle_between_two_codes() -> None:
    """Under scales of every fp16 exponent: fp32 numbers at a tie of codes and the nearest ones beside it."""
    g = torch.Generator().manual_seed(0)
    scale = (torch.arange(64, 0x7800, 241, dtype=torch.int32).to(torch.int16).view(torch.float16).float())[:, None]
    for fmt, reach, ties in (("int8", 127, (torch.arange(-126, 126) + 0.5)), ("fp8", 448, torch.arange(17, 64, 2) / 2)):
        tie = ties[torch.randint(len(ties), (len(scale), 64), generator=g)] * scale
        x = (tie.view(torch.int32) + torch.randint(-2, 3, tie.shape, generator=g).int()).view(torch.float32)
        x[:, 0] = reach * scale[:, 0]  # so that this is the scale
        x = x[None, None]
        a, b = (KVCache(1, 1, 64, x.shape[2], keys=fmt, values=fmt) for _ in range(2))
        put(a, x, x, None, "reference")
        put(b, x, x, None, "triton")
        assert a.keys.scales is not None
        assert torch.equal(a.keys.scales[0, 0].float(), scale[:, 0])
        assert not differences(a, b)


# ------------------------------------------------------------------------------------------------------------ around the op


def test_opcheck_and_compiling() -> None:
    """What the op changes is declared, and a compiled append stores what an eager one does."""
    a, b = new_cache("paged", 1, 64, keys="int8_tensor"), new_cache("paged", 1, 64, keys="int8_tensor")
    k, v = tokens((3, 1, 3, 64))
    q = tokens((3, 4, 3, 64), 1)[0]
    counts = torch.tensor([3, 1, 0], dtype=torch.int32)
    rope = rope_tables(torch.arange(3), 64)
    call = AppendCall(k, v, a.keys, a.values, a.lengths, counts, a.page_table, rope=Rope(*rope), q=q, impl="triton")
    torch.library.opcheck(
        torch.ops.halfbyte.append_.default,
        APPEND.flat(call._replace(rotated_q=q.clone())),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )
    a = new_cache("paged", 1, 64, keys="int8_tensor")  # opcheck runs the op on it
    step = torch.compile(put, backend="aot_eager", fullgraph=True)
    for counts_of in ([3, 1, 0], [2, 3, 3]):
        rotated = step(a, k, v, counts_of, "triton", rope=rope, q=q)
        assert torch.equal(rotated, put(b, k, v, counts_of, "triton", rope=rope, q=q))  # type: ignore[arg-type]
    assert not differences(a, b)


class OnGpu(torch.Tensor):
    """Memory that says it is a GPU's, to see when a cache looks at it."""

    is_cuda = True  # type: ignore[assignment]


def test_the_host_counts_tokens_and_rarely_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr("halfbyte.cache.check_capacity", lambda *a: (looks.append(1), check_capacity(*a)))
    capturing: list[bool] = []
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: bool(capturing))
    cache = KVCache(3, 1, 64, 8)
    cache.lengths = cache.lengths.as_subclass(OnGpu)
    for _ in range(4):
        cache._check_capacity(2, None)
        cache.lengths += 2
    assert not looks
    with pytest.raises(CapacityError):
        cache._check_capacity(1, None)
    assert len(looks) == 1
    cache.crop(4)
    cache._check_capacity(4, None)
    assert len(looks) == 1
    cache.reset()
    counts = torch.tensor([1, 0, 0], dtype=torch.int32)
    for i in range(8):  # the bound grows by all tokens, not by those that are real, and is then put right
        cache._check_capacity(2, counts)
        cache.lengths += counts
        assert len(looks) == 1 + (i > 3) + (i > 5) + (i > 6), i
    cache.reset()
    looks.clear()
    for _ in range(2):  # an engine's lengths are not known until they have been read
        wrapped = KVCache.from_buffers(cache.keys, cache.values, cache.lengths)
        wrapped._check_capacity(2, None)
        wrapped._check_capacity(2, None)
    assert len(looks) == 2
    capturing.append(True)
    cache._check_capacity(9, None)
    assert len(looks) == 2
    capturing.clear()
    for i in range(3):  # replays of a graph append without a word
        cache._check_capacity(1, None)
        assert len(looks) == 3 + i


def test_rope_is_looked_at() -> None:
    k, v = tokens((3, 2, 2, 64))
    cos, sin = rope_tables(torch.arange(2), 64)
    cache = KVCache(3, 2, 64, 8)
    for rope, says in (
        (cos, "expected two tensors"),
        ((cos, sin[:1]), r"rope\[1\] \(sin\) has shape \[1, 32\]; expected \[2, R/2\]"),
        ((cos[None], sin), r"rope\[0\] \(cos\) has shape \[1, 2, 32\]; expected \[3, 2, R/2\]"),
        ((cos.expand(3, -1, -1), sin), "cos has shape"),
        ((cos, sin[:, :31]), "cos has shape"),
        ((cos[:, :0], sin[:, :0]), "have 0 columns; expected 1 to 32"),
        ((cos.half(), sin), r"rope\[0\] \(cos\) is torch.float16; expected torch.float32"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            cache.append(k, v, rope=rope)  # type: ignore[arg-type]
    assert not cache.lengths.any()
    odd = KVCache(1, 1, 59, 8, values="int8")
    with pytest.raises(InvalidArgument, match="have 32 columns; expected 1 to 29"):
        odd.append(torch.zeros(1, 1, 2, 59), torch.zeros(1, 1, 2, 59), rope=(cos, sin))
    cache.append(k, v, rope=(cos, sin))
    assert cache.lengths.tolist() == [2, 2, 2]


# -------------------------------------------------------------------------------------------------- heads rotated on their own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 5, 80), (3, 2, 7, 96), (2, 4, 9, 128), (1, 2, 11, 256)])
def test_heads_are_rotated_as_specified(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows between others, all of which are NaN; nothing beyond the result is written."""
    b, heads, tokens, dim = shape
    whole = torch.full((b, tokens, heads, 2 * dim + 3), torch.nan, dtype=dtype)
    x = whole[..., 2 : 2 + dim].transpose(1, 2)
    x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(dim)) * torch.logspace(-2, 2, dim))
    memory = torch.full((x.numel() + 64,), torch.nan, dtype=dtype)
    out = memory[: x.numel()].view(shape)
    launch(x, out)
    assert torch.equal(out, rotate(x.float()).to(dtype))
    assert bool(memory[x.numel() :].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 6, 5, 80), (3, 2, 7, 96), (2, 8, 19, 128), (1, 2, 11, 256)])
@pytest.mark.parametrize("wide", [True, False])
def test_heads_times_a_matrix(shape: tuple[int, ...], dtype: torch.dtype, wide: bool) -> None:
    """Heads of keys and of queries, of several a KV head and of one, between rows of NaN; within the rounding of fp32 sums."""
    b, heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(dim)
    whole = torch.full((b, tokens, heads, 2 * dim + 3), torch.nan, dtype=dtype)
    x = whole[..., 2 : 2 + dim].transpose(1, 2)
    x.copy_(torch.randn(shape, generator=generator))
    kv_heads = 2 - heads % 2
    matrix, shift = (torch.randn(kv_heads, *rest, generator=generator) for rest in ((dim, dim), (dim,)))
    matrix = matrix if wide else matrix.to(dtype)
    for call in (TransformCall(x, matrix, shift), TransformCall(x, matrix)):
        memory = torch.full((x.numel() + 64,), torch.nan, dtype=dtype)
        out = memory[: x.numel()].view(shape)
        launch_product(call, out)
        exact = transformed(x.double(), matrix, call.shift)
        rounding = torch.finfo(dtype).eps * exact.abs() + dim * 2.0**-20 * exact.abs().amax()
        assert bool(((out.double() - exact).abs() <= rounding).all())
        assert bool(memory[x.numel() :].isnan().all())


def test_the_op_takes_the_kernel() -> None:
    strided = torch.randn(2, 3, 4, 64).half()[..., ::2]
    assert torch.equal(transform_heads(strided, impl="triton"), transform_heads(strided, impl="reference"))
    wide = torch.randn(2, 3, 4, 64, dtype=torch.float64)
    assert torch.equal(transform_heads(wide, impl="triton"), rotate(wide))
    assert transform_heads(torch.randn(0, 3, 4, 64), impl="triton").shape == (0, 3, 4, 64)
