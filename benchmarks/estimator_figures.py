"""The picture and the table of ``estimator_bias``, from its rows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def degrees(row: dict[str, Any]) -> float:
    """The angle between the mean and the gradient."""
    return math.degrees(math.acos(min(1.0, row["cosine"])))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown. What is 0 to rounding is 0."""
    lines = [
        "| estimator | bias | measured | degrees from the gradient | of the bias, towards more turns | variance | unbiased |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, *settings = row["estimator"].split(", ")
        described = ", ".join([f"`{name}`", *(f"`{text}`" if "=" in text else text for text in settings)])
        bias, turns = (
            f"{value:{sign}.2f}" if abs(value) > 1e-9 else "0"
            for value, sign in ((row["bias"], ""), (row["turns_bias"], "+"))
        )
        lines.append(
            f"| {described} | {bias} | {row['measured_bias']:.3f} ± {row['standard_error']:.3f} | {degrees(row):.0f} | {turns} | "
            f"{row['variance']:.1f} | {'yes' if row['is_unbiased'] else 'no'} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], png: Path) -> None:
    """Draw each estimator's angle to the gradient, and its variance."""
    figure = Figure(figsize=(9.2, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    names = [row["estimator"] for row in rows]
    drawn = (
        ("degrees between the mean and the gradient", [degrees(row) for row in rows]),
        ("variance over squared length", [r["variance"] for r in rows]),
    )
    colors = ["#3d9a6d" if row["is_unbiased"] else "#c8504b" for row in rows]
    for axes, (title, values) in zip(panels, drawn, strict=True):
        axes.barh(names, values, color=colors, height=0.62)
        axes.bar_label(
            axes.containers[0],
            labels=[f"{value:.3g}" if value > 0.01 else "0" for value in values],
            padding=3,
            fontsize=8.5,
        )
        axes.set_title(title, loc="left", fontsize=10)
        axes.margins(x=0.14)
        axes.grid(axis="x", color="#e8eaed", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(png)
