"""When the samples of a run were in an engine, and beside what: what its record and its trace say together.

    samples/ ──replies of each sample──┐
    trace/ ──pauses, training──────────┴─> arrays, one entry per reply

Times are seconds since the run's trace began.
"""

import itertools
import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skyrl_async.config.schema.run import Config
from skyrl_async.metrics.trace_parts import Span
from skyrl_async.record.ended import Outcome
from skyrl_async.simulator.models import KnownGroup, Turn

WITHOUT_DEVICES = "devices"
"""Track of the spans in which others compute on the engines' devices."""
Floats: TypeAlias = NDArray[np.float64]
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Arrays of (N,), one entry per reply of the samples that were generated for training; where the record does not say when each was
    sampled, one per sample."""

    step: NDArray[np.int64]
    """That trained it, or began when it was thrown away."""
    num_tokens: Floats
    """Sampled."""
    num_turns: Floats
    """1, or those of the sample."""
    seconds: Floats
    """In an engine or waiting for one, without the time in which engines stood still: for an update, or while others computed on their
    devices."""
    environment_seconds: Floats
    """What followed until the next reply was asked for, or the sample's end."""
    waiting: Floats
    """The part of ``seconds`` without a place among ``engine.max_num_seqs``."""
    load: Floats
    """Mean of the requests that ran in an engine beside it, itself counted."""
    speed: Floats
    """Mean of how fast its engine was, 1 where nothing else took its cores."""
    num_starts: Floats
    """Requests that began or were continued in an engine while it ran in one, its own counted."""
    num_updates: Floats
    """Weight updates that it outlived."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """One reply of a sample, or all of them. Seconds count from the sample's begin."""

    begin: float
    end: float
    engine_seconds: float
    """Part of the time until ``end``."""
    environment_seconds: float
    """Before, between and after its engine calls."""
    num_tokens: int
    num_turns: int = 1


