"""Candidates that are judged, timed in turn, and judged again: a time only for what gave right results throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from halfbyte.device import Device
from halfbyte.errors import HalfbyteError
from halfbyte_lab.measure.checks import Accuracy
from halfbyte_lab.measure.timing import Effort, Sampler, Timing, Work, make_sampler, paired_launches, sample_in_turn, summary

K = TypeVar("K")


@dataclass(frozen=True)
class Trial:
    """What is timed, `what` it is called in messages, and what judges the results of one pass over its rotation as one."""

    what: str
    work: Work
    judge: Callable[[Iterable[Any]], Accuracy]


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: its error, and its time or, in words, why it has none."""

    accuracy: Accuracy | None = None
    timing: Timing | None = None
    refused: str = ""


def one_by_one(judge: Callable[[Any], Accuracy]) -> Callable[[Iterable[Any]], Accuracy]:
    """A judge of passes from one of single results: the first that is not allowed, else the last."""

    def judge_all(results: Iterable[Any]) -> Accuracy:
        accuracy = Accuracy(0.0, 0.0, "")
        for result in results:
            accuracy = judge(result)
            if not accuracy.ok:
                break
        return accuracy

    return judge_all


def run_trials(trials: Mapping[K, Trial], device: Device, effort: Effort) -> dict[K, Outcome]:
    """Every buffer of a rotation must give a right result before it is timed, and the graph that was timed must have given one."""
    outcomes: dict[K, Outcome] = {}
    samplers: dict[K, Sampler] = {}
    with torch.no_grad():
        for key, trial in trials.items():
            with paired_launches(trial.work.paired):
                outcomes[key] = _judged(trial, (fn() for fn in trial.work.fns), "")
            if not outcomes[key].refused:
                try:
                    samplers[key] = make_sampler(trial.what, trial.work, device, effort)
                except Exception as error:
                    outcomes[key] = Outcome(outcomes[key].accuracy, refused=reason(error))
        names = {str(i): key for i, key in enumerate(samplers)}
        samples = sample_in_turn({name: samplers[key] for name, key in names.items()}, effort) if samplers else {}
        for name, key in names.items():
            outcome = _judged(trials[key], samplers[key].run(), ", as it was timed")
            timing = None if outcome.refused else summary(samples[name], samplers[key].method)
            outcomes[key] = Outcome(outcome.accuracy, timing, outcome.refused)
    return outcomes


def _judged(trial: Trial, results: Iterable[Any], when: str) -> Outcome:
    accuracy = None
    try:
        accuracy = trial.judge(results)
        accuracy.require(f"{trial.what}{when}")
    except Exception as error:
        return Outcome(accuracy, refused=reason(error))
    return Outcome(accuracy)


def reason(error: Exception) -> str:
    """What an error says in one line; its type too, unless it is one of ours."""
    text = str(error).strip() or "no message"
    return text if isinstance(error, HalfbyteError) else f"{type(error).__name__}: {text.splitlines()[0]}"
