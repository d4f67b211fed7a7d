"""Chrome/Perfetto trace of a run: spans, instants and counters on named tracks, streamed to a file as a JSON array.

Viewers also load the array without its closing bracket, hence after ``kill -9``. The trace also sums up how long each kind of span took.
The clock is an argument, so that virtual time can be traced.
"""

import heapq
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from skyrl_async.metrics.record_file import RecordFile
from skyrl_async.runtime.stages import OnLeft, StageState

_open_span: ContextVar["_Span | None"] = ContextVar("open_span", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanStatistics:
    """Statistics of all spans of one name on one track."""

    count: int
    total_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSpan:
    """A span that is open now."""

    track: str
    name: str
    seconds: float
    """Seconds since it was opened."""
    args: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Span:
    track: str
    parent: "_Span | None"
    name: str
    begin: float
    args: Mapping[str, Any]
    lane: "_Lane | None" = None


@dataclass(slots=True, eq=False)
class _Lane:
    """One row of a track; spans on it are nested, never overlapping."""

    thread_id: int
    stack: list[_Span] = field(default_factory=list)


class Trace:
    """Writes a trace; a context manager. ``process/thread`` as track name groups threads under a process."""

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        """Begin the file; with ``path=None`` only keep statistics. ``clock`` returns seconds."""
        if path is not None:
            path.write_text("")
        self._file = None if path is None else RecordFile(path)
        self._clock = clock
        self._start = clock()
        self._lock = threading.Lock()
        self._lanes: dict[str, list[_Lane]] = {}
        self._free_lanes: dict[str, list[tuple[int, _Lane]]] = {}
        self._processes: dict[str, int] = {}
        self._totals: dict[tuple[str, str], SpanStatistics] = {}
        self._num_events = 0

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Trace the block, across awaits. It yields a dictionary, shown with the span, to which the block may add.

        A span inside another of the same task and track is drawn below it. A span that overlaps another task's gets a row of its own.
        """
        begin = self._clock()
        span = _Span(track, _open_span.get(), name, begin, args)
        with self._lock:
            lane = self._enter(span)
        token = _open_span.set(span)
        try:
            yield args
        finally:
            end = self._clock()
            _open_span.reset(token)
            with self._lock:
                self._leave(span, lane)
                self._count(track, name, end - begin)
                self._write(
                    "X", name, track, lane.thread_id, begin, {"dur": self._micros(end) - self._micros(begin)}, args
                )

    def past_span(self, name: str, track: str, begin: float, end: float, **args: Any) -> None:
        """Trace a span from ``begin`` to ``end``, seconds on the trace's clock. On such a track spans must not overlap.

        The span is not in the statistics.
        """
        with self._lock:
            lane = self._lanes_of(track)[0]
            self._write("X", name, track, lane.thread_id, begin, {"dur": self._micros(end) - self._micros(begin)}, args)

    def instant(self, name: str, track: str, **args: Any) -> None:
        """Mark a moment."""
        with self._lock:
            lane = self._lanes_of(track)[0]
            self._write("i", name, track, lane.thread_id, self._clock(), {"s": "t"}, args)

    def counter(self, name: str, track: str, values: Mapping[str, float]) -> None:
        """Draw values over time, stacked."""
        with self._lock:
            lane = self._lanes_of(track)[0]
            self._write("C", name, track, lane.thread_id, self._clock(), {}, dict(values))

    def statistics(self) -> dict[str, SpanStatistics]:
        """Return statistics of the spans closed so far, by ``track:name``."""
        return {f"{track}:{name}": totals for (track, name), totals in self._totals.items()}

    def open_spans(self) -> tuple[OpenSpan, ...]:
        """Return the innermost spans that are open now, the oldest first."""
        now = self._clock()
        with self._lock:
            spans = [span for lanes in self._lanes.values() for lane in lanes for span in lane.stack]
        around = {id(span.parent) for span in spans}
        innermost = sorted((span for span in spans if id(span) not in around), key=lambda span: span.begin)
        return tuple(OpenSpan(track=s.track, name=s.name, seconds=now - s.begin, args=s.args) for s in innermost)

    def close(self) -> None:
        """End the array. Idempotent. Spans that end later only appear in the statistics."""
        with self._lock:
            if self._file is not None:
                self._file.append("\n]\n" if self._num_events else "[]\n")
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _enter(self, span: _Span) -> _Lane:
        """Put the span on the lane of the nearest enclosing span of its track, if that is the innermost there; else on a free lane."""
        around = span.parent
        while around is not None and around.track != span.track:
            around = around.parent
        lane = None if around is None else around.lane
        if lane is None or not lane.stack or lane.stack[-1] is not around:
            lane = self._take_free_lane(span.track)
        span.lane = lane
        lane.stack.append(span)
        return lane

    def _leave(self, span: _Span, lane: _Lane) -> None:
        lane.stack.remove(span)
        if not lane.stack:
            heapq.heappush(self._free_lanes[span.track], (lane.thread_id, lane))

    def _take_free_lane(self, track: str) -> _Lane:
        """Take the uppermost free lane; thread ids ascend within a track."""
        self._lanes_of(track)
        if not self._free_lanes[track]:
            self._add_lane(track)
        return heapq.heappop(self._free_lanes[track])[1]

    def _lanes_of(self, track: str) -> list[_Lane]:
        if track not in self._lanes:
            self._lanes[track], self._free_lanes[track] = [], []
            self._add_lane(track)
        return self._lanes[track]

    def _add_lane(self, track: str) -> None:
        lanes = self._lanes[track]
        order = sum(map(len, self._lanes.values()))
        lane = _Lane(thread_id=order + 1)
        lanes.append(lane)
        heapq.heappush(self._free_lanes[track], (lane.thread_id, lane))
        process, thread = _split(track)
        if process not in self._processes:
            self._processes[process] = len(self._processes) + 1
            self._write("M", "process_name", track, lane.thread_id, self._start, {}, {"name": process})
        title = thread if len(lanes) == 1 else f"{thread} {len(lanes)}"
        self._write("M", "thread_name", track, lane.thread_id, self._start, {}, {"name": title})
        sort_index = list(self._lanes).index(track) * 100_000 + len(lanes)
        self._write("M", "thread_sort_index", track, lane.thread_id, self._start, {}, {"sort_index": sort_index})

    def _count(self, track: str, name: str, seconds: float) -> None:
        old = self._totals.get((track, name), SpanStatistics(count=0, total_s=0.0, max_s=0.0))
        self._totals[track, name] = SpanStatistics(
            count=old.count + 1, total_s=old.total_s + seconds, max_s=max(old.max_s, seconds)
        )

    def _micros(self, moment: float) -> int:
        return round((moment - self._start) * 1e6)

    def _write(
        self,
        kind: str,
        name: str,
        track: str,
        thread_id: int,
        moment: float,
        more: dict[str, Any],
        args: dict[str, Any],
    ) -> None:
        if self._file is None:
            return
        event = {"ph": kind, "name": name, "pid": self._processes[_split(track)[0]], "tid": thread_id}
        event |= {"ts": self._micros(moment), **more, "args": args}
        self._num_events += self._file.append(
            ("[\n" if self._num_events == 0 else ",\n") + json.dumps(event, default=str)
        )


def _split(track: str) -> tuple[str, str]:
    process, slash, thread = track.partition("/")
    return (process, thread) if slash else ("run", track)


_TRACED = {StageState.WAITING_FOR_INPUT, StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT}


def trace_stages(trace: Trace) -> OnLeft:
    """Return a callback that draws one row per stage. Trace and stages must have the same clock."""

    def draw(name: str, state: StageState, item: str, begin: float, end: float) -> None:
        if state in _TRACED and end > begin:
            shown = item if state is StageState.PROCESSING else state.value
            trace.past_span(shown, f"stages/{name}", begin, end, state=state.value, item=item)

    return draw
