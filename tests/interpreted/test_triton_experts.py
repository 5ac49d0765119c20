"""The Triton level of `experts_linear` in the interpreter: within the promise of every level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from experts_cases import CALLS, IDS, OAI, Mixture, both_in_one, normal, routed, sorted_pairs, stack
from halfbyte.device import GPU, H200, sm_shared_memory
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.dequantize import launch_experts
from halfbyte.ops import _experts_prompt, experts_mlp
from halfbyte.ops.experts_linear import _run_on_gpu
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_mma import BLOCK_BYTES
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_portable import PortableTiles, portable_tiles
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_slabs import dequantized_rows
from halfbyte.reference.experts import ExpertsCall
from watched import watched

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned_memory")]


def _run_triton(call: ExpertsCall) -> torch.Tensor:
    return _run_on_gpu(call._replace(impl="triton"))


def problem_of(
    name: str, tokens: int, stack: tuple[int, int, int] = (128, 1536, 2048), top_k: int = 8, half: str = "bf16"
) -> GemmProblem:
    experts, features, width = stack
    return GemmProblem(((WEIGHT_FORMATS[name], features),), tokens, width, half, Routing(experts, top_k))


def tiles(case: Mixture, *, splits: int = 1, m: int = 16, fold: bool = False) -> PortableTiles:
    experts, _, width = case.weight.shape
    pairs = case.ids.numel()
    share = -(-(width // 32) // splits)
    return PortableTiles(32, m, 32, -(-(width // 32) // share), share, fold, 1, 1, blocks=pairs // m + min(pairs, experts))


def run(case: Mixture, chosen: PortableTiles) -> torch.Tensor:
    """Launches into memory that holds NaN."""
    out = case.new_result().fill_(torch.nan)
    _experts_prompt.run(case, chosen, out)
    return out


def by_blocks(case: Mixture, rows: int = 16) -> torch.Tensor:
    """Through dequantized experts, `rows` of each at a time."""
    out = case.new_result().fill_(torch.nan)
    _experts_prompt.run(case, rows, out)
    return out


@pytest.mark.slow(sample=20)
@pytest.mark.parametrize("way", [_run_triton, by_blocks], ids=["launched", "by blocks"])
@pytest.mark.parametrize("name", CALLS)
def test_every_call(name: str, way: Callable[..., torch.Tensor]) -> None:
    CALLS[name]().check(way)


WAYS = [{"splits": n, "m": m, "fold": fold} for n in (1, 3) for m, fold in ((16, False), (32, True))]


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_to_cut_the_work(way: dict[str, int], gated: bool) -> None:
    gates = torch.rand(len(IDS), 2) if gated else None
    case = Mixture(normal(len(IDS), 96).half(), stack("int4_g32", 4, 36, 96), IDS, gates, normal(4, 36), OAI)
    case.check(lambda *_: run(case, tiles(case, **way)))  # type: ignore[arg-type]


def test_nothing_but_an_experts_own_pairs_reaches_it() -> None:
    """NaN in one token's row, gate and expert stays there."""
    weight, ids = stack("int4_g32", 4, 34, 64), torch.tensor([[0, 1], [1, 2], [0, 2]])
    x, gates = normal(3, 64).half(), torch.rand(3, 2)
    clean = _run_triton(Mixture(x, weight, ids, gates))
    assert weight.scales is not None
    weight.scales[3], x[1], gates[1] = torch.nan, torch.nan, torch.nan
    out = _run_triton(Mixture(x, weight, ids, gates))
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_no_width_leaves_the_bias() -> None:
    weight, bias = stack("int4_col", 2, 4, 0), normal(2, 4).half()
    out = _run_triton(Mixture(normal(1, 0).half(), weight, torch.tensor([[1]]), bias=bias))
    assert torch.equal(out[0, 0], bias[1])


def test_experts_without_tokens_are_not_dequantized() -> None:
    """Nor read: theirs is NaN, and the memory for their values holds NaN."""
    weight = stack("int4_g32", 4, 34, 64)
    assert weight.scales is not None
    weight.scales[2] = torch.nan
    out = torch.full((4, 16, 64), 7.0, dtype=torch.bfloat16)
    launch_experts(weight, sorted_pairs(IDS, 4).starts, out, 4)
    expected = weight.dequantize(torch.bfloat16)[:, 4:20]
    assert torch.equal(out[[0, 1, 3]], expected[[0, 1, 3]])
    assert bool((out[2] == 7).all())
    assert by_blocks(Mixture(normal(len(IDS), 64).bfloat16(), weight, IDS)).isfinite().all()


