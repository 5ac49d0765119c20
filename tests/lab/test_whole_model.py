"""The whole model on two ranks of a CPU, in small: it is one model, what is refused is refused on both, and what is told of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import benches
import pytest
import torch
import torch.distributed as dist
from benches import BRIEF, CPU, quick

from halfbyte.device import Device
from halfbyte.ops.all_reduce import AllReduce, of_all
from halfbyte_lab.cases import whole_model
from halfbyte_lab.cases.rank import LLAMA_2_70B, Entry, Model, Product, Rank, RankLayer, Step, StepCase, first_of_ranks
from halfbyte_lab.cases.whole_model import SMALL, RanksJob, WholeStep
from halfbyte_lab.measure import caches, decode
from halfbyte_lab.measure import session as session_module
from halfbyte_lab.measure.caches import DecodeCase, Inputs
from halfbyte_lab.measure.checks import BenchmarkRefused
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import decode_70b

GPU = replace(benches.GPU, memory_bytes=80 * 10**9)
SIZES = Rank(hidden=128, q_heads=8, kv_heads=2, dim=32, ffn=128, layers=3, vocabulary=64)
ATTEND = partial(decode.attend, impl="auto")


def step_of(rank: Rank, model: Model, heads: slice, reduce: AllReduce | None = None) -> Step:
    """A step over those KV heads of a cache that is the same in all calls."""
    whole = Inputs.random(DecodeCase("p", SIZES.shape(3, 40)), torch.device("cpu"))
    ((k, v),) = whole.spans
    inputs = Inputs(DecodeCase("p", rank.shape(3, 40)), whole.q[:, : rank.q_heads], [(k[:, heads], v[:, heads])])
    rotation = caches.Rotation(caches.fill(inputs, "bf16"), inputs, model.count)
    rotation.restore_short()
    return Step(model, rotation.caches, 40, ATTEND, reduce)


def joined(parts: list[Model]) -> Model:
    """One model of the ranks' weights."""
    made, rank = Model(SIZES, CPU, SIZES.layers), parts[0].rank

    def beside(products: list[Product], *sizes: int) -> Product:
        """Weights that ranks hold by rows, in blocks of so many."""
        blocks = zip(*(p.weight.split(list(sizes)) for p in products), strict=True)
        return Product(torch.cat([torch.cat(block) for block in blocks]))

    def layer(of: list[RankLayer]) -> RankLayer:
        qkv = beside([each.qkv for each in of], *(n * rank.dim for n in (rank.q_heads, rank.kv_heads, rank.kv_heads)))
        o, down = (Product(torch.cat([getattr(each, name).weight for each in of], 1)) for name in ("o", "down"))
        return RankLayer(qkv, o, beside([each.up for each in of], rank.ffn, rank.ffn), down)

    made.layers = [layer(list(of)) for of in zip(*(part.layers for part in parts), strict=True)]
    made.heads = [beside([part.heads[0] for part in parts], rank.vocabulary)]
    return made


class Unequal(AllReduce):
    """Sums that are other ones on each rank."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + dist.get_rank()


class OneShot(AllReduce):
    """Says that it exchanges, though on a CPU no launch does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.exchange = mock.Mock()

    def exchange_of(self, x: torch.Tensor) -> Any:
        return self.exchange


def ways(factor: float, kind: str) -> list[Entry]:
    """Our attention, which the second rank multiplies."""
    return [Entry("it", "int4", lambda q, cache: ATTEND(q, cache) * (factor if dist.get_rank() else 1.0))]


def out_of_memory(*args: object) -> None:
    if dist.get_rank():
        raise torch.OutOfMemoryError("x")


def work(machine: Device) -> Iterator[tuple[str, Any]]:
    """What both ranks do: a step of `SIZES`; then a case of `SMALL`, as it is and with faults of one rank."""
    session_module.QUICK = BRIEF  # in a process of its own
    share, index = SIZES.shared(2), dist.get_rank()
    model, sums = Model(share, machine, share.layers, seed=index), AllReduce(SIZES.hidden, torch.bfloat16, machine.torch)
    with torch.no_grad():
        made = step_of(share, model, slice(index, index + 1), sums).whole()
    yield "hidden", of_all(made.hidden, machine.torch)
    yield "logits", torch.cat(of_all(made.logits, machine.torch), 1)
    small, session = SMALL.shared(2), Session(Options(quick=True), machine)
    case = StepCase(Model(small, machine, small.layers, seed=index), 2, 64, whole_model.OP, "batch 2 x 64 on 2")
    step = WholeStep(case, AllReduce(small.hidden, torch.bfloat16, machine.torch))
    one_shot = OneShot(small.hidden, torch.bfloat16, machine.torch)
    yield "right", list(WholeStep(case, one_shot).measure(session))
    with mock.patch.object(whole_model, "ways", partial(ways, 1.1)):
        yield "attention", list(step.measure(session))
    with mock.patch.object(whole_model, "ways", partial(ways, 1.0)):
        yield "sums", list(WholeStep(case, Unequal(small.hidden, torch.bfloat16, machine.torch)).measure(session))
        with mock.patch.object(StepCase, "filled", out_of_memory):
            yield "memory", list(step.measure(session))
        yield "again", list(step.measure(session))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(first_of_ranks(work, 2, "cpu"))


