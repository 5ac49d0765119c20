"""Whole models in known sizes: the cases are those of the targets, and a CPU lists them only."""

from __future__ import annotations

import pytest

from benchmarks import step
from halfbyte.errors import InvalidArgument
from halfbyte.hf.model_step import SIZES, Steps


def test_cases_can_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    for case in step.CASES.values():
        config = SIZES[case.model]
        assert config.hidden_size % 128 == config.intermediate_size % 128 == 0  # the groups of the weights
        assert case.context + step.NEW <= config.max_position_embeddings
        Steps(case.batch, case.context, step.NEW)
    step.main(None, None, ["fused"], "cpu")
    assert capsys.readouterr().out.count("target on an H200") == len(step.CASES)


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="there is no case 8b; choose from: 8b-1, 8b-8"):
        step.main(["8b"], None, None, "cpu")


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--way fuse is not known; choose from: transformers, generate, graph, fused"):
        step.main(None, None, ["fused", "fuse"], "cpu")
