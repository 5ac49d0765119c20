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
