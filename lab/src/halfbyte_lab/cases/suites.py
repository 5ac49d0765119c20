"""The suites of the benchmarks: each command is one of them, and `python -m halfbyte_lab all` is all under one progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from halfbyte_lab import studies
from halfbyte_lab.baselines import run as run_baselines
from halfbyte_lab.cases import decode_cases, experts_cases, linear_cases, qkv_layers, report_sections
from halfbyte_lab.cases.overhead import CallJob
from halfbyte_lab.measure import suite
from halfbyte_lab.measure.report_sections import plain
from halfbyte_lab.measure.session import Session
from halfbyte_lab.measure.suite import Suite
from halfbyte_lab.measure.timing import MANY_GRAPHS
from halfbyte_lab.studies import fused_qkv


def decode(session: Session, impls: Sequence[str] = ()) -> Suite:
    """Attention of one new token: on a GPU the cases with targets, on a CPU the default ones."""
    if session.device.kind != "cuda":
        return suite.decode_attention(impls=impls)
    return Suite(lambda s: decode_cases.jobs(impls or ["auto"], s.device.kind, s.options.quick), report_sections.DECODE)


def linear(session: Session, impls: Sequence[str] = ()) -> Suite:
    """Linear layers: on a GPU the cases with targets, on a CPU the default ones."""
    if session.device.kind != "cuda":
        return suite.linear_layers(impls=impls)
    return Suite(
        lambda s: linear_cases.jobs(impls or ["auto"], s.device.kind, s.options.quick), report_sections.LINEAR, MANY_GRAPHS
    )


def experts(session: Session, impls: Sequence[str] = ()) -> Suite:
    """Mixtures of experts when they decode; on a CPU a small one."""
    default = ("auto", "triton") if session.device.kind == "cuda" else ("auto",)
    return Suite(
        lambda s: experts_cases.jobs(impls or default, s.device.kind, s.options.quick), plain("experts_linear"), MANY_GRAPHS
    )


def qkv(weights: Path | None = None, impl: str = "auto") -> Suite:
    """The study of fused projections, on an extract or on the shipped model's weights."""
    first = qkv_layers.shipped_weights(qkv_layers.GPT2) if weights is None else qkv_layers.extracted_weights(weights)
    return replace(study(fused_qkv.STUDY.name), jobs=lambda s: fused_qkv.jobs_on(s, first, impl))


def overhead() -> Suite:
    """What one eager call costs the host."""
    return Suite(lambda _: [CallJob()], report_sections.DECODE)


def baselines() -> Suite:
    """Every baseline that runs here, on one case of attention and two of a linear layer."""
    return Suite(run_baselines.jobs, report_sections.BASELINES, MANY_GRAPHS, report_sections.BASELINES_MARK)


def study(name: str) -> Suite:
    """One study."""
    found = studies.study(name)
    return Suite(found.jobs, report_sections.of_study(found), found.effort, found.name)


def every(session: Session) -> list[Suite]:
    """All of them: the host's overhead and appends are among the cases with targets."""
    return [decode(session), linear(session), baselines(), experts(session), *(study(name) for name in studies.QUESTIONS)]
