"""The ops: torch.library's own checks, torch.compile, and the levels against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte import plans
from halfbyte.cache import KVCache
from halfbyte.errors import HalfbyteError, InvalidArgument, Unsupported
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kv_buffer import AppendCall, AttentionOptions, DecodeCall, Rope
from halfbyte.ops._linear_on_gpu import LINEAR
from halfbyte.ops.append import APPEND
from halfbyte.ops.declare import Op
from halfbyte.ops.decode_attention import DECODE, decode_attention
from halfbyte.ops.linear import linear, qkv_projection
from halfbyte.ops.prefill_attention import prefill_attention
from halfbyte.ops.transform_heads import TRANSFORM_HEADS, transform_heads
from halfbyte.paging import PagedKVCache
from halfbyte.reference.linear import LinearCall
from halfbyte.reference.quantize import dequantize, quantize
from halfbyte.reference.rope import rope_tables
from halfbyte.reference.transform import TransformCall
from halfbyte.tensors import QuantTensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LAYOUTS: list[dict[str, Any]] = [
    {"keys": "int8", "values": "int4_g32"},
    {"keys": "int4_channel", "values": "fp8"},
    {"keys": "int8_tensor", "values": "fp8_tensor", "k_scale": 0.1, "v_scale": 0.1},
    {"keys": "int8_token", "values": "fp16", "rotate_keys": True},
    {"keys": "int8", "values": "int8", "paged": True},
    {"keys": "int8_channel", "values": "int4", "paged": True},
    {"keys": "int4", "values": "int8_token", "sink_tokens": 2, "recent_tokens": 4},
]
IDS = ["-".join(str(v) for v in layout.values()) for layout in LAYOUTS]


def build(layout: dict[str, Any], count: int = 37) -> KVCache:
    options = {name: value for name, value in layout.items() if name != "paged"}
    kind = PagedKVCache if layout.get("paged") else KVCache
    cache = kind(2, 2, 64, 128, **options)
    cache.append(*random_tokens(count), torch.tensor([count, count - 1], dtype=torch.int32))
    return cache


def random_tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    k, v = (torch.randn(2, 2, count, 64, generator=generator) for _ in range(2))
    return k, v


def opcheck(op: Op[Any], call: Any, **options: Any) -> None:
    """torch.library's own checks of a declared op."""
    torch.library.opcheck(getattr(torch.ops.halfbyte, op.name).default, op.flat(call), **options)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_opcheck_append(layout: dict[str, Any]) -> None:
    cache, (k, v) = build(layout), random_tokens(3)
    if isinstance(cache, PagedKVCache):  # the op writes where the page table says: give each sequence another page
        cache.append(*random_tokens(1))
    counts = torch.tensor([3, 1], dtype=torch.int32)
    for given in (counts, None):
        memory = (cache.keys, cache.values, cache.lengths, given, cache.page_table, cache.rotate_keys)
        call = AppendCall(k, v, *memory, impl="reference")
        opcheck(APPEND, call)
        q, rope = torch.randn(2, 3, 4, 64).transpose(1, 2), Rope(*rope_tables(torch.arange(3), 64))
        opcheck(APPEND, call._replace(rope=rope, q=q, rotated_q=torch.empty(q.shape)))


def test_opcheck_append_by_slot() -> None:
    cache, (k, v), q = build(LAYOUTS[4]), random_tokens(1), torch.randn(2, 4, 1, 64)
    rope = Rope(*rope_tables(torch.arange(2).unsqueeze(1), 64))
    call = AppendCall(k, v, cache.keys, cache.values, torch.tensor([-1, 70]), rope=rope, q=q, measure=False, by_slot=True)
    opcheck(APPEND, call._replace(impl="reference", rotated_q=torch.empty(q.shape)))


