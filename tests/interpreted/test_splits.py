"""Attention whose number of splits is set, in Triton's interpreter: the same numbers however a unit is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import halfbyte
from accuracy import attention_accuracy, eager_attention, float64_attention
from halfbyte.device import Device
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.ops import by_plan
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte_lab.cases import decode_variants
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.measure.timing import Effort
from halfbyte_lab.studies import int8_splitk


def case(context: int, lengths: tuple[int, ...] = ()) -> tuple[torch.Tensor, halfbyte.KVCache]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, tokens, 32, generator=draw).bfloat16() for heads, tokens in ((4, 1), (2, context), (2, context))
    )
    cache = halfbyte.KVCache(2, 2, 32, context, keys="int8_tensor", values="int8_tensor")
    cache.append(k, v)
    for b, length in enumerate(lengths):
        cache.lengths[b] = length
    return 4 * q, cache


@pytest.mark.parametrize(("count", "kernels"), [(1, 1), (2, 2), (5, 2)])
def test_the_portable_kernel_in_so_many_splits(count: int, kernels: int) -> None:
    q, cache = case(300, (300, 70))
    plan = decode_variants.split(by_plan.planned(q, cache, "triton"), count, 300)
    assert isinstance(plan, TritonTiles)
    assert (decode_variants.splits_of(plan), decode_variants.launches(plan)) == (count, kernels)
    out = by_plan.attend(q, cache, plan)
    for b, length in enumerate((300, 70)):
        k, v = (x[b : b + 1, :, :length] for x in cache.dequantized())
        mine = q[b : b + 1]
        base, ref = (way(mine, k, v, 32**-0.5) for way in (eager_attention, float64_attention))
        assert attention_accuracy(out[b : b + 1], base, ref).ok
    with pytest.raises(Unsupported, match="6 splits of 300 tokens; the portable kernel has 5 blocks"):
        decode_variants.split(plan, 6, 300)


def test_the_tuned_kernel_has_as_many_programs_and_a_tile_for_each() -> None:
    q, cache = case(1024)
    plan = by_plan.planned(q, cache, "gluon")
    assert isinstance(plan, DecodePlan)
    for count in (1, 2, 8, 16):
        cut = decode_variants.split(plan, count, 1024)
        assert isinstance(cut, DecodePlan)
        assert (cut.programs, decode_variants.splits_of(cut), decode_variants.launches(cut)) == (4 * count, count, 1)
        assert count * cut.spec.tile <= 1024
        assert cut.floats == 2 * cut.programs * cut.spec.partial_floats
    assert decode_variants.split(plan, 2, 1024).spec == plan.spec  # type: ignore[union-attr]
    with pytest.raises(Unsupported, match="32 splits of 1024 tokens; the tuned kernel's tiles have 64 at least"):
        decode_variants.split(plan, 32, 1024)
    with pytest.raises(Unsupported, match="32768 programs"):
        decode_variants.split(plan, 2**14, 2**24)
    with pytest.raises(InvalidArgument, match="splits=0"):
        decode_variants.split(plan, 0, 1024)
    paired = replace(plan, spec=replace(plan.spec, use_pdl=True))
    assert by_plan.unpaired(paired) == replace(plan, spec=replace(plan.spec, use_pdl=False))


def test_without_a_gpu_or_the_interpreter_there_are_no_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = case(64)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unsupported, match="splits are those of kernels"):
        by_plan.planned(q, cache, "triton")


def test_the_study_runs_the_portable_kernel_in_every_split() -> None:
    problem = replace(int8_splitk.ONE, shape=DecodeShape(1, 2, 1, 32, 128), layout="tokens first")
    session = Session(Options(quick=True), Device("cpu", "fake", memory_bytes=2**30, cache_bytes=0, cores=1, threads=1))
    session.effort = Effort(seconds=0.0, repeats=1, block_seconds=1e-5, settle_seconds=0.0)
    measured = session.run([int8_splitk.AttendJob(problem, (2, 16))])
    ours = {r.implementation: r for r in measured if r.implementation.startswith("halfbyte triton")}
    assert list(ours) == ["halfbyte triton, as planned", "halfbyte triton, 2 splits"]  # 16 are more than there are blocks
    assert not any(r.refused for r in ours.values())
    assert [(r.shape["programs"], r.shape["launches"]) for r in ours.values()] == [(1, 1), (2, 2)]
    tuned = [r for r in measured if r.implementation.startswith("halfbyte gluon")]
    assert tuned  # the interpreter does not have it: no time, and why
    assert all(r.refused and r.seconds is None for r in tuned)
