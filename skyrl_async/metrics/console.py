"""Shows a run on standard output: a live display on a terminal, plain lines elsewhere.

It shows phases ("booting engines"), the values of each step, messages and a summary, and never blocks the loop that it reports on.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console as Output
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from skyrl_async.runtime.stages import StageStatus

_STEP_INTERVAL_S = 2.0
_PHASE_INTERVAL_S = 5.0
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_SPARKS = 32
_PLAIN_WIDTH = 100
_NUM_STUCK = 3
_STAGES_INTERVAL_S = 20.0
_MAX_STAGE_WIDTH = 100


class Console:
    """The progress of one run. A context manager: outside of it only ``message`` and ``summary`` print."""

    def __init__(
        self,
        enabled: bool,
        total_steps: int | None,
        *,
        output: Output | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``enabled=False`` prints nothing but the summary. ``total_steps`` is None if epochs end the run."""
        self._is_enabled = enabled
        self._output = output or Output()
        self._display = _LiveDisplay(total_steps) if self._output.is_terminal else None
        self._live: Live | None = None
        self._lines = _PlainLines(total_steps, clock)
        self._values: dict[str, float] = {}
        self._stages: Callable[[], Sequence[StageStatus]] = list

    def __enter__(self) -> Self:
        if self._is_enabled and self._display is not None:
            self._live = Live(get_renderable=self._render, console=self._output, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live display, leaving its last state. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Show the current phase, such as "warm start 34 %"."""
        if self._display is not None:
            self._display.set_phase(text)
        else:
            self._print(self._lines.phase(text))

    def step(self, values: Mapping[str, float]) -> None:
        """Show the values of a step. A value that it lacks keeps its last state."""
        self._values.update(values)
        if self._display is not None:
            self._display.set_values(self._values)
        else:
            self._print(self._lines.step(self._values, has_evaluation="reward/eval" in values))
            self._print(self._lines.stages(self._stages()))

    def watch(self, stages: Callable[[], Sequence[StageStatus]]) -> None:
        """Show what stages are doing: one line per stage on a terminal, elsewhere all of them in one line every 20 seconds."""
        self._stages = stages

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step's values as a tracker's sink."""
        self.step({**values, "trainer/step": step})

    def stuck(self, lines: Sequence[str]) -> None:
        """Show what takes too long, the longest first, until the next call. An empty list clears it."""
        if self._display is not None:
            self._display.set_stuck(lines)
        elif lines:
            self._print(f"[stuck: {'; '.join(_shortened(lines))}]")

    def message(self, text: str) -> None:
        """Print one line that stays."""
        self._print(text)

    def summary(self, table: RenderableType) -> None:
        """Print the summary of the run, also if the display is off."""
        self._output.print(table, width=None if self._display else _PLAIN_WIDTH)

    def _render(self) -> RenderableType:
        assert self._display is not None
        return self._display.render(self._stages())

    def _print(self, line: str | None) -> None:
        if self._is_enabled and line is not None:
            self._output.print(escape(line), highlight=False, soft_wrap=True)


class _LiveDisplay:
    """A progress bar and a row of figures, drawn from another thread a few times a second."""

    def __init__(self, total_steps: int | None) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=36),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("starting", total=total_steps)
        self._rewards: deque[float] = deque(maxlen=_NUM_SPARKS)
        self._cells: dict[str, str] | None = None
        self._stuck: tuple[str, ...] = ()

    def set_phase(self, text: str) -> None:
        self._progress.update(self._task, description=escape(text))

    def set_values(self, values: Mapping[str, float]) -> None:
        step = int(values.get("trainer/step", 0))
        if "reward/mean" in values and step > self._progress.tasks[0].completed:
            self._rewards.append(values["reward/mean"])
        self._progress.update(self._task, completed=step)
        self._cells = cells(values)

    def set_stuck(self, lines: Sequence[str]) -> None:
        self._stuck = _shortened(lines)

    def render(self, stages: Sequence[StageStatus] = ()) -> RenderableType:
        stuck = [f"[red]stuck[/red] {escape(line)}" for line in self._stuck]
        return Stack(*self._figures(), *(_stage_rows(stages)), *stuck)

    def _figures(self) -> tuple[RenderableType, ...]:
        if self._cells is None:
            return (self._progress,)
        table = Table.grid(padding=(0, 3))
        for _ in self._cells:
            table.add_column(no_wrap=True)
        table.add_row(*(f"[dim]{name}[/dim]" for name in self._cells))
        table.add_row(*(f"[bold]{text}[/bold]" for text in self._cells.values()))
        return self._progress, table, f"[dim]reward[/dim] [green]{sparkline(self._rewards)}[/green]"


