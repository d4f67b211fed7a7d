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
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

import msgspec

from skyrl_async.metrics.tracker import MAX_WAITING_BYTES, AppendedFile, replace_file
from skyrl_async.runtime.disk_writer import DiskWriter

logger = logging.getLogger(__name__)

_PART_BYTES = 4_000_000
"""Some 300 steps of the default job. Thinning such a part held up an event loop for 7 ms at most, one of 10 MB for 20 ms."""
_MIN_PARTS = 16
"""Parts are smaller if less than this would fit."""
_THINNED_SHARE = 0.1
_LINES_PER_TURN = 200
"""Lines that are read for thinning (in under 1 ms) before the event loop's thread may take its turn."""
_WRITE_INTERVAL_S = 1.0
"""Least time between two writes."""
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


class _Event(msgspec.Struct):
    """A line of a part."""

    ph: str
    name: str
    ts: int | float = 0
    dur: int | float = 0
    pid: int = 0
    tid: int = 0
    args: dict[str, Any] = {}


def read_spans(trace: Path, begin: float = -math.inf, end: float = math.inf) -> Iterator[Span]:
    """Yield the spans that overlap a time, part after part, in the order of their ends; also while the run goes on.

    Args:
        trace: directory of a run, its ``trace/``, or one part.
        begin, end: seconds since the run's trace began.
    """
    parts = [trace] if trace.is_file() else _part_files(trace / "trace") or _part_files(trace)
    for part, after in itertools.zip_longest(parts, parts[1:]):
        if after is not None and (start := next(_events(after), None)) and start.ts / 1e6 <= begin:
            continue
        rows: dict[int, tuple[str, int]] = {}
        for event in _events(part):
            if event.ph == "M" and {"track", "lane"} <= event.args.keys():
                rows[event.tid] = (event.args["track"], event.args["lane"])
            elif event.ph == "X" and event.tid in rows:
                began, ended = event.ts / 1e6, (event.ts + event.dur) / 1e6
                if ended > begin and began < end:
                    track, lane = rows[event.tid]
                    yield Span(track=track, lane=lane, name=event.name, begin=began, end=ended, args=event.args)


def trace_end(run_dir: Path) -> float:
    """When the newest span ended, seconds since the run's trace began; 0 without a trace."""
    for part in reversed(_part_files(run_dir / "trace")):
        ends = [(event.ts + event.dur) / 1e6 for event in _events(part) if event.ph == "X"]
        if ends:
            return max(ends)
    return 0.0


def _part_files(directory: Path) -> list[Path]:
    """Return the parts, the oldest first. People may have put copies beside them."""
    return sorted(part for part in directory.glob("*.json") if part.stem.isdecimal())


def _events(part: Path) -> Iterator[_Event]:
    """Yield a part's events. A line that was cut off, or has no such event, is left out; a part that was deleted meanwhile has none."""
    try:
        file = part.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if line.startswith(b"{"):
                try:
                    event = msgspec.json.decode(line.rstrip(b",\n"), type=_Event)
                except msgspec.DecodeError:
                    continue
                yield event


class TraceParts:
    """Writes events to the parts of a directory, after those of the processes before, beside the event loop.

    When the whole nears ``max_bytes``, the oldest parts are thinned: of each track the longest spans stay, together a tenth. Whole parts
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
        self._has_thinned = False
        earlier = _part_files(directory)
        heads = (event for part in earlier for event in itertools.islice(_events(part), 1))
        now = wall_clock()
        self._began_at: float = next((head.args["unix_s"] for head in heads if "unix_s" in head.args), round(now, 6))
        self._zero = clock() - max(0.0, now - self._began_at)
        self._names: list[str] = []
        self._writer: DiskWriter[tuple[int, str]] = DiskWriter(
            directory,
            "spans",
            self._write,
            size_of=lambda span: len(span[1]),
            max_bytes=MAX_WAITING_BYTES,
            interval_s=_WRITE_INTERVAL_S,
        )
        self._size = self._num_names = 0
        """Characters of the newest part, and names that are in it."""
        self._is_closed = False
        self._begin_part(int(earlier[-1].stem) + 1 if earlier else 1)

    def add_name(self, event: Mapping[str, Any]) -> None:
        """Write a metadata event before the next span, and into each later part."""
        self._names.append(_encode(event))

    def add_span(self, begin: float, end: float, event: Mapping[str, Any]) -> None:
        """Write a span from ``begin`` to ``end``, seconds on the clock. Never waits."""
        began = self._microseconds(begin)
        line = _encode({**event, "ts": began, "dur": self._microseconds(end) - began})
        self._writer.add((self._microseconds(self._clock()), line))
        self._writer.begin()

    async def flush(self) -> None:
        """Wait until the spans so far are in a part, or have failed to get there; half a minute for a disk that hangs, once."""
        await self._writer.flush()

    def close(self) -> None:
        """Write the rest, and end the newest part. Idempotent. A disk that hangs is left."""
        if self._writer.close():  # else a write that still runs would end the part before the last spans
            self._is_closed = True
            self._writer.close()

    def _write(self, spans: list[tuple[int, str]]) -> None:
        """Write spans, each with the microsecond at which it was added, to the newest part and those after it."""
        while spans:
            # There is room for spans beside any number of names.
            part_bytes = max(self._part_bytes, 2 * sum(map(len, self._names)))
            if self._size >= part_bytes:
                self._end_part()
            names, num = self._names[self._num_names :], 0
            lines = [self._head(spans[0][0]), *names] if self._size == 0 else list(names)
            size = self._size + sum(map(len, lines))
            while num < len(spans) and size < part_bytes:
                lines.append(spans[num][1])
                size += len(lines[-1]) + len(",\n")
                num += 1
            self._file.append((",\n" if self._size else "[\n") + ",\n".join(lines))
            self._size = size
            self._num_names += len(names)
            del spans[:num]
        if self._is_closed and self._size:
            self._end_part()

    def _head(self, microseconds: int) -> str:
        """The first event of a part that begins then, before which there is room for the part."""
        self._make_room(self._number)
        args = {"unix_s": self._began_at}
        return _encode({"ph": "M", "name": "trace_start", "ts": microseconds, "pid": 0, "args": args})

    def _begin_part(self, number: int) -> None:
        self._number = number
        self._file = AppendedFile(self._directory / f"{number:06}.json")
        self._size = self._num_names = 0

    def _end_part(self) -> None:
        self._file.append("\n]\n")
        self._file.close()
        self._begin_part(self._number + 1)

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
    spans: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
    """Track -> (microseconds, position in the part, line) of its spans; a moment comes before any span."""
    for position, event in enumerate(_events(part)):
        line = msgspec.json.encode(event).decode()
        if event.ph == "M":
            heads.append(line)
            tracks |= {event.tid: event.args["track"]} if "track" in event.args else {}
        elif event.tid in tracks:
            spans[tracks[event.tid]].append((event.dur or sys.maxsize, position, line))
        if position % _LINES_PER_TURN == 0:
            time.sleep(0.0005)
    most = int(_THINNED_SHARE * sum(map(len, spans.values()))) // max(1, len(spans))
    kept = itertools.chain.from_iterable(nlargest(most, of_track) for of_track in spans.values())
    lines = [*heads, *(line for _, _, line in sorted(kept, key=lambda span: span[1]))]
    replace_file(part, "[\n" + ",\n".join(lines) + "\n]\n")
