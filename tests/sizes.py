"""Sizes that tests take from a format, so that a new format needs no change of theirs."""

from __future__ import annotations

from halfbyte.formats import KV_FORMATS


def head_dim(*names: str) -> int:
    """A head dim that all these KV formats store: 64, or more where one has larger groups."""
    return max(64, *(KV_FORMATS[name].group_size(64) for name in names))
