"""Counters for CUDA graphs: handed out once, aligned, and alive as long as the process is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from halfbyte.ops import workspace


def test_a_reserve_that_is_used_up_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(workspace, "_RESERVE", 256)
    monkeypatch.setattr(workspace, "_reserves", {device: (torch.zeros(256, dtype=torch.int32), 0)})
    first = workspace._from_reserve(device, 3)
    second = workspace._from_reserve(device, 200)
    assert second.data_ptr() - first.data_ptr() == 32 * 4
    reserve = workspace._reserves[device][0]
    assert reserve is not None
    memory = weakref.ref(reserve)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda *_: type("Stream", (), {"synchronize": lambda self: None})())
        workspace.prepare(device)
    del first, second, reserve
    gc.collect()
    assert memory() is not None
    assert workspace._reserves[device][1] == 0
    assert workspace._from_reserve(device, 300).eq(0).all()  # more than a reserve holds: zeros of its own


def test_warm_up_calls_of_many_graphs_keep_the_reserve_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """51 graphs of 8 calls, each with an eager call before: none clears counters of its own."""
    device, recording = torch.device("cpu"), False
    monkeypatch.setattr(workspace, "_RESERVE", 1 << 10)
    monkeypatch.setattr(workspace, "_reserves", {})
    monkeypatch.setattr(workspace, "_floats", {(device, 0): torch.zeros(8)})
    monkeypatch.setattr(workspace, "_counters", {(device, 0): torch.zeros(8, dtype=torch.int32)})
    monkeypatch.setattr(workspace, "stream_of", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    waits: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda *_: type("Stream", (), {"synchronize": lambda self: waits.append(1)})()
    )
    workspace.prepare(device)
    for _ in range(51):
        recording = False
        if workspace.shared(device, 8, 8) is None:
            workspace.prepare(device)  # as `counters` does
        assert workspace.shared(device, 8, 8) is not None
        recording = True
        reserve = workspace._reserves[device][0]
        assert reserve is not None
        end = reserve.data_ptr() + 4 * reserve.numel()
        for _ in range(8):
            assert reserve.data_ptr() <= workspace._from_reserve(device, 40).data_ptr() < end
    assert 51 * 8 * 64 / 1024 <= len(waits) <= 52


def test_no_counters_take_no_memory_and_need_no_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph neither a node nor a part of the reserve; the address is 0, which kernels take for aligned."""
    device = torch.device("cpu")
    reserve = torch.zeros(256, dtype=torch.int32)
    monkeypatch.setattr(workspace, "_reserves", {device: (reserve, 64)})
    assert workspace._from_reserve(device, 0).data_ptr() == 0
    assert workspace._reserves[device] == (reserve, 64)
    assert workspace.counters(device, 0, own=True).data_ptr() == 0


def test_a_workspace_is_shared_by_a_stream_if_it_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    device, recording = torch.device("cuda", 1), False
    part, count = torch.zeros(100), torch.zeros(10, dtype=torch.int32)
    monkeypatch.setattr(workspace, "_floats", {(device, 7): part})
    monkeypatch.setattr(workspace, "_counters", {(device, 7): count})
    monkeypatch.setattr(workspace, "stream_of", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    stream = 7
    memory = workspace.shared(device, 100, 10)
    assert memory is not None
    assert memory[0] == 7
    assert memory[1][0] is part
    assert memory[1][1] is count
    assert workspace.shared(device, 0, 0) == (7, ())
    assert workspace.shared(device, 101, 10) is None
    assert workspace.shared(device, 100, 11) is None
    assert workspace.shared(torch.device("cuda", 0), 100, 10) is None
    stream = 8
    assert workspace.shared(device, 100, 10) is None
    stream, recording = 7, True
    assert workspace.shared(device, 100, 10) is None
    assert workspace.shared(device, 0, 0) == (7, ())


def test_counters_are_at_hand_unless_a_launch_would_clear_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device, recording = torch.device("cuda", 0), False
    monkeypatch.setattr(workspace, "_reserves", {device: (torch.zeros(100, dtype=torch.int32), 64)})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    assert workspace.at_hand(device, 1000)
    assert not workspace.at_hand(device, 1000, own=True)
    recording = True
    assert workspace.at_hand(device, 36, own=True)
    assert not workspace.at_hand(device, 37)
    assert not workspace.at_hand(torch.device("cuda", 1), 1)


def test_the_reserve_grows_with_the_largest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    device, stream = torch.device("cpu"), type("Stream", (), {"synchronize": lambda self: None})
    monkeypatch.setattr(workspace, "_reserves", {})
    monkeypatch.setattr(workspace, "_counters", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream())
    sizes = []
    for size in (1 << 12, 1 << 13, 1 << 20):
        workspace._counters[(device, 0)] = torch.zeros(size, dtype=torch.int32)
        workspace.prepare(device)
        reserve = workspace._reserves[device][0]
        assert reserve is not None
        sizes.append(reserve.numel())
    assert sizes == [1 << 20, 192 << 13, 1 << 24]


def test_graphs_of_an_engine_share_the_counters_of_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else dozens of graphs would use up the reserve: their calls would take slower plans, and clear counters of their own."""
    device, recording, stream = torch.device("cuda", 0), False, 7
    reserve, own = torch.zeros(100, dtype=torch.int32), torch.zeros
    for name in ("_floats", "_counters"):
        monkeypatch.setattr(workspace, name, {})
    monkeypatch.setattr(workspace, "_in_turn", set())
    monkeypatch.setattr(workspace, "_used_up", [])
    monkeypatch.setattr(workspace, "_reserves", {device: (reserve, 0)})
    monkeypatch.setattr(workspace, "stream_of", lambda _: stream)
    monkeypatch.setattr(workspace, "prepare", lambda _: None)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: own(size, dtype=dtype))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: own(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    workspace.replay_in_turn(device)
    assert workspace.at_hand(device, 5000, own=True)
    small = workspace.counters(device, 10, own=True)
    assert workspace.floats(device, 10, own=True) is workspace.floats(device, 10)
    large = workspace.counters(device, 5000, own=True)
    assert large is not small
    assert workspace._used_up[0] is small  # a graph may have it
    recording = True
    assert workspace.at_hand(device, 5000, own=True)
    assert not workspace.at_hand(device, 5001, own=True)
    for size in (5000, 10, 5000):
        assert workspace.counters(device, size, own=True) is large
    stream = 8  # runs beside the other, within one graph
    parts = [workspace.counters(device, 96) for _ in range(2)]
    assert parts[0] is parts[1]
    assert parts[0].data_ptr() == reserve.data_ptr()
    assert not workspace.at_hand(device, 97)
