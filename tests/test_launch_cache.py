"""Eager calls that are launched like an earlier one, of every op: what makes them alike, and that no other call is taken for one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from halfbyte import prefill_attention
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported
from halfbyte.kernels.common.compat import launcher
from halfbyte.ops import launch_cache, workspace
from launch_cache_ops import (
    ATTENTION,
    FACTS,
    OPS,
    Arguments,
    Change,
    Given,
    Op,
    Watched,
    at,
    cache,
    changed,
    misaligned,
    query,
    to,
    token,
)  # fmt: skip
from pretended_gpu import Compiled, Gpu, forget_launches, pretend_gpu

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
with_workspace = pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in OPS.items() if op.workspace])


def of_ops(name: str, cases: Callable[[Op], dict[str, Any] | Iterable[str]]) -> pytest.MarkDecorator:
    """Every op with each of its cases: of a dict its values, with their names as ids."""
    found = []
    for op_name, op in OPS.items():
        each = cases(op)
        named = each if isinstance(each, dict) else {case: case for case in each}
        found += [pytest.param(op, case, id=f"{op_name}: {key}") for key, case in named.items()]
    return pytest.mark.parametrize(("op", name), found)


def other_calls(op: Op) -> dict[str, Change]:
    return {
        **{f"{path}: {name}": changed(path, fact) for path in op.tensors for name, fact in FACTS.items()},
        **{f"no {path}": to(path, None) for path in op.optional},
        **op.others,
    }


def unlike_any(op: Op) -> dict[str, Change]:
    return {**op.never, **{f"{path} watched": changed(path, lambda t: t.as_subclass(Watched)) for path in op.tensors}}


# ------------------------------------------------------------------------------------------------------------ signatures


@every_op
def test_other_addresses_are_the_same_call(op: Op) -> None:
    one, other = op.signature(op.full()), op.signature(op.full())
    assert one is not None
    assert other is not None
    assert one.key == other.key
    assert hash(one.key) == hash(other.key)
    assert not {a for a in one.addresses if a} & {a for a in other.addresses if a}


@of_ops("change", lambda op: op.same)
def test_other_numbers_are_the_same_call(op: Op, change: Change) -> None:
    call = op.full()
    assert op.key(change(call)) == op.key(call)


@of_ops("path", lambda op: [path for path in op.tensors if path != "q"])
def test_a_parameter_is_a_tensor(op: Op, path: str) -> None:
    call = op.full()
    assert op.key(changed(path, lambda t: torch.nn.Parameter(t, requires_grad=False))(call)) == op.key(call)


@of_ops("change", other_calls)
def test_every_fact_makes_another_call(op: Op, change: Change) -> None:
    call = op.full()
    assert op.key(change(call)) != op.key(call)


@of_ops("path", lambda op: op.tensors)
def test_a_tensor_of_another_device_makes_another_call(op: Op, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were on GPU 5, its address as it is."""
    call = op.full()
    tensor, before = at(call, path), op.key(call)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 5 if t is tensor else -1)
    assert op.key(call) != before


