"""Files of a trace: ``trace/000001.json`` and so on, each an array of Chrome trace events with the names of its rows, which opens alone.

Times in all parts of a run count from the start of its first process, by the wall clock at the start of each process; the event
``trace_start`` at the head of each part has that moment as Unix time, and the part's own start as ``ts``. The newest part has no closing
bracket while it is written, or after ``kill -9``.
"""

import itertools
import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from skyrl_async.metrics.tracker import RecordFile, replace_file
from skyrl_async.runtime.daemon_threads import DaemonThreads

logger = logging.getLogger(__name__)

_PART_BYTES = 4_000_000
"""Some 300 steps of the default job. Thinning such a part held up an event loop for 7 ms at most, one of 10 MB for 20 ms."""
_MIN_PARTS = 16
"""Parts are smaller if less than this would fit."""
_THINNED_SHARE = 0.1
_LINES_PER_TURN = 200
"""Lines that the thinning thread reads (in under 1 ms) before the event loop's thread may take its turn."""
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of a trace."""

    track: str
    lane: int
    """Row of the track, from 1; spans on a row are nested, never overlapping."""
    name: str
    begin: float
    """Seconds since the run's trace began."""
    end: float
    args: Mapping[str, Any]


def read_spans(trace: Path, begin: float = -math.inf, end: float = math.inf) -> Iterator[Span]:
    """Yield the spans that overlap a time, part after part, in the order of their ends; also while the run goes on.

    Args:
        trace: directory of a run, its ``trace/``, or one part.
        begin, end: seconds since the run's trace began.
    """
    parts = [trace] if trace.is_file() else _part_files(trace / "trace") or _part_files(trace)
    for part, after in itertools.zip_longest(parts, parts[1:]):
        if after is not None and (start := next(_events(after), None)) and start["ts"] / 1e6 <= begin:
            continue
        rows: dict[int, tuple[str, int]] = {}
        for event in _events(part):
            args = event.get("args", {})
            if "track" in args and event["ph"] == "M":
                rows[event["tid"]] = (args["track"], args["lane"])
            elif event.get("ph") == "X" and event["tid"] in rows:
                began, ended = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                if ended > begin and began < end:
                    track, lane = rows[event["tid"]]
                    yield Span(track=track, lane=lane, name=event["name"], begin=began, end=ended, args=args)


def trace_end(run_dir: Path) -> float:
    """When the newest span ended, seconds since the run's trace began; 0 without a trace."""
    for part in reversed(_part_files(run_dir / "trace")):
        ends = [(event["ts"] + event["dur"]) / 1e6 for event in _events(part) if event.get("ph") == "X"]
        if ends:
            return max(ends)
    return 0.0


def _part_files(directory: Path) -> list[Path]:
    """Return the parts, the oldest first."""
    return sorted(directory.glob("[0-9]*.json"))


def _events(part: Path) -> Iterator[dict[str, Any]]:
    """Yield a part's events. A line that was cut off is left out; a part that was deleted meanwhile has none."""
    try:
        file = part.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if line.startswith("{"):
                try:
                    event = json.loads(line.rstrip(",\n"))
                except ValueError:
                    continue
                yield event


