"""The portable Triton level of decode attention, run in the interpreter: against float64, within the promise of every level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_levels import CALLS, DRAWN, decode_call, errors, in_pages, same, small, strided
from gpu.gpu_cases import VALUES, Call, build
from halfbyte.formats import KV_FORMATS, key_format, plain_format
from halfbyte.kernels.decode.merge import launch as launch_merge
from halfbyte.kernels.decode.portable import launch, workspace_floats
from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.plans.decode_portable import TritonTiles, triton_tiles
from halfbyte.reference import attention as reference

#: numpy warns of what a GPU computes silently, and as meant: log2 of 0, NaN that was put there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def tiles(splits: int = 1, chunk: int = 0, *, tokens: int = 32, rows: int = 16) -> TritonTiles:
    return TritonTiles(tokens, rows, splits, chunk, num_warps=1, num_stages=1)


#: One program, splits, and chunks of tokens that no batch changes.
TILES = (tiles(), tiles(2), tiles(16, 32))


def run(call: DecodeCall, chosen: TritonTiles = TILES[0]) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing that the kernel is given to write into is clean."""
    shape, dim = call.q.shape[:3], call.values.dim
    out, lse = torch.full((*shape, dim), torch.nan, dtype=call.q.dtype), torch.full(shape, torch.nan)
    launch(call, chosen, out, lse, torch.full((workspace_floats(lse.numel(), dim, chosen.splits),), torch.nan))
    return out, lse


def check(call: Call, *chosen: TritonTiles) -> None:
    for one in chosen or TILES[:1]:
        assert not errors(call, run(decode_call(call), one))


def check_against_truth(call: Call, share: float, chosen: TritonTiles = TILES[0]) -> None:
    """Within a share of the largest value: for numbers that eager PyTorch overflows at."""
    (out, lse), (truth, truth_lse) = run(decode_call(call), chosen), call.expected[0]
    largest = torch.nan_to_num(reference.read(call.cache.values, call.cache.lengths, None)).abs().max()
    assert (out.double() - truth).abs().max() <= share * largest
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.slow(sample=60)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_keeps_the_promise(name: str) -> None:
    turn = list(CALLS).index(name)
    check(small(**CALLS[name]), TILES[turn % 3], replace(TILES[(turn + 1) % 3], block_rows=(16, 32)[turn % 2]))


