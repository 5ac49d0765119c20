"""Products with quantized weights on a GPU: drawn calls against float64, the same bits again, graphs, streams, large memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gpu_gemms as gemms
import pytest
import torch
from gpu_cases import differs, junk, poisoned, same_bits
from gpu_gemms import FORMATS, LAYOUTS, Call, Case
from gpu_place import PLACE, TALLY
from test_gpu_graphs import Captured, needs_gpu

import halfbyte as hb
from accuracy import check_product
from halfbyte.device import H200
from halfbyte.errors import Unsupported
from halfbyte.formats import EVERY_WEIGHT_FORMAT
from halfbyte.ops._linear_on_gpu import LINEAR, expands, plan_of
from halfbyte.plans.gemm_mma import mma_plan
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import WgmmaSpec
from halfbyte.reference.linear import LinearCall
from halfbyte.tensors import QuantTensor
from halfbyte_lab.measure.cupti import names_of

drawn = partial(
    gemms.drawn, width=PLACE.size(6000, 300), rows=PLACE.size(1000, 20), features=(PLACE.size(1000, 100), PLACE.size(4096, 64))
)
build, normal = partial(gemms.build, device=PLACE.device), partial(gemms.normal, device=PLACE.device)
CASES = drawn(PLACE.size(300, 24), seed=1)


def attempt(case: Case, impl: str) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """The call and its result; what is refused is counted and skipped."""
    call = build(case)
    try:
        with poisoned():
            outs = call.run(impl)
    except Unsupported as error:
        TALLY.refused[impl, str(error)] += 1
        pytest.skip(str(error))
    TALLY.ran[impl] += 1
    return call, outs


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(CASES)))
def test_products_keep_their_promise(number: int, impl: str) -> None:
    """With very many rows also as it runs without poison, which asks torch for deterministic algorithms: by dequantized parts."""
    call, outs = attempt(CASES[number], impl)
    call.check(outs)
    if impl == "auto" and expands(LinearCall(call.x, call.weights, call.biases)):
        call.check(call.run(impl))


def test_the_cases_cover_what_they_should() -> None:
    assert {name for case in CASES for name in case.formats} == set(FORMATS)
    assert {case.layout for case in CASES} == set(LAYOUTS)
    assert {True, False} == {case.act_order for case in CASES} == {case.bias for case in CASES}
    assert {1, 3} == {len(case.formats) for case in CASES}


@pytest.mark.parametrize("name", [name for name in EVERY_WEIGHT_FORMAT if name not in FORMATS])
def test_x_in_int8(name: str) -> None:
    """By Hopper's tuned kernel; a dry run takes the CPU's level."""
    if not PLACE.dry and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("x stays in 16 bits")
    impl, rng = "cpu" if PLACE.dry else "gluon", torch.Generator().manual_seed(0)
    for rows, features, width, dtype in (
        (520, 130, 1152, torch.bfloat16),
        (PLACE.size(2047, 519), PLACE.size(4104, 40), PLACE.size(4096, 256), torch.float16),
    ):
        x = torch.randn(rows, width, generator=rng).to(PLACE.device, dtype)
        x[3], x[5, 7], x[6, 100] = 0, torch.nan, torch.inf
        weight = hb.quantize(torch.randn(features, width, generator=rng), name).to(PLACE.device)
        with poisoned():
            out, again = (hb.linear(x, weight, impl=impl) for _ in range(2))
        assert same_bits(out, again)
        assert not out[3].any()
        assert out[[5, 6]].isnan().all()
        others = torch.arange(rows, device=x.device) > 6
        check_product(out[others], x[others], weight)


#: Each kind of code and scale; few rows (K split), many (large tiles), three weights at once.
MARKED = [
    Case(("int4_g128",), (PLACE.size(4096, 64),), 1, PLACE.size(4096, 256)),
    Case(("int4_sym_g32",), (PLACE.size(1000, 33),), 16, PLACE.size(4096, 256), "float16", bias=True),
    Case(("nf4_dq",), (PLACE.size(2048, 40),), 33, PLACE.size(2048, 192)),
    Case(("nvfp4",), (PLACE.size(2048, 40),), PLACE.size(700, 20), PLACE.size(2048, 208)),
    Case(("int8_col",), (PLACE.size(3001, 41),), PLACE.size(130, 17), PLACE.size(2050, 202), "float16"),
    Case(("int4_g64", "nf4", "mxfp4"), (PLACE.size(4096, 64), 131, 1024), PLACE.size(8, 3), PLACE.size(4096, 192), bias=True),
    Case(("int4_g128",) * 3, (PLACE.size(4096, 64), 1024, 1024), PLACE.size(500, 9), PLACE.size(4096, 256), act_order=True),
    Case(("int4_g128",) * 3, (PLACE.size(4000, 64), 1024, 1024), PLACE.size(24, 3), PLACE.size(4096, 256), bias=True),
    Case(("nvfp4",), (PLACE.size(3001, 40),), PLACE.size(64, 3), PLACE.size(2320, 208), "float16"),
    Case(("int4_g64",), (PLACE.size(2000, 40),), PLACE.size(40, 3), PLACE.size(4352, 256)),
    # Programs of the kernel for few rows that go round their rings: parts of tiles and whole ones, few and many slots for scales.
    Case(("nf4",), (PLACE.size(20000, 40),), 1, PLACE.size(8192, 256)),
    Case(("int4_g32",), (PLACE.size(20000, 40),), 4, PLACE.size(8192, 256), "float16"),
    Case(("int4_g32",), (PLACE.size(20000, 40),), 16, PLACE.size(8192, 256)),
    Case(("int4_sym_g128",), (PLACE.size(20000, 40),), 16, PLACE.size(8192, 256), bias=True),
    # Large M on Hopper: act-order, a split of K, whole tiles and parts of them.
    Case(("int4_sym_g128",), (PLACE.size(4000, 40),), PLACE.size(600, 17), PLACE.size(4096, 256), act_order=True),
    Case(("int4_g64",), (PLACE.size(1000, 40),), PLACE.size(512, 17), PLACE.size(14336, 256), "float16", bias=True),
    Case(("nf4",), (PLACE.size(28672, 40),), PLACE.size(512, 17), PLACE.size(4096, 256)),
]


@needs_gpu
def test_some_programs_go_round_the_rings_of_few_rows() -> None:
    """Twice round the slots of scales, with streams that say what they have read and with slots enough to know it."""
    told = set()
    for case in MARKED:
        weights = tuple((hb.WEIGHT_FORMATS[name], n) for name, n in zip(case.formats, case.features, strict=True))
        problem = GemmProblem(weights, case.rows, case.width, "bf16" if case.dtype == "bfloat16" else "fp16")
        plan = mma_plan(problem, H200, use_pdl=True)
        if isinstance(plan, GemmPlan) and plan.tiles * plan.steps > 2 * plan.spec.scale_slots * plan.programs:
            told.add(plan.spec.has_empty_barrier)
    assert told == {True, False}


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(MARKED)))
def test_repeats_give_the_same_bits(number: int, impl: str) -> None:
    """Compared on the device, without waiting: repeats overlap as they do in use."""
    call, outs = attempt(MARKED[number], impl)
    call.check(outs)
    different = torch.zeros((), dtype=torch.bool, device=PLACE.device)
    with poisoned():
        for _ in range(PLACE.size(1000, 3)):
            for a, b in zip(call.run(impl), outs, strict=True):
                different |= differs(a, b)
    assert not different


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(MARKED)))
def test_a_row_does_not_depend_on_its_neighbours(number: int, impl: str) -> None:
    """The same bits alone, with others, in another order; with `row_invariant`."""
    call, _ = attempt(MARKED[number], impl)
    x = torch.cat([call.x, normal(3, call.x.shape[1]).to(call.x.dtype)])
    together = replace(call, x=x).run(impl, row_invariant=True)
    order = torch.randperm(len(x), device=x.device)
    for rows in (order, order[:1], order[: len(x) // 2]):
        for a, b in zip(replace(call, x=x[rows]).run(impl, row_invariant=True), together, strict=True):
            assert same_bits(a, b[rows])
    replace(call, x=x).check(together)


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(MARKED)))
def test_nan_stays_in_its_row(number: int, impl: str) -> None:
    call, _ = attempt(replace(MARKED[number], rows=max(3, MARKED[number].rows)), impl)
    expected = call.run(impl)
    call.x[1] = torch.nan
    for a, b in zip(call.run(impl), expected, strict=True):
        assert a[1].isnan().all()
        assert same_bits(torch.cat([a[:1], a[2:]]), torch.cat([b[:1], b[2:]]))


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(MARKED)))
def test_a_graph_gives_the_bits_of_an_eager_call(number: int, impl: str) -> None:
    call, outs = attempt(MARKED[number], impl)
    # Once without poison, as it will be captured: very many rows go to cuBLAS, which sets itself up at its first call.
    call.run(impl)
    PLACE.sync()
    graph = Captured(lambda: call.run(impl))
    for seed in range(3):
        call.x.copy_(normal(*call.x.shape, seed=seed))
        replayed = [t.clone() for t in graph.replay()]
        for a, b in zip(replayed, call.run(impl), strict=True):
            assert same_bits(a, b)
    assert len(replayed) == len(outs)


@pytest.mark.compile_first
@pytest.mark.parametrize("number", [0, 3, 5, 7])
def test_compiled_equals_eager(number: int, impl: str) -> None:
    call, _ = attempt(MARKED[number], impl)
    torch._dynamo.reset()
    run: Callable[[torch.Tensor], Any] = torch.compile(
        lambda x: replace_x(call, x).run(impl), fullgraph=True, backend="aot_eager" if PLACE.dry else "inductor"
    )
    for a, b in zip(run(call.x), call.run(impl), strict=True):
        assert same_bits(a, b)


def replace_x(call: Call, x: torch.Tensor) -> Call:
    return Call(x, call.weights, call.biases)


@needs_gpu
def test_two_streams_at_once(impl: str) -> None:
    """Split products on two streams share no workspace."""
    calls = [build(replace(MARKED[i], seed=i)) for i in (0, 1)]
    expected = [call.run(impl) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    PLACE.sync()
    different = [torch.zeros((), dtype=torch.bool, device=PLACE.device) for _ in calls]
    for _ in range(300):
        for i, (call, stream) in enumerate(zip(calls, streams, strict=True)):
            with torch.cuda.stream(stream):
                different[i] |= differs(call.run(impl)[0], expected[i][0])
    PLACE.sync()
    assert not any(different)


@needs_gpu
def test_the_current_stream_is_used(impl: str) -> None:
    """On a side stream that is kept busy first: a kernel on any other stream would read what is not there yet."""
    call = build(MARKED[0])
    wanted, later = call.run(impl)[0], call.x.clone()
    call.x.fill_(torch.nan)
    stream = torch.cuda.Stream()
    PLACE.sync()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        call.x.copy_(later)
        out = call.run(impl)[0]
    stream.synchronize()
    assert same_bits(out, wanted)


@pytest.mark.parametrize(("rows", "dtype"), [(1, "bfloat16"), (100, "float16")])
def test_the_last_rows_of_a_huge_weight(rows: int, dtype: str, impl: str) -> None:
    """Codes beyond 2^31 bytes; all rows but the last are junk."""
    n, width, last = PLACE.size(560_000, 300), PLACE.size(8192, 256), 70
    small = hb.quantize(normal(last, width), "int4_g128")
    parts = {name: torch.cat([junk(t.new_empty(1)).expand(n - last, *t.shape[1:]), t]) for name, t in small.parts().items()}
    large = QuantTensor(small.format, (n, width), **parts)
    assert PLACE.dry or large.codes.numel() > 2**31
    x = normal(rows, width).to(getattr(torch, dtype))
    check_product(hb.linear(x, large, impl=impl)[:, -last:], x, small, None)
    if not PLACE.dry:
        del large, parts
        torch.cuda.empty_cache()


def test_the_last_rows_of_a_huge_x(impl: str) -> None:
    """Rows of x, and of the result, beyond 2^31 elements."""
    rows, width, n = PLACE.size(1_100_000, 70), 2048, PLACE.size(2048, 8)
    w = hb.quantize(normal(n, width), "int8_col")
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=PLACE.device)
    x[-5:] = normal(5, width)
    y = hb.linear(x, w, impl=impl)
    assert PLACE.dry or min(x.numel(), y.numel()) > 2**31
    check_product(y[-5:], x[-5:], w)
    assert not y[: rows // 2 : 1000].any()
    if not PLACE.dry:
        del x, y
        torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("name", ["nf4", "nf4_dq", "fp4_bnb"])
def test_levels_do_not_add_up_their_errors(name: str, rows: int, impl: str) -> None:
    """x of one sign: what rounding does to a level is the same wherever its code stands."""
    x = normal(rows, PLACE.size(8192, 256)).relu().bfloat16()
    w = hb.quantize(normal(PLACE.size(512, 32), x.shape[1]), name)
    check_product(hb.linear(x, w, impl=impl), x, w)


@pytest.mark.parametrize(("name", "broken"), [("mxfp4", 255), ("nvfp4", 127), ("nvfp4", 255)])
def test_a_broken_scale_is_seen(name: str, broken: int, impl: str) -> None:
    w = hb.quantize(normal(70, 256), name)
    scales = w.scales.clone()  # type: ignore[union-attr]
    scales[3, 1] = broken
    y = hb.linear(normal(2, 256).bfloat16(), replace(w, scales=scales), impl=impl)
    assert y[:, 3].isnan().all()
    assert not torch.cat([y[:, :3], y[:, 4:]], 1).isnan().any()


@pytest.mark.parametrize("rows", [5, 6, 9, PLACE.size(600, 20)])
def test_biases_of_several_types(rows: int, impl: str) -> None:
    x, weights = normal(rows, 256).bfloat16(), [hb.quantize(normal(n, 256), "int4_g64") for n in (64, 32, 33)]
    biases = (normal(64), None, normal(33).bfloat16())
    for y, w, b in zip(hb.qkv_projection(x, tuple(weights), biases, impl=impl), weights, biases, strict=True):  # type: ignore[arg-type]
        check_product(y, x, w, b)


def test_a_share_of_a_weight_is_read_where_it_lies(impl: str) -> None:
    """Half of the columns, as a view, with few rows and with many."""
    full = hb.quantize(normal(100, 512), "int4_g64")
    half = QuantTensor(full.format, (100, 256), **{name: t[:, t.shape[1] // 2 :] for name, t in full.parts().items()})
    for rows in (2, PLACE.size(600, 20)):
        x = normal(rows, 256).bfloat16()
        check_product(hb.linear(x, half, impl=impl), x, half, None)


def test_a_bias_that_wants_a_gradient_is_refused(impl: str) -> None:
    w, bias = hb.quantize(normal(64, 256), "int4_g64"), normal(64).requires_grad_()
    for rows in (2, PLACE.size(600, 20)):
        y = hb.linear(normal(rows, 256).bfloat16(), w, bias, impl=impl)
        with pytest.raises(Unsupported, match="no gradient"):
            y.sum().backward()


@pytest.mark.parametrize("tiles", [1.0, 0.25])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_a_product_in_compiled_code_is_one_kernel(tiles: float, rows: int) -> None:
    """And one that clears counters where tiles are shared, not where each program has a tile for itself; and one that orders x."""
    num_sms = 4 if PLACE.dry else torch.cuda.get_device_properties(0).multi_processor_count
    n, level = int(tiles * num_sms) * 64, "cpu" if PLACE.dry else "gluon"
    weight, x = hb.quantize(normal(n, PLACE.size(4096, 256)), "int4_sym_g128"), normal(rows, PLACE.size(4096, 256)).bfloat16()

    def product() -> Any:
        return LINEAR(LinearCall(x, [weight], [None], level))[0]

    assert same_bits(product(), hb.linear(x, weight, impl=level))
    if not PLACE.dry:
        plan = plan_of(LinearCall(x, [weight], [None], level))
        assert isinstance(plan, GemmPlan)
        names_of(product)  # the profiler may miss what comes while it starts
        names = names_of(product)
        assert sum("linear" in name for name in names) == 1
        others = bool(plan.split_tiles) + (type(plan.spec) is WgmmaSpec)
        assert len(names) <= 1 + others, (names, plan.why)
