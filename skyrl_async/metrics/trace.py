"""Chrome/Perfetto trace of a run: spans on named tracks, streamed to the parts of a directory.

The clock is an argument, so that virtual time can be traced.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from skyrl_async.metrics.trace_parts import TraceParts
from skyrl_async.runtime.stages import OnLeft, StageState

_open_span: ContextVar["_Span | None"] = ContextVar("open_span", default=None)


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

    process_id: int
    thread_id: int
    stack: list[_Span] = field(default_factory=list)


class Trace:
    """Writes a trace, until it is closed. ``process/thread`` as track name groups threads under a process."""

    def __init__(self, directory: Path | None, clock: Callable[[], float], max_bytes: int = 10**9) -> None:
        """Begin a part in ``directory`` (see ``TraceParts``), or only know the open spans. ``clock`` returns seconds."""
        self._parts = None if directory is None else TraceParts(directory, clock, max_bytes)
        self._clock = clock
        self._lanes: dict[str, list[_Lane]] = {}
        self._free: dict[str, list[tuple[int, _Lane]]] = {}
        """Track -> heap of the lanes without a span, by thread id."""
        self._processes: dict[str, int] = {}

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Trace the block, across awaits. It yields a dictionary, shown with the span, to which the block may add.

        A span inside another of the same task and track is drawn below it. A span that overlaps another task's gets a row of its own.
        """
        span = _Span(track, _open_span.get(), name, self._clock(), args)
        lane = span.lane = self._lane_for(span)
        if not lane.stack:
            heappop(self._free[track])
        lane.stack.append(span)
        token = _open_span.set(span)
        try:
            yield args
        finally:
            _open_span.reset(token)
            lane.stack.remove(span)
            if not lane.stack:
                heappush(self._free[track], (lane.thread_id, lane))
            self._write_span(lane, name, span.begin, self._clock(), args)

    def past_span(self, name: str, track: str, begin: float, end: float, **args: Any) -> None:
        """Trace a span from ``begin`` to ``end``, seconds on the trace's clock. On such a track spans must not overlap."""
        if self._parts is not None:
            self._write_span(self._free_lane(track), name, begin, end, args)

    def moment(self, name: str, track: str, **args: Any) -> None:
        """Trace this moment, as a span of no length."""
        now = self._clock()
        self.past_span(name, track, now, now, **args)

    def open_spans(self) -> tuple[OpenSpan, ...]:
        """Return the innermost spans that are open now, the oldest first."""
        now = self._clock()
        spans = [span for lanes in self._lanes.values() for lane in lanes for span in lane.stack]
        around = {id(span.parent) for span in spans}
        innermost = sorted((span for span in spans if id(span) not in around), key=lambda span: span.begin)
        return tuple(OpenSpan(track=s.track, name=s.name, seconds=now - s.begin, args=s.args) for s in innermost)

    def close(self) -> None:
        """End the newest part. Idempotent. Spans that end later are left out."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None

    def _lane_for(self, span: _Span) -> _Lane:
        """Return the lane of the nearest enclosing span of its track, if that is the innermost there; else the uppermost free lane."""
        around = span.parent
        while around is not None and around.track != span.track:
            around = around.parent
        if around is not None and around.lane is not None and around.lane.stack[-1:] == [around]:
            return around.lane
        return self._free_lane(span.track)

    def _free_lane(self, track: str) -> _Lane:
        """Return the uppermost lane without a span."""
        free = self._free.setdefault(track, [])
        return free[0][1] if free else self._add_lane(track)

    def _add_lane(self, track: str) -> _Lane:
        """Add a lane, and write the names by which viewers show it. Thread ids ascend within a track."""
        process, thread = track.split("/", 1) if "/" in track else ("run", track)
        names: dict[str, Any] = {} if process in self._processes else {"process_name": {"name": process}}
        process_id = self._processes.setdefault(process, len(self._processes) + 1)
        lanes = self._lanes.setdefault(track, [])
        lane = _Lane(process_id, thread_id=sum(map(len, self._lanes.values())) + 1)
        lanes.append(lane)
        heappush(self._free[track], (lane.thread_id, lane))
        name = thread if len(lanes) == 1 else f"{thread} {len(lanes)}"
        names["thread_name"] = {"name": name, "track": track, "lane": len(lanes)}
        names["thread_sort_index"] = {"sort_index": list(self._lanes).index(track) * 100_000 + len(lanes)}
        if self._parts is not None:
            for kind, args in names.items():
                self._parts.add_name(
                    {"ph": "M", "name": kind, "ts": 0, "pid": process_id, "tid": lane.thread_id, "args": args}
                )
        return lane

    def _write_span(self, lane: _Lane, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        if self._parts is not None:
            event = {"ph": "X", "name": name, "pid": lane.process_id, "tid": lane.thread_id}
            self._parts.add_span(begin, end, event | {"args": args} if args else event)


_TRACED = {StageState.WAITING_FOR_INPUT, StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT}


def trace_stages(trace: Trace) -> OnLeft:
    """Return a callback that draws one row per stage. Trace and stages must have the same clock.

    A span of processing has the item as its name; a span of waiting has the state as its name, and the item as an argument.
    """

    def draw(name: str, state: StageState, item: str, begin: float, end: float) -> None:
        if state in _TRACED and end > begin:
            track = f"stages/{name}"
            if state is StageState.PROCESSING:
                trace.past_span(item, track, begin, end)
            else:
                trace.past_span(state.value, track, begin, end, item=item)

    return draw