def _stage_rows(stages: Sequence[StageStatus]) -> tuple[RenderableType, ...]:
    if not stages:
        return ()
    table = Table.grid(padding=(0, 2))
    for status in stages:
        table.add_row(f"[dim]{status.name}[/dim]", escape(status.where[:_MAX_STAGE_WIDTH]))
    return (table,)


class _PlainLines:
    """Chooses the lines for a log file or a pipe: one per step or every few seconds, and every evaluation."""

    def __init__(self, total_steps: int | None, clock: Callable[[], float]) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._step_due = self._phase_due = float("-inf")
        self._stages_due = clock() + _STAGES_INTERVAL_S
        self._phase = ""

    def phase(self, text: str) -> str | None:
        """Return the line, or None if the phase only counted up since the last line."""
        kind, now = re.sub(r"[\d.]+", "", text), self._clock()
        if kind == self._phase and now < self._phase_due:
            return None
        self._phase, self._phase_due = kind, now + _PHASE_INTERVAL_S
        return f"[{text}]"

    def stages(self, stages: Sequence[StageStatus]) -> str | None:
        """Return a line about all stages; None if there are none, or the last line is recent."""
        now = self._clock()
        if not stages or now < self._stages_due:
            return None
        self._stages_due = now + _STAGES_INTERVAL_S
        return f"[stages: {'; '.join(map(str, stages))}]"

    def step(self, values: Mapping[str, float], *, has_evaluation: bool) -> str | None:
        """Return the line; None if the last line is recent and this step has no evaluation and is not the last."""
        step, now = int(values.get("trainer/step", 0)), self._clock()
        is_last = step == self._total_steps
        if now < self._step_due and not has_evaluation and not is_last:
            return None
        self._step_due = now + _STEP_INTERVAL_S
        count = f"{step}/{self._total_steps}" if self._total_steps else str(step)
        return " | ".join([f"step {count}", *(f"{name} {text}" for name, text in cells(values).items())])


def cells(values: Mapping[str, float]) -> dict[str, str]:
    """Return the most important figures as text; "-" for a figure that is not known yet.

    Engines are shown if they can come and go. Filtered groups are shown if there are any: the share of the last step, and the total.
    """

    def text(pattern: str, *names: str) -> str:
        known = [values[name] for name in names if name in values]
        return pattern.format(*known) if len(known) == len(names) else "-"

    return {
        "reward": text("{:.2f}", "reward/mean"),
        "eval": text("{:.2f}", "reward/eval"),
        "staleness mean/max": text("{:.1f}/{:.0f}", "async/staleness_mean", "async/staleness_max"),
        "buffered/running": text("{:.0f}/{:.0f}", "async/buffer_groups", "async/running_groups"),
        "tokens/s": text("{:,.0f}", "generate/tokens_per_second"),
        **(
            {"filtered": text("{:.0%} ({:,.0f})", "generate/filtered_frac", "generate/filtered_groups")}
            if values.get("generate/filtered_groups")
            else {}
        ),
        **({"engines": text("{:.0f}", "engines/serving")} if "engines/serving" in values else {}),
        "trainer idle": text("{:.0%}", "trainer/idle_frac"),
    }


def _shortened(lines: Sequence[str]) -> tuple[str, ...]:
    num_more = len(lines) - _NUM_STUCK
    return (*lines[:_NUM_STUCK], *([f"and {num_more} more"] if num_more > 0 else []))


def sparkline(values: deque[float]) -> str:
    """Return one character per value, scaled between the smallest and the largest."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    scaled = [(value - low) / span if span else 0.0 for value in values]
    return "".join(_SPARKS[round(share * (len(_SPARKS) - 1))] for share in scaled)