class TraceParts:
    """Writes events to the parts of a directory, after those of the processes before.

    When the whole nears ``max_bytes``, a thread thins the oldest parts: of each track the longest spans stay, together a tenth. Whole parts
    have at least half of the space. When thinned ones fill the other half, the oldest are deleted.

    Args:
        directory: made if missing.
        clock: returns seconds.
        max_bytes: bound on the size of all parts, with room for one that is written while others are thinned.
        wall_clock: returns Unix time.
    """

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float],
        max_bytes: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._clock = clock
        self._part_bytes = min(_PART_BYTES, max_bytes // _MIN_PARTS)
        self._room_bytes = max_bytes - 2 * self._part_bytes
        self._threads = DaemonThreads("trace")
        self._thinning: Future[None] | None = None
        self._has_thinned = False
        earlier = _part_files(directory)
        heads = (event for part in earlier for event in itertools.islice(_events(part), 1))
        now = wall_clock()
        self._began_at: float = next((head["args"]["unix_s"] for head in heads), round(now, 6))
        self._zero = clock() - max(0.0, now - self._began_at)
        self._names: list[str] = []
        self._begin_part(int(earlier[-1].stem) + 1 if earlier else 1)

    def add_name(self, event: Mapping[str, Any]) -> None:
        """Write a metadata event before the next span, and into each later part."""
        self._names.append(_encode(event))
        self._unwritten.append(self._names[-1])

    def add_span(self, begin: float, end: float, event: Mapping[str, Any]) -> None:
        """Write a span from ``begin`` to ``end``, seconds on the clock."""
        began = self._microseconds(begin)
        lines = [*self._unwritten, _encode({**event, "ts": began, "dur": self._microseconds(end) - began})]
        if self._size == 0:
            args = {"unix_s": self._began_at}
            start = {"ph": "M", "name": "trace_start", "ts": self._microseconds(self._clock()), "pid": 0, "args": args}
            lines.insert(0, _encode(start))
        record = (",\n" if self._size else "[\n") + ",\n".join(lines)
        if self._file.append(record):
            self._unwritten.clear()
            self._size += len(record)
            if self._size >= self._part_bytes:
                self.close()
                self._begin_part(self._number + 1)

    def close(self) -> None:
        """End the newest part."""
        if self._size:
            self._file.append("\n]\n")
        self._file.close()

    def _begin_part(self, number: int) -> None:
        self._number = number
        self._file = RecordFile(self._directory / f"{number:06}.json")
        self._size = 0
        self._unwritten = list(self._names)
        if number > 1 and (self._thinning is None or self._thinning.done()):
            self._thinning = self._threads.submit(self._make_room, number)

    def _microseconds(self, moment: float) -> int:
        return round((moment - self._zero) * 1e6)

    def _make_room(self, before: int) -> None:
        """Thin or delete parts with a number below ``before`` until all fit."""
        try:
            sizes = {part: part.stat().st_size for part in _part_files(self._directory) if int(part.stem) < before}
            whole = [part for part, size in sizes.items() if size > self._part_bytes / 4]
            while sum(sizes.values()) > self._room_bytes:
                if not self._has_thinned:
                    logger.info(
                        "%s reaches logging.trace_max_gb: old parts keep only long spans, or go", self._directory
                    )
                self._has_thinned = True
                if sum(sizes.get(part, 0) for part in whole) > self._room_bytes / 2:
                    part = whole.pop(0)
                    _thin(part)
                    sizes[part] = part.stat().st_size
                else:
                    part = next(iter(sizes))
                    part.unlink()
                    del sizes[part]
        except OSError as error:
            logger.warning("%s cannot be thinned: %s", self._directory, error)


def _thin(part: Path) -> None:
    """Keep of each track its moments and longest spans, of all together at most a tenth. Tracks with few spans keep them all."""
    heads: list[str] = []
    tracks: dict[int, str] = {}
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    """Track -> (microseconds, position in the part, line) of its spans; a moment comes before any span."""
    for position, event in enumerate(_events(part)):
        line = _encode(event)
        if event["ph"] == "M":
            heads.append(line)
            tracks |= {event["tid"]: event["args"]["track"]} if "track" in event["args"] else {}
        else:
            spans[tracks[event["tid"]]].append((event["dur"] or sys.maxsize, position, line))
        if position % _LINES_PER_TURN == 0:
            time.sleep(0.0005)
    most = int(_THINNED_SHARE * sum(map(len, spans.values()))) // max(1, len(spans))
    kept = itertools.chain.from_iterable(nlargest(most, of_track) for of_track in spans.values())
    lines = [*heads, *(line for _, _, line in sorted(kept, key=lambda span: span[1]))]
    replace_file(part, "[\n" + ",\n".join(lines) + "\n]\n")