@pytest.mark.parametrize(("variable", "value"), [("HALFBYTE_PDL", "0"), ("HALFBYTE_IMPL", "triton")])
@every_op
def test_the_environment_makes_another_call(op: Op, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = op.full()
    monkeypatch.delenv(variable, raising=False)
    before = op.key(call)
    monkeypatch.setenv(variable, value)
    assert op.key(call) != before


@of_ops("change", unlike_any)
def test_what_is_never_like_another(op: Op, change: Change) -> None:
    assert op.signature(change(op.full())) is None


@every_op
def test_tensors_of_two_devices_are_not_stored(op: Op) -> None:
    """Host memory that is pinned can be read by a GPU; what is not pinned looks the same and cannot."""
    made = op.signature(op.full())
    assert made is not None
    assert made.covers(made.tensors)
    there = (made.tensors[0].to("meta"), *made.tensors[1:])
    assert not made._replace(tensors=there).covers(made.tensors)


# -------------------------------------------------------------------------------------------------------------- launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return pretend_gpu(monkeypatch)


def addresses(arguments: Any, moved: dict[int, int]) -> Any:
    """Tensors as their addresses, which have `moved`, in tuples too."""
    if isinstance(arguments, torch.Tensor):
        return moved.get(arguments.data_ptr(), arguments.data_ptr())
    return tuple(addresses(a, moved) for a in arguments) if isinstance(arguments, tuple | list) else arguments


def flat(arguments: Any) -> Iterator[Any]:
    for one in arguments:
        yield from flat(one) if isinstance(one, tuple) else [one]


def check_replay(op: Op, first: Arguments, given: Arguments, gpu: Gpu) -> None:
    """`given` is launched like `first`, with the arguments and results that it would have had without it."""
    op.run(**first)
    launches = len(gpu.first)
    results = op.run(**given)
    assert len(gpu.first) == len(gpu.replayed) == launches > 0
    forget_launches()
    expected = op.run(**given)
    assert len(gpu.first) == 2 * launches
    moved = {a.data_ptr(): b.data_ptr() for a, b in zip(expected, results, strict=True)}
    if launches == 2:  # of which the first makes what the second reads
        moved[gpu.first[2][0][1].data_ptr()] = gpu.replayed[0][10]
    for (arguments, grid), replayed in zip(gpu.first[launches:], gpu.replayed, strict=True):
        assert replayed[:9] == (*grid, 7, 11, (4, 1, 100), None, None, None)
        assert replayed[9:] == addresses(arguments, moved)
    assert [(tuple(r.shape), r.dtype) for r in results] == [(tuple(shape), dtype) for shape, dtype in op.results(given)]
    assert all(r.is_contiguous() for r in results)


@of_ops("extra", lambda op: op.options)
def test_the_same_arguments_at_other_addresses(op: Op, extra: Given, gpu: Gpu) -> None:
    """Another layer with another token: launched as the long way would have launched it."""
    check_replay(op, op.plain() | extra(), op.plain() | extra(), gpu)


@of_ops("twice", lambda op: op.aliased)
def test_what_was_one_tensor_may_be_two(op: Op, twice: Given, gpu: Gpu) -> None:
    """A first call with the same memory twice, as in a warm-up, is like one of two tensors: each goes where it belongs."""
    check_replay(op, op.right() | twice(), op.right(), gpu)


@of_ops("extra", lambda op: op.unstored)
def test_what_was_converted_or_needs_other_launches_is_not_stored(op: Op, extra: Given, gpu: Gpu) -> None:
    for _ in range(2):
        op.run(**op.plain() | extra())
    assert not launch_cache._launches
    assert not gpu.replayed
    assert gpu.unreplayed >= 2


@of_ops("bad", lambda op: op.bad)
def test_wrong_arguments_raise_after_a_right_call(op: Op, bad: tuple[Given, str], gpu: Gpu) -> None:
    right, (wrong, message) = op.right(), bad
    for _ in range(2):
        op.run(**right)
    assert len(gpu.replayed) == 1
    with pytest.raises(InvalidArgument, match=message):
        op.run(**right | wrong())
    assert len(gpu.replayed) == 1


def check_falls_back(op: Op, given: Arguments, gpu: Gpu) -> None:
    """This call takes the long way, now."""
    before, replayed = gpu.unreplayed, len(gpu.replayed)
    op.run(**given)
    assert gpu.unreplayed == before + 1
    assert len(gpu.replayed) == replayed


@with_workspace
def test_while_a_graph_is_recorded_calls_take_the_long_way(op: Op, gpu: Gpu) -> None:
    """As they do where the workspace is too small by now."""
    given = op.right()
    op.run(**given)
    gpu.recording = True
    check_falls_back(op, given, gpu)
    gpu.recording = False
    op.run(**given)
    assert len(gpu.replayed) == 1


@pytest.mark.parametrize("memory", ["floats", "counters"])
@with_workspace
def test_a_workspace_that_is_not_aligned_takes_the_long_way(op: Op, memory: str, gpu: Gpu) -> None:
    given = op.right()
    op.run(**given)
    setattr(gpu, memory, getattr(gpu, memory)[1:])
    check_falls_back(op, given, gpu)


@every_op
def test_results_that_are_not_aligned_take_the_long_way(op: Op, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given, made = op.right(), torch.Tensor.new_empty_strided
    op.run(**given)
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", lambda *args, **options: misaligned(made(*args, **options)))
    check_falls_back(op, given, gpu)


@every_op
def test_another_device_is_made_the_current_one(op: Op, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = op.right()
    op.run(**given)
    entered: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_of", lambda t: entered.append(t) or nullcontext())
    op.run(**given)
    assert [t is given[op.first] for t in entered] == [True]
    assert len(gpu.replayed) == 1


@of_ops("path", lambda op: op.gradients)
def test_what_wants_a_gradient_takes_the_long_way(op: Op, path: str, gpu: Gpu) -> None:
    given = op.right()
    op.run(**given)
    wanting = changed(path, lambda t: t.clone().requires_grad_() if path == op.first else torch.nn.Parameter(t))(given)
    with pytest.raises(Unsupported, match="no gradient") if op.refuses else nullcontext():
        op.run(**wanting)
    assert not gpu.replayed
    with torch.no_grad():
        op.run(**wanting)
    assert len(gpu.replayed) == 1


@every_op
def test_a_subclass_takes_the_long_way(op: Op, gpu: Gpu) -> None:
    given = op.right()
    op.run(**given)
    check_falls_back(op, changed(op.first, lambda t: t.as_subclass(Watched))(given), gpu)


@every_op
def test_compiled_code_does_not_look_for_earlier_calls(op: Op, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = op.right()
    op.run(**given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check_falls_back(op, given, gpu)
    assert not gpu.kernel.hooked


@every_op
def test_a_profiler_sees_every_launch(op: Op, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = op.right()
    op.run(**given)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    op.run(**given)
    assert len(gpu.first) == len(gpu.kernel.hooked) == 1
    assert not gpu.replayed


@every_op
def test_nothing_keeps_a_tensor_alive(op: Op, gpu: Gpu) -> None:
    given = op.plain()
    for _ in range(2):
        op.run(**given)
    store = given.get("weight") or (given["weights"][1] if "weights" in given else given["cache"].values)
    kept = [weakref.ref(t) for t in (given[op.first], store.codes, store.scales)]
    gpu.first.clear()
    del given, store
    gc.collect()
    assert [t() for t in kept] == [None] * 3
    assert len(launch_cache._launches) == len(gpu.replayed) == 1


def test_so_many_calls_are_kept_and_then_none(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "_CAPACITY", 3)
    held = cache()
    for tokens in (1, 2, 3):
        ATTENTION.run(q=query(tokens), cache=held)
        launch_cache.with_compiled((tokens,), lambda found: found or tokens)
    assert len(launch_cache._launches) == len(launch_cache._compiled) == 3
    ATTENTION.run(q=query(4), cache=held)
    assert len(launch_cache._launches) == 1
    assert launch_cache.with_compiled((3,), lambda found: found) == 3
    launch_cache.with_compiled((4,), lambda found: found or 4)
    assert launch_cache._compiled == {(4,): 4}


# ----------------------------------------------------------------------------------------------------------- of one op


def test_numbers_are_those_of_each_call(gpu: Gpu) -> None:
    first = ATTENTION.plain() | {"sm_scale": 0.5, "window": 3, "softcap": 4.0}
    check_replay(ATTENTION, first, first | {"sm_scale": 0.25, "window": 2**31 - 1, "softcap": 5.0}, gpu)
    launched = list(flat(gpu.replayed[0]))
    scale = launched.index(0.25)
    assert launched[scale : scale + 3] == [0.25, 5.0, 2**30]


def test_a_prefill_is_launched_again_in_both_parts(gpu: Gpu) -> None:
    for _ in range(2):
        prefill_attention(query(3), token(3), token(3), cache())
    assert len(gpu.first) == len(gpu.replayed) == 2


@pytest.mark.parametrize("name", ["attention", "linear", "projections"])
def test_32_bits_are_not_stored(name: str, gpu: Gpu) -> None:
    op = OPS[name]
    for _ in range(2):
        with pytest.raises(Unsupported, match="takes float16 and bfloat16"):
            op.run(**changed(op.first, torch.Tensor.float)(op.plain()))
    assert not launch_cache._launches


def test_a_full_cache_is_refused_as_ever(gpu: Gpu) -> None:
    held = cache(capacity=3)
    for _ in range(3):
        held.append(token(), token())
    held.lengths.fill_(3)  # what no kernel did here
    with pytest.raises(CapacityError):
        held.append(token(), token())
    assert len(gpu.replayed) == 2


def test_pages_are_taken_before_the_launch(gpu: Gpu) -> None:
    held = cache(paged=True)
    for _ in range(17):
        held.append(token(), token())
    assert len(gpu.first) == 1
    assert len(gpu.replayed) == 16
    assert (held.page_table[:, :2] >= 0).all()
    assert (held.page_table[:, 2:] < 0).all()


# ------------------------------------------------------------------------------------------------- what it is built on


def test_hooks_of_a_profiler_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Compiled()
    launch = launcher(kernel, (3, 1, 1))

    def hook(metadata: Any) -> None: ...

    launch(7, 1, 2)
    knobs.runtime.launch_exit_hook.add(hook)
    try:
        launch(7, 3, 4)
    finally:
        knobs.runtime.launch_exit_hook.remove(hook)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    launch(7, 5, 6)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    launch(7, 7, 8)
    assert kernel.replayed == [(3, 1, 1, 7, 11, (4, 1, 100), None, None, None, *pair) for pair in ((1, 2), (7, 8))]
    assert kernel.hooked == [((3, 1, 1), 7, pair) for pair in ((3, 4), (5, 6))]


def test_a_workspace_is_shared_by_a_stream_if_it_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    device, recording = torch.device("cuda", 1), False
    part, count = torch.zeros(100), torch.zeros(10, dtype=torch.int32)
    monkeypatch.setattr(workspace, "_floats", {(device, 7): part})
    monkeypatch.setattr(workspace, "_counters", {(device, 7): count})
    monkeypatch.setattr(workspace, "stream_of", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    stream = 7
    found = workspace.shared(device, 100, 10)
    assert found is not None
    assert found[0] == 7
    assert found[1] is part
    assert found[2] is count
    assert workspace.shared(device, 101, 10) is None
    assert workspace.shared(device, 100, 11) is None
    assert workspace.shared(torch.device("cuda", 0), 100, 10) is None
    stream = 8
    assert workspace.shared(device, 100, 10) is None
    stream, recording = 7, True
    assert workspace.shared(device, 100, 10) is None
