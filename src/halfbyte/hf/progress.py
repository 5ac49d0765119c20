"""How far a forward has come through the layers of a cache: one that stopped half-way left tokens in some of them only."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from halfbyte.errors import InvalidArgument

#: What a forward does to a layer: it appends keys and values; it requests a state, which it may move on in place; or it moves a
#: convolution on, and writes the state of the recurrence behind it.
APPENDED, REQUESTED, WRITTEN = "appended", "requested", "written"
CROSS = "A model with cross-attention needs a second cache: past_key_values=EncoderDecoderCache(cache, DynamicCache())"


class Progress:
    """What a forward does to the first and to the last layer that hold anything, as eager code tells it.

    A forward begins with what the one before began with. It is over once the last layer has keys and values, and its
    state was requested; a state that is moved on in place counts as moved from then on.
    """

    def __init__(self, packed: list[int], states: list[int]) -> None:
        """The layers that hold keys and values, and those that have a state."""
        states = states if hasattr(Cache, "get_conv_state") else []  # transformers before asked the layers
        self.first, self.last = min(packed + states), max(packed + states)
        self._ends = {what for what, layers in ((APPENDED, packed), (REQUESTED, states)) if self.last in layers}
        self._began = ""
        self._left: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether a forward has begun and not reached its end."""
        return bool(self._left)

    def stopped_before(self, layer: int, what: str) -> bool:
        """Whether a forward begins here although another one is open."""
        return layer == self.first and self.is_open and what == self._began

    def begins(self, layer: int, what: str) -> None:
        """A forward begins, if this is where."""
        if layer == self.first and (not self._left or what == self._began):
            self._began, self._left = what, set(self._ends)

    def awaits(self, layer: int, what: str) -> None:
        """At the last layer, `what` is yet to come."""
        if layer == self.last:
            self._left.add(what)

    def ends(self, layer: int, what: str) -> None:
        """`what` is done; at the last layer, the forward may be over."""
        if layer == self.last and not torch.compiler.is_compiling():
            self._left.discard(what)

    def forget(self) -> None:
        """No forward is open."""
        self._left = set()


def half_way(count: int, layers: int, has_states: bool) -> InvalidArgument:
    """The error of a forward that begins behind one that stopped, in a cache of which `count` of `layers` hold tokens."""
    return InvalidArgument(
        "past_key_values: an earlier forward stopped half-way, or one of another thread goes on, and its tokens are in "
        f"some layers only ({count} of {layers} hold any; a model of fewer layers needs its own cache); "
        f"call {'restore() on the cache to forget them, or ' * (not has_states)}reset(). {CROSS}"
    )
