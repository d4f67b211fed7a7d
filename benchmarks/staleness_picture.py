"""Learning curves under staleness as one picture: a panel per correction, a line per bound.

Flows in: the rows of ``staleness_curves``. Flows out: a PNG. Lines are means over seeds, bands go from the lowest to the highest.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLORS = ("#9aa0a6", "#3b6fb6", "#e08a2e", "#c8504b", "#8064a8", "#3d9a6d")
_MAX_COLUMNS = 4


def draw_staleness_curves(rows: Sequence[dict[str, Any]], png: Path) -> None:
    """Draw ``rows`` to ``png``."""
    corrections = list(dict.fromkeys(row["correction"] for row in rows))
    bounds = sorted({row["staleness"] for row in rows})
    num_columns = max(1, min(_MAX_COLUMNS, len(corrections)))
    num_lines = max(1, math.ceil(len(corrections) / num_columns))
    figure = Figure(figsize=(3.6 * num_columns + 0.6, 2.9 * num_lines + 0.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_lines, num_columns, sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[len(corrections) :]:
        axes.set_visible(False)
    for axes, correction in zip(panels.flat, corrections, strict=False):
        of_correction = [row for row in rows if row["correction"] == correction]
        for color, bound in zip(_COLORS, bounds, strict=False):
            curves = [dict(row["curve"]) for row in of_correction if row["staleness"] == bound]
            _line(axes, curves, f"S = {bound}", color)
        axes.set_title(correction, loc="left", fontsize=11, fontweight="bold")
        axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if corrections:
        panels.flat[0].legend(frameon=False, fontsize=8.5, loc="lower right")
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel("held-out reward", fontsize=9)
    figure.savefig(png)


def _line(axes: Axes, curves: Sequence[dict[int, float]], label: str, color: str) -> None:
    """The mean at the steps that every curve has."""
    if not curves:
        return
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    axes.plot(steps, [fmean(v) for v in values], color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, linewidth=0)
