"""How streams of warps wait for each other's copies of scales, without a GPU: every order in which they can run is tried.

The model is the loop of kernels/linear/mma.py. Where a step's scales lie and which barrier is waited for, with which parity,
say the kernel's own functions. That who arrives at a barrier is as many as it counts is seen by running them (machine/inline.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.device import H200
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.linear import sync
from halfbyte.plans.gemm_mma import _scale_slots, mma_plan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import MmaSpec
from machine.inline import Threads, on_block
from machine.memory import SHARED

STREAMS = 2
NEVER = 1000  # steps of a tile: more than are tried
MEET, ASK, READ = range(3)  # what a stream does next in a step
#: (step of a stream, what it does next, copies of scales that are there, counted in steps), of each stream.
State = tuple[tuple[int, int, int], ...]


class Broken(Exception):
    """What must not happen."""


@dataclass(frozen=True)
class Rules:
    """Of each step: the slot of its scales, and (slot, parity) that is waited for ahead of reading, and ahead of asking for them.

    free: None where streams do not say what they have read. tile: steps after which the whole block meets.
    """

    stages: int
    steps: int
    tile: int
    slot: list[int]
    filled: list[tuple[int, int]]
    free: list[tuple[int, int]] | None


def rules_of(spec: MmaSpec, monkeypatch: pytest.MonkeyPatch, tile: int) -> Rules:
    """What the kernel's functions say, which count with tensors as they do with the compiler's values."""
    waited: list[tuple[int, int, int]] = []

    def wait(slot: torch.Tensor, parity: torch.Tensor, at: int) -> None:
        waited.append((int(slot), int(parity), at - spec.barriers_at))

    plain: dict[str, Callable[..., Any]] = {
        name: getattr(sync, name).fn for name in ("after", "slot_of", "_parity_of", "await_scales", "await_free")
    }
    for name, function in plain.items():
        monkeypatch.setattr(sync, name, function)
    monkeypatch.setattr(sync, "_await", wait)
    monkeypatch.setattr(sync, "gl", SimpleNamespace(where=torch.where, int32=torch.int32))
    steps = 2 * spec.scale_slots + spec.stages + 1
    turn, slots = torch.tensor(0, dtype=torch.int32), []
    for _ in range(steps + spec.stages):
        slots.append(int(plain["slot_of"](turn, spec)))
        plain["await_scales"](turn, spec)
        plain["await_free"](turn, spec)
        turn = plain["after"](turn, spec)
    assert all(at == 0 for _, _, at in waited[::2])
    assert all(at == 8 * spec.scale_slots for _, _, at in waited[1::2])
    pairs = [(slot, parity) for slot, parity, _ in waited]
    return Rules(spec.stages, steps, tile, slots, pairs[::2], pairs[1::2] if spec.has_empty_barrier else None)


def _ended(arrived: int, parity: int) -> bool:
    """What mbarrier.test_wait.parity says when so many streams have arrived: it knows no more than the parity of the round."""
    return arrived // STREAMS % 2 != parity


def _filled(state: State, slot: int, rules: Rules) -> int:
    return sum(rules.slot[step] == slot for _, _, there in state for step in range(there))


def _told(state: State, slot: int, rules: Rules) -> int:
    return sum(rules.slot[step] == slot for now, does, _ in state for step in range(now + (does > MEET)))


def _asked(stream: tuple[int, int, int], stages: int) -> int:
    """Steps whose scales a stream has asked for."""
    return stream[0] + stages - 1 + (stream[1] == READ)


def _has_read(stream: tuple[int, int, int]) -> int:
    """Steps whose scales a stream's warps have all read: known when they meet in the next step."""
    return stream[0] - (stream[1] == MEET)


def _step_of(state: State, w: int, rules: Rules) -> tuple[int, int, int] | None:
    """The stream once it has done what it does next; None if it waits."""
    now, does, there = state[w]
    if does == MEET:
        # Its own copies for this step have to be there, and at the end of a tile those of all streams had been read.
        block = now % rules.tile == 0 and any((other, then) < (now, MEET) for other, then, _ in state)
        return None if now == rules.steps or there <= now or block else (now, ASK, there)
    if does == ASK:
        wanted = now + rules.stages - 1
        if rules.free and not _ended(_told(state, rules.free[wanted][0], rules), rules.free[wanted][1]):
            return None
        before = [step for step in range(wanted) if rules.slot[step] == rules.slot[wanted]]
        if before and any(_has_read(other) <= before[-1] for other in state):
            raise Broken(f"scales of step {before[-1]} are still read when those of step {wanted} are asked for")
        return (now, READ, there)
    slot, parity = rules.filled[now]
    if not _ended(_filled(state, slot, rules), parity):
        return None
    if any(other[2] <= now for other in state):
        raise Broken(f"scales of step {now} are read before they are there")
    return (now + 1, MEET, there)


def _successors(state: State, rules: Rules) -> Iterator[State]:
    for w, stream in enumerate(state):
        if moved := _step_of(state, w, rules):
            yield (*state[:w], moved, *state[w + 1 :])
        if stream[2] < _asked(stream, rules.stages):  # copies come at any time, of a thread in the order in which it asked
            yield (*state[:w], (stream[0], stream[1], stream[2] + 1), *state[w + 1 :])


def explored(rules: Rules) -> int:
    """How far apart streams come in steps, over all that can happen; raises Broken."""
    start: State = ((0, MEET, 0),) * STREAMS
    seen, todo, apart = {start}, [start], 0
    while todo:
        state = todo.pop()
        apart = max(apart, max(s[0] for s in state) - min(s[0] for s in state))
        following = list(_successors(state, rules))
        if not following and any(now < rules.steps for now, _, _ in state):
            raise Broken(f"nobody can go on: {state}")
        todo += [one for one in following if one not in seen]
        seen.update(following)
    return apart


