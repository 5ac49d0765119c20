"""The kernels' own times by CUPTI: they are there, they fit the times of graphs, and what taking them costs later ones.

`make gpu-test` runs these by themselves: tests beside them on the same GPU would be in the times.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from gpu_place import PLACE, TALLY
from test_gpu_graphs import needs_gpu

import halfbyte as hb
from halfbyte.device import describe
from halfbyte_lab.cases import qkv_cases, qkv_layers
from halfbyte_lab.measure import cupti
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.measure.timing import GRAPHS, Work, measure, paired_launches

alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times need the GPU for themselves")


def test_cupti_gives_kernel_times_or_says_why_not() -> None:
    assert cupti.unavailable(torch.device(PLACE.device)) == ("torch sees no NVIDIA GPU" if PLACE.dry else "")


@needs_gpu
@alone
def test_kernel_times_fit_those_of_graphs() -> None:
    """Of copies and products of many microseconds, launches kept apart in both: a graph counts what lies between kernels, too."""
    large = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(3)]
    copies: list[Any] = [partial(torch.bitwise_not, one, out=large[-1]) for one in large[:2]]
    x = torch.randn(1, 8192, device="cuda").bfloat16()
    weights = [hb.quantize(torch.randn(8192, 8192, device="cuda"), "int4_sym_g128") for _ in range(4)]
    products: list[Any] = [partial(hb.linear, x, weight) for weight in weights]
    with paired_launches(False):
        graphs = {name: measure(fns).median for name, fns in (("copies", copies), ("products", products))}
    traced = cupti.traced({"copies": Work(copies, paired=False), "products": Work(products, paired=False)})
    times = {name: cupti.seconds_of(calls) or 0.0 for name, calls in traced.items()}
    TALLY.lines += [f"{name}: {1e6 * graphs[name]:.1f} us in a graph, {1e6 * times[name]:.1f} us of kernels" for name in graphs]
    assert all(len(kernels) == 1 for kernels in traced["copies"])
    assert 0.9 < times["copies"] / graphs["copies"] < 1.1
    assert 0.6 < times["products"] / graphs["products"] < 1.3


@needs_gpu
@alone
def test_tracing_kernel_times_costs_later_times_a_few_percent() -> None:
    """Measured once: 3.2 %, which is why nothing is traced unless asked for."""
    x = torch.randn(1, 8192, device="cuda").bfloat16()
    weights = [hb.quantize(torch.randn(8192, 8192, device="cuda"), "int4_sym_g128") for _ in range(4)]
    fns: list[Any] = [partial(hb.linear, x, weight) for weight in weights]
    before = measure(fns, effort=GRAPHS).median
    spent = []
    for _ in range(4):
        began = time.perf_counter()
        cupti.traced({str(i): Work(fns, paired=False) for i in range(10)})
        spent.append(time.perf_counter() - began)
    after = measure(fns, effort=GRAPHS).median
    shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in spent)
    TALLY.lines.append(f"10 works traced in {shown} ms; a graph takes {1e6 * before:.2f} us a call before, {1e6 * after:.2f} after")
    assert after < 1.06 * before


@needs_gpu
@alone
def test_kernel_times_of_variants_are_told_launch_by_launch() -> None:
    job = qkv_cases.VariantsJob(qkv_layers.random_weights(qkv_layers.GPT2), "auto", ("nf4",))
    measured = Session(Options(quick=True, device="cuda", kernels=True), describe("cuda")).run([job])
    assert {r.implementation for r in measured} >= {"two-kernel", "16-bit weights"}
    assert not any(r.refused for r in measured)
    for r in measured:
        assert len(r.kernels) == r.shape["launches"]
        assert sum(r.kernels.values()) == pytest.approx(r.kernel_seconds, rel=0.2)
        assert 0 < (r.kernel_seconds or 0) < 1.5 * (r.alone or 0)
