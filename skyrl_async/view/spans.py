"""A time of a run's trace as the page draws it, in memory that does not grow with the trace."""

import math
from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import groupby
from pathlib import Path
from typing import Any

from skyrl_async.columns import fields_of
from skyrl_async.metrics.trace_parts import Span, read_spans, trace_end

_ENGINES = ("engines/", "publish/pause")
_GROUP = ("generation", "group")
_NUM_WAITS = 10
_PIXELS = 1000
"""Width of the window: shorter spans are drawn together."""


def spans_between(run_dir: Path, begin: float | None, end: float | None) -> dict[str, Any]:
    """Spans of the trace between two times, seconds since it began; those of its last minute where none are given.

    Spans shorter than a pixel are put together. Of those of engines, which say what an engine serves, and of those that begin a version,
    the newest of a pixel stays. ``waits`` are the trainer's longest, each with the group whose end let it go on.
    """
    last = trace_end(run_dir)
    end = last if end is None else end
    begin = max(0.0, end - 60) if begin is None else begin
    shortest = (end - begin) / _PIXELS
    drawn, short = list[Span](), _ShortSpans(shortest)
    waits, group = list[tuple[float, int, Span, Span | None]](), None
    newest: dict[tuple[str, int, str, int], Span] = {}
    for number, span in enumerate(read_spans(run_dir, begin, end)):
        if (span.track, span.name) == _GROUP:
            group = span
        elif span.track == "waiting":
            heappush(waits, (span.end - span.begin, -number, span, group))
            if len(waits) > _NUM_WAITS:
                heappop(waits)
        if span.track.startswith(_ENGINES) or span.name == "gather":
            newest[span.track, span.lane, span.name, int(span.begin / shortest) if shortest else 0] = span
        elif span.end - span.begin >= shortest:
            drawn.append(span)
        else:
            short.add(span)
    spans = sorted([*drawn, *newest.values()], key=lambda span: span.end)
    return {
        "begin": begin,
        "end": end,
        "last": last,
        "num_short": short.num,
        "spans": [fields_of(span) for span in (*_served_at(run_dir, begin), *spans, *short.put_together())],
        "waits": [_wait(wait, group) for _, _, wait, group in sorted(waits, reverse=True)],
    }


def _served_at(run_dir: Path, begin: float) -> Iterator[Span]:
    """The last loads of engines before a time, and the weights gathered since the first of them: what engines serve then."""
    for seconds in (600.0, 6000.0, math.inf):
        last, gathers = dict[str, Span](), list[Span]()
        for span in read_spans(run_dir, begin - seconds, begin):
            if span.end <= begin and span.track.startswith("engines/"):
                last[span.track] = max(span, last.get(span.track, span), key=lambda span: span.begin)
            elif span.end <= begin and span.name == "gather":
                gathers.append(span)
        if any(span.name == "load" for span in last.values()):
            first = min(span.begin for span in last.values())
            yield from last.values()
            yield from (span for span in gathers if span.begin >= first)
            return


class _ShortSpans:
    """Counts spans that are shorter than a pixel, so that any number of them takes the memory of the pixels."""

    def __init__(self, pixel_s: float) -> None:
        self.num = 0
        self._pixel_s = pixel_s
        self._rows: defaultdict[tuple[str, int, str], defaultdict[int, list[float]]]
        self._rows = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
        """Row and kind -> pixel in which they begin -> their number and seconds."""

    def add(self, span: Span) -> None:
        kind = span.name if span.name.startswith("waiting for") else ""
        of_pixel = self._rows[span.track, span.lane, kind][int(span.begin / self._pixel_s)]
        of_pixel[0] += 1
        of_pixel[1] += span.end - span.begin
        self.num += 1

    def put_together(self) -> Iterator[Span]:
        """Blocks of up to eight pixels in which spans of a row begin, work and waiting apart; ``share`` is what part of it they fill."""
        for (track, lane, kind), pixels in self._rows.items():
            for _, block in groupby(
                enumerate(sorted(pixels)), lambda numbered: (numbered[1] - numbered[0], numbered[1] // 8)
            ):
                places = [place for _, place in block]
                begin, end = places[0] * self._pixel_s, (places[-1] + 1) * self._pixel_s
                num, seconds = (sum(of) for of in zip(*(pixels[place] for place in places), strict=True))
                args = {"spans": num, "share": min(1.0, seconds / (end - begin))}
                yield Span(track=track, lane=lane, name=kind or "short spans", begin=begin, end=end, args=args)


def _wait(wait: Span, group: Span | None) -> dict[str, Any]:
    """A wait of the trainer, with the group whose end let it go on: ``group`` is the last one that ended before the wait did."""
    is_awaited = group is not None and wait.name == "wait_for_groups" and group.end >= wait.begin
    uid = group.args.get("uid") if group and is_awaited else None
    return {"name": wait.name, "begin": wait.begin, "end": wait.end, "uid": uid, **wait.args}