KEPT = [
    (stages, slots)
    for stages in (2, 3, 4)
    for slots in sorted({*range(stages, 2 * stages + 1), 1 << (2 * stages - 1).bit_length()})
]


def kept(stages: int, slots: int, rows: int = 1) -> MmaSpec:
    """A plan with so many stages, and with slots for the scales of so many steps."""
    weight = WEIGHT_FORMATS["int4_sym_g128"]
    found = mma_plan(GemmProblem(((weight, 16384),), rows, 8192, "bf16"), H200, use_pdl=True)
    assert not isinstance(found, str), found
    assert isinstance(found.spec, MmaSpec)
    return replace(found.spec, stages=stages, scale_slots=slots)


@pytest.mark.parametrize("tile", [3, NEVER])
@pytest.mark.parametrize(("stages", "slots"), KEPT)
def test_scales_are_there_and_nobody_waits_for_ever(stages: int, slots: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = explored(rules_of(kept(stages, slots), monkeypatch, tile))
    assert apart <= stages
    if tile == NEVER:  # with twice the stages, and one less, nothing but others' copies holds a stream back
        assert apart == min(stages, slots - stages + 1)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_plans_keep_scales_of_so_many_steps(stages: int) -> None:
    assert {(stages, slots) for slots in _scale_slots(stages)} == {one for one in KEPT if one[0] == stages}


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_slots_that_nobody_calls_free_have_to_be_twice_the_stages(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kept(stages, slots).has_empty_barrier for slots in (2 * stages - 1, 2 * stages)] == [True, False]
    with pytest.raises(Broken, match="still read"):
        explored(replace(rules_of(kept(stages, 2 * stages - 1), monkeypatch, NEVER), free=None))


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ("fewer slots than stages", "nobody can go on"),
        ("free a step too early", "still read"),
        ("free a step too late", "nobody can go on"),
        ("free in the other round", "still read|nobody can go on"),
        ("scales of the other round", "before they are there|nobody can go on"),
        ("scales of the step before", "before they are there|nobody can go on"),
    ],
)
def test_the_model_finds_what_is_wrong(broken: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rules_of(kept(3, 2 if broken == "fewer slots than stages" else 3), monkeypatch, NEVER)
    assert rules.free is not None
    free, filled = rules.free, rules.filled
    if broken == "free a step too early":
        rules = replace(rules, free=[free[0], *free[:-1]])
    elif broken == "free a step too late":
        rules = replace(rules, free=[*free[1:], free[0]])
    elif broken == "free in the other round":
        rules = replace(rules, free=[(slot, 1 - parity) for slot, parity in free])
    elif broken == "scales of the other round":
        rules = replace(rules, filled=[(slot, 1 - parity) for slot, parity in filled])
    elif broken == "scales of the step before":
        rules = replace(rules, filled=[filled[0], *filled[:-1]])
    with pytest.raises(Broken, match=what):
        explored(rules)


def threads_of(spec: MmaSpec, monkeypatch: pytest.MonkeyPatch) -> Threads:
    layout = sync.thread_layout(spec)
    assert [layout.size_per_thread, layout.threads_per_warp] == [[1, 1, 1], [1, 1, 32]]
    assert [layout.warps_per_cta, layout.order] == [[spec.k_slices, spec.warps_m, 1], [2, 1, 0]]
    block = Threads((spec.k_slices, spec.warps_m, 32), spec.ring_bytes)
    on_block(block, (sync,), monkeypatch)
    return block


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("stages", "slots"), KEPT)
def test_barriers_count_who_arrives(stages: int, slots: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads at those of a filled slot, one of each stream at those of a free one."""
    spec = kept(stages, slots, rows)
    block = threads_of(spec, monkeypatch)
    sync.make_barriers(spec)
    assert sorted(at - SHARED for at in block.barriers) == [
        spec.barriers_at + 8 * i for i in range(slots * (1 + spec.has_empty_barrier))
    ]
    turn = torch.tensor(0, dtype=torch.int32)
    for _ in range(slots):
        sync.filled(sync.slot_of(turn, spec), spec)
        sync.meet(turn, stages - 2, spec)
        turn = sync.after(turn, spec)
    assert all((one.phases, one.missing) == (1, one.count) for one in block.barriers.values())


@pytest.mark.parametrize("rows", [1, 16])
def test_a_stream_meets_behind_its_copies_and_apart_from_others(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warp alone, or each stream at a barrier of its own, none of which is the block's: 0."""
    spec = kept(2, 3, rows)
    assert (spec.warps_m == 1) == (rows == 1)
    block = threads_of(spec, monkeypatch)
    sync.make_barriers(spec)
    sync.meet(torch.tensor(0, dtype=torch.int32), 1, spec)
    waits = [one for one in block.ran[-1].instructions if one.name.startswith(("cp.async", "bar", "mbarrier"))]
    meets = "bar.warp.sync" if spec.warps_m == 1 else "bar.sync"
    assert [one.name for one in waits] == ["cp.async.wait_group", meets, "mbarrier.arrive.shared.b64"]
    assert waits[0].operands == ("1",)
    if spec.warps_m == 1:
        assert waits[1].operands == ("0xffffffff",)
        return
    number, count = (one.reshape(spec.k_slices, -1) for one in block.met[-1])
    assert (number == number[:, :1]).all()
    assert sorted({*number[:, 0].tolist()}) == [*range(1, spec.k_slices + 1)]
    assert (count == number.shape[1]).all()
