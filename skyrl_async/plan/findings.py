"""What in a run makes a forecast of it doubtful: small functions over what was measured, each with the figure that shows it."""

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np

from skyrl_async.plan.measured import Measured

_STANDARD_ERRORS = 3.0
"""By which lengths must differ to have drifted, and speeds of engines to differ."""
_DRIFT = 0.2
_HANG_FACTOR = 10.0
_HANG_SHARE = 0.1
_SLOW_ENGINE = 0.8
_FAILED = 0.01


def findings(run: Measured) -> list[str]:
    """A sentence for each thing found."""
    return [*_drift(run), *_hanging_environments(run), *_slow_engines(run), *_failures(run)]


def _drift(run: Measured) -> Iterator[str]:
    """Answers get longer or shorter while the policy learns: a forecast is for their mean over the run."""
    steps, calls = np.unique(run.calls.step), run.calls
    third = len(steps) // 3
    first = calls.num_tokens[np.isin(calls.step, steps[:third])]
    last = calls.num_tokens[np.isin(calls.step, steps[-third:])]
    if third < 1 or not len(first) or not len(last):
        return
    error = float(np.hypot(first.std() / len(first) ** 0.5, last.std() / len(last) ** 0.5))
    change = float(last.mean() - first.mean())
    if abs(change) > max(_STANDARD_ERRORS * error, _DRIFT * float(first.mean())):
        yield (
            f"lengths drift: {first.mean():.0f} tokens per reply in the first third of the steps, {last.mean():.0f} in the last; "
            f"the forecast is for {calls.num_tokens.mean():.0f}"
        )


def _hanging_environments(run: Measured) -> Iterator[str]:
    """After a few replies environments take most of their time."""
    seconds = run.calls.environment_seconds
    median = float(np.median(seconds))
    slow = seconds[(seconds > _HANG_FACTOR * median) & (seconds > run.mean("timing/step"))]
    if len(slow) and slow.sum() > _HANG_SHARE * seconds.sum():
        yield (
            f"environments hang: {len(slow)} of {len(seconds)} replies waited {slow.mean():.1f} s in the mean for theirs, the median "
            f"{median:.2g} s; they are {slow.sum() / seconds.sum():.0%} of all its time, and how often it happens is known to "
            f"+-{100 / len(slow) ** 0.5:.0f} %"
        )


def _slow_engines(run: Measured) -> Iterator[str]:
    """The model has engines of one speed."""
    speeds: dict[str, list[float]] = {}
    for step in run.steps:
        for name, figures in (step.get("engines") or {}).items():
            if "tokens_per_call_second" in figures:
                speeds.setdefault(name, []).append(figures["tokens_per_call_second"])
    means = {name: fmean(found) for name, found in speeds.items() if len(found) > 1}
    if len(means) > 1:
        slowest, fastest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        error = math.hypot(*(stdev(speeds[name]) / len(speeds[name]) ** 0.5 for name in (slowest, fastest)))
        is_sure = means[fastest] - means[slowest] > _STANDARD_ERRORS * error
        if means[slowest] < _SLOW_ENGINE * means[fastest] and is_sure:
            yield (
                f"engines differ: {means[slowest]:.0f} tokens per call and second in {slowest}, {means[fastest]:.0f} in {fastest}: "
                "the forecast has all of them alike"
            )


def _failures(run: Measured) -> Iterator[str]:
    """How many tokens failed samples had is not recorded, and engines that die are not in the model."""
    if (failed := run.mean("generate/failed_frac")) > _FAILED:
        yield (
            f"{failed:.0%} of the samples failed; as many do in the forecast, after as many seconds, in which they sample as the others do"
        )
    counts = [step.get("engines/restarts", 0.0) for step in run.steps]
    # A resumed run counts from 0.
    if restarts := sum(now - before if now >= before else now for before, now in pairwise(counts)):
        yield f"engines were restarted {restarts:.0f} times; the forecast has none that die"
