"""Times the parts of each step, adds up the totals of the run, and logs both."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from skyrl_async.metrics.run_totals import RunTotals
from skyrl_async.metrics.step import StepFigures
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.ended import EndedGroup, Outcome, RecordsSamples

logger = logging.getLogger(__name__)


async def no_log() -> None:
    """There is nothing to wait for."""


@dataclass(kw_only=True, eq=False)
class Recorder:
    """Records the figures of one run."""

    log: Callable[[int, dict[str, float]], None]
    """Called with (step, values)."""
    trace: Trace
    """Gets one span per timed part."""
    record: RecordsSamples
    """Takes every group at its end."""
    generation_counts: Callable[[], Mapping[str, int]]
    """Returns the counts of generation so far (finished groups, tokens, ...), which only grow."""
    flush_log: Callable[[], Awaitable[None]] = no_log
    """Waits until what was logged is on disk, or has failed to get there."""
    totals: RunTotals = field(default_factory=RunTotals, init=False)
    _logged_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._counted = self._logged = self.generation_counts()

    async def flush(self) -> None:
        """Wait until what was recorded and logged is on disk, or has failed to get there."""
        await self.record.flush()
        await self.flush_log()

    def start(self) -> None:
        """Start the clock of the first step."""
        self._logged_at = asyncio.get_running_loop().time()

    @contextmanager
    def timed(self, figures: StepFigures, name: str, *, track: str) -> Iterator[None]:
        """Trace a part of a step, and add its seconds to the step's."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        with self.trace.span(name, track=track, step=figures.version):
            yield
        figures.add_seconds(name, loop.time() - started)

    def record_step(self, figures: StepFigures) -> None:
        """Record the groups that were trained in a step, or in the batch that ends with it."""
        for group in figures.groups:
            ended = EndedGroup(group=group, outcome=Outcome.TRAINED, step=figures.version, reason=figures.why_untaken)
            self.record.add(ended)
        self.record.end_step()

    def count_generation(self) -> None:
        """Add the counts of generation since the last call to the totals."""
        counts = self.generation_counts()
        self.totals.add_generation(_since(self._counted, counts))
        self._counted = counts

    def _generation_values(self) -> dict[str, float]:
        """Return the figures of generation since the last logged step."""
        now, counts = asyncio.get_running_loop().time(), self.generation_counts()
        new, seconds = _since(self._logged, counts), max(now - self._logged_at, 1e-9)
        self._logged, self._logged_at = counts, now
        return {
            "generate/tokens": float(new["tokens"]),
            "generate/tokens_per_second": new["tokens"] / seconds,
            "generate/filtered_frac": new["filtered_groups"] / max(1, new["groups"]),
            "generate/failed_frac": new["lost_samples"] / max(1, new["ended_samples"]),
        }

    def log_step(self, figures: StepFigures, policy: Mapping[str, float], more: Mapping[str, float]) -> None:
        """Log a step: its figures, the figures of generation since the last step, and the totals.

        Args:
            figures: figures of the step.
            policy: figures of the optimizer step, without the prefix ``policy/``.
            more: further values by metric name.
        """
        if figures.waits:
            longest = max(figures.waits, key=lambda wait: wait.seconds)
            logger.info(
                "step %d waited %.1f s to hold the staleness bound, longest for %s (%.1f s)",
                figures.version,
                figures.staleness_wait_seconds,
                longest.uid,
                longest.seconds,
            )
        if figures.trains_nothing:
            rows = [row for group in figures.groups for row in group.trajectories]
            logger.warning(
                "step %d trains nothing: of its %d answers a length limit cut %d (raise generator.sampling.max_tokens, or set "
                "generator.apply_overlong_filtering=false), and %d tokens are older than trainer.max_staleness_steps allows",
                figures.version,
                len(rows),
                sum(row.is_overlong for row in rows),
                figures.num_masked_tokens,
            )
        elif figures.is_all_masked:
            logger.warning(
                "step %d has no policy gradient: off-policy corrections masked all of its %d tokens; widen the bounds of "
                "trainer.algorithm.off_policy_correction or lower trainer.max_staleness_steps",
                figures.version,
                figures.num_tokens,
            )
        values = figures.values() | {f"policy/{name}": value for name, value in policy.items()}
        self.count_generation()
        self.log(figures.version, {**values, **self._generation_values(), **self.totals.values(), **more})


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> Counter[str]:
    return Counter({name: count - before[name] for name, count in now.items()})
