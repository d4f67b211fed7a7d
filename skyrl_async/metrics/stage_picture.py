"""Draws the states of each stage over time as a picture, one row per stage.

    python -m skyrl_async.metrics.stage_picture outputs/RUN stages.png --begin 30 --end 35

The run may be still going on, or have been killed.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from skyrl_async.errors import ConfigError
from skyrl_async.metrics.trace_parts import read_spans

_COLORS = {"processing": "#3b6fb6", "waiting for output": "#e08a2e", "waiting for input": "#dfe3e8"}
_CHARACTER_SHARE = 0.0062
"""Width of a character, as a share of the picture's: an item is shown if it fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """A period in which a stage was in one state, with one item."""

    stage: str
    state: str
    item: str
    begin: float
    """Seconds since the trace began."""
    end: float


def read_stages(trace: Path, begin: float = 0.0, end: float = math.inf) -> list[StageSpan]:
    """Return the spans of all stages that overlap a time, in the order of time. Raises ``ConfigError`` if there are none.

    Args:
        trace: directory of a run, its ``trace/``, or one part.
        begin, end: seconds since the run's trace began.
    """
    spans = [
        StageSpan(
            stage=span.track.removeprefix("stages/"),
            state=span.name if "item" in span.args else "processing",
            item=span.args.get("item", span.name),
            begin=span.begin,
            end=span.end,
        )
        for span in read_spans(trace, begin, end)
        if span.track.startswith("stages/")
    ]
    if not spans:
        last = max((span.end for span in read_spans(trace)), default=0.0)
        found = (
            f" from {begin:g} s to {end:g} s: it ends at {last:g} s" if last else ": expected the directory of a run"
        )
        raise ConfigError(f"{trace} holds no stages{found}")
    return sorted(spans, key=lambda span: span.begin)


def draw_stages(
    traces: Sequence[tuple[str, Path]],
    png: Path,
    *,
    order: Sequence[str],
    begin: float = 0.0,
    end: float = math.inf,
) -> None:
    """Draw the stages of one or more runs below each other.

    Args:
        traces: (title, directory) of each run.
        png: the file to write.
        order: stages from top to bottom; stages that a run lacks are left out.
        begin, end: seconds since the run's trace began.

    Raises ``ConfigError`` if a trace has no stages in that time.
    """
    panels = [
        (title, [replace(s, begin=max(s.begin, begin), end=min(s.end, end)) for s in read_stages(trace, begin, end)])
        for title, trace in traces
    ]
    heights = [0.8 + 0.36 * len({span.stage for span in spans}) for _, spans in panels]
    figure = Figure(figsize=(12, sum(heights) + 0.5), dpi=120, layout="constrained", facecolor="white")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, spans) in zip(all_axes, panels, strict=True):
        _draw(axes, title, spans, [name for name in order if any(span.stage == name for span in spans)])
    figure.legend(
        handles=[Patch(color=color, label=state) for state, color in _COLORS.items()],
        loc="outside upper right",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(png)


def _draw(axes: Axes, title: str, spans: Sequence[StageSpan], stages: Sequence[str]) -> None:
    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    for row, stage in enumerate(stages):
        for span in (span for span in spans if span.stage == stage):
            width = span.end - span.begin
            is_wide = width > 0.004 * (last - first)
            color, line = _COLORS[span.state], 0.4 if is_wide else 0.0
            axes.barh(row, width, left=span.begin, height=0.72, color=color, edgecolor="white", linewidth=line)
            if span.state == "processing" and width > len(span.item) * _CHARACTER_SHARE * (last - first):
                middle = span.begin + width / 2
                axes.text(middle, row, span.item, ha="center", va="center", fontsize=7.5, color="white", clip_on=True)
    axes.set_yticks(range(len(stages)), stages, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(first, last)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("seconds", fontsize=9)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from skyrl_async.runtime.stages import STAGES

    parser = argparse.ArgumentParser(description="Draw where each stage of a run was when.")
    parser.add_argument("run", type=Path, help="directory of a run, or one part of its trace")
    parser.add_argument("png", type=Path, help="the picture to write")
    parser.add_argument("--begin", type=float, default=0.0, help="seconds since the run began")
    parser.add_argument(
        "--end", type=float, default=math.inf, help="the same; the end of the trace where it is left out"
    )
    options = parser.parse_args(argv)
    try:
        draw_stages([(str(options.run), options.run)], options.png, order=STAGES, begin=options.begin, end=options.end)
    except (ConfigError, OSError, ValueError) as error:  # matplotlib's, for a picture of a kind that it does not write
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{options.png}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