@pytest.mark.slow(sample=10)
@pytest.mark.parametrize("number", range(26))
def test_drawn_calls_keep_the_promise(number: int) -> None:
    """Some of them: the interpreter takes seconds for each. A rotated query is rounded to 16 bits here, as on a GPU."""
    variant = DRAWN[number].variant
    half = variant.dtype if variant.dtype != "float32" else "bfloat16"
    call = build(replace(DRAWN[number], variant=replace(variant, dtype=half)), "cpu")
    if call.q.numel():
        assert not call.wrong(*run(decode_call(call), TILES[number % 3]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("keys", [name for name, fmt in KV_FORMATS.items() if fmt.is_quantized])
def test_no_key_is_rounded(keys: str, dtype: str) -> None:
    """Large scores of a single row: whatever a 16-bit number of a key would be off by, these would."""
    call = small(keys=keys, heads=1, group=1, lengths=(40,), dim=192, dtype=dtype, q_scale=8.0)
    torch.testing.assert_close(run(decode_call(call))[1].double(), call.expected[0][1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("plain", ["fp16", "bf16", "fp32"])
def test_new_keys_and_values_as_they_are(plain: str) -> None:
    """A chunk that has just been computed, in its own dtype."""
    fmt = plain_format(plain)
    for dtype in ("float16", "bfloat16"):
        call = small(keys="fp16", values="fp16", lengths=(20,), queries=20, dtype=dtype)
        for name in ("keys", "values"):
            setattr(call.cache, name, KVBuffer(fmt, getattr(call.cache, name).codes.to(fmt.code.dtype)))
        check(call)


def test_tiles_of_more_rows() -> None:
    """Rows of a KV head in several tiles, each with its own part of the triangle."""
    check(small({"window": 6}, queries=50, heads=1, lengths=(40,), keys="int8_g32"), tiles(rows=32))


# -------------------------------------------------------------------------------------------- lengths, shares, pages, memory


@pytest.mark.parametrize("keys", ["int4", "int8_channel"])
def test_chunks_give_the_same_bits_in_every_batch(keys: str) -> None:
    options = {"window": 70, "sinks": torch.tensor([0.5, -1.0])}
    call = small(options, keys=keys, lengths=(37, 0, 100), queries=2, heads=1)
    whole, chosen = decode_call(call), tiles(4, 32)
    together = run(whole, chosen)
    assert not errors(call, together)
    for b in range(3):
        one, index = slice(b, b + 1), torch.tensor([b])
        planes = {"keys": whole.keys.select(index), "values": whole.values.select(index)}
        alone = whole._replace(q=whole.q[one], lengths=whole.lengths[one], query_start=whole.query_start[one], **planes)
        assert same(run(alone, chosen), tuple(t[one] for t in together))
    # A cache that could hold more has more splits, which see nothing.
    assert same(run(whole, replace(chosen, splits=9)), together)


@pytest.mark.parametrize(
    ("keys", "values"), [("int4", "int8_token"), ("int8_channel", "int4_g32"), ("fp8_tensor", "bf16"), ("int4_g32", "int8")]
)
def test_other_memory_gives_the_same_bits(keys: str, values: str) -> None:
    """Pages, and tokens before heads. Views of any offset and stride are within the promise."""
    sizes = {"keys": keys, "values": values, "lengths": (60, 3), "slack": 64, "queries": 2, "heads": 1}
    whole = small(**sizes)
    call = decode_call(whole)
    pages = [page for page in (16, 32, 64) if page % (key_format(keys).token_block or 1) == 0]
    for other in [in_pages(call, page) for page in pages] + [decode_call(small(**sizes, layout="BTHD"))]:
        assert same(run(other, TILES[1]), run(call, TILES[1]))
    for places in ((1, 1), (1, 2), (3, 2)):
        assert not errors(whole, run(strided(call, *places), TILES[1]))


def test_any_page_number_reads_some_page() -> None:
    call = decode_call(small(keys="int8", values="int4", lengths=(64,)))
    assert call.keys.codes.shape[0] == 1
    out, lse = run(call._replace(page_table=torch.tensor([[10**9, -5]], dtype=torch.int32)))
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_lengths_beyond_the_capacity_read_nothing_beyond_it() -> None:
    whole = decode_call(small(keys="int8", values="int4", lengths=(64, 64), slack=16))
    # what lies behind them in memory is NaN
    cut = [KVBuffer(p.format, *(t[:, :, :64] for t in p.tensors() if t is not None)) for p in (whole.keys, whole.values)]
    call = whole._replace(keys=cut[0], values=cut[1])
    beyond = call._replace(lengths=call.lengths + 10**9, query_start=call.query_start + 10**9)
    assert same(run(beyond, TILES[1]), run(call, TILES[1]))
    out, lse = run(beyond._replace(lengths=torch.tensor([-5, -(2**31)], dtype=torch.int32)), TILES[1])
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("words", [True, False])
def test_offsets_of_more_than_32_bits(words: bool) -> None:
    """The second sequence lies more than 2^31 words behind the first, in memory of which two pages are touched."""
    call = small(keys="int8", values="int8", lengths=(20, 20))
    far = 2**32 + 2**17 if words else 2**31 + 2**16 + 1
    for name in ("keys", "values"):
        p = getattr(call.cache, name)
        codes = torch.empty(far + 2**16, dtype=torch.int8).as_strided(p.codes.shape, (far, *p.codes.stride()[1:]))
        setattr(call.cache, name, replace(p, codes=codes.copy_(p.codes)))
    check(call)


# ---------------------------------------------------------------------------------------------------------- hard numbers


def test_queries_near_the_ends_of_their_range() -> None:
    for scale, dtype in ((2e4, "float16"), (1e-6, "float16"), (1e30, "bfloat16"), (1e-30, "bfloat16")):
        for keys in ("int8", "int4_g32", "fp16", "bf16"):
            sizes = {"keys": keys, "values": "int8", "dtype": dtype, "q_scale": scale, "lengths": (40,), "heads": 1}
            check_against_truth(small({"sm_scale": 0.2 / scale}, **sizes), 2.0**-8 if dtype == "bfloat16" else 2.0**-10)


@pytest.mark.parametrize("values", ["int8", "int8_token", "int8_g32", "int4", "int4_g32", "fp8"])
def test_value_scales_of_every_size_side_by_side(values: str) -> None:
    """Neighbouring tokens under the smallest fp16 scale, the largest and 0; no weight over- or underflows."""
    for low, high in ((2.0**-24, 65504.0), (0.0, 2.0**-24), (0.0, 0.0)):
        call = small(keys="int8", values=values, dtype="bfloat16", lengths=(50,), heads=1, q_scale=3.0)
        scales = call.cache.values.scales
        by_token = scales.movedim(2 if scales.ndim == 4 else -1, 0)
        by_token[::2], by_token[1::2] = low, high
        check(call, TILES[1])


def test_a_small_weight_of_a_large_value_counts() -> None:
    """Token 0 has nearly all the probability and tiny values, token 1 the rest and large ones."""
    call = small({"sm_scale": 1.0}, keys="fp16", values="int8", dtype="bfloat16", lengths=(2,), heads=1, group=1)
    call.cache.keys.codes[0, 0, :2] = 0
    call.cache.keys.codes[0, 0, 0, 0] = 20.0
    call.q[..., 0] = 1.0
    call.cache.values.scales[0, 0, 0], call.cache.values.scales[0, 0, 1] = 2.0**-24, 60000.0
    check(call)
    torch.testing.assert_close(run(decode_call(call))[0].double(), call.expected[0][0], rtol=0.02, atol=0)


def test_very_low_scores_are_scores() -> None:
    call = small({"sm_scale": -5e4}, keys="fp16", values="fp16", queries=2, heads=1)
    for splits in (1, 3):
        check_against_truth(call, 2.0**-10, tiles(splits))


@pytest.mark.parametrize(("keys", "values"), [("int8", "int8"), ("int4_g32", "fp16"), ("fp8", "int4"), ("int4_channel", "fp8")])
def test_a_visible_nan_stays_in_its_sequence(keys: str, values: str) -> None:
    call = decode_call(small(keys=keys, values=values, lengths=(40, 40, 40), heads=1, group=1))
    expected = run(call, TILES[1])
    for plane, sequence in ((call.keys, 0), (call.values, 1)):
        broken = plane.codes if plane.scales is None or plane.format.code.kind == "float" else plane.scales
        broken[sequence, :, 0] = torch.nan if broken.is_floating_point() else 0x7F
    out, _ = run(call, TILES[1])
    assert out[:2].isnan().any(-1).all()
    assert torch.equal(out[2], expected[0][2])


def test_a_nan_in_a_query_stays_in_its_row() -> None:
    call = decode_call(small(keys="int4", values="int8", queries=3, heads=1))
    expected, _ = run(call)
    call.q[0, 1, 1, 5] = torch.nan
    out, lse = run(call)
    assert out[0, 1, 1].isnan().all()
    assert lse[0, 1, 1].isnan()
    expected[0, 1, 1] = out[0, 1, 1] = 0
    assert torch.equal(out, expected)


# --------------------------------------------------------------------------------------------------------------------- plan


@settings(max_examples=200)
@given(
    keys=st.sampled_from(list(KV_FORMATS)),
    values=st.sampled_from(VALUES),
    batch=st.integers(1, 600),
    heads=st.integers(1, 64),
    rows=st.integers(1, 3000),
    capacity=st.integers(0, 1 << 20),
    dim=st.sampled_from([40, 59, 64, 128, 192, 256]),
    chunk=st.sampled_from([0, 1, 100, 1024]),
)
def test_tiles(keys: str, values: str, batch: int, heads: int, rows: int, capacity: int, dim: int, chunk: int) -> None:
    sizes = {"batch": batch, "heads": heads, "rows": rows, "capacity": capacity, "dim": dim, "num_sms": 132, "chunk": chunk}
    chosen = triton_tiles(key_format(keys), key_format(values), **sizes)
    assert chosen.block_tokens % (key_format(keys).token_block or 16) == 0
    assert chosen.splits >= 1
    if chunk:
        assert chosen.chunk >= chunk
        assert chosen.chunk % chosen.block_tokens == 0
        assert chosen.splits * chosen.chunk >= capacity
    else:
        assert chosen.chunk == 0
        assert chosen.splits <= max(1, capacity)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("parts", "shape"), [(1, (1, 1, 1, 1)), (2, (2, 3, 5, 80)), (3, (1, 2, 33, 64)), (2, (1, 1, 2, 256))])
def test_parts_are_merged_as_specified(parts: int, shape: tuple[int, ...], sinks: bool) -> None:
    """Parts of other strides; what a part did not see is NaN; a row that nobody saw is 0 and -inf."""
    rng = torch.Generator().manual_seed(parts)
    b, heads, queries, dim = shape
    outs = [torch.randn(b, queries, heads, dim, generator=rng).bfloat16().transpose(1, 2) for _ in range(parts)]
    lses = [20 * torch.randn(b, queries, heads, generator=rng).transpose(1, 2) for _ in range(parts)]
    for out, lse in zip(outs, lses, strict=True):
        hidden = torch.rand(lse.shape, generator=rng) < 0.3
        lse[hidden], out[hidden] = -torch.inf, torch.nan
    logits = torch.randn(heads, generator=rng) if sinks else None
    out, lse = torch.full(shape, torch.nan, dtype=torch.bfloat16), torch.full(shape[:3], torch.nan)
    launch_merge(outs, lses, logits, out, lse)
    truth, truth_lse = reference.merge_states(outs, lses, logits)
    torch.testing.assert_close(lse, truth_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, truth, rtol=2**-8, atol=1e-6)
    assert bool((out[lse == -torch.inf] == 0).all())
