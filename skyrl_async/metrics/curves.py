"""Draws the curves of a run from its ``metrics.jsonl`` as one PNG: reward, staleness, throughput, time and answer length.

A panel whose metrics were never logged says so instead of failing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from skyrl_async.metrics.tracker import read_steps

Rows = Sequence[dict[str, float]]

_BLUE, _ORANGE, _GREEN, _RED, _GREY, _PURPLE = "#3b6fb6", "#e08a2e", "#3d9a6d", "#c8504b", "#9aa0a6", "#8064a8"
_TIMING = (
    ("timing/wait_for_groups", "waiting for generation", _GREY),
    ("timing/forward_backward", "forward and backward", _BLUE),
    ("timing/optimizer_step", "optimizer", _PURPLE),
    ("timing/gather", "copying weights", _GREEN),
    ("timing/wait_for_publish", "waiting for a publish", _ORANGE),
    ("timing/checkpoint", "checkpoint", _RED),
)


def draw_curves(metrics_jsonl: Path, png: Path) -> None:
    """Draw the run logged in ``metrics_jsonl`` to ``png``."""
    rows = read_steps(metrics_jsonl)
    figure = Figure(figsize=(13, 7.2), dpi=120, layout="constrained", facecolor="white")
    throughput = partial(_smoothed, name="generate/tokens_per_second", label="sampled", color=_GREEN)
    length = partial(_smoothed, name="generate/response_tokens_mean", label="trained", color=_PURPLE)
    idle = partial(_smoothed, name="trainer/idle_frac", label="idle", color=_RED, top=1.0, pattern="{x:.0%}")
    panels: tuple[tuple[str, str, Callable[[Axes, Rows], None]], ...] = (
        ("Reward", "mean reward", _reward),
        ("Staleness of trained groups", "policy versions", _staleness),
        ("Where the trainer's time goes", "seconds per step", _timing),
        ("Generation throughput", "tokens per second", throughput),
        ("Length of trained answers", "mean tokens", length),
        ("Trainer waiting for generation", "share of the step", idle),
    )
    for axes, (title, label, draw) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        _style(axes, title, label)
        draw(axes, rows)
        _finish(axes, rows)
    figure.suptitle(metrics_jsonl.resolve().parent.name, fontsize=10, color="#5f6368")
    figure.supxlabel("faint: single steps; bold: moving average", fontsize=8, color="#9aa0a6", ha="left", x=0.01)
    figure.savefig(png)


def _style(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=8.5, length=3, color="#9aa0a6")
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bdc1c6")


def _finish(axes: Axes, rows: Rows) -> None:
    if not axes.has_data():
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="#9aa0a6")
        return
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=8.5, loc="best", ncols=2 if axes.containers else 1)
    last = max(row["step"] for row in rows)
    axes.set_xlim(-0.03 * last - 0.5, 1.02 * last + 0.5)


def _series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a metric was logged, and its values."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average, corrected for its start (Kingma and Ba 2015, section 3)."""
    smoothed, average = [], 0.0
    for index, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight**index))
    return smoothed


def _noisy_line(axes: Axes, rows: Rows, name: str, label: str, color: str) -> None:
    """Draw the values faintly, and their moving average under the name in the legend."""
    steps, values = _series(rows, name)
    if steps:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(values), color=color, linewidth=1.8, label=label)


def _smoothed(
    axes: Axes, rows: Rows, *, name: str, label: str, color: str, top: float | None = None, pattern: str = "{x:,.0f}"
) -> None:
    """Draw one metric on an axis from 0 to ``top``, or to its largest value."""
    _noisy_line(axes, rows, name, label, color)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(pattern)


def _reward(axes: Axes, rows: Rows) -> None:
    _noisy_line(axes, rows, "reward/mean", "training prompts (smoothed)", _GREY)
    steps, values = _series(rows, "reward/eval")
    if not steps:
        return
    axes.plot(steps, values, color=_BLUE, linewidth=2.2, marker="o", markersize=5, label="held-out prompts")
    for index in {0, len(steps) - 1}:
        point = (steps[index], values[index])
        offset, anchor = ((9, -4), "left") if index == 0 else ((0, -16), "center")
        text = f"{values[index]:.2f}"
        axes.annotate(text, point, offset, textcoords="offset points", ha=anchor, fontsize=9, color=_BLUE)


def _staleness(axes: Axes, rows: Rows) -> None:
    steps, largest = _series(rows, "async/staleness_max")
    if steps:
        axes.step(steps, largest, where="mid", color=_ORANGE, linewidth=1.3, label="largest of the step")
    steps, mean = _series(rows, "async/staleness_mean")
    if steps:
        axes.plot(steps, mean, color=_BLUE, linewidth=1.8, label="mean")
        axes.fill_between(steps, mean, color=_BLUE, alpha=0.12, linewidth=0)
    axes.set_ylim(0, 1.2 * max([1.0, *largest]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _timing(axes: Axes, rows: Rows) -> None:
    rows = [row for row in rows if "timing/step" in row or "timing/forward_backward" in row]
    steps = [row["step"] for row in rows]
    bottom = [0.0] * len(rows)
    for name, label, color in _TIMING:
        heights = [row.get(name, 0.0) for row in rows]
        if any(heights):
            axes.bar(steps, heights, bottom=bottom, width=0.85, color=color, label=label, linewidth=0)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if any(bottom):
        axes.set_ylim(0, 1.3 * _high(bottom))


def _high(values: Sequence[float]) -> float:
    """Return an upper limit of the axis that does not depend on one or two very slow steps."""
    ordered = sorted(values)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return min(ordered[-1], 2.5 * usual) or 1.0
