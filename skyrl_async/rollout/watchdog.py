"""Names what takes too long, while it does: in the log, in the metrics, on the console.

Flows in: what rollouts say they are doing, the stages that are under way. Flows out: lines and figures. Ends nothing: deadlines are
the business of whoever waits.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_async.metrics.logs import SHOWN
from skyrl_async.metrics.trace import OpenSpan
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.tasks import task_group

logger = logging.getLogger(__name__)

_MAX_NAMED = 5
_TRACKS_OF_ROLLOUTS = ("generation", "evaluation")
"""Their spans are as long as rollouts are many: what counts is what each rollout says."""
_TRACK_OF_WAITS = "waiting"
"""Of the trainer's spans while it waits for groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a watchdog looks."""

    rollouts: Callable[[], Iterable[Sequence[RolloutStatus]]]
    """What each group in flight is doing, a status per sample, the longest first."""
    stages: Callable[[], Iterable[OpenSpan]]
    """What else is under way: publishing, training, writing checkpoints."""


class Watchdog:
    """Looks every ``threshold_s`` seconds for rollouts and stages that have done the same thing for longer than that.

    Args:
        sources: where it looks.
        threshold_s: see above; > 0.
        log: takes metrics while something is stuck, and once when nothing is any more: without steps nobody else logs them.
        show: takes a line for each thing that is stuck, the longest first; none when nothing is any more.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        threshold_s: float,
        log: Callable[[dict[str, float]], None],
        show: Callable[[Sequence[str]], None] = lambda lines: None,
    ) -> None:
        self._sources = sources
        self._threshold_s = threshold_s
        self._log = log
        self._show = show
        self._told: dict[str, float] = {}

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while inside."""
        async with task_group() as tasks:
            watching = tasks.create_task(self._watch(), name="watchdog")
            try:
                yield
            finally:
                watching.cancel()

    def values(self) -> dict[str, float]:
        """The figures of this moment, by metric name."""
        rollouts = [statuses for statuses in self._sources.rollouts() if statuses]
        return {
            "async/oldest_rollout_seconds": max((statuses[0].total_seconds for statuses in rollouts), default=0.0),
            "async/stuck_rollouts": float(sum(statuses[0].seconds >= self._threshold_s for statuses in rollouts)),
        }

    def look(self) -> None:
        """Say what is stuck: all of it to the console, in the log what is new or has taken twice as long since it was named."""
        stuck = self._stuck()
        due = [name for name, (seconds, _) in stuck.items() if seconds >= 2 * self._told.get(name, 0.0)]
        if due:
            logger.warning("longer than trainer.stall_warning_s=%g: %s", self._threshold_s, _joined(stuck), extra=SHOWN)
        if stuck or self._told:
            self._show([line for _, line in stuck.values()])
            self._log(self.values())
        self._told = {name: stuck[name][0] if name in due else self._told[name] for name in stuck}

    async def _watch(self) -> None:
        """Waits for time alone."""
        while True:
            await asyncio.sleep(self._threshold_s)
            self.look()

    def _stuck(self) -> dict[str, tuple[float, str]]:
        """Seconds and line of each thing that is stuck, by what stays the same while it is; the longest first."""
        found: dict[str, tuple[float, str]] = {}
        statuses = [status for group in self._sources.rollouts() for status in group]
        for status in statuses:
            found[f"{status.uid}{status.where} {status.phase}"] = (status.seconds, str(status))
        for span in self._sources.stages():
            if span.track in _TRACKS_OF_ROLLOUTS:
                continue
            what = span.name + "".join(f" {name} {value}" for name, value in span.args.items())
            note = ", none of which is in flight" if span.track == _TRACK_OF_WAITS and not statuses else ""
            found[f"{span.track} {what}"] = (span.seconds, f"{what} (for {span.seconds:.0f} s{note})")
        longest_first = sorted(found.items(), key=lambda item: -item[1][0])
        return {name: what for name, what in longest_first if what[0] >= self._threshold_s}


def _joined(stuck: dict[str, tuple[float, str]]) -> str:
    lines = [line for _, line in stuck.values()]
    num_more = len(lines) - _MAX_NAMED
    return "; ".join(lines[:_MAX_NAMED]) + (f"; and {num_more} more" if num_more > 0 else "")
