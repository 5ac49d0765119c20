"""The machine can fail: programs that do not wait, do not meet, or read beyond a tensor are found out; and it counts bank conflicts
of the tuned kernels on the addresses that they compute: passes through shared memory per access."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from emulation import ORDERS, attend, multiply
from gpu_cases import Case, Variant, build

import halfbyte as hb
from machine.banks import Accesses, counted

WEIGHT = hb.quantize(torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)), "int4_g128")
X = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()


def without(pattern: str, which: int = 0, instead: str = "") -> Callable[[str], str]:
    """The program with one statement changed, the `which`-th of those that match."""

    def change(ptx: str) -> str:
        place = list(re.finditer(pattern, ptx))[which]  # an IndexError where there is none
        return ptx[: place.start()] + place.expand(instead) + ptx[place.end() :]

    return change


def everywhere(pattern: str, instead: str) -> Callable[[str], str]:
    def change(ptx: str) -> str:
        changed = re.sub(pattern, instead, ptx)
        if changed == ptx:
            raise IndexError(pattern)
        return changed

    return change


def goes_wrong(change: Callable[[str], str], x: torch.Tensor = X, weight: hb.QuantTensor = WEIGHT) -> bool:
    """Whether the changed program is stopped, or gives another result, in one order at least. Six SMs: three programs share a tile
    of WEIGHT, and its last one reduces."""
    right = multiply(x, [weight], [None], ORDERS[0], 6)[0]
    for order in ORDERS:
        try:
            if not torch.equal(multiply(x, [weight], [None], order, 6, change=change)[0], right):
                return True
        except AssertionError:
            return True
    return False


def test_what_changes_nothing_goes_right() -> None:
    assert not goes_wrong(lambda ptx: ptx)


@pytest.mark.parametrize(
    "change",
    [
        everywhere(r"cp\.async\.wait_group 2;", "cp.async.wait_group 3;"),
        everywhere(r"bar\.warp\.sync 0xffffffff;", ""),
        everywhere(r"mbarrier\.test_wait\.parity\.shared\.b64 q, [^;]*;", "setp.eq.u32 q, 0, 0;"),
        everywhere(r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64", "mbarrier.arrive.shared.b64 _,"),
        without(r"mbarrier\.init\.shared\.b64 \[b\+\d+\], 128", instead="mbarrier.init.shared.b64 [b+0], 128"),
        everywhere(r"bar\.sync\s+0;", ""),
        without(r"bar\.sync\s+0;", -1),
        without(
            r"cp\.async\.cg\.shared\.global \[s\+0\], \[p\+0\], 16", instead="cp.async.cg.shared.global [s+0], [p+1048576], 16"
        ),
        without(r"cp\.async\.cg\.shared\.global \[s\+0\]", instead="cp.async.cg.shared.global [s+8]"),
        without(
            r"atom\.global\.gpu\.acq_rel\.add\.u32 ([^,]*), ([^,]*), [^;]*;", instead=r"atom.global.gpu.acq_rel.add.u32 \1, \2, 0;"
        ),
        without(r"st\.global\.cg\.b32 [^;]*;"),
        without(r"mma\.sync[^;]*;"),
    ],
    ids=lambda change: "",
)
def test_a_wrong_program_is_found_out(change: Callable[[str], str]) -> None:
    assert goes_wrong(change)


@pytest.mark.parametrize("which", [0, 1], ids=["what to run", "that they end"])
def test_warps_that_part_and_are_told_too_late_are_found_out(which: int) -> None:
    """The compiler's protocol: warps read in shared memory, between two barriers, what the first ones have written there."""
    told = without(r"(st\.shared\.b32\s+\[global_smem\+\d+\], \d+;\s*)(barrier\.sync\s+1;)", which, r"\2\1")
    weight = hb.quantize(torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)), "int4_g128")
    assert goes_wrong(told, torch.randn(40, 1024, generator=torch.Generator().manual_seed(1)).bfloat16(), weight)


# ----------------------------------------------------------------------------------------------------------- bank conflicts


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
