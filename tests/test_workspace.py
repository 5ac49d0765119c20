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
    memory = weakref.ref(workspace._reserves[device][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda *_: type("Stream", (), {"synchronize": lambda self: None})())
        workspace.prepare(device)
    del first, second
    gc.collect()
    assert memory() is not None
    assert workspace._reserves[device][1] == 0
    assert workspace._from_reserve(device, 300).eq(0).all()  # more than a reserve holds: zeros of its own


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