def test_ranks_together_are_one_model(found: dict[str, Any]) -> None:
    share = SIZES.shared(2)
    one = joined([Model(share, CPU, share.layers, seed=seed) for seed in range(2)])
    with torch.no_grad():
        made = step_of(SIZES, one, slice(None)).whole()
    assert torch.equal(*found["hidden"])
    for expected, together in ((made.hidden, found["hidden"][0]), (made.logits, found["logits"])):
        off = float((together.double() - expected.double()).norm() / expected.double().norm())
        assert off <= 2 * SIZES.layers * 2**-8  # partial results of each sum are rounded to bf16 first


def test_each_way_is_judged_and_timed(found: dict[str, Any]) -> None:
    right: list[Record] = found["right"]
    assert [r.formats for r in right] == ["bf16", "bf16", "int4", "int4_g32", "int4_g32"]
    assert right[-1].implementation == whole_model.BY_NCCL
    share = SMALL.shared(2)
    for r in right:
        assert r.seconds
        assert not r.refused
        assert (r.error or 1) <= (r.error_allowed or 0)
        assert r.shape == {"B": 2, "Hq": 4, "H": 1, "D": 64, "T": 64, "ranks": 2}
        assert r.nbytes == share.step_bytes(2, 64, r.formats, False)
        summed = "gloo" if r is right[-1] else "one-shot"
        assert f"slowest of 2 ranks; 4 layers and the output head; all-reduce: {summed}; feed-forward in bf16" in r.method


def test_what_one_rank_refuses_all_refuse_and_go_on(found: dict[str, Any]) -> None:
    reasons = {"attention": "attention of layer 0: max abs error", "sums": "different hidden states", "memory": "out of memory"}
    for name, why in reasons.items():
        (record,) = found[name]
        assert why in record.refused
        assert record.seconds is None
    assert found["again"][0].seconds
    assert decode_70b.whole_table(found["memory"])[1][0][5] == "does not fit"


@pytest.mark.parametrize(("code", "why"), [(0, "second rank"), (3, "process 1 terminated with exit code 3")])
def test_an_error_of_a_rank_is_said_and_what_came_before_it_is_kept(code: int, why: str) -> None:
    came = first_of_ranks(partial(breaks, code), 2, "cpu")
    assert next(came) == 1
    with pytest.raises(BenchmarkRefused, match=f"2 ranks: .*{why}"):
        next(came)


def breaks(code: int, machine: Device) -> Iterator[int]:
    yield 1
    dist.barrier()
    if dist.get_rank():
        if code:
            os._exit(code)
        raise ValueError("second rank")
    dist.barrier()


@pytest.mark.slow
def test_the_study_measures_ranks() -> None:
    session = quick(pattern="on 2 int4")
    measured = session.run(decode_70b.jobs(session))
    assert [(r.case, r.formats) for r in measured] == [("batch 2 x 256 on 2", f) for f in ("int4", "int4_g32")]
    assert all(r.seconds for r in measured)


def test_jobs_by_number_of_gpus_and_what_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    session = Session(Options(pattern="x 2,048 on 4 int4 "), GPU)
    two, four = whole_model.jobs(session)
    assert isinstance(two, RanksJob)
    assert isinstance(four, RanksJob)
    assert list(two.to_compile(session)) == []
    problems = [problem for problem, _ in four.to_compile(session)]
    assert {(p.batch, p.heads, p.keys) for p in problems} == {(batch, 2, "int4") for batch in (1, 32, 64, 256)}
    assert list(two.measure(session)) == []  # starts nothing


@pytest.mark.parametrize(("ranks", "batch", "context", "held"), [(4, 64, 16384, False), (4, 256, 2048, True), (8, 64, 16384, True)])
def test_what_does_not_fit_is_known_before(ranks: int, batch: int, context: int, held: bool) -> None:
    model = Model(LLAMA_2_70B.shared(ranks), GPU, 80)
    case = StepCase(model, batch, context, whole_model.OP, "it")
    blanks = {way.formats: case.blank(Session(Options(), GPU), way, whole_model.SHARE) for way in whole_model.ways("cuda")}
    assert bool(blanks["bf16"].refused) is not held
    assert not blanks["int4"].refused
