"""The tuned kernel for mixtures of experts, emulated: against float64, with the same bits in any order of warps and programs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from emulation import EARLY_OF, ORDERS, Refused, mix, mix_both
from gpu_cases import same_bits
from triton.runtime.jit import JITFunction

from experts_cases import ACTIVATIONS, IDS, OAI, Mixture, normal, routed, stack
from halfbyte.device import H200
from halfbyte.ops import _experts_prompt
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_mma import MOST_TOKENS, block_rows
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.reference.experts import Activation, ExpertsCall


@dataclass(frozen=True)
class Case:
    """`tokens` tokens of `top_k` experts each. num_sms: few, so that programs share tiles; or more than tiles."""

    weight: str
    tokens: int
    top_k: int
    shape: tuple[int, int, int]
    options: str = ""  # "bias", "gates", "fp16"
    activation: Activation | None = None
    num_sms: int = 3

    def build(self) -> Mixture:
        experts, n, k = self.shape
        x = normal(self.tokens, *((self.top_k,) if "gates" in self.options else ()), k)
        return Mixture(
            x.half() if "fp16" in self.options else x.bfloat16(),
            stack(self.weight, *self.shape),
            routed(self.tokens, self.top_k, experts),
            torch.rand(self.tokens, self.top_k) if "gates" in self.options else None,
            normal(experts, n) if "bias" in self.options else None,
            self.activation,
        )


CASES = (
    Case("int4_g128", 1, 8, (9, 96, 2048), activation=ACTIVATIONS[1], num_sms=8),
    Case("int4_g128", 1, 4, (5, 70, 768), "gates", num_sms=8),
    Case("int4_sym_g128", 4, 2, (6, 40, 3712), "bias fp16", num_sms=1),
    Case("int4_g32", 2, 2, (3, 34, 1152), "gates bias"),
    Case("int4_g64", 5, 2, (3, 70, 768), activation=ACTIVATIONS[2]),
    Case("int4_sym_col", 20, 1, (4, 33, 544), "gates"),
    Case("int8_col", 64, 2, (3, 40, 528), "gates fp16", ACTIVATIONS[2]),
    Case("int8_g128", 8, 2, (2, 36, 512), "bias", ACTIVATIONS[3]),
    Case("nf4", 2, 1, (3, 70, 1088), "gates"),
    Case("fp4_bnb", 17, 2, (3, 32, 320), "fp16"),
    Case("mxfp4", 4, 2, (6, 98, 3520), "bias", OAI, num_sms=2),
    Case("mxfp4", 40, 2, (4, 36, 2112), "gates bias fp16"),
    Case("nvfp4", 1, 2, (2, 66, 1344), "gates"),
    Case("nvfp4", 12, 2, (2, 32, 576), activation=ACTIVATIONS[1]),
    Case("int4_g128", 70, 2, (3, 270, 768), activation=ACTIVATIONS[1]),  # prompts from here on
    Case("int4_g32", 66, 2, (4, 140, 1152), "gates bias", num_sms=1),
    Case("nf4", 65, 1, (2, 130, 1088), "fp16", num_sms=8),
    Case("mxfp4", 65, 3, (5, 132, 704), "bias", OAI),
    Case("nvfp4", 65, 2, (7, 136, 576), "bias fp16", ACTIVATIONS[3]),
    Case("int8_col", 65, 1, (3, 40, 544), "gates"),
    Case("int4_g128", 80, 1, (3, 40, 640)),  # scales of odd rows are loaded
    Case("int4_sym_g32", 66, 2, (4, 36, 352), "gates fp16"),
    Case("int4_g128", 66, 1, (4, 140, 640)),  # few pairs an expert
    Case("int4_sym_g128", 130, 1, (2, 40, 256)),  # blocks of 128 pairs
    Case("nf4", 200, 1, (2, 40, 320)),  # of 256
)


def check(case: Mixture, num_sms: int) -> torch.Tensor:
    """Within the promise, the same bits again, and nothing read ahead of the kernel before, which may write ids. The sum's launch
    reads ids and gates, no more: the one before has waited for those that write them."""
    out = case.check(lambda *_: mix(case, ORDERS[0], num_sms))
    if len(case.ids) <= MOST_TOKENS:  # launches of prompts begin one after the other
        early, *early_of_sum = EARLY_OF
        assert not early
        assert [len(of) for of in early_of_sum] == [2] * (case.gates is not None)
    assert same_bits(out, mix(case, ORDERS[1], num_sms, backwards=True))
    return out


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, (c.weight, c.tokens, *c.shape, *c.options.split()))))
def test_mixtures_keep_their_promise(case: Case) -> None:
    check(case.build(), case.num_sms)


@pytest.mark.parametrize(
    ("first", "last", "inner", "half"),
    [
        ("int4_g128", "int4_g128", 128, torch.bfloat16),
        ("mxfp4", "mxfp4", 160, torch.bfloat16),  # columns between the results and the next whole step
        ("int8_col", "int4_g64", 192, torch.float16),
        ("nf4", "int8_g128", 128, torch.bfloat16),
        ("nvfp4", "int4_g32", 96, torch.float16),
    ],
)
def test_rows_of_prompts_stay_sorted_between_projections(first: str, last: str, inner: int, half: torch.dtype) -> None:
    """As in two calls, bit for bit: also with ids that are no expert."""
    ids = IDS.repeat(4, 1)
    gates = torch.rand(len(ids), 2)
    up = ExpertsCall(normal(len(ids), 256).to(half), stack(first, 4, 2 * inner, 256), ids, None, normal(4, 2 * inner), OAI)
    down = ExpertsCall(up.x, stack(last, 4, 36, inner), ids, gates, normal(4, 36))
    expected = mix(down._replace(x=mix(up, ORDERS[0])), ORDERS[0])
    assert torch.equal(mix_both(up, down, ORDERS[0]), expected)
    assert torch.equal(mix_both(up, down, ORDERS[1], backwards=True), expected)


@pytest.mark.parametrize(("gated", "num_sms", "times"), [(True, 8, 1), (False, 1, 1), (True, 1, 4), (False, 8, 4)])
def test_any_ids(gated: bool, num_sms: int, times: int) -> None:
    ids = IDS.repeat(times, 1)
    gates = torch.rand(len(ids), 2) if gated else None
    case = Mixture(normal(len(ids), 2, 256).half(), stack("int4_sym_g32", 4, 36, 256), ids, gates, normal(4, 36))
    out = check(case, num_sms)
    assert gated or not out[17].any()


def test_any_ids_of_one_token() -> None:
    ids = torch.tensor([[3, -1, 0, 0, 4]])
    check(Mixture(normal(1, 256).half(), stack("int4_sym_g32", 4, 36, 256), ids, None, normal(4, 36)), 2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("times", "name"), [(1, "int8_g128"), (40, "int8_g128"), (40, "int4_g128")])  # the last loads zero points
def test_no_id_is_an_expert(gated: bool, times: int, name: str) -> None:
    ids, weight = torch.tensor([[-1, 3], [5, 2**40]]).repeat(times, 1), stack(name, 3, 40, 256)
    gates = torch.full(ids.shape, torch.nan) if gated else None
    case = Mixture(normal(2 * times, 2, 256).half(), weight, ids, gates, normal(3, 40))
    assert not mix(case, ORDERS[0]).any()


@pytest.mark.parametrize(("tokens", "experts"), [(33, 4), (130, 4), (130, 8)])  # by the kernels for few, many and some pairs
def test_one_expert_takes_all(tokens: int, experts: int) -> None:
    ids = torch.full((tokens, 1), 2)
    check(Mixture(normal(tokens, 256).bfloat16(), stack("int4_sym_g128", experts, 64, 256), ids, torch.rand(tokens, 1)), 3)


def test_nothing_but_an_experts_own_pairs_reaches_it() -> None:
    """NaN in one token's row, gate, expert and output channel stays there."""
    weight, ids = stack("mxfp4", 4, 34, 320), torch.tensor([[0, 1], [1, 2], [0, 2]])
    x, gates = normal(3, 320).half(), torch.rand(3, 2)
    clean = mix(Mixture(x, weight, ids, gates), ORDERS[0])
    assert weight.scales is not None
    weight.scales[3], weight.scales[0, 5], x[1], gates[1] = 255, 255, torch.nan, torch.nan
    out = mix(Mixture(x, weight, ids, gates), ORDERS[0])
    assert out[1].isnan().all()
    assert out[[0, 2], 5].isnan().all()
    others = torch.arange(34) != 5
    assert torch.equal(out[[0, 2]][:, others], clean[[0, 2]][:, others])


