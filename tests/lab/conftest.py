from __future__ import annotations

import pytest
from benches import BRIEF


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--quick` with next to no repeats; and the compiler, as tests/interpreted has the kernels in Triton's interpreter."""
    from halfbyte_lab.measure import session

    monkeypatch.setattr(session, "QUICK", BRIEF)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
