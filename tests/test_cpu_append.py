"""`append` by compiled loops stores what the reference stores, bit for bit, and writes nothing else."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from append_levels import cases, check_bits, differences, new_cache, raw
from gpu.gpu_cases import VALUES
from halfbyte.cache import KVCache
from halfbyte.cpu import append as cpu
from halfbyte.errors import CapacityError, InvalidArgument
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import AppendCall, Rope
from halfbyte.ops.append import append_, append_slots

pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), count=st.sampled_from([1, 3]))
def test_bits_are_those_of_the_reference(case: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)  # as `over_rows` reads it
    monkeypatch.setattr("halfbyte.cpu.threads.STEPS", 1)
    check_bits(case, "cpu")


@pytest.mark.parametrize("keys", [*KV_FORMATS])
def test_loops_take_every_format(keys: str) -> None:
    """No case above is compared to itself."""
    cache = KVCache(1, 2, 64, 64, keys=keys, values="int4_g32")
    x = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16)
    for number in range(2):  # the first append measures scales of all numbers, by the reference
        c = AppendCall(x, x, cache.keys, cache.values, cache.lengths, rotate_keys=cache.rotate_keys)
        assert cpu.append_(c) == (number > 0 or KV_FORMATS[keys].granularity != "tensor")
        cache.append(x, x)


@pytest.mark.parametrize("values", VALUES)
def test_slots(values: str) -> None:
    results = []
    for impl in ("reference", "cpu"):
        cache = KVCache(5, 2, 64, 16, keys="int8_token", values=values)
        k, v = (torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
        for slots in ([17, -1, 3, 79], [18, 4, -5, 0]):
            append_slots(k, v, cache.keys, cache.values, torch.tensor(slots), impl=impl)
        results.append(cache)
    assert not differences(*results)
    with pytest.raises(InvalidArgument, match="slot 80"):
        append_slots(k, v, cache.keys, cache.values, torch.tensor([0, 1, 2, 80]), impl="cpu")


BAD: dict[str, tuple[type[Exception], str, Any]] = {
    "not finite": (InvalidArgument, r"k holds 1 NaN", lambda c: c.k[0, 0, 0].__setitem__(0, torch.nan)),
    "infinite values": (InvalidArgument, r"v holds 1 NaN", lambda c: c.v[1, 1, 0].__setitem__(5, torch.inf)),
    "too large": (InvalidArgument, r"k \(keys\) is too large for int8_token in sequence 0", lambda c: c.k.fill_(3e38)),
    "no room": (CapacityError, "sequence 1", lambda c: c.lengths.copy_(torch.tensor([0, 96, 0]))),
    "no length": (InvalidArgument, "lengths holds -1", lambda c: c.lengths.fill_(-1)),
    "no number": (InvalidArgument, "counts runs from 0 to 2", lambda c: c.counts.copy_(torch.tensor([0, 2, 1]))),
    "no page": (InvalidArgument, r"page_table names a page outside 0\.\.8", lambda c: c.page_table.fill_(9)),
}


@pytest.mark.parametrize("fault", BAD)
def test_refused_appends_change_nothing(fault: str) -> None:
    error, message, spoil = BAD[fault]
    cache = new_cache("paged", 2, 64, keys="int8_token", values="int4")
    x = [torch.ones(3, 2, 1, 64, dtype=torch.bfloat16) for _ in range(2)]
    where = (cache.lengths, torch.ones(3, dtype=torch.int32), cache.page_table)
    call = AppendCall(x[0], x[1], cache.keys, cache.values, *where)
    spoil(call)
    before = [raw(t).clone() for t in cache.tensors()]
    with pytest.raises(error, match=message):
        append_(*call[:5], counts=call.counts, page_table=call.page_table, impl="cpu")
    assert all(torch.equal(raw(t), old) for t, old in zip(cache.tensors(), before, strict=True))


def test_large_numbers_are_left_to_the_reference() -> None:
    """Where a scale might exceed fp16."""
    caches = [KVCache(1, 1, 64, 64, keys="int8", values="int8") for _ in range(2)]
    x = torch.full((1, 1, 1, 64), 3e5, dtype=torch.bfloat16)
    call = AppendCall(x, x, caches[0].keys, caches[0].values, caches[0].lengths)
    assert not cpu.append_(call)
    for cache, impl in zip(caches, ("reference", "cpu"), strict=True):
        append_(x, x, cache.keys, cache.values, cache.lengths, impl=impl)
    assert not differences(*caches)


def test_moved_memory_is_seen() -> None:
    """Views of a buffer are made once, and again where its memory is another."""
    cache, x = KVCache(1, 1, 64, 64), torch.ones(1, 1, 1, 64)
    cache.append(x, x)
    cache.keys.codes.data = cache.keys.codes.clone()
    cache.append(2 * x, x)
    assert cache.keys.codes[0, 0, :2].bool().all()


def test_angles_are_those_of_the_call_whatever_other_threads_append() -> None:
    """Another thread, at every line of it, has just turned keys by other angles."""
    ropes = [Rope(torch.full((1, 1, 4), float(n)), torch.zeros(1, 1, 4), False) for n in range(2)]
    other = ropes[1], cpu.angles(ropes[1])

    def between(frame: Any, event: str, arg: object) -> Any:
        cpu._newest = other
        return between if frame.f_code is cpu.angles.__code__ else None

    before = sys.gettrace()
    sys.settrace(between)
    try:
        cos = cpu.angles(ropes[0])[0]
    finally:
        sys.settrace(before)
    assert not cos.any()
