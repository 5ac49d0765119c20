"""The cases of mixtures of experts: what runs, what its bytes are, and that a wrong result gets no time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benches import quick

from halfbyte.errors import InvalidArgument
from halfbyte_lab.baselines import triton_experts
from halfbyte_lab.cases import experts_cases
from halfbyte_lab.measure.records import Record

GATE_AND_UP, DOWN, BOTH = experts_cases.jobs(["auto"], "cpu")


@pytest.mark.slow
def test_prompts_stand_beside_16_bits() -> None:
    for job in (GATE_AND_UP, DOWN):
        peer, ours = quick(pattern="96 tokens").run([job])
        assert (peer.implementation, peer.formats, peer.bars) == (experts_cases.GROUPED, "bf16", ())
        assert (ours.peer, ours.peer_seconds) == (peer.implementation, peer.seconds)
        assert [bar.quantity for bar in experts_cases._bars(ours)] == ["times_16_bit"]


def test_both_projections_of_prompts_stand_beside_16_bits() -> None:
    one, two, peer = quick(pattern="96 tokens").run([BOTH])
    assert (one.case, one.nbytes) == ("a small mixture, both projections, 96 tokens", 4 * (32768 + 3 * 512) * 3 // 2)
    assert [r.implementation for r in (one, two, peer)] == ["halfbyte auto", "halfbyte auto, two calls", experts_cases.GROUPED]
    assert {r.peer_seconds for r in (one, two)} == {peer.seconds}
    assert all(r.seconds and not r.refused for r in (one, two, peer))


def test_both_projections_of_a_token_have_a_bar_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experts_cases.BOTH_BARS, BOTH.layer.model, {1: 0.5})
    (one,) = BOTH.measure(quick(pattern="1 token"))
    assert (one.case, one.shape["hit"]) == ("a small mixture, both projections, 1 token", 2)
    assert one.nbytes == 2 * (32768 + 3 * 512) * 3 // 2
    assert [(bar.quantity, bar.bound) for bar in one.bars] == [("roof_share", 0.5)]
    assert one.seconds


def test_bytes_are_those_of_the_experts_that_are_hit() -> None:
    """An expert of 256 rows of 256 codes in groups of 128: 32,768 bytes, and 3 for each of 512 groups."""
    one = quick(pattern="1 token").run([GATE_AND_UP])[0]
    assert (one.shape["hit"], one.nbytes) == (2, 2 * (32768 + 3 * 512))


def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts_cases.run
    monkeypatch.setattr(experts_cases, "run", lambda call, impl: 1.05 * right(call, impl))
    (found,) = quick(pattern="1 token").run([DOWN])
    assert found.seconds is None
    assert "exceeds the allowed" in found.refused


def test_layers_on_a_gpu() -> None:
    jobs = experts_cases.jobs(["auto", "triton"], "cuda")
    assert len({job.name for job in jobs}) == 3 * len(experts_cases.LAYERS)
    assert len(experts_cases.jobs(["auto"], "cuda", quick=True)) == 3
    assert len(experts_cases.jobs(["triton"], "cuda", quick=True)) == 2


def test_mxfp4_is_held_against_tritons_own_kernel() -> None:
    """The fastest of its ways, where there is a time of one and ours is that of a graph."""
    blank = Record(
        "experts_linear", {"T": 4}, "mxfp4", "halfbyte auto", 1, quick().environment, case="4 tokens", method="cuda graph"
    )
    assert [(bar.quantity, bar.bound) for bar in experts_cases._bars(blank)] == [("roof_share", 0.85), ("times_4_bit", 1.5)]
    ours = replace(blank, seconds=2e-6)
    assert experts_cases.figures(ours, 4e-6)["times_4_bit"] == pytest.approx(2.0)
    assert experts_cases.figures(ours, None)["times_4_bit"] is None
    assert not experts_cases.figures(replace(ours, method="cuda, not captured (why)"), 4e-6)
    assert len({way.name for way in triton_experts.WAYS}) == len(triton_experts.WAYS)


def test_a_folder_without_tritons_kernel_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_KERNELS", raising=False)
    assert "TRITON_KERNELS names no folder" in triton_experts.missing()
    monkeypatch.setenv("TRITON_KERNELS", str(tmp_path))
    assert triton_experts.missing() == ""
    with pytest.raises(InvalidArgument, match=r"lacks .*matmul_ogs\.py.*; expected the folder of the package triton_kernels"):
        triton_experts.package()
