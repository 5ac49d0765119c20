"""Calls that are launched like an earlier one give what they would have given without it, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import Call, Case, Variant, build, differs, same_bits, variants
from gpu_place import PLACE

import halfbyte as hb
from halfbyte.errors import InvalidArgument, Unsupported
from pretended_gpu import forget_launches, watch_launches

pytestmark = pytest.mark.compile_first
needs_gpu = pytest.mark.skipif(PLACE.dry, reason="a CPU launches nothing")

#: Not in float32: torch code runs that, which says so once, and a warning is an error here.
VARIANTS = [
    replace(v, queries=1 if i % 2 else v.queries, dtype="bfloat16" if v.dtype == "float32" else v.dtype)
    for i, v in enumerate(
        [
            *variants(PLACE.size(40, 4), seed=23),
            Variant("int4", "int8", exact=(4, 60)),
            Variant("int4", "int8", page=64, exact=(0, 5)),
        ]
    )
]
LENGTHS = (PLACE.size(3000, 90), 5, 0)
TUNED = Variant("int8", "int4_g32", options=frozenset({"sinks"}))


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return watch_launches(monkeypatch).results


def anew(call: Any, impl: str) -> Any:
    """The call as if it were the first one."""
    forget_launches()
    return call.run(impl)


def check_equal(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert same_bits(a, b)


def check_like_the_first(first: Any, second: Any, impl: str) -> None:
    """Two calls in turn, each with the bits that it has as the first one."""
    try:
        expected = anew(second, impl), anew(first, impl)
    except (Unsupported, InvalidArgument) as error:
        pytest.skip(str(error))
    for _ in range(2):
        check_equal(second.run(impl), expected[0])
        check_equal(first.run(impl), expected[1])


def check_each(calls: list[Any], impl: str) -> list[Any]:
    """All calls in turn, each with the bits that it has as the first one; these."""
    expected = [anew(each, impl) for each in calls]
    for _ in range(2):
        for each, wanted in zip(calls, expected, strict=True):
            check_equal(each.run(impl), wanted)
    return expected


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_another_layer_is_launched_like_the_first(number: int, impl: str) -> None:
    """Other tensors, lengths and numbers, the same shapes."""
    cases = (Case(VARIANTS[number], 2, LENGTHS, seed=4), Case(VARIANTS[number], 2, LENGTHS[::-1], seed=6))
    first, second = (build(case, PLACE.device) for case in cases)
    second.options["sm_scale"] = 0.05
    check_like_the_first(first, second, impl)


@needs_gpu
@pytest.mark.parametrize("option", ["sinks", "rotate"])
def test_the_second_call_is_launched_again(again: list[Any], option: str) -> None:
    call = build(Case(replace(TUNED, options=frozenset({option})), 2, LENGTHS), PLACE.device)
    expected = call.run("auto")
    assert not again
    got = call.run("auto")
    assert got[0] is again[0][0]
    assert got[1] is again[0][1]
    check_equal(got, expected)
    assert not call.wrong(*got)


def moved(t: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, `by` elements behind an address that is a multiple of 16."""
    room = t.new_empty(t.numel() + by)
    room[by:] = t.flatten()
    return room[by:].view(t.shape)


@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_addresses_that_are_no_multiple_of_16(by: int, impl: str) -> None:
    """The kernel of aligned addresses must not be given others."""
    call = build(Case(TUNED, 2, LENGTHS), PLACE.device)
    shifted = hb.KVCache.from_buffers(call.cache.keys, call.cache.values, moved(call.cache.lengths, by))
    calls = [
        *(call, Call(moved(call.q, by), call.cache, call.options), Call(call.q, shifted, call.options)),
        Call(call.q, call.cache, {"sinks": moved(call.options["sinks"], by)}),
    ]
    for each, wanted in zip(calls, check_each(calls, impl), strict=True):
        assert not each.wrong(*wanted)


@pytest.mark.parametrize("change", ["1", "0"])
def test_the_environment_is_read_each_time(change: str, monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    call = build(Case(TUNED, 2, LENGTHS), PLACE.device)
    expected = call.run(impl)
    monkeypatch.setenv("HALFBYTE_PDL", change)
    check_equal(call.run(impl), expected)
    check_equal(call.run(impl), expected)
    if not PLACE.dry and impl == "auto":
        monkeypatch.setenv("HALFBYTE_PDL", "2")
        with pytest.raises(InvalidArgument, match="HALFBYTE_PDL='2'"):
            call.run(impl)


def test_a_workspace_that_grew_in_between(impl: str) -> None:
    """A larger call has the memory of the stream replaced: the smaller one must not use what was given back."""
    small = build(Case(TUNED, 2, LENGTHS), PLACE.device)
    expected = small.run(impl)
    for queries in (4, 8):
        build(Case(replace(TUNED, queries=queries), 2, LENGTHS), PLACE.device).run(impl)
        others = [torch.full((1 << 18,), torch.nan, device=PLACE.device) for _ in range(PLACE.size(64, 1))]
        check_equal(small.run(impl), expected)
        assert all(bool(t.isnan().all()) for t in others)


@needs_gpu
def test_two_streams_have_a_workspace_each(impl: str) -> None:
    """Eager calls that overlap; each unit is shared by several programs."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    calls = [build(Case(TUNED, 2, (20_000, 9_000), seed=i), PLACE.device) for i in range(2)]
    expected = [call.run(impl) for call in calls]
    different = [torch.zeros((), dtype=torch.bool, device=PLACE.device) for _ in streams]
    PLACE.sync()
    for _ in range(300):
        for n, (call, stream) in enumerate(zip(calls, streams, strict=True)):
            with torch.cuda.stream(stream):
                out, lse = hb.decode_attention(call.q, call.cache, return_lse=True, impl=impl, **call.options)
                different[n] |= differs(out, expected[n][0]) | differs(lse, expected[n][1])
    PLACE.sync()
    assert not any(different)


@needs_gpu
@pytest.mark.parametrize("pin", [False, True])
def test_lengths_of_the_host_are_not_taken_for_those_of_the_gpu(pin: bool) -> None:
    """A GPU can read memory that is pinned; what is not pinned raises, also after that."""
    call = build(Case(TUNED, 2, LENGTHS), PLACE.device)
    expected = call.run("auto")
    host = call.cache.lengths.cpu()
    for lengths in (host.pin_memory(), host) if pin else (host,):
        call.cache.lengths = lengths
        if lengths.is_pinned():
            check_equal(call.run("auto"), expected)
            PLACE.sync()
        else:
            with pytest.raises(ValueError, match="cannot be accessed"):
                call.run("auto")


@needs_gpu
def test_a_profiler_sees_every_launch() -> None:
    from triton import knobs

    call = build(Case(TUNED, 2, LENGTHS), PLACE.device)
    expected = call.run("auto")
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        check_equal(call.run("auto"), expected)
        check_equal(call.run("auto"), expected)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    check_equal(call.run("auto"), expected)
    assert len(seen) == 2
