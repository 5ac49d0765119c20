"""Kernels check themselves, here as if nobody had tested this GPU: all pass, in little time, and a wrong one does not run."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_cases import build as build_attention
from gpu_cases import draw, exact_variants, narrow_variants, variants
from gpu_place import PLACE, TALLY
from test_gpu_graphs import needs_gpu
from test_gpu_linear import build, drawn

import halfbyte as hb
from halfbyte import errors
from halfbyte.device import describe
from halfbyte.ops import _linear_on_gpu, self_check
from halfbyte.paths import own_checks
from pretended_gpu import forget_launches


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nobody tested this GPU. Warnings are errors; so is a kernel that differs, that is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_results", {})
    monkeypatch.setattr(self_check, "TESTED", frozenset())
    self_check.untested.cache_clear()
    forget_launches()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="halfbyte: .* differs")
        warnings.filterwarnings("ignore", message="halfbyte: .* blocked torch code runs")  # queries in fp32 have no kernel
        yield
    self_check.untested.cache_clear()


def results() -> list[dict[str, object]]:
    """What was stored for this GPU."""
    file = own_checks(describe(PLACE.device).name)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check_all(count: int, run: Callable[[int], object]) -> None:
    """Run `count` calls. The margin of the tally: errors over what is allowed."""
    for number in range(count):
        try:
            run(number)
        except hb.errors.Unsupported:
            continue
    PLACE.sync()
    found = results()
    assert PLACE.dry or found
    worst = max((float(str(one["error"])) for one in found), default=0.0)
    assert worst <= 0.5, found
    TALLY.lines.append(f"checked themselves: {len(found)} kernels, at most {worst:.2g} of the error that is allowed")


def test_attention_checks_itself(unknown: None) -> None:
    grid = [*variants(PLACE.size(60, 6)), *narrow_variants(PLACE.size(10, 1)), *exact_variants(PLACE.size(10, 1))]
    cases = draw(len(grid), grid, longest=PLACE.size(2048, 64), elements=PLACE.size(1 << 24, 1 << 14))
    check_all(len(cases), lambda number: build_attention(cases[number], PLACE.device).run("auto"))


@pytest.mark.timeout(900)  # each case compiles kernels of its own
def test_products_check_themselves(unknown: None) -> None:
    cases = drawn(PLACE.size(40, 6), seed=9)
    check_all(len(cases), lambda number: build(cases[number]).run("auto"))


def test_mixtures_check_themselves(unknown: None) -> None:
    size, formats = PLACE.size(512, 64), [name for name in hb.WEIGHT_FORMATS if not name.endswith("_dq")]

    def run(number: int) -> None:
        torch.manual_seed(number)
        weight = hb.quantize(torch.randn(8, size, 2 * size, device=PLACE.device), formats[number % len(formats)])
        tokens = (1, 4, 40, PLACE.size(600, 70))[number % 4]
        x = torch.randn(tokens, 2 * size, device=PLACE.device).bfloat16()
        hb.experts_linear(x, weight, torch.randint(8, (tokens, 2), device=PLACE.device))

    check_all(PLACE.size(40, 4), run)


def test_appends_check_themselves(unknown: None) -> None:
    values = [name for name, fmt in hb.KV_FORMATS.items() if not fmt.token_block]

    def run(number: int) -> None:
        keys = list(hb.KV_FORMATS)[number % len(hb.KV_FORMATS)]
        cache = hb.KVCache(2, 4, 128, 256, keys=keys, values=values[number % len(values)], device=PLACE.device)
        for tokens in (1, 40):
            cache.append(*torch.randn(2, 2, 4, tokens, 128, device=PLACE.device).bfloat16())

    check_all(PLACE.size(2 * len(hb.KV_FORMATS), 4), run)


@needs_gpu
def test_a_model_pays_little(unknown: None) -> None:
    """Eight kernels of a model, compiled before: all of their checks take less than 0.3 s."""
    weight = hb.quantize(torch.randn(4096, 4096, device=PLACE.device), "int4_g128")
    cache = hb.KVCache(1, 8, 128, 4096, keys="int8_channel", values="int8", device=PLACE.device)

    def step() -> None:
        for rows in (1, 2, 4, 8, 16, 100):
            hb.linear(torch.randn(rows, 4096, device=PLACE.device).bfloat16(), weight)
        cache.append(*torch.randn(2, 1, 8, 1, 128, device=PLACE.device).bfloat16())
        hb.decode_attention(torch.randn(1, 32, 1, 128, device=PLACE.device).bfloat16(), cache)
        torch.cuda.synchronize()

    def timed() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    step()
    plain = timed()
    self_check._results.clear()
    own_checks(describe(PLACE.device).name).unlink()
    forget_launches()
    checked = timed() - plain
    TALLY.lines.append(f"{len(results())} kernels checked themselves in {checked:.3f} s")
    assert checked < 0.3


@needs_gpu
def test_a_wrong_kernel_does_not_run(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run_plan = _linear_on_gpu._run_plan

    def wrong(call: object, plan: object, outs: list[torch.Tensor], *args: object, **kwargs: object) -> None:
        run_plan(call, plan, outs, *args, **kwargs)  # type: ignore[arg-type]
        for out in outs:
            out.mul_(1.2)

    monkeypatch.setattr(_linear_on_gpu, "_run_plan", wrong)
    monkeypatch.setattr(errors, "_WARNED", set())
    x, weight = torch.randn(2, 4096, device="cuda").bfloat16(), hb.quantize(torch.randn(256, 4096, device="cuda"), "nf4")
    with pytest.warns(UserWarning, match="linear differs from the reference"):
        y = hb.linear(x, weight)
    truth = hb.linear(x, weight, impl="reference")
    assert self_check.excess(y, truth) < 0.5
