"""Reports rollouts and stages that take too long, while they do: in the log, in the metrics, on the console.

Reads statuses of rollouts and open spans of stages. Ends nothing: that is the deadlines' business.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from skyrl_async.metrics.logs import SHOWN
from skyrl_async.metrics.trace import OpenSpan
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.tasks import task_group

logger = logging.getLogger(__name__)

_MAX_NAMED = 5
_TRACKS_OF_ROLLOUTS = ("generation", "evaluation")
"""Tracks that are skipped: each rollout has a status, which says more than its span."""
_TRACK_OF_WAITS = "waiting"
"""Track of the trainer's spans while it waits for groups."""


@dataclass(eq=False)
class Watchdog:
    """Checks every ``threshold_s`` seconds for rollouts and stages that have been in one phase for longer than that."""

    rollouts: Callable[[], Iterable[Sequence[RolloutStatus]]]
    """Returns the statuses of each group in flight, one per sample, the longest first."""
    stages: Callable[[], Iterable[OpenSpan]]
    """Returns other open spans: publishing, training, writing checkpoints."""
    threshold_s: float
    """> 0."""
    log: Callable[[dict[str, float]], None]
    """Takes metrics while something is stuck, and once after that; without steps nothing else logs them."""
    show: Callable[[Sequence[str]], None] = lambda lines: None
    """Takes a line per stuck rollout or stage, the longest first; an empty list after that."""
    _reported: dict[str, float] = field(default_factory=dict, init=False)

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
        rollouts = [statuses for statuses in self.rollouts() if statuses]
        return {
            "timing/oldest_rollout": max((statuses[0].total_seconds for statuses in rollouts), default=0.0),
            "async/stuck_rollouts": float(sum(statuses[0].seconds >= self.threshold_s for statuses in rollouts)),
        }

    def check(self) -> None:
        """Report everything stuck to the console; log it if it is new or has taken twice as long since the last log line."""
        stuck = self._stuck()
        due = [name for name, (seconds, _) in stuck.items() if seconds >= 2 * self._reported.get(name, 0.0)]
        if due:
            logger.warning("longer than trainer.stall_warning_s=%g: %s", self.threshold_s, _joined(stuck), extra=SHOWN)
        if stuck or self._reported:
            self.show([line for _, line in stuck.values()])
            self.log(self.values())
        self._reported = {name: stuck[name][0] if name in due else self._reported[name] for name in stuck}

    async def _watch(self) -> None:
        """Waits for time alone."""
        while True:
            await asyncio.sleep(self.threshold_s)
            self.check()

    def _stuck(self) -> dict[str, tuple[float, str]]:
        """Key -> (seconds, line) of each stuck rollout or stage, the longest first; the key stays the same while it is stuck."""
        found: dict[str, tuple[float, str]] = {}
        statuses = [status for group in self.rollouts() for status in group]
        for status in statuses:
            found[f"{status.uid}{status.where} {status.phase}"] = (status.seconds, str(status))
        for span in self.stages():
            if span.track in _TRACKS_OF_ROLLOUTS:
                continue
            label = span.name + "".join(f" {name} {value}" for name, value in span.args.items())
            note = ", none of which is in flight" if span.track == _TRACK_OF_WAITS and not statuses else ""
            found[f"{span.track} {label}"] = (span.seconds, f"{label} (for {span.seconds:.0f} s{note})")
        longest_first = sorted(found.items(), key=lambda item: -item[1][0])
        return {key: (seconds, line) for key, (seconds, line) in longest_first if seconds >= self.threshold_s}


def _joined(stuck: dict[str, tuple[float, str]]) -> str:
    lines = [line for _, line in stuck.values()]
    num_more = len(lines) - _MAX_NAMED
    return "; ".join(lines[:_MAX_NAMED]) + (f"; and {num_more} more" if num_more > 0 else "")