@pytest.mark.parametrize("case", [c for c in CASES if c.tokens <= MOST_TOKENS][::3], ids=lambda c: c.weight)
def test_the_second_of_two_reads_ids_and_weights_early(case: Case) -> None:
    made = case.build()
    alone = mix(made, ORDERS[0], case.num_sms)
    for order in ORDERS:
        assert same_bits(mix(made, order, case.num_sms, ids_early=True), alone)
        w = made.weight
        stored = {t.untyped_storage().data_ptr() for t in (made.ids, w.codes, w.scales, w.offsets) if t is not None}
        assert set() < EARLY_OF[0] <= stored


@pytest.mark.parametrize("tokens", [3, 66])
def test_act_order_and_strides(tokens: int) -> None:
    weight = stack("int4_g32", 4, 32, 256, act_order=True)
    check(Mixture(normal(256, tokens).half().mT, weight, routed(tokens, 2, 4), torch.rand(tokens, 2).T.contiguous().T), 3)


def test_what_the_kernel_refuses() -> None:
    for weight, tokens, why in (("mxfp4", 65, "exceed fp16"), ("nf4_dq", 1, "portable kernel only")):
        case = Mixture(normal(tokens, 128).half(), stack(weight, 2, 32, 128), routed(tokens, 1, 2))
        with pytest.raises(Refused, match=why):
            mix(case, ORDERS[0])


def test_very_many_pairs_fit_into_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has 2^31 - 1 programs along the first axis of a grid, and 65,535 along the others."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(JITFunction, "run", lambda *_, grid, **more: grids.append(grid))
    x, ids = torch.empty(1 << 18, 256, dtype=torch.half, device="meta"), torch.empty(1 << 18, 1, dtype=torch.int64, device="meta")
    weight = stack("int4_g128", 2, 32, 256).to("meta")
    plan = tuned_gemm(GemmProblem(((weight.format, 32),), len(ids), 256, "fp16", Routing(2, 1)), H200, use_pdl=True)
    assert isinstance(plan, GemmPlan)
    call = ExpertsCall(x, weight, ids)
    _experts_prompt.run(call, plan, call.new_result())
    assert len(grids) == 6  # three of the sort, then x, the product and results
    assert all(n < 1 << 16 for grid in grids for n in grid[1:])


def test_blocks_hold_the_pairs_of_an_expert() -> None:
    """As many rows as tokens; of many experts fewer, as nearly none is chosen by so many."""
    rows = [[block_rows(experts, tokens, k) for tokens in (1, 4, 16, 64)] for experts, k in ((128, 8), (32, 4), (8, 2))]
    assert rows == [[1, 2, 4, 8], [1, 2, 4, 16], [1, 4, 8, 16]]
