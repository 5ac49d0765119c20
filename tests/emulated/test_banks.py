"""Bank conflicts of the tuned kernels, counted on the addresses that they compute: passes through shared memory per access."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from emulation import ORDERS, attend, multiply
from gpu_cases import Case, Variant, build

import halfbyte as hb
from machine.banks import Accesses, counted


@pytest.mark.parametrize(
    ("stride", "size", "passes"), [(4, 4, 1), (0, 4, 1), (8, 4, 2), (128, 4, 32), (132, 4, 1), (16, 16, 1), (128, 16, 8), (2, 2, 1)]
)
def test_a_warp_is_counted_as_the_hardware_serves_it(stride: int, size: int, passes: int) -> None:
    found = Accesses()
    found.add("ld.shared", 1024 + stride * np.arange(64), size, np.arange(64))
    assert found.passes("ld.shared") == passes


def _attention(keys: str, values: str, **more: int) -> Callable[[], object]:
    return lambda: attend(build(Case(Variant(keys, values, group=8, **more), 1, (300, 64)), "cpu"), ORDERS[0])  # type: ignore[arg-type]


def _product(weight: str, rows: int) -> Callable[[], object]:
    rng = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 1280, generator=rng).bfloat16(), torch.randn(128, 1280, generator=rng)
    return lambda: multiply(x, [hb.quantize(w, weight)], [None], ORDERS[0])


#: The most passes that an access takes on average, where it is not one.
CASES: dict[str, tuple[Callable[[], object], dict[str, float]]] = {
    "int4 attention": (_attention("int4", "int4"), {"st.shared": 2}),
    "int8 over int4 in groups": (_attention("int8", "int4_g32"), {"st.shared": 2}),
    "keys of channels": (_attention("int4_channel", "int8"), {"st.shared": 2}),
    "attention of 64 rows, wgmma": (_attention("int4", "int4", queries=8), {"st.shared": 3}),
    "int4_g128, one row": (_product("int4_g128", 1), {}),
    "int4_g128, 16 rows": (_product("int4_g128", 16), {"st.shared": 2}),
    "int4_g128, 32 rows, wgmma": (_product("int4_g128", 32), {}),
    "int8_g128, one row": (_product("int8_g128", 1), {}),
    "nf4, one row: the table is checked once, four lanes on a bank": (_product("nf4", 1), {"ld.shared": 1.5}),
    "nvfp4, four rows: a scale for 16 numbers": (_product("nvfp4", 4), {"ld.shared": 2.5}),
}


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", CASES)
def test_passes_through_shared_memory(name: str) -> None:
    """Codes (ldmatrix) never meet on a bank; what else does is known."""
    run, most = CASES[name]
    with counted() as found:
        run()
    assert found.passes("ldmatrix") == 1
    assert {kind: found.passes(kind) for kind in found.found if found.passes(kind) > most.get(kind, 1)} == {}