def _replies(row: Mapping[str, Any]) -> list[_Reply]:
    """The replies of a sample, one after the other; one for all where the record does not say when each was asked for, or the run was
    resumed between two of them."""
    found = [turn for turn in row["turns"] or () if turn["engine_seconds"] is not None]
    seconds, num_tokens, num_turns = row["seconds"], row["num_sampled_tokens"], max(1, row["num_turns"] or 1)
    is_known = len(found) == num_turns and all(turn["asked_at"] is not None for turn in found)
    if not is_known or found[-1]["asked_at"] - found[0]["asked_at"] > seconds:  # which are since it was resumed
        in_engine = min(sum(turn["engine_seconds"] for turn in found), seconds) if found else seconds
        return [_Reply(0.0, seconds, in_engine, seconds - in_engine, num_tokens, num_turns)]
    begins = [turn["asked_at"] - found[0]["asked_at"] for turn in found] + [seconds]
    # A turn's span has the template's tokens too.
    ends = list(itertools.accumulate(turn["end"] - turn["start"] for turn in found))
    tokens = [0, *(num_tokens * end // ends[-1] for end in ends)]
    return [
        _Reply(
            begin,
            begin + turn["engine_seconds"],
            turn["engine_seconds"],
            max(0.0, until - begin - turn["engine_seconds"]),
            max(1, last - first),
        )
        for turn, (begin, until), (first, last) in zip(found, pairwise(begins), pairwise(tokens), strict=True)
    ]


def groups_of(rows: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, Any]] = ()) -> tuple[KnownGroup, ...]:
    """Turns of each sample; of replies that are known together only, equal shares.

    Of failed samples only their seconds are recorded: in the mean they are taken to have spent as long in engines as the others, and
    sampled as fast.

    Args:
        rows: of samples that did not fail.
        failed: of samples that did.
    """
    groups: dict[tuple[int, bool], list[tuple[Turn, ...]]] = defaultdict(list)
    num_masked: Counter[tuple[int, bool]] = Counter()
    newest = max((row["admission_index"] for row in rows if row["outcome"] != Outcome.FILTERED), default=math.inf)
    for row in rows:
        if row["admission_index"] > newest:
            continue  # those beside it that are not filtered are still in the buffer
        turns: list[Turn] = []
        for reply in _replies(row):
            ends = [reply.num_tokens * turn // reply.num_turns for turn in range(reply.num_turns + 1)]
            turns += [(max(1, e - b), reply.environment_seconds / reply.num_turns) for b, e in pairwise(ends)]
        key, is_masked = (row["admission_index"], row["outcome"] == Outcome.FILTERED), not row["num_trained_tokens"]
        groups[key].insert(0 if is_masked else len(groups[key]), tuple(turns))
        num_masked[key] += is_masked
    mean_tokens = fmean(row["num_sampled_tokens"] for row in rows)
    in_engine = fmean(sum(reply.engine_seconds for reply in _replies(row)) for row in rows)
    lasted = max(in_engine, fmean(row["seconds"] for row in failed)) if failed else in_engine
    num_failing: Counter[int] = Counter()
    for row in failed:
        if (index := row["admission_index"]) <= newest:
            num_failing[index] += 1
            share = row["seconds"] / lasted
            groups[index, False].append(((max(1, round(share * mean_tokens)), share * (lasted - in_engine)),))
    return tuple(
        KnownGroup(
            samples=tuple(samples),
            num_masked=num_masked[index, is_filtered],
            num_failing=num_failing[index],
            is_filtered=is_filtered,
        )
        for (index, is_filtered), samples in groups.items()
    )


class OverTime:
    """A quantity that changes at moments, and its integral.

    Args:
        times: moments of change, seconds.
        changes: what is added at each.
    """

    def __init__(self, times: Floats, changes: Floats) -> None:
        order = np.argsort(times, kind="stable")
        self.times = times[order]
        self.values = np.concatenate([[0.0], np.cumsum(changes[order])])
        """From each moment on."""

    def at(self, times: Floats) -> Floats:
        """The quantity right before each of these moments."""
        return self.values[np.searchsorted(self.times, times, side="left")]

    def since(self, times: Floats) -> Floats:
        """The quantity from each of these moments on."""
        return self.values[np.searchsorted(self.times, times, side="right")]

    def integral(self, begin: Floats, end: Floats, of: Floats | None = None) -> Floats:
        """From each ``begin`` to its ``end``. ``of``: other values from each moment on."""
        values = self.values if of is None else of
        times = self.times
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


def spans_over_time(spans: Iterable[Span]) -> OverTime:
    """How many of the spans are open."""
    found = [(span.begin, span.end) for span in spans] or [(0.0, 0.0)]
    times = np.array(found, float)
    return OverTime(times.T.ravel(), np.repeat([1.0, -1.0], len(times)))


class Samples:
    """When the samples' requests ran, and beside what."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], begin: Floats, spans: Sequence[Span], config: Config) -> None:
        self._num_engines = config.engine.num_engines
        self._most = config.engine.max_num_seqs
        found = [(begun, row, reply) for begun, row in zip(begin, rows, strict=True) for reply in _replies(row)]
        self._rows, self._replies = [row for _, row, _ in found], [reply for _, _, reply in found]
        self.begin = np.array([begun + reply.begin for begun, _, reply in found], float)
        self.end = np.array([begun + reply.end for begun, _, reply in found], float)
        self._in_engine = self._of_replies("engine_seconds")
        # Of replies that are known together it is not known when each was sampled: they count as the share of their time in engines.
        self._share = self._in_engine / np.maximum(self.end - self.begin, 1e-9)
        changes = np.concatenate([self._share, -self._share]) / self._num_engines
        self.open = OverTime(np.concatenate([self.begin, self.end]), changes)
        """Requests per engine."""
        self._pauses = [span for span in spans if span.track == "publish/pause"]

    def _of_replies(self, name: str) -> Floats:
        return np.array([getattr(reply, name) for reply in self._replies], float)

    def _of_rows(self, name: str) -> list[Any]:
        return [row[name] for row in self._rows]

    def calls(self, first_step: int, spans: Sequence[Span], speed: OverTime) -> Calls:
        """The calls of samples that were trained from ``first_step`` on, and did not overlap a validation. ``speed``: of engines."""
        num_turns, step = self._of_replies("num_turns"), np.array(self._of_rows("step"), np.int64)
        lasted = self.end - self.begin
        began = np.concatenate(
            [b + np.arange(n) * s / n for b, n, s in zip(self.begin, num_turns, lasted, strict=True)]
        )
        moments = np.array([span.begin for span in self._pauses], float)
        continued = np.minimum(self.open.at(moments), self._most) if len(moments) else np.zeros(0)
        starts = OverTime(
            np.concatenate([began, moments]), np.concatenate([np.full(len(began), 1 / self._num_engines), continued])
        )
        pauses = spans_over_time([*self._pauses, *(span for span in spans if span.track == WITHOUT_DEVICES)])
        # Waiting is counted while engines run, as ``seconds`` is.
        running = [times - pauses.integral(np.zeros(len(times)), times) for times in (self.begin, self.end, moments)]
        order, places = np.array(self._of_rows("admission_index"), float), self._share / self._num_engines
        waiting = waiting_seconds(running[0], running[1], order, running[2], places, capacity=self._most)
        seconds = self._in_engine * (1 - pauses.mean(self.begin, self.end))
        running_share = 1 - waiting / np.maximum(seconds, 1e-9)
        validating = spans_over_time(span for span in spans if span.track == "evaluation")
        kept = (step >= first_step) & (validating.mean(self.begin, self.end) == 0)
        found = {
            "step": step,
            "num_tokens": self._of_replies("num_tokens"),
            "num_turns": num_turns,
            "seconds": seconds,
            "environment_seconds": self._of_replies("environment_seconds"),
            "waiting": waiting,
            "load": self.open.mean(self.begin, self.end, of=np.minimum(self.open.values, self._most)),
            "speed": speed.mean(self.begin, self.end),
            "num_updates": np.diff(np.searchsorted(np.sort(moments), [self.begin, self.end]), axis=0)[0].astype(float),
            "num_starts": (starts.at(self.end) - starts.at(self.begin)) * np.maximum(0.0, running_share),
        }
        return Calls(**{name: values[kept] for name, values in found.items()})
