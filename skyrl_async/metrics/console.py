"""Shows a run on standard output: a live display on a terminal, plain lines elsewhere.

It shows phases ("booting engines"), the values of each step, messages and a summary, and never blocks the loop that it reports on.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Self

from rich.console import Console as Output
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from skyrl_async.metrics.alarms import Alarm, Row, alarms, engine_figures
from skyrl_async.runtime.stages import StageStatus

_STEP, _PHASE, _STAGES = "step", "phase", "stages"
_INTERVALS_S = {_STEP: 2.0, _PHASE: 5.0, _STAGES: 20.0}
"""Seconds between lines of one kind."""
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_SPARKS = 32
_PLAIN_WIDTH = 100
_NUM_STUCK = 3
_NUM_ROWS = 50
"""Steps that alarms are looked for in."""
_MAX_STAGE_WIDTH = 100


@dataclass(eq=False)
class Console:
    """The progress of one run. A context manager: outside of it only ``message`` and ``summary`` print.

    A terminal gets a live display. Elsewhere a line appears per step or every few seconds, and for every evaluation.
    """

    enabled: bool
    """Whether anything but the summary is printed."""
    total_steps: int | None
    """None if epochs end the run."""
    _: KW_ONLY
    output: Output = field(default_factory=Output)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._display = _LiveDisplay(self.total_steps) if self.output.is_terminal else None
        self._live: Live | None = None
        self._values: dict[str, float] = {}
        self._rows: deque[Row] = deque(maxlen=_NUM_ROWS)
        self._alarms: list[Alarm] = []
        self._stages: Callable[[], Sequence[StageStatus]] = list
        self._failures: Callable[[], Mapping[str, Sequence[str]]] = dict
        self._engines: Callable[[], Mapping[str, Mapping[str, float]]] = dict
        self._due = {_STAGES: self.clock() + _INTERVALS_S[_STAGES]}
        self._phase = ""

    def __enter__(self) -> Self:
        if self.enabled and self._display is not None:
            self._live = Live(get_renderable=self._render, console=self.output, refresh_per_second=4)
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
        """Show the current phase, such as "warm start 34 %". A phase that only counts up is printed every few seconds."""
        if self._display is not None:
            self._display.set_phase(text)
            return
        kind = re.sub(r"[\d.]+", "", text)
        if self._is_due(_PHASE, at_once=kind != self._phase):
            self.message(f"[{text}]")
        self._phase = kind

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step, and a new alarm. A value that the step lacks keeps its last state."""
        self._values.update(values)
        # Alarms count steps, not lines.
        before = self._rows.pop() if self._rows and self._rows[-1]["step"] == step else {}
        self._rows.append({**before, "step": step, **values, **engine_figures(self._engines())})
        known = {alarm.name for alarm in self._alarms}
        self._alarms = list(alarms(self._rows, self._failures, self._alarms))
        if self._display is not None:
            self._display.set_values(step, self._values)
            self._display.alarms = self._alarms
            return
        for alarm in self._alarms:
            if alarm.name not in known:
                self.message(f"[alarm: {alarm}]")
        if self._is_due(_STEP, at_once="reward/eval" in values or step == self.total_steps):
            count = f"{step}/{self.total_steps}" if self.total_steps else str(step)
            figures = (f"{name} {text}" for name, text in cells(self._values).items())
            self.message(" | ".join([f"step {count}", *figures]))
        if (stages := self._stages()) and self._is_due(_STAGES):
            self.message(f"[stages: {'; '.join(map(str, stages))}]")

    def watch(
        self,
        stages: Callable[[], Sequence[StageStatus]],
        failures: Callable[[], Mapping[str, Sequence[str]]] = dict,
        engines: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
    ) -> None:
        """Show what stages are doing: one line per stage on a terminal, elsewhere all of them in one line every 20 seconds.

        ``failures``: why the newest samples failed or were abandoned, by metric, for the alarms that too many are. ``engines``: figures by
        engine, for the alarm on a slow one.
        """
        self._stages, self._failures, self._engines = stages, failures, engines

    def stuck(self, lines: Sequence[str]) -> None:
        """Show what takes too long, the longest first, until the next call. An empty list clears it."""
        num_more = len(lines) - _NUM_STUCK
        shown = [*lines[:_NUM_STUCK], *([f"and {num_more} more"] if num_more > 0 else [])]
        if self._display is not None:
            self._display.stuck = shown
        elif lines:
            self.message(f"[stuck: {'; '.join(shown)}]")

    def message(self, text: str) -> None:
        """Print one line that stays."""
        if self.enabled:
            self.output.print(escape(text), highlight=False, soft_wrap=True)

    def summary(self, table: RenderableType) -> None:
        """Print the summary of the run, also if the display is off, and what is wrong at its end."""
        self.output.print(table, width=None if self._display else _PLAIN_WIDTH)
        for alarm in self._alarms:
            self.output.print(f"alarm: {alarm}", markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        assert self._display is not None
        return self._display.render(self._stages())

    def _is_due(self, kind: str, *, at_once: bool = False) -> bool:
        """Whether a line of this kind is printed now: ``at_once``, or because the last one is old enough."""
        now = self.clock()
        if now < self._due.get(kind, now) and not at_once:
            return False
        self._due[kind] = now + _INTERVALS_S[kind]
        return True


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
        self.stuck: Sequence[str] = ()
        self.alarms: Sequence[Alarm] = ()

    def set_phase(self, text: str) -> None:
        self._progress.update(self._task, description=escape(text))

    def set_values(self, step: int, values: Mapping[str, float]) -> None:
        completed = self._progress.tasks[0].completed
        if "reward/mean" in values and step > completed:
            self._rewards.append(values["reward/mean"])
        self._progress.update(self._task, completed=max(step, completed))  # an evaluation may be of an earlier step
        self._cells = cells(values)

    def render(self, stages: Sequence[StageStatus]) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for status in stages:
            rows.add_row(f"[dim]{status.name}[/dim]", escape(status.where[:_MAX_STAGE_WIDTH]))
        stuck = [f"[red]stuck[/red] {escape(line)}" for line in self.stuck]
        newest = max(self.alarms, key=lambda alarm: alarm.since_step, default=None)
        alarm = [f"[yellow]alarm[/yellow] {escape(str(newest))}"] if newest else []
        return Stack(*self._figures(), *([rows] if stages else []), *stuck, *alarm)

    def _figures(self) -> tuple[RenderableType, ...]:
        if self._cells is None:
            return (self._progress,)
        table = Table.grid(padding=(0, 3))
        for _ in self._cells:
            table.add_column(no_wrap=True)
        table.add_row(*(f"[dim]{name}[/dim]" for name in self._cells))
        table.add_row(*(f"[bold]{text}[/bold]" for text in self._cells.values()))
        return self._progress, table, f"[dim]reward[/dim] [green]{sparkline(list(self._rewards))}[/green]"


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


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value, scaled between the smallest and the largest."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    scaled = [(value - low) / span if span else 0.0 for value in values]
    return "".join(_SPARKS[round(share * (len(_SPARKS) - 1))] for share in scaled)
