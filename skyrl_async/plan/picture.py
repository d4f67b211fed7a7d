"""Forecasts as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from skyrl_async.plan.report import Row, name_of


def draw(rows: Sequence[Row], measured_seconds: float | None, path: Path) -> None:
    """Step times with their error bars, and each side's idle share."""
    names = [name_of(row.what_if) for row in rows]
    figure = Figure(figsize=(11, 1.6 + 0.34 * len(rows)), dpi=120, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    found = [row.forecast for row in rows]
    seconds = [one.step_seconds for one in found]
    errors = [
        [one.step_seconds - one.low_seconds for one in found],
        [one.high_seconds - one.step_seconds for one in found],
    ]
    places = range(len(rows))
    left.barh(places, seconds, xerr=errors, color="#3b6fb6", ecolor="#5f6368", capsize=3, height=0.6)
    left.set_yticks(places, names)
    left.invert_yaxis()
    left.set_xlabel("seconds per step")
    if measured_seconds is not None:
        left.axvline(measured_seconds, color="#c8504b", linewidth=1, label="measured, as it was")
        left.legend(frameon=False, fontsize=8)
    for offset, name, color in ((-0.16, "trainer", "#c8504b"), (0.16, "engines", "#e08a2e")):
        shares = [getattr(one, f"{name}_idle_frac") for one in found]
        right.barh([place + offset for place in places], shares, color=color, height=0.3, label=f"{name} idle")
    right.set_xlim(0, 1)
    right.set_xlabel("share of the time")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e8eaed", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)
