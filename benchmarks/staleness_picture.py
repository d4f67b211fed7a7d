"""Learning curves under staleness as one picture: a panel per correction, a line per bound; and rewards after training over the bound.

Flows in: the rows of ``staleness_curves``. Flows out: a PNG. Lines are means over seeds, bands go from the lowest to the highest. The
command draws the rewards after training of rows that are kept.
"""

import json
import math
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
        _clear(axes)
    if corrections:
        panels.flat[0].legend(frameon=False, fontsize=8.5, loc="lower right")
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel("held-out reward", fontsize=9)
    figure.savefig(png)


def draw_rewards(rows: Sequence[dict[str, Any]], names: Mapping[str, str], png: Path) -> None:
    """Draw rewards after training over the bound to ``png``, a line per correction, with what ``names`` calls it."""
    figure = Figure(figsize=(6.4, 3.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    of_seeds: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        of_seeds[row["correction"]][row["seed"]][row["staleness"]] = row["reward_after"]
    for color, (correction, curves) in zip(_COLORS[1:], of_seeds.items(), strict=False):
        _line(axes, list(curves.values()), names.get(correction, correction), color)
    axes.set_xticks(sorted({row["staleness"] for row in rows}))
    axes.set_xlabel("S (trainer.max_staleness_steps)", fontsize=9)
    axes.set_ylabel(f"held-out reward after {rows[0]['steps']} steps", fontsize=9)
    _clear(axes)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")
    figure.savefig(png)


def _clear(axes: Axes) -> None:
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(axes: Axes, curves: Sequence[dict[int, float]], label: str, color: str) -> None:
    """The mean at the steps that every curve has."""
    if not curves:
        return
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    axes.plot(steps, [fmean(v) for v in values], color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15, linewidth=0)


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="what staleness_curves has written")
    parser.add_argument("png", type=Path)
    parser.add_argument("--names", nargs="+", default=[], metavar="CORRECTION=NAME")
    options = parser.parse_args()
    draw_rewards(
        json.loads(options.json.read_text())["rows"], dict(n.split("=", 1) for n in options.names), options.png
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
