"""Forecasts as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from skyrl_async.plan.report import Row, name_of

_BLUE, _RED, _ORANGE, _GREY = "#3b6fb6", "#c8504b", "#e08a2e", "#5f6368"


def draw(rows: Sequence[Row], measured_seconds: float | None, path: Path) -> None:
    """Step times with their error bars, each side's idle share, staleness, and dollars where there is a price."""
    has_prices = any(row.dollars is not None for row in rows)
    widths = (3, 2, 1.2, 1.2) if has_prices else (3, 2, 1.2)
    names = [name_of(row.what_if) for row in rows]
    width = 5 + 2.4 * sum(widths[1:]) + 0.08 * max(map(len, names))
    figure = Figure(figsize=(width, 1.6 + 0.34 * len(rows)), dpi=120, layout="constrained")
    seconds, idle, staleness, *cost = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    found, places = [row.forecast for row in rows], range(len(rows))
    steps = [one.step_seconds for one in found]
    _bars(seconds, "seconds per step", steps, [(one.low_seconds, one.high_seconds) for one in found])
    seconds.set_yticks(places, names)
    seconds.set_ylim(len(rows) - 0.5, -0.5)
    if measured_seconds is not None:
        seconds.axvline(measured_seconds, color=_RED, linewidth=1, label="measured, as it was")
        _legend(seconds)
    for offset, name, color in ((-0.16, "trainer", _RED), (0.16, "engines", _ORANGE)):
        shares = [getattr(one, f"{name}_idle_frac") for one in found]
        idle.barh([place + offset for place in places], shares, color=color, height=0.3, label=f"{name} idle")
    idle.set_xlim(0, 1)
    idle.set_xlabel("share of the time")
    _legend(idle)
    _bars(staleness, "staleness, steps", [one.staleness_mean for one in found])
    if has_prices:
        per_second = [(row.dollars or 0.0) / one.step_seconds for row, one in zip(rows, found, strict=True)]
        errors = [(p * one.low_seconds, p * one.high_seconds) for p, one in zip(per_second, found, strict=True)]
        _bars(cost[0], "$ per 1,000 steps", [row.dollars or 0.0 for row in rows], errors)
    for axes in (seconds, idle, staleness, *cost):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e8eaed", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)


def _bars(axes: Axes, label: str, values: Sequence[float], ranges: Sequence[tuple[float, float]] | None = None) -> None:
    """One bar per row, with its error bar from and to."""
    errors = None
    if ranges is not None:
        pairs = list(zip(values, ranges, strict=True))
        errors = [[value - low for value, (low, _) in pairs], [high - value for value, (_, high) in pairs]]
    axes.barh(range(len(values)), values, xerr=errors, color=_BLUE, ecolor=_GREY, capsize=3, height=0.6)
    axes.set_xlabel(label)


def _legend(axes: Axes) -> None:
    """Above the bars, so that it hides none."""
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
