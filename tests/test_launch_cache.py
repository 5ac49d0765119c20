"""Eager calls that are launched like an earlier one, op by op: what makes them alike, and that no other is taken for one."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

pytest.importorskip("triton")
from triton import knobs

from halfbyte import KVCache, QuantTensor, prefill_attention
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported
from halfbyte.kernels.common.compat import launcher
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops import launch_cache
from launch_cache_ops import (
    ATTENTION,
    FACTS,
    LINEAR,
    MIXTURE,
    OPS,
    PROJECTIONS,
    UNPACK,
    Arguments,
    Change,
    Given,
    Suite,
    Watched,
    at,
    cache,
    changed,
    in_compiled_code,
    misaligned,
    query,
    token,
)
from pretended_gpu import Compiled, Gpu, forget_launches, pretend_gpu

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())


def of_ops(name: str, cases: Callable[[Suite], dict[str, Any]]) -> pytest.MarkDecorator:
    """Every op with each of its cases."""
    params = [pytest.param(op, case, id=f"{of}: {key}") for of, op in OPS.items() for key, case in cases(op).items()]
    return pytest.mark.parametrize(("op", name), params)


def facts(op: Suite) -> dict[str, Change]:
    """Every fact of every tensor, another."""
    changes = {f"{path}: {name}": changed(path, fact) for path in op.tensors() for name, fact in FACTS.items()}
    return changes | {f"no {path}": changed(path, None) for path, optional in op.tensors().items() if optional}


# ------------------------------------------------------------------------------------------------------------ signatures


@of_ops("change", lambda op: {"other addresses": lambda call: call, **op.same()})
def test_other_addresses_and_numbers_are_the_same_call(op: Suite, change: Change) -> None:
    one, other = op.signature(op.full()), op.signature(change(op.full()))
    assert one is not None
    assert other is not None
    assert one.key == other.key
    assert hash(one.key) == hash(other.key)
    assert not set(one.addresses) & set(other.addresses)


@every_op
def test_no_fact_is_taken_for_another(op: Suite) -> None:
    """Each makes another call, or one that is never replayed."""
    call = op.full()
    calls = [change(call) for change in (facts(op) | op.others()).values()]  # alive together, as their formats are facts by id
    signatures = [op.signature(c) for c in (call, *calls)]
    assert [signature is None for signature in signatures] == [not c.replayable for c in (call, *calls)]
    keys = [signature.key for signature in signatures if signature is not None]
    assert len(set(keys)) == len(keys) >= len(FACTS) * len(op.tensors())


@of_ops("path", lambda op: {path: path for path in op.tensors()})
def test_a_tensor_of_another_device_makes_another_call(op: Suite, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were on GPU 5, its address as it is."""
    call = op.full()
    tensor, before = at(call, path), op.key(call)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 5 if t is tensor else -1)
    assert op.key(call) != before


