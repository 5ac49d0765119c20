"""The portable Triton level of decode attention, run in the interpreter: against float64, within the promise of every level."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import test_cpu_attention as corpus
from halfbyte.formats import KV_FORMATS, key_format, plain_format
from halfbyte.kernels.decode.portable import launch, workspace_floats
from halfbyte.kv_buffer import KVBuffer
from halfbyte.plans.decode_portable import TritonTiles, triton_tiles
from halfbyte.reference import attention as reference

#: numpy warns of what a GPU computes silently, and as meant: log2 of 0, NaN that was put there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VALUES = corpus.VALUE_FORMATS
#: Cache and query of different 16-bit types, and of the same.
DTYPES = [torch.float16, torch.bfloat16]


def tiles(splits: int = 1, chunk: int = 0, *, tokens: int = 32, rows: int = 16) -> TritonTiles:
    return TritonTiles(tokens, rows, splits, chunk, num_warps=1, num_stages=1)


class Case(corpus.Case):
    """A case of the corpus, launched. Nothing that the kernel is given to write into is clean."""

    def check_against_truth(self, share: float, block: Any = None) -> None:
        """Within a share of the largest value: for numbers that eager PyTorch overflows at."""
        out, lse = self.run(block)
        truth, truth_lse = self.attend(torch.float64)
        largest = torch.nan_to_num(reference.read(self.values, self.lengths, self.page_table)).abs().max()
        assert (out.double() - truth).abs().max() <= share * largest
        torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-3)

    def run(self, block: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = block if isinstance(block, TritonTiles) else tiles()
        q, dim = self.q, self.values.dim
        out = torch.full((*q.shape[:3], dim), torch.nan, dtype=q.dtype)
        lse = torch.full(q.shape[:3], torch.nan)
        workspace = torch.full((workspace_floats(lse.numel(), dim, chosen.splits),), torch.nan)
        launch(self.call(), chosen, out, lse, workspace)
        return out, lse


def case(**arguments: Any) -> Case:
    arguments = {"dtype": torch.float16, "heads": (2, 1), **arguments}
    return Case(**vars(corpus.case(**arguments)))


def same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("keys", KV_FORMATS)
def test_every_key_format(keys: str) -> None:
    turn = list(KV_FORMATS).index(keys)
    values, dtype = VALUES[(turn + 5) % len(VALUES)], DTYPES[turn % 2]
    case(keys=keys, values=values, dtype=dtype, lengths=[37, 0], queries=1 + turn // 2 % 2).check(tiles(1 + turn % 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [name for name, fmt in KV_FORMATS.items() if fmt.is_quantized])
def test_no_key_is_rounded(keys: str, dtype: torch.dtype) -> None:
    """Large scores of a single row: whatever a 16-bit number of a key would be off by, these would."""
    c = case(keys=keys, heads=(1, 1), lengths=[40], dim=192, batch=1, dtype=dtype, q_scale=8.0)
    _, lse = c.run()
    _, truth = c.attend(torch.float64)
    torch.testing.assert_close(lse.double(), truth, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("options", corpus.LATENTS, ids=str)
def test_latents_are_values_and_most_of_the_keys(options: dict[str, Any]) -> None:
    turn = corpus.LATENTS.index(options)
    sizes = {"dim": 128, "value_dim": 256, "heads": (4, 1), "dtype": DTYPES[turn % 2]}
    case(**{**sizes, "latent": True, **options}).check(tiles(1 + turn % 2))


@pytest.mark.parametrize("values", VALUES)
def test_every_value_format(values: str) -> None:
    case(keys="int8", values=values, lengths=[65, 64], dtype=DTYPES[len(values) % 2]).check(tiles(2))


@pytest.mark.parametrize("plain", ["fp16", "bf16", "fp32"])
def test_new_keys_and_values_as_they_are(plain: str) -> None:
    """A chunk that has just been computed, in its own dtype."""
    fmt = plain_format(plain)
    for dtype in DTYPES:
        c = case(keys="fp16", values="fp16", lengths=[20], queries=20, dtype=dtype)
        for name in ("keys", "values"):
            setattr(c, name, KVBuffer(fmt, getattr(c, name).codes.to(fmt.code.dtype)))
        c.check()


@pytest.mark.parametrize(
    ("dim", "value_dim", "keys", "values"),
    [
        (40, 96, "int8", "int4_g32"),
        (59, 59, "int8", "fp8"),
        (59, 40, "fp16", "int4"),
        (80, 64, "int4", "int8_tensor"),
        (96, 80, "int4_g32", "int8_channel"),
        (128, 128, "int4_channel", "int4_g64"),
        (192, 128, "int8_g64", "int8_token"),
        (256, 256, "int4", "int4"),
        (20, 12, "int4", "int8"),
        (96, 64, "int2", "int2_g32"),
    ],
)
def test_head_sizes(dim: int, value_dim: int, keys: str, values: str) -> None:
    values = "int8" if key_format(values).token_block else values
    rotate = dim % 16 == 0
    case(dim=dim, value_dim=value_dim, keys=keys, values=values, rotate_keys=rotate, lengths=[33, 5]).check(tiles(2))


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1), (3, 3), (20, 1)])
def test_heads(heads: tuple[int, int]) -> None:
    case(heads=heads, keys="int4", values="int8", queries=3, lengths=[35]).check(tiles(2))


# --------------------------------------------------------------------------------------------------------------- options

SLOPES = torch.tensor([0.5, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "softcap, small": {"softcap": 1e-30},
    "softcap, large": {"softcap": 1e30},
    "alibi": {"alibi_slopes": SLOPES},
    "window": {"window": 9},
    "window 1": {"window": 1},
    "window, largest": {"window": 2**31 - 1},
    "starts": {"starts": torch.tensor([5, 40], dtype=torch.int32)},
    "starts beyond the length": {"starts": torch.tensor([5, 2**31 - 1], dtype=torch.int32)},
    "ends": {"ends": torch.tensor([-3, 33], dtype=torch.int32)},
    "sinks": {"sinks": torch.tensor([3.0, -torch.inf])},
    "large sinks": {"sinks": torch.tensor([200.0, -200.0])},
    "rotate_keys": {"rotate_keys": True},
    "all": {
        "softcap": 3.0,
        "alibi_slopes": SLOPES,
        "window": 20,
        "sinks": torch.tensor([0.3, -0.7]),
        "rotate_keys": True,
        "starts": torch.tensor([30, 50], dtype=torch.int32),
        "ends": torch.tensor([36, 99], dtype=torch.int32),
    },
}


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("queries", "splits", "keys"), [(1, 1, "int8"), (5, 2, "int4_channel")])
def test_every_option(name: str, queries: int, splits: int, keys: str) -> None:
    case(queries=queries, keys=keys, values="int4", **OPTIONS[name]).check(tiles(splits, tokens=32 if keys != "int8" else 16))


@pytest.mark.parametrize("window", [None, 7])
def test_queries_anywhere_see_the_past_only(window: int | None) -> None:
    c = case(queries=5, lengths=[90, 90, 9], window=window, keys="int4_channel")
    c.query_start = torch.tensor([0, 61, -3], dtype=torch.int32)
    for splits in (1, 2):
        c.check(tiles(splits))


def test_chunks_of_many_queries() -> None:
    """Rows of a KV head in several tiles, each with its own part of the triangle."""
    for splits in (1, 2):
        case(queries=33, heads=(2, 1), lengths=[70, 20], keys="bf16", values="bf16", dtype=torch.bfloat16).check(tiles(splits))
    case(queries=50, heads=(2, 1), lengths=[40], keys="int8_g32", window=6).check(tiles(rows=32))


# -------------------------------------------------------------------------------------------- lengths, shares, pages, memory


@pytest.mark.parametrize("keys", ["int8", "int4_channel"])
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_around_tiles(keys: str, splits: int) -> None:
    case(keys=keys, lengths=[0, 1, 31, 32, 33, 64, 65, 101], heads=(1, 1)).check(tiles(splits))


@pytest.mark.parametrize("keys", ["int4", "int8_channel"])
def test_chunks_give_the_same_bits_in_every_batch(keys: str) -> None:
    c = case(keys=keys, lengths=[37, 0, 100], queries=2, window=70, sinks=torch.tensor([0.5, -1.0]))
    chosen = tiles(4, 32)
    together = c.run(chosen)
    c.check(chosen)
    for b in range(3):
        one = slice(b, b + 1)
        planes = (KVBuffer(p.format, *(None if t is None else t[one] for t in p.tensors())) for p in (c.keys, c.values))
        alone = Case(c.q[one], *planes, c.lengths[one], c.query_start[one], c.options)
        assert same(alone.run(chosen), tuple(t[one] for t in together))
    # A cache that could hold more has more splits, which see nothing.
    assert same(c.run(dataclasses.replace(chosen, splits=9)), together)


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize(("keys", "values"), [("int4", "int8_token"), ("int8_channel", "int4_g32"), ("fp8_tensor", "bf16")])
def test_pages_give_the_same_bits(keys: str, values: str, page: int) -> None:
    if page % (key_format(keys).token_block or 1):
        pytest.skip("a page holds whole blocks")
    c = case(keys=keys, values=values, lengths=[70, 3], queries=2)
    capacity = c.keys.codes.shape[2] // page * page
    c.lengths = c.lengths.clamp_max(capacity)
    for name in ("keys", "values"):
        p = getattr(c, name)
        rows = dict.fromkeys(("scales", "offsets"), capacity // (p.format.token_block or 1)) | {"codes": capacity}
        cut = {
            n: t if t is None or t.ndim == 1 else t.narrow(1 if t.ndim == 2 else 2, 0, rows[n])
            for n, t in (("codes", p.codes), ("scales", p.scales), ("offsets", p.offsets))
        }
        setattr(c, name, KVBuffer(p.format, **cut, tail=p.tail))
    order = corpus.shuffled(2, capacity // page)
    pages = Case(**{**vars(c), "keys": corpus.paged(c.keys, page, order), "values": corpus.paged(c.values, page, order)})
    beyond = torch.arange(capacity // page) >= (c.lengths.view(-1, 1) + page - 1) // page
    junk = torch.tensor([-1, 2**31 - 1, -(2**31), 10**6] * 2)[: capacity // page]
    pages.page_table = torch.where(beyond, junk, order).int()
    assert same(pages.run(tiles(2)), c.run(tiles(2)))


def test_any_page_number_reads_some_page() -> None:
    c = case(keys="int8", values="int4", lengths=[64], batch=1)
    c.page_table = torch.tensor([[10**9, -5]], dtype=torch.int32)
    assert c.keys.codes.shape[0] == 1
    out, lse = c.run()
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_lengths_beyond_the_capacity_read_nothing_beyond_it() -> None:
    c = case(keys="int8", values="int4", lengths=[64, 64])
    for name in ("keys", "values"):  # what lies behind them in memory is NaN
        p = getattr(c, name)
        setattr(c, name, KVBuffer(p.format, *(None if t is None else t[:, :, :64] for t in p.tensors())))
    expected = c.run(tiles(2))
    c.lengths, c.query_start = c.lengths + 10**9, c.query_start + 10**9
    assert same(c.run(tiles(2)), expected)
    c.lengths = torch.tensor([-5, -(2**31)], dtype=torch.int32)
    out, lse = c.run(tiles(2))
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("keys", "values"), [("bf16", "int4"), ("int4_g32", "int8"), ("int4_channel", "fp8"), ("int8_token", "fp16")]
)
def test_both_layouts_give_the_same_bits(keys: str, values: str) -> None:
    ours, theirs = (case(keys=keys, values=values, heads=(2, 2), strided=s, queries=2, lengths=[37]) for s in (True, False))
    assert not ours.keys.codes.is_contiguous()
    assert same(ours.run(), theirs.run())


@pytest.mark.parametrize(("shift", "step"), [(1, 1), (1, 2), (3, 2)])
def test_views_at_any_offset_and_stride(shift: int, step: int) -> None:
    c = case(keys="int4_g32", values="int8", queries=2, heads=(2, 2), lengths=[37])

    def moved(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        wide = torch.zeros(*t.shape[:-1], step * t.shape[-1] + shift, dtype=t.dtype)
        view = wide[..., shift::step]
        return view.copy_(t)

    planes = (KVBuffer(p.format, *(moved(t) for t in p.tensors())) for p in (c.keys, c.values))  # type: ignore[arg-type]
    Case(moved(c.q), *planes, c.lengths, c.query_start, c.options).check(tiles(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [True, False])
def test_offsets_of_more_than_32_bits(words: bool) -> None:
    """The second sequence lies more than 2^31 words behind the first, in memory of which two pages are touched."""
    c = case(keys="int8", values="int8", lengths=[20, 20])
    far = 2**32 + 2**17 if words else 2**31 + 2**16 + 1
    for name in ("keys", "values"):
        p = getattr(c, name)
        codes = torch.empty(far + 2**16, dtype=torch.int8).as_strided(p.codes.shape, (far, *p.codes.stride()[1:]))
        setattr(c, name, dataclasses.replace(p, codes=codes.copy_(p.codes)))
    c.check()


# ---------------------------------------------------------------------------------------------------------- hard numbers


@pytest.mark.parametrize(("keys", "values"), [("int8", "int4_g32"), ("int4", "int4"), ("int4_channel", "int8"), ("fp8", "fp8")])
@pytest.mark.parametrize(
    "hard", [{"q_scale": 40.0}, {"k_bias": 300.0}, {"v_scale": 1e-5}, {"v_scale": 1e3}, {"q_scale": 1e-3, "k_bias": -200.0}]
)
def test_outliers(keys: str, values: str, hard: dict[str, float]) -> None:
    dtype = DTYPES[(len(keys) + len(values) + len(hard)) % 2]
    case(keys=keys, values=values, dtype=dtype, queries=2, lengths=[97], batch=1, **hard).check()


def test_queries_near_the_ends_of_their_range() -> None:
    for scale, dtype in ((2e4, torch.float16), (1e-6, torch.float16), (1e30, torch.bfloat16), (1e-30, torch.bfloat16)):
        for keys in ("int8", "int4_g32", "fp16", "bf16"):
            c = case(keys=keys, values="int8", q_scale=scale, sm_scale=0.2 / scale, dtype=dtype, lengths=[40], batch=1)
            c.check_against_truth(2.0**-8 if dtype is torch.bfloat16 else 2.0**-10)


@pytest.mark.parametrize("values", ["int8", "int8_token", "int8_g32", "int4", "int4_g32", "fp8"])
def test_value_scales_of_every_size_side_by_side(values: str) -> None:
    """Neighbouring tokens under the smallest fp16 scale, the largest and 0; no weight over- or underflows."""
    for low, high in ((2.0**-24, 65504.0), (0.0, 2.0**-24), (0.0, 0.0)):
        c = case(keys="int8", values=values, dtype=torch.bfloat16, lengths=[50], batch=1, q_scale=3.0)
        assert c.values.scales is not None
        c.values.scales[..., ::2, :] = low if c.values.scales.ndim == 4 else c.values.scales[..., ::2, :]
        if c.values.scales.ndim == 4:
            c.values.scales[..., 1::2, :] = high
        else:
            c.values.scales[..., ::2], c.values.scales[..., 1::2] = low, high
        c.check(tiles(2))


def test_a_small_weight_of_a_large_value_counts() -> None:
    """Token 0 has nearly all the probability and tiny values, token 1 the rest and large ones."""
    c = case(keys="fp16", values="int8", dtype=torch.bfloat16, lengths=[2], batch=1, heads=(1, 1), sm_scale=1.0)
    c.keys.codes[0, 0, :2] = 0
    c.keys.codes[0, 0, 0, 0] = 20.0
    c.q[..., 0] = 1.0
    c.values.scales[0, 0, 0], c.values.scales[0, 0, 1] = 2.0**-24, 60000.0  # type: ignore[index]
    c.check()
    truth, _ = c.attend(torch.float64)
    out, _ = c.run()
    torch.testing.assert_close(out.double(), truth, rtol=0.02, atol=0)


def test_very_low_scores_are_scores() -> None:
    c = case(keys="fp16", values="fp16", sm_scale=-5e4, queries=2)
    for splits in (1, 3):
        c.check_against_truth(2.0**-10, tiles(splits))


@pytest.mark.parametrize(("keys", "values"), [("int8", "int8"), ("int4_g32", "fp16"), ("fp8", "int4"), ("int4_channel", "fp8")])
def test_a_visible_nan_stays_in_its_sequence(keys: str, values: str) -> None:
    clean = case(keys=keys, values=values, lengths=[40, 40, 40], heads=(1, 1))
    expected = clean.run(tiles(2))
    for name, sequence in (("keys", 0), ("values", 1)):
        plane = getattr(clean, name)
        broken = plane.codes if plane.scales is None or plane.format.code.kind == "float" else plane.scales
        broken[sequence, :, 0] = torch.nan if broken.is_floating_point() else 0x7F
    out, _ = clean.run(tiles(2))
    assert out[:2].isnan().any(-1).all()
    assert torch.equal(out[2], expected[0][2])


def test_a_nan_in_a_query_stays_in_its_row() -> None:
    c = case(keys="int4", values="int8", queries=3)
    expected, _ = c.run()
    c.q[0, 1, 1, 5] = torch.nan
    out, lse = c.run()
    assert out[0, 1, 1].isnan().all()
    assert lse[0, 1, 1].isnan()
    expected[0, 1, 1] = out[0, 1, 1] = 0
    assert torch.equal(out, expected)


# ----------------------------------------------------------------------------------------------------------- awkward shapes


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, TritonTiles]:
    heads = draw(st.sampled_from([(1, 1), (4, 1), (2, 2), (6, 2), (7, 1)]))
    dim = draw(st.sampled_from([40, 64, 80, 96, 128]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 64, 65, 97]), min_size=1, max_size=2))
    fits = [n for n, f in KV_FORMATS.items() if dim % f.group_size(dim) == 0]
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 30.0]))
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 2, 31, 32, 33, 1000]))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.arange(heads[0]) / 8
    for name in ("starts", "ends"):
        if draw(st.booleans()):
            drawn = draw(st.lists(st.integers(-1, 70), min_size=len(lengths), max_size=len(lengths)))
            options[name] = torch.tensor(drawn, dtype=torch.int32)
    if draw(st.booleans()):
        options["sinks"] = torch.arange(heads[0]) - 3.0
    built = case(
        heads=heads,
        dim=dim,
        lengths=lengths,
        queries=draw(st.sampled_from([1, 2, 5, 17])),
        keys=draw(st.sampled_from(fits)),
        values=draw(st.sampled_from([n for n in fits if n in VALUES])),
        dtype=draw(st.sampled_from(DTYPES)),
        strided=draw(st.booleans()),
        rotate_keys=dim != 40 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        **options,
    )
    chosen = tiles(draw(st.integers(1, 5))) if draw(st.booleans()) else tiles(4, 32)
    return built, dataclasses.replace(chosen, block_tokens=draw(st.sampled_from([32, 64])) if chosen.chunk == 0 else 32)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(cases())
def test_awkward_shapes(drawn: tuple[Case, TritonTiles]) -> None:
    built, chosen = drawn
    built.check(chosen)


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
    chosen = triton_tiles(
        *(key_format(keys), key_format(values)),
        batch=batch,
        heads=heads,
        rows=rows,
        capacity=capacity,
        dim=dim,
        num_sms=132,
        chunk=chunk,
    )
    assert chosen.block_tokens % (key_format(keys).token_block or 16) == 0
    assert chosen.splits >= 1
    if chunk:
        assert chosen.chunk >= chunk
        assert chosen.chunk % chosen.block_tokens == 0
        assert chosen.splits * chosen.chunk >= capacity
    else:
        assert chosen.chunk == 0
        assert chosen.splits <= max(1, capacity)