def test_blocks_of_rows_change_no_bits() -> None:
    case = Mixture(normal(30, 64).bfloat16(), stack("mxfp4", 3, 50, 64), routed(30, 2, 3), normal(30, 2).softmax(1), activation=OAI)
    assert torch.equal(by_blocks(case), by_blocks(case, 50))
    assert torch.equal(by_blocks(case), by_blocks(case))


def test_auto_dequantizes_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("experts_linear", "_linear_on_gpu"):
        monkeypatch.setattr(f"halfbyte.ops.{module}.gpu", lambda _: GPU("", 132, (10, 0)))
    ran = watched(monkeypatch, _experts_prompt, "run", lambda call, way, out: way)
    case = Mixture(normal(96, 64).bfloat16(), stack("int4_g32", 1, 12, 64), torch.zeros(96, 1, dtype=torch.int64))
    case.check(_run_on_gpu)
    case.check(_run_triton)
    assert ran[0] == 12
    assert isinstance(ran[1], PortableTiles)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_g32", "mxfp4", "nf4_dq", "nvfp4"])
def test_rows_that_stay_sorted_between_projections_change_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with ids that are no expert, an expert without tokens, biases, and another order of columns in each expert."""
    sorts: list[int] = []
    gates = normal(len(IDS), 2).softmax(1)
    for act_order in (False, True):
        first, last = stack(name, 4, 128, 128, act_order=act_order), stack(name, 4, 66, 64, act_order=act_order)
        up = Mixture(normal(len(IDS), 128).bfloat16(), first, IDS, None, normal(4, 128), OAI)
        down = Mixture(by_blocks(up), last, IDS, gates, normal(4, 66))
        expected = by_blocks(down)
        seen = watched(monkeypatch, _experts_prompt, "sorting", lambda ids, experts, _: experts)
        out = down.new_result().fill_(torch.nan)
        for step in _experts_prompt.both(*both_in_one(up, down).contiguous().projections(), (48, 32), out):
            step()
        monkeypatch.undo()
        sorts += seen
        assert torch.equal(out, expected)
    assert sorts == [4, 4]


def test_auto_keeps_the_rows_of_prompts_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("experts_linear", "_linear_on_gpu"):
        monkeypatch.setattr(f"halfbyte.ops.{module}.gpu", lambda _: GPU("", 132, (10, 0)))
    ran = watched(monkeypatch, _experts_prompt, "both", lambda up, down, rows, out: rows)
    up, down, gates = stack("int4_g32", 1, 128, 64), stack("int4_g32", 1, 12, 64), torch.ones(96, 1)
    for tokens in (96, 95):
        x, ids = normal(tokens, 64).bfloat16(), torch.zeros(tokens, 1, dtype=torch.int64)
        first, last = Mixture(x, up, ids, activation=OAI), Mixture(x, down, ids, gates[:tokens])
        impl = "auto" if tokens == 96 else "triton"
        made = experts_mlp.run(both_in_one(first._replace(impl=impl), last))
        inner = _run_triton(first)
        torch.testing.assert_close(made, _run_triton(last._replace(x=inner)), rtol=0.02, atol=0.02)
    assert ran == [(128, 12)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8], ids=str)
def test_pairs_are_sorted_in_their_order(dtype: torch.dtype) -> None:
    ids = torch.tensor([[2, 0], [100, 2], [0, 1]]).to(dtype)
    order, place, starts, experts, _ = sorted_pairs(ids, 4)
    assert place[order].tolist() == [*range(6)]
    assert order.tolist() == [1, 4, 5, 0, 3, 2]
    assert starts.tolist() == [0, 2, 3, 5, 5]
    assert experts.tolist() == [0, 0, 1, 2, 2, 4]


def test_blocks_of_sorted_pairs() -> None:
    """An expert with more than two blocks, one with exactly one, one without pairs, and ids that are no expert."""
    blocks = sorted_pairs(torch.tensor([0] * 9 + [2] * 4 + [-1, 3]).view(-1, 1), 3, 4).blocks
    assert blocks is not None
    assert blocks[0, 0] == 4
    assert blocks[1:5].tolist() == [[0, 0, 0, 9]] * 3 + [[2, 3, 9, 13]]


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(("pairs", "experts"), [(1, 1), (255, 3), (256, 40), (257, 30), (1000, 31), (66000, 5)])
def test_pairs_are_sorted_as_torch_sorts_them(pairs: int, experts: int) -> None:
    """Also with numbers that are no expert, which come last, and more blocks than are added up at a time."""
    drawn = torch.randint(-1, experts + 2, (pairs, 1), generator=torch.Generator().manual_seed(pairs))
    order, place, starts, found, _ = sorted_pairs(drawn, experts)
    assert torch.equal(place[order.long()], torch.arange(pairs, dtype=torch.int32))
    keys, expected = drawn.flatten().masked_fill((drawn.flatten() < 0) | (drawn.flatten() >= experts), experts).sort(stable=True)
    assert torch.equal(order.long(), expected)
    assert torch.equal(found.long(), keys)
    assert starts.tolist() == [int((keys < e).sum()) for e in range(experts + 1)]


def test_which_prompts_dequantize() -> None:
    qwen = problem_of("int4_g32", 8192)
    assert dequantized_rows(qwen, (9, 0)) == 1024
    assert dequantized_rows(qwen._replace(rows=1536), (9, 0))
    assert not dequantized_rows(qwen._replace(rows=1535), (9, 0))
    assert dequantized_rows(problem_of("int4_g32", 65536, (256, 4096, 7168)), (9, 0)) == 128
    assert dequantized_rows(problem_of("int4_g32", 512, (8, 34, 64)), (9, 0)) == 34
    assert not dequantized_rows(qwen._replace(half="fp16"), (9, 0))
    assert not dequantized_rows(qwen, (8, 0))
    assert not dequantized_rows(problem_of("int4_g32", 8192, (8, 1536, 2052)), (9, 0))


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(set(WEIGHT_FORMATS) - {"nf4_dq", "int4_col"}))
def test_blocks_of_prompts(name: str, half: str) -> None:
    """Larger ones for more pairs; the list has room for all of them, whatever the ids are."""
    for tokens, block in ((384, 32), (512, 64), (1024, 128), (4096, 256)):
        plan = tuned_gemm(problem_of(name, tokens, half=half), H200, use_pdl=True)
        if (name, half) == ("mxfp4", "fp16"):  # whose scales fp16 does not hold
            assert isinstance(plan, str)
            continue
        assert isinstance(plan, GemmPlan)
        assert plan.spec.block_m == block
        assert plan.programs == 132
        assert plan.blocks >= max(128 + (8 * tokens - 128) // block, -(-8 * tokens // block))
        assert plan.spec.shared_bytes + BLOCK_BYTES <= sm_shared_memory((9, 0))


@pytest.mark.parametrize(
    ("more", "capability", "why"),
    [
        ({"name": "mxfp4", "half": "fp16"}, (9, 0), "scales in E8M0 exceed fp16"),
        ({}, (10, 0), "compute capability 10.0; wgmma needs 9.0"),
        ({"stack": (128, 1536, 2056)}, (9, 0), "not a multiple of 16"),
        ({"name": "nf4_dq"}, (9, 0), "portable kernel only"),
        ({"stack": (1024, 1 << 21, 4096), "tokens": 1024}, (9, 0), "numbers up to 8388608 tiles"),
    ],
)
def test_what_the_kernel_for_prompts_refuses(more: dict[str, Any], capability: tuple[int, int], why: str) -> None:
    problem = problem_of(**{"name": "int4_sym_col", "tokens": 512} | more)
    found = tuned_gemm(problem, H200._replace(capability=capability), use_pdl=True)
    assert isinstance(found, str)
    assert why in found


def test_plans_cover_the_work() -> None:
    for tokens, top_k, experts, width in [(1, 8, 128, 2048), (64, 16, 512, 768), (65, 1, 2, 64), (4096, 8, 128, 2880)]:
        found = portable_tiles(problem_of("int4_g32", tokens, (experts, 1536, width), top_k), H200)
        assert found.splits * found.share * found.block_k >= width > (found.splits - 1) * found.share * found.block_k
        pairs = tokens * top_k
        assert found.blocks >= max(min(experts, pairs), -(-pairs // found.block_m))
        assert found.block_m <= 128