@pytest.mark.parametrize(("variable", "value"), [("HALFBYTE_PDL", "0"), ("HALFBYTE_IMPL", "triton")])
@every_op
def test_the_environment_makes_another_call(op: Suite, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = op.full()
    monkeypatch.delenv(variable, raising=False)
    before = op.key(call)
    monkeypatch.setenv(variable, value)
    assert op.key(call) != before


@of_ops("change", Suite.wrong)
def test_an_argument_of_another_type_is_left_to_the_checks(op: Suite, change: Change) -> None:
    assert op.signature(change(op.full())) is None


@of_ops("path", lambda op: {path: path for path in op.tensors()})
def test_what_torch_must_see_is_left_to_the_dispatcher(op: Suite, path: str) -> None:
    """A subclass, and what may want a gradient. A parameter is no more than a tensor, but for the first one."""
    watched, frozen = (changed(path, change)(op.full()) for change in (lambda t: t.as_subclass(Watched), parameter))
    assert op.signature(watched) is None
    assert (op.signature(frozen) is None) == (path == op.first)
    if path in op.differentiable():
        wanting = changed(path, lambda t: t.to(torch.float32).requires_grad_())(op.full())
        assert op.signature(wanting) is None
        with torch.no_grad():
            assert op.signature(wanting) is not None


def parameter(t: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(t, requires_grad=False)


@every_op
def test_tensors_of_two_devices_are_not_stored(op: Suite) -> None:
    """Host memory that is pinned can be read by a GPU; what is not pinned looks the same and cannot."""
    signature = op.signature(op.full())
    assert signature is not None
    assert signature.covers(signature.tensors)
    there = (signature.tensors[0].to("meta"), *signature.tensors[1:])
    assert not signature._replace(tensors=there).covers(signature.tensors)
    assert not signature.covers([*signature.tensors[:-1], None])


@every_op
def test_a_call_passes_through_its_flat_form(op: Suite) -> None:
    """Every field arrives as it was."""
    call = op.full()
    values = op.op.flat(call)
    again = op.op.call(*values)
    assert type(again) is type(call)
    for before, after in zip(values, op.op.flat(again), strict=True):
        if isinstance(before, list):
            assert len(before) == len(after)
            assert all(a is b for a, b in zip(before, after, strict=True))
        else:
            assert before is after or before == after


# -------------------------------------------------------------------------------------------------------------- launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return pretend_gpu(monkeypatch)


def addresses(arguments: Any, moved: dict[int, int]) -> Any:
    """Tensors as their addresses, which have `moved`, in tuples too."""
    if isinstance(arguments, torch.Tensor):
        return moved.get(arguments.data_ptr(), arguments.data_ptr())
    if hasattr(arguments, "block_shape"):  # a TMA descriptor
        fields = [arguments.shape, arguments.strides, arguments.block_shape, arguments.layout, arguments.padding]
        address = arguments.base.data_ptr()
        return (moved.get(address, address), *map(str, fields), arguments.round_f32_to_tf32)
    return tuple(addresses(a, moved) for a in arguments) if isinstance(arguments, tuple | list) else arguments


def flat(arguments: Any) -> Iterator[Any]:
    for one in arguments:
        yield from flat(one) if isinstance(one, tuple) else [one]


def tensors_in(owner: Any) -> Iterator[torch.Tensor]:
    """What a kernel reads and writes of an argument."""
    if isinstance(owner, torch.Tensor):
        yield owner
    elif isinstance(owner, KVCache):
        yield from tensors_in((owner.keys, owner.values, owner.lengths, owner.page_table))
    elif isinstance(owner, tuple | list | KVBuffer | QuantTensor):
        for part in owner if isinstance(owner, tuple | list) else vars(owner).values():
            yield from tensors_in(part)


def check_replay(op: Suite, first: Arguments, given: Arguments, gpu: Gpu) -> None:
    """`given` is launched like `first`, with the arguments and results that it would have had without it."""
    op.run(**first)
    launches = len(gpu.first)
    results = op.run(**given)
    assert len(gpu.first) == len(gpu.replayed) == launches > 0
    forget_launches()
    expected = op.run(**given)
    assert len(gpu.first) == 2 * launches
    moved = {a.data_ptr(): b.data_ptr() for a, b in zip(expected, results, strict=True)}
    fixed = {t.data_ptr() for t in tensors_in([*given.values()])}
    for (arguments, grid), replayed in zip(gpu.first[launches:], gpu.replayed, strict=True):
        assert replayed[:9] == (*grid, 7, 11, (4, 1, 100), None, None, None)
        for there, here in zip(flat(arguments), flat(replayed[9:]), strict=True):
            memory, address = (getattr(one, "base", one) for one in (there, here))  # of a TMA descriptor
            if isinstance(memory, torch.Tensor) and memory.data_ptr() not in fixed:  # what one launch makes and another reads
                moved.setdefault(memory.data_ptr(), address)
        assert addresses(replayed[9:], {}) == addresses(arguments, moved)
    assert len(set(moved.values())) == len(moved)
    launched = {a for replayed in gpu.replayed for a in flat(addresses(replayed[9:], {}))}
    assert launched >= {t.data_ptr() for t in tensors_in([*given.values(), *results])}
    assert [(tuple(r.shape), r.dtype) for r in results] == [(tuple(shape), dtype) for shape, dtype in op.results(given)]
    assert all(r.is_contiguous() for r in results)


@of_ops("extra", lambda op: op.options)
def test_the_same_arguments_at_other_addresses(op: Suite, extra: Given, gpu: Gpu) -> None:
    """Another layer with another token: launched as the long way would have launched it."""
    check_replay(op, op.plain() | extra(), op.plain() | extra(), gpu)


@pytest.mark.parametrize(
    "op",
    [in_compiled_code(LINEAR), in_compiled_code(PROJECTIONS), UNPACK, MIXTURE],
    ids=["traced linear", "traced projections", "unpack", "prompts of mixtures"],
)
@torch.no_grad()
def test_what_an_engine_calls_is_launched_like_an_earlier_call(op: Suite, gpu: Gpu) -> None:
    pairs = [(op.plain() | extra(), op.plain() | extra()) for extra in op.options.values()]
    for first, given in (*pairs, *[(op.right() | twice(), op.right()) for twice in op.aliased.values()]):
        for launches in (launch_cache._launches, launch_cache._compiled, gpu.first, gpu.replayed):
            launches.clear()
        check_replay(op, first, given, gpu)
    gpu.replayed.clear()
    op.run(**changed(op.first, FACTS["misaligned"])(op.right()))
    assert not gpu.replayed


@pytest.mark.parametrize("extra", MIXTURE.unstored.values(), ids=MIXTURE.unstored.keys())
@torch.no_grad()
def test_prompts_of_mixtures_that_are_converted_are_not_stored(extra: Given, gpu: Gpu) -> None:
    for _ in range(2):
        MIXTURE.run(**MIXTURE.plain() | extra())
    assert not launch_cache._launches
    assert not gpu.replayed


@of_ops("twice", lambda op: op.aliased)
def test_what_was_one_tensor_may_be_two(op: Suite, twice: Given, gpu: Gpu) -> None:
    """A first call with the same memory twice, as in a warm-up, is like one of two tensors: each goes where it belongs."""
    check_replay(op, op.right() | twice(), op.right(), gpu)


@of_ops("extra", lambda op: op.unstored)
def test_what_was_converted_or_needs_other_launches_is_not_stored(op: Suite, extra: Given, gpu: Gpu) -> None:
    for _ in range(2):
        op.run(**op.plain() | extra())
    assert not launch_cache._launches
    assert not gpu.replayed
    assert gpu.unreplayed >= 2


@of_ops("bad", lambda op: op.bad)
def test_wrong_arguments_raise_after_a_right_call(op: Suite, bad: tuple[Arguments, str], gpu: Gpu) -> None:
    right, (wrong, message) = op.right(), bad
    for _ in range(2):
        op.run(**right)
    assert len(gpu.replayed) == 1
    with pytest.raises(InvalidArgument, match=message):
        op.run(**right | wrong)
    assert len(gpu.replayed) == 1


Meet = Callable[[Gpu, pytest.MonkeyPatch], None]
new_empty_strided = torch.Tensor.new_empty_strided
#: What a call meets that has been launched before: by name, how.
IN_THE_WAY: dict[str, Meet] = {
    "forward mode": lambda _, patch: patch.setattr(forward_ad, "_current_level", 0),
    "a profiler": lambda _, patch: patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None),
    "results that are not aligned": lambda _, patch: patch.setattr(
        torch.Tensor, "new_empty_strided", lambda *of, **options: misaligned(new_empty_strided(*of, **options))
    ),
    "no workspace, as while a graph is recorded": lambda gpu, patch: patch.setattr(gpu, "recording", True),
    "a workspace whose floats are not aligned": lambda gpu, patch: patch.setattr(gpu, "floats", gpu.floats[1:]),
    "a workspace whose counters are not aligned": lambda gpu, patch: patch.setattr(gpu, "counters", gpu.counters[1:]),
}


@of_ops("meet", lambda op: {name: meet for name, meet in IN_THE_WAY.items() if op.workspace or "workspace" not in name})
def test_what_cannot_be_replayed_now_takes_the_long_way(
    op: Suite, meet: Callable[[Gpu, pytest.MonkeyPatch], None], gpu: Gpu
) -> None:
    given = op.right()
    op.run(**given)
    with pytest.MonkeyPatch.context() as patch:
        meet(gpu, patch)
        op.run(**given)
    assert gpu.unreplayed == 2
    assert not gpu.replayed
    op.run(**given)
    assert len(gpu.replayed) == 1


@every_op
def test_another_device_is_made_the_current_one(op: Suite, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = op.right()
    op.run(**given)
    entered: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_of", lambda t: entered.append(t) or nullcontext())
    op.run(**given)
    assert [t is given[op.first] for t in entered] == [True]
    assert len(gpu.replayed) == 1


@of_ops("path", lambda op: {path: path for path in op.gradients})
def test_what_wants_a_gradient_takes_the_long_way(op: Suite, path: str, gpu: Gpu) -> None:
    given = op.right()
    op.run(**given)
    wanting = changed(path, lambda t: t.clone().requires_grad_())(given)
    with pytest.raises(Unsupported, match="no gradient") if op.refuses else nullcontext():
        op.run(**wanting)
    assert not gpu.replayed
    with torch.no_grad():
        op.run(**wanting)
    assert len(gpu.replayed) == 1


@every_op
def test_a_subclass_takes_the_long_way(op: Suite, gpu: Gpu) -> None:
    given = op.right()
    for seen in (given, changed(op.first, lambda t: t.as_subclass(Watched))(given)):
        op.run(**seen)
    assert gpu.unreplayed == 2
    assert not gpu.replayed


@every_op
def test_compiled_code_does_not_look_for_earlier_calls(op: Suite, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = op.right()
    op.run(**given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    op.run(**given)
    assert gpu.unreplayed == 2
    assert not gpu.replayed


@every_op
def test_nothing_keeps_a_tensor_alive(op: Suite, gpu: Gpu) -> None:
    given = op.right()
    for _ in range(2):
        op.run(**given)
    kept = [weakref.ref(t) for t in tensors_in(list(given.values()))]
    gpu.first.clear()
    del given
    gc.collect()
    assert all(t() is None for t in kept)
    assert len(launch_cache._launches) == len(gpu.replayed) == 1


def test_so_many_calls_are_kept_and_then_none(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "_CAPACITY", 3)
    held, numbers = cache(), itertools.count(1)
    for tokens in (1, 2, 3):
        ATTENTION.run(q=query(tokens), cache=held)
        launch_cache.with_compiled((tokens,), lambda found: found or next(numbers))
    assert len(launch_cache._launches) == len(launch_cache._compiled) == 3
    ATTENTION.run(q=query(4), cache=held)
    assert len(launch_cache._launches) == 1
    assert launch_cache.with_compiled((3,), lambda found: found or next(numbers)) == 3
    launch_cache.with_compiled((4,), lambda found: found or next(numbers))
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


@pytest.mark.parametrize("op", [LINEAR, PROJECTIONS], ids=["linear", "projections"])
def test_a_gemm_that_is_not_stored_is_compiled_once(op: Suite, gpu: Gpu) -> None:
    for _ in range(2):
        op.run(**op.plain() | op.unstored["x not aligned"]())
    assert len(gpu.first) == len(gpu.kernel.hooked) == 1


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