def test_rotation_of_heads() -> None:
    """An op that compiled code sees; twice it gives x back, in float64 to the last digits; rounded once in other types."""
    x = torch.randn(2, 5, 3, 96).transpose(1, 2)
    matrix, shift = torch.randn(3, 96, 96), torch.randn(3, 96)
    for call in (TransformCall(x, impl="reference"), TransformCall(x, matrix, shift, impl="reference")):
        opcheck(TRANSFORM_HEADS, call)
    wide = x.double()
    torch.testing.assert_close(transform_heads(transform_heads(wide)), wide, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(transform_heads(x.bfloat16()), transform_heads(x.bfloat16().double()).bfloat16(), rtol=0, atol=2**-7)
    for given, says in ((torch.randn(2, 3, 96), "x"), (torch.randn(1, 1, 1, 40), "head_dim=40"), (3, "x")):
        with pytest.raises(InvalidArgument, match=says):
            transform_heads(given)  # type: ignore[arg-type]
    exact = wide @ matrix.double() + shift.double()[:, None]
    torch.testing.assert_close(transform_heads(wide, matrix, shift), exact)
    wrong = (
        ("matrix", {"matrix": matrix[:, :4]}),
        ("x has 3 heads and matrix 2", {"matrix": matrix[:2]}),
        ("shift", {"matrix": matrix, "shift": shift[:2]}),
        ("not contiguous", {"matrix": matrix.mT}),
        ("belongs to a matrix", {"shift": shift}),
    )
    for says, options in wrong:
        with pytest.raises(InvalidArgument, match=says):
            transform_heads(x, **options)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("level", ["cpu", "reference"])
def test_opcheck_decode_attention(layout: dict[str, Any], level: str) -> None:
    cache, q = build(layout), torch.randn(2, 4, 3, 64).bfloat16()
    starts, heads = torch.tensor([0, 2], dtype=torch.int32), torch.rand(4)
    memory = (cache.keys, cache.values, cache.lengths, cache.lengths - 3, cache.page_table)
    plain = AttentionOptions(0.125, rotate_keys=cache.rotate_keys)
    for options in (plain, AttentionOptions(0.125, 20.0, heads, 7, starts, starts + 9, heads, cache.rotate_keys)):
        opcheck(DECODE, DecodeCall(q, *memory, options, level))
    opcheck(DECODE, DecodeCall(torch.cat([q, q], -1), *memory, plain, level, latent=True))


@pytest.mark.parametrize("name", ["int4_g32", "int4_sym_col", "int8_col", "nf4_dq", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("level", ["cpu", "reference"])
def test_opcheck_linear(name: str, level: str) -> None:
    weight, x = quantize(torch.randn(24, 128), name), torch.randn(2, 3, 128).half()
    for bias in (None, torch.randn(24)):
        opcheck(LINEAR, LinearCall(x, [weight], [bias], level))


@pytest.mark.parametrize("name", ["nf4", "int8_col"])
def test_opcheck_linear_of_fp32(name: str) -> None:
    opcheck(LINEAR, LinearCall(torch.randn(5, 128), [quantize(torch.randn(24, 128), name)], [None], "cpu"))


def act_order(weight: QuantTensor) -> QuantTensor:
    return replace(weight, perm=torch.randperm(weight.shape[1]).int())


def test_opcheck_projections() -> None:
    names = ("nf4", "int4_g32", "nvfp4")
    first, *others = (quantize(torch.randn(n, 128), name) for n, name in zip((32, 16, 8), names, strict=True))
    weights = [first, act_order(others[0]), others[1]]
    opcheck(LINEAR, LinearCall(torch.randn(5, 128), weights, [torch.randn(32), None, torch.randn(8)], "cpu"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=IDS[:4])
def test_a_compiled_step_is_the_eager_step(layout: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()

    def step(cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = cache.append(k, v, rope=rope_tables(cache.lengths.unsqueeze(-1), 64), q=q)
        out, lse = decode_attention(q, cache, window=20, softcap=30.0, return_lse=True)
        return out * 2, lse

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    a, b = build(layout, 30), build(layout, 30)
    for i in range(4):  # past the end of a block of tokens
        k, v = random_tokens(1)
        q = torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(i))
        for got, expected in zip(compiled(a, q, k + i, v), step(b, q, k + i, v), strict=True):
            assert torch.equal(got, expected)
    for got, expected in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("rotated", [False, True])
def test_compiled_code_appends_any_number_of_tokens(rotated: bool) -> None:
    """One graph for a single token and one for all other numbers, with positions and without."""
    torch._dynamo.reset()
    compiled, graphs = KVCache(2, 2, 32, 256, keys="int8", values="int4_g32"), []
    eager = copy.deepcopy(compiled)
    cos, sin = rope_tables(torch.arange(64), 32)

    def append(cache: KVCache, k: torch.Tensor) -> None:
        cache.append(k, k, rope=(cos[: k.shape[2]], sin[: k.shape[2]]) if rotated else None)

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(append, backend=backend, fullgraph=True)
    for count in (1, 5, 6, 7, 9, 11, 13, 1, 20, 3, 4, 2):
        k = torch.randn(2, 2, count, 32)
        step(compiled, k)
        append(eager, k)
    assert len(graphs) == 2
    assert all(torch.equal(a, b) for a, b in zip(compiled.tensors(), eager.tensors(), strict=True))


def test_a_compiled_linear_is_the_eager_linear() -> None:
    torch._dynamo.reset()
    weights = [quantize(torch.randn(n, 64), name) for n, name in ((32, "nf4"), (16, "int4_g32"), (8, "mxfp4"))]
    weights = (weights[0], act_order(weights[1]), act_order(weights[2]))  # type: ignore[assignment]
    x = torch.randn(3, 64)
    compiled = torch.compile(lambda x: qkv_projection(x, weights), fullgraph=True, backend="aot_eager")  # type: ignore[arg-type]
    for got, expected in zip(compiled(x), qkv_projection(x, weights), strict=True):  # type: ignore[arg-type]
        assert torch.equal(got, expected)


# -------------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_reference_is_the_product_with_the_dequantized_weight(name: str, dtype: torch.dtype) -> None:
    """Rounded once."""
    weight, x, bias = quantize(torch.randn(33, 256), name), torch.randn(2, 5, 256).to(dtype), torch.randn(33)
    exact = x.double() @ dequantize(weight, torch.float64).T + bias.double()
    assert torch.equal(linear(x, weight, bias, impl="reference"), exact.to(dtype))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_qkv_projection_is_three_products(impl: str) -> None:
    names = ("nvfp4", "int4_sym_g64", "nf4_dq")
    weights = [quantize(torch.randn(n, 128) * n, name) for n, name in zip((32, 16, 8), names, strict=True)]
    weights = (act_order(weights[0]), weights[1], act_order(weights[2]))  # type: ignore[assignment]
    biases = (torch.randn(32), None, torch.randn(8))
    x = torch.randn(4, 128).bfloat16()
    got = qkv_projection(x, weights, biases, impl=impl)  # type: ignore[arg-type]
    with torch.autocast("cpu"):  # through torch's dispatcher, which plain calls skip
        dispatched = qkv_projection(x, weights, biases, impl=impl)  # type: ignore[arg-type]
    for y, same, weight, bias in zip(got, dispatched, weights, biases, strict=True):
        assert torch.equal(y, linear(x, weight, bias, impl=impl))
        assert torch.equal(y, same)


def test_views_of_queries_and_options_attend_like_their_copies() -> None:
    cache = build(LAYOUTS[0])
    base = torch.randn(66, 5, 4, 2)
    q = base.permute(3, 2, 1, 0)[..., 1:65]
    slopes = torch.rand(8)[::2]
    for impl in ("cpu", "reference"):
        a = decode_attention(q, cache, alibi_slopes=slopes, sinks=slopes, impl=impl)
        b = decode_attention(q.contiguous(), cache, alibi_slopes=slopes.contiguous(), sinks=slopes.contiguous(), impl=impl)
        torch.testing.assert_close(a, b)


# ----------------------------------------------------------------------------------------------------------------- plans


def test_every_level_of_every_op_can_be_asked_for() -> None:
    for op, levels in plans.LEVELS.items():
        for level in levels:
            assert plans.plan(op, level, "cuda").level == level
            if level in plans.GPU_LEVELS:
                with pytest.raises(Unsupported, match=f"impl='{level}' of {op} runs on an NVIDIA GPU"):
                    plans.plan(op, level, "cpu")
            else:
                assert plans.plan(op, level, "cpu").level == level
        assert plans.plan(op, "auto", "cuda").level == levels[0]
        assert plans.plan(op, "auto", "cpu").level == next(level for level in levels if level not in plans.GPU_LEVELS)
        for device in ("cpu", "cuda"):
            why = plans.plan(op, "auto", device).why
            assert device in why or "GPU" in why
    assert plans.plan("decode_attention", "triton", "cpu", interpreted=True).level == "triton"


@pytest.mark.parametrize("impl", ["cuda", "", "Cpu", None])
def test_a_level_that_does_not_exist_is_refused(impl: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"impl=.*choose auto or one of: gluon, triton, cpu, reference"):
        plans.plan("decode_attention", impl, "cpu")
    with pytest.raises(InvalidArgument, match="impl="):
        decode_attention(torch.randn(2, 4, 1, 64), build(LAYOUTS[0]), impl=impl)


def test_the_environment_picks_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = build(LAYOUTS[0]), torch.randn(2, 4, 1, 64).double()
    reference, cpu = (decode_attention(q, cache, impl=impl) for impl in ("reference", "cpu"))
    assert not torch.equal(reference, cpu)  # else this test could not tell
    for value, expected in (("reference", reference), ("cpu", cpu), ("", cpu), ("auto", cpu)):
        monkeypatch.setenv("HALFBYTE_IMPL", value)
        assert torch.equal(decode_attention(q, cache), expected)
    monkeypatch.setenv("HALFBYTE_IMPL", "reference")
    assert torch.equal(decode_attention(q, cache, impl="cpu"), cpu)  # what is asked for wins
    monkeypatch.setenv("HALFBYTE_IMPL", "fast")
    with pytest.raises(InvalidArgument, match=r"HALFBYTE_IMPL='fast'; choose one of: auto, reference, cpu, triton, gluon"):
        decode_attention(q, cache)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_fp8_nan_codes_of_an_engine_stay_nan(impl: str) -> None:
    cache = build({"keys": "int8", "values": "fp8"})
    cache.values.codes[0, 0, 3, 5] = 0x7F
    out = decode_attention(torch.randn(2, 2, 1, 64), cache, impl=impl)
    assert out[0, 0, 0, 5].isnan()  # type: ignore[index]
    assert out[1].isfinite().all()  # type: ignore[index]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_row_alone_has_the_bits_it_has_among_others(impl: str) -> None:
    weights = tuple(quantize(torch.randn(n, 320), name) for n, name in ((33, "int4_g64"), (8, "nf4"), (5, "int8_col")))
    x, bias = torch.randn(2, 9, 320), torch.randn(33)
    together = linear(x, weights[0], bias, row_invariant=True, impl=impl)
    shards = qkv_projection(x, weights, row_invariant=True, impl=impl)  # type: ignore[arg-type]
    for i in range(9):
        assert torch.equal(linear(x[:1, i], weights[0], bias, row_invariant=True, impl=impl)[0], together[0, i])
        for all_rows, one in zip(shards, qkv_projection(x[1, i], weights, row_invariant=True, impl=impl), strict=True):  # type: ignore[arg-type]
            assert torch.equal(all_rows[1, i], one)
    assert linear(x[:, :0], weights[0], row_invariant=True, impl=impl).shape == (2, 0, 33)


def test_gradients_are_refused() -> None:
    """Asking for a gradient raises; it is never silently missing. Without a backward pass nothing is in the way."""
    cache = KVCache(1, 2, 64, 8)
    cache.append(torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 64))
    weight, k = quantize(torch.randn(8, 64), "nf4"), torch.randn(1, 2, 1, 64)
    x, q = torch.randn(2, 64, requires_grad=True), torch.randn(1, 4, 1, 64, requires_grad=True)
    for out in (
        linear(x, weight),
        decode_attention(q, cache),
        prefill_attention(q, k, k, cache),
        qkv_projection(x, (weight,) * 3)[1],
    ):
        with pytest.raises(HalfbyteError, match="no gradient"):
            out.sum().backward()


def test_queries_that_lie_far_apart_are_not_for_the_tuned_kernel() -> None:
    """Where a head's queries lie is a product in 32 bits there."""
    from halfbyte.plans.decode_problem import aligned

    codes = torch.empty(1, 2, 64, 64, dtype=torch.int8, device="meta")
    for apart, near in ((2**28, True), (2**29, False)):
        q = torch.empty_strided((1, 4, 2, 64), (0, apart, 64, 1), dtype=torch.bfloat16, device="meta")
        assert aligned(q, codes) is near
