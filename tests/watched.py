"""Functions and methods that say how they were called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, say: Callable[..., Any] = lambda *a, **k: a) -> list[Any]:
    """What `say` says of the arguments of each call from now on, in order; the call itself is as before."""
    calls: list[Any] = []
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: calls.append(say(*a, **k)) or right(*a, **k))
    return calls
