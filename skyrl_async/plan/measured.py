"""What a run's files say about where its time goes.

    samples/ ──when each call ran──┐
    trace/ ──what ran beside it────┼─> arrays, one entry per sample and one per trained group
    metrics.jsonl ──steps──────────┘

Times are seconds since the run's trace began.
"""

import itertools
import os
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skyrl_async.config.load import built, changed, compose_config
from skyrl_async.config.rules.devices import engine_device
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.metrics.trace_parts import Span, read_spans
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.record.files import DIRECTORY, files_in, read_samples
from skyrl_async.simulator.models import Turn
from skyrl_async.simulator.shared_machine import ENGINE_CORES, TRAINING_CORES, slowdown

Floats: TypeAlias = NDArray[np.float64]
Step: TypeAlias = dict[str, Any]
"""One line of ``metrics.jsonl``."""

MIN_STEPS = 8
"""Fewer say little about how much a figure varies."""
WARM_UP_STEPS = 2
"""Left out: the buffer fills, and caches are cold."""
_MAX_ROWS = 20_000
"""Newest samples that are read."""
_ROUNDING = 1e-9
_OUTCOMES = ("trained", "filtered", "masked", "abandoned")
_COLUMNS = (
    *("outcome", "uid", "scheduled_version", "admission_index", "sample", "branch", "step"),
    *("seconds", "num_turns", "num_prompt_tokens", "num_response_tokens", "num_sampled_tokens", "turns"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Arrays of (N,), one entry per sample that was generated for training."""

    step: NDArray[np.int64]
    """That trained it, or began when it was thrown away."""
    num_tokens: Floats
    """Sampled, in all turns."""
    num_turns: Floats
    seconds: Floats
    """In an engine or waiting for one, all turns together, without the time in which engines stood still for an update."""
    environment_seconds: Floats
    """What else the sample took."""
    waiting: Floats
    """Of ``seconds``, without a place among ``engine.max_num_seqs``."""
    load: Floats
    """Mean of the requests that ran in an engine beside it, itself counted."""
    training_share: Floats
    """Share of its time in which the trainer computed."""
    num_starts: Floats
    """Requests that began or were continued in an engine while it ran in one, its own counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Arrays of (M,), one entry per group that was trained."""

    step: NDArray[np.int64]
    num_tokens: Floats
    """Of its rows, prompts counted; the step's mean where the record does not say which group it was."""
    seconds: Floats
    """Forward and backward."""
    running_share: Floats
    """Share of ``seconds`` in which requests ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, as far as a forecast needs it."""

    config: Config
    steps: tuple[Step, ...]
    """Without the first and the last ones."""
    calls: Calls
    gradients: Gradients
    samples: tuple[tuple[tuple[Turn, ...], ...], ...]
    """By group, the turns of each sample."""
    unsampled_tokens: float
    """Of a row, in the mean: its prompt, and what its environment answered."""
    stages: Mapping[str, float]
    """Stages between the reward and training: name -> seconds per group."""

    shared_cores: int | None
    """Cores of the machine that trainer and engines share, this one; None where they have devices of their own."""

    def slowdown(self, *, with_training: bool = False) -> float:
        """Of all that computes there while each engine has requests, see ``simulator.shared_machine``."""
        wanted = self.config.engine.num_engines * ENGINE_CORES + with_training * TRAINING_CORES
        return 1.0 if self.shared_cores is None else slowdown(wanted, self.shared_cores)

    def mean(self, name: str) -> float:
        """Mean of a figure over the steps; one that is missing counts as 0."""
        return float(np.mean([step.get(name, 0.0) for step in self.steps]))


def measured(run_dir: Path) -> Measured:
    """Read a run, which may go on; of one that has ended, without its last steps, if there are enough: nothing is left to generate in them.

    Raises ``ConfigError`` for a directory that is none, or that has too few steps or no samples.
    """
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(f"{run_dir} must be the directory of a run, such as outputs/RUN: it has no config.yaml")
    config = built(compose_config([], config_file))
    steps = _steps(run_dir / "metrics.jsonl")
    num_engines = int(steps[-1].get("engines/serving", 0) if steps else 0) or config.engine.num_engines
    newest = list(itertools.takewhile(lambda s: s.get("engines/serving", num_engines) == num_engines, reversed(steps)))
    least = MIN_STEPS + WARM_UP_STEPS
    if len(newest) < least:
        since = "" if len(newest) == len(steps) else f" since it has {num_engines} engines"
        raise ConfigError(
            f"{run_dir} has {len(newest)} steps{since}, and a forecast needs {least}, the first {WARM_UP_STEPS} of which are left "
            "out: let it run on"
        )
    config = changed(config, {"engine.num_engines": num_engines})
    if newest[0]["step"] == config.trainer.num_steps:
        newest = newest[min(config.trainer.staleness_bound, len(newest) - least) :]
    steps = newest[::-1][WARM_UP_STEPS:]
    spans = list(read_spans(run_dir))
    rows = _rows(run_dir)
    begins = {(s.args.get("uid"), s.args.get("version")): s.begin for s in spans if s.track == "generation"}
    rows = [row for row in rows if (row["uid"], row["scheduled_version"]) in begins]
    if not rows:
        raise ConfigError(
            f"{run_dir} says of no sample when it was generated: {DIRECTORY}/ and trace/ must be those of the run, with logging.trace on"
        )
    begin = np.array([begins[row["uid"], row["scheduled_version"]] for row in rows])
    samples = _Samples(rows, begin, spans, config)
    return Measured(
        config=config,
        steps=tuple(steps),
        calls=samples.calls(steps[0]["step"], spans),
        gradients=_gradients(rows, spans, samples, steps[0]["step"]),
        samples=_turns_by_group(rows),
        unsampled_tokens=float(
            np.mean([row["num_prompt_tokens"] + row["num_response_tokens"] - row["num_sampled_tokens"] for row in rows])
        ),
        stages=_stages(spans),
        shared_cores=os.cpu_count() if engine_device(config.engine) is Device.cpu else None,
    )


def _steps(path: Path) -> list[Step]:
    """One row per optimizer step."""
    rows = read_rows(path) if path.exists() else ()
    return list({row["step"]: row for row in rows if "timing/step" in row}.values())


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    """One row per sample of training that has tokens: of its branches the one with the most."""
    files = files_in(run_dir / DIRECTORY)
    begin = max(0, files[-1].end - _MAX_ROWS) if files else 0
    longest: dict[tuple[int, int], dict[str, Any]] = {}
    for row in read_samples(run_dir, _COLUMNS, begin=begin).to_pylist():
        if row["outcome"] in _OUTCOMES and row["num_sampled_tokens"]:
            known = longest.get(key := (row["admission_index"], row["sample"]))
            if known is None or row["num_sampled_tokens"] > known["num_sampled_tokens"]:
                longest[key] = row
    return list(longest.values())


def _engine_seconds(row: Mapping[str, Any]) -> float:
    """What a sample spent in engines; all of its time where the record does not say."""
    of_turns = [turn["engine_seconds"] for turn in row["turns"] or () if turn["engine_seconds"] is not None]
    return min(sum(of_turns), row["seconds"]) if of_turns else row["seconds"]


def _turns_by_group(rows: Iterable[Mapping[str, Any]]) -> tuple[tuple[tuple[Turn, ...], ...], ...]:
    """Turns of each sample: equal shares of its tokens, and of what its environment took."""
    groups: dict[int, list[tuple[Turn, ...]]] = defaultdict(list)
    for row in rows:
        num_turns = max(1, row["num_turns"] or 1)
        seconds = (row["seconds"] - _engine_seconds(row)) / num_turns
        ends = [row["num_sampled_tokens"] * turn // num_turns for turn in range(num_turns + 1)]
        turns = [(max(1, end - begin), seconds) for begin, end in pairwise(ends)]
        groups[row["admission_index"]].append(tuple(turns))
    return tuple(map(tuple, groups.values()))


class _OverTime:
    """A quantity that changes at moments, and its integral.

    Args:
        times: moments of change, seconds.
        changes: what is added at each.
    """

    def __init__(self, times: Floats, changes: Floats) -> None:
        order = np.argsort(times, kind="stable")
        self._times = np.concatenate([[-np.inf], times[order]])
        self.values = np.concatenate([[0.0], np.cumsum(changes[order])])
        """From each moment on."""

    def at(self, times: Floats) -> Floats:
        """The quantity right before each of these moments."""
        return self.values[np.searchsorted(self._times, times, side="left") - 1]

    def integral(self, begin: Floats, end: Floats, of: Floats | None = None) -> Floats:
        """From each ``begin`` to its ``end``. ``of``: other values from each moment on."""
        values = self.values if of is None else of
        times = self._times[1:]
        integral = np.concatenate([[0.0], np.cumsum(values[1:-1] * np.diff(times))])

        def until(moments: Floats) -> Floats:
            index = np.searchsorted(times, moments, side="right") - 1
            inside = integral[index] + values[index + 1] * (moments - times[index])
            return np.where(index >= 0, inside, 0.0)

        return until(end) - until(begin)

    def mean(self, begin: Floats, end: Floats, of: Floats | None = None) -> Floats:
        """Mean from each ``begin`` to its ``end``. ``of``: other values from each moment on."""
        return self.integral(begin, end, of) / np.maximum(end - begin, 1e-9)


def waiting_seconds(
    begin: Floats, end: Floats, order: Floats, updates: Floats, places: Floats, *, capacity: float
) -> Floats:
    """Seconds that each request was in an engine without a place to run: the lowest ``order`` gets the next one that is free.

    Args:
        begin, end, order: (N,) of each request.
        updates: moments at which all places are given anew, since every request is ended and continued.
        places: (N,) what each takes of an engine's ``capacity``, 1 over the number of engines if it is in one all the time.
        capacity: requests that run in an engine at a time.
    """
    waited, since, free = np.zeros(len(begin)), begin.copy(), capacity
    waiting: list[tuple[float, int]] = []
    running: dict[int, None] = {}
    # At one moment places get free before they are given.
    events = [
        *((float(time), "1 ends", i) for i, time in enumerate(end)),
        *((float(time), "2 all end", -1) for time in updates),
        *((float(time), "3 begins", i) for i, time in enumerate(begin)),
    ]
    for time, kind, i in sorted(events):
        if kind == "1 ends" and i in running:
            del running[i]
            free += places[i]
        elif kind == "1 ends":
            waited[i] += time - since[i]
            waiting.remove((order[i], i))
        elif kind == "3 begins":
            insort(waiting, (order[i], i))
        else:
            for one in running:
                insort(waiting, (order[one], one))
                since[one] = time
            running.clear()
            free = capacity
        while waiting and free > _ROUNDING:
            _, one = waiting.pop(0)
            running[one] = None
            free -= places[one]
            waited[one] += time - since[one]
    return waited


def _spans_over_time(spans: Iterable[Span]) -> _OverTime:
    """How many of the spans are open."""
    found = [(span.begin, span.end) for span in spans] or [(0.0, 0.0)]
    times = np.array(found, float)
    return _OverTime(times.T.ravel(), np.repeat([1.0, -1.0], len(times)))


class _Samples:
    """When the samples' requests ran, and beside what."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], begin: Floats, spans: Sequence[Span], config: Config) -> None:
        self._rows = rows
        self._num_engines = config.engine.num_engines
        self._most = config.engine.max_num_seqs
        self.begin = begin
        self._all = np.array([row["seconds"] for row in rows], float)
        self.end = begin + self._all
        self._in_engine = np.array([_engine_seconds(row) for row in rows], float)
        # Of a sample with several turns it is not known when each was sampled: it counts as the share of its time spent in engines.
        self._share = self._in_engine / np.maximum(self._all, 1e-9)
        changes = np.concatenate([self._share, -self._share]) / self._num_engines
        self.open = _OverTime(np.concatenate([begin, self.end]), changes)
        """Requests per engine."""
        self._pauses = [span for span in spans if span.track == "publish/pause"]

    def calls(self, first_step: int, spans: Sequence[Span]) -> Calls:
        """Of the samples that were trained from ``first_step`` on, and did not overlap a validation."""
        num_turns = np.array([max(1, row["num_turns"] or 1) for row in self._rows], float)
        step = np.array([row["step"] for row in self._rows], np.int64)
        began = np.concatenate(
            [b + np.arange(n) * s / n for b, n, s in zip(self.begin, num_turns, self._all, strict=True)]
        )
        moments = np.array([span.begin for span in self._pauses], float)
        continued = np.minimum(self.open.at(moments), self._most) if len(moments) else np.zeros(0)
        starts = _OverTime(
            np.concatenate([began, moments]), np.concatenate([np.full(len(began), 1 / self._num_engines), continued])
        )
        order = np.array([row["admission_index"] for row in self._rows], float)
        pauses = _spans_over_time(self._pauses)
        # Waiting is counted while engines run, as ``seconds`` is.
        running = [times - pauses.integral(np.zeros(len(times)), times) for times in (self.begin, self.end, moments)]
        waiting = waiting_seconds(
            running[0], running[1], order, running[2], self._share / self._num_engines, capacity=self._most
        )
        paused = self._in_engine * pauses.mean(self.begin, self.end)
        training = _spans_over_time(span for span in spans if span.track == "training" and span.name != "checkpoint")
        validating = _spans_over_time(span for span in spans if span.track == "evaluation")
        seconds = self._in_engine - paused
        running_share = 1 - waiting / np.maximum(seconds, 1e-9)
        kept = (step >= first_step) & (validating.mean(self.begin, self.end) == 0)
        found = {
            "step": step,
            "num_tokens": np.array([row["num_sampled_tokens"] for row in self._rows], float),
            "num_turns": num_turns,
            "seconds": seconds,
            "environment_seconds": self._all - self._in_engine,
            "waiting": waiting,
            "load": self.open.mean(self.begin, self.end, of=np.minimum(self.open.values, self._most)),
            "training_share": np.minimum(1.0, training.mean(self.begin, self.end)),
            "num_starts": (starts.at(self.end) - starts.at(self.begin)) * np.maximum(0.0, running_share),
        }
        return Calls(**{name: values[kept] for name, values in found.items()})


def _gradients(
    rows: Iterable[Mapping[str, Any]], spans: Iterable[Span], samples: _Samples, first_step: int
) -> Gradients:
    """Groups are trained in the order of their rows; where a step has another number of them, each gets the mean of their tokens."""
    tokens: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        if row["outcome"] in ("trained", "masked"):
            num_tokens = row["num_prompt_tokens"] + row["num_response_tokens"]
            tokens[row["step"]][row["admission_index"]] += num_tokens
    trained: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.track == "training" and span.name == "forward_backward" and span.args.get("step", -1) >= first_step:
            trained[span.args["step"]].append(span)
    is_running = np.minimum(1.0, samples.open.values)
    found: list[tuple[int, float, float, float]] = []
    for step, of_step in trained.items():
        of_groups = list(tokens[step].values())
        if len(of_groups) != len(of_step):
            of_groups = [sum(of_groups) / len(of_step)] * len(of_step)
        begin, end = (np.array([getattr(span, name) for span in of_step]) for name in ("begin", "end"))
        shares = samples.open.mean(begin, end, of=is_running)
        found += zip([step] * len(of_step), of_groups, end - begin, shares, strict=True)
    columns = np.array(found, float).reshape(-1, 4).T
    return Gradients(
        step=columns[0].astype(np.int64), num_tokens=columns[1], seconds=columns[2], running_share=columns[3]
    )


def _stages(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds per group of each stage that a run may have between the reward and training."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        stage = span.track.removeprefix("stages/")
        if stage in ("ref_logp", "logp", "teacher_logp", "values") and not span.name.startswith("waiting for"):
            seconds[stage].append(span.end - span.begin)
    return {stage: float(np.mean(found)) for stage, found in seconds.items()}
