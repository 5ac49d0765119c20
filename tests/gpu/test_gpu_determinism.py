"""The same bits: over 1,000 repeats, and with `deterministic_batch=True` whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import Case, Variant, build, differs, poisoned, same_bits, some_of, variants
from gpu_place import PLACE

from halfbyte.errors import InvalidArgument, Unsupported

pytestmark = pytest.mark.compile_first

REPEATS = PLACE.size(1000, 3)
LENGTHS = (PLACE.size(5000, 200), 1, 0, 300, PLACE.size(1023, 63))
HALVES = [v for v in variants(PLACE.size(30, 6), seed=7) if v.dtype != "float32"]
CONFIGURATIONS = [Case(v, 2, LENGTHS, seed=i) for i, v in enumerate(HALVES[: PLACE.size(20, 4)])]


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_repeats_give_the_same_bits(number: int, impl: str) -> None:
    """Compared on the device, without waiting: repeats overlap as they do in use."""
    call = build(CONFIGURATIONS[number], PLACE.device)
    try:
        out, lse = call.run(impl)
    except (Unsupported, InvalidArgument) as error:
        pytest.skip(str(error))
    assert not call.wrong(out, lse)
    different = torch.zeros((), dtype=torch.bool, device=PLACE.device)
    with poisoned():
        for _ in range(REPEATS):
            again = call.run(impl)
            different |= differs(again[0], out) | differs(again[1], lse)
    assert not different


INVARIANT = [
    Variant("int8", "int4_g32", queries=2),
    Variant("int4", "int4", group=8, dtype="float16", options=frozenset({"sinks", "starts"})),
    Variant("int4_channel", "int8", dim=64, group=1, queries=2),
    Variant("int8_token", "fp8", dim=256, group=7, queries=2, page=64, options=frozenset({"window"})),
    Variant("bf16", "bf16", dim=96, group=6, page=32, options=frozenset({"rotate", "alibi"})),
    Variant("int4", "int8", group=4, page=16, exact=(4, 100)),
    Variant("int2", "int4", group=8, queries=30),
]


@pytest.mark.parametrize("variant", INVARIANT, ids=lambda v: f"{v.keys}-{v.values}-{v.dim}-{v.page}")
def test_a_row_does_not_depend_on_its_batch(variant: Variant, impl: str) -> None:
    """Alone, among others, in another order, with more capacity: the same bits. `auto`: the tuned kernel's."""
    impl = "gluon" if impl == "auto" else impl
    lengths = (PLACE.size(3000, 100), 1, PLACE.size(17000, 130), 64, 0, PLACE.size(333, 33))
    call = build(Case(replace(variant, layout="BHTD"), 2, lengths), PLACE.device)

    def attend(rows: list[int], slack: int) -> Any:
        some = some_of(call, rows, slack)
        some.options["deterministic_batch"] = True
        return some.run(impl)

    try:
        together = attend(list(range(len(lengths))), 0)
    except (Unsupported, InvalidArgument) as error:
        if impl == "gluon":
            raise
        pytest.skip(str(error))
    assert not call.wrong(*together)
    order = [3, 5, 0, 2, 4, 1]
    permuted, padded = attend(order, 0), attend(order, PLACE.size(4000, 40))
    for i, row in enumerate(order):
        for got in (permuted, padded):
            assert same_bits(got[0][i], together[0][row])
            assert same_bits(got[1][i], together[1][row])
        alone = attend([row], 0)
        assert same_bits(alone[0][0], together[0][row])
        assert same_bits(alone[1][0], together[1][row])
