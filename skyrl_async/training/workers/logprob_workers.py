"""Log-probs from workers that do not train: rows in, log-probs out. Workers that die are replaced.

    stage ──rows──> LogprobWorkers ──calls──> workers ── die, hang ──> new workers, at the newest version
                          ^
          published versions (of a policy; a reference takes none)

Knows neither Ray nor torch. Workers hold nothing but weights, so that replacing them loses nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from skyrl_async.errors import TrainingError
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.runtime.tasks import Changes
from skyrl_async.training.workers.recovering import LOST, RestartedWorkers, Workers
from skyrl_async.types import Group, LogprobModel, RowLogprobs, Trajectory, WeightUpdate

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NEWER_VERSION_TIMEOUT_S = 600.0
ComputeColumns = Callable[[Sequence[Trajectory]], Awaitable[RowLogprobs]]
"""``LogprobWorkers.logprobs_of``, ``Policy.logprobs_of`` with one model, or ``Critic.values_of``."""


@dataclass(frozen=True, slots=True)
class ColumnStageWork:
    """The work of the stages ``ref_logp``, ``logp``, ``teacher_logp`` and ``values``: fills in a column that a finished group's rows lack,
    and ``teacher_top`` where the workers give likeliest tokens.

    Some rows of a group from a checkpoint have it already.
    """

    compute: ComputeColumns
    column: str
    """Field of ``Trajectory``."""
    version: str | None = None
    """Field of ``Trajectory`` that gets the version of the weights; None: none does."""

    async def __call__(self, group: Group) -> Group:
        """Return the group with the column in every row. Rows that have it keep it."""
        rows = list(group.trajectories)
        lacking = [i for i, row in enumerate(rows) if getattr(row, self.column) is None]
        if not lacking:
            return group
        found = await self.compute([rows[index] for index in lacking])
        version: dict[str, Any] = {} if self.version is None else {self.version: found.version}
        for index, values in zip(lacking, found.values, strict=True):
            rows[index] = replace(rows[index], **{self.column: values}, **version)
        for index, top in zip(lacking, found.top, strict=False):
            rows[index] = replace(rows[index], teacher_top=top)
        return replace(group, trajectories=tuple(rows))


class ForwardWorkers(Workers, Protocol):
    """One group of ranks that do not train: ``PolicyWorkers`` or ``InProcessPolicy`` with ``trains=False``."""

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """As ``Policy.logprobs_of``."""

    async def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by a published version's. Raises ``TrainingError``; the previous version stays."""


class LogprobWorkers(RestartedWorkers[ForwardWorkers]):
    """``started`` comes first, ``close`` last. Calls run one at a time.

    On shared devices, workers compute and load while they hold a lease: of one call, or of several (``lease``). No lease is held while
    workers are replaced or wait for a version: engines on the same devices have to load that version first.

    Args:
        start: starts workers with the weights of version 0. Called again for each restart, after the previous workers are closed.
        max_restarts: >= 0, over all calls.
        device_lease: held while workers compute or load, by these workers alone; None if they share their devices with nobody.
    """

    kind = "log-prob workers"

    def __init__(
        self,
        start: Callable[[], Awaitable[ForwardWorkers]],
        *,
        max_restarts: int,
        device_lease: DeviceLease | None = None,
    ) -> None:
        super().__init__(start, max_restarts=max_restarts)
        self._device_lease = device_lease or DeviceLease()
        self._lock = asyncio.Lock()
        self._caller: asyncio.Task[Any] | None = None
        """The task that holds ``lease``."""
        self._newest: WeightUpdate | None = None
        self._published = Changes()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[None]:
        """Hold the devices for all calls that this task makes in the block. Calls of other tasks wait."""
        async with self._lock:
            self._caller = asyncio.current_task()
            try:
                if self._workers is not None:
                    await self._device_lease.acquire()
                yield
            finally:
                self._caller = None
                self._device_lease.release()

    async def logprobs_of(self, trajectories: Sequence[Trajectory]) -> RowLogprobs:
        """Log-probs of the trajectories' sampled tokens as training's forward takes them, and the version of the weights.

        Raises:
            WorkerDiedError, DeadlineError: workers died or hung more often than ``max_restarts`` allows.
        """

        async def compute(workers: ForwardWorkers) -> RowLogprobs:
            await self._device_lease.acquire()
            try:
                return await workers.logprobs_of(trajectories, LogprobModel.POLICY)
            except LOST:
                self._device_lease.release()
                raise

        return await self._call("logprobs_of", compute)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Load a published version. Workers that are being replaced begin with it, without waiting for this call to run.

        Without ``weight_sync.double_buffer`` its files may be gone by then, to make room for the next version. Workers then stay at the
        previous version, and new ones wait for the next.

        Raises:
            TrainingError: it cannot be read or is of another model; the previous version stays.
        """
        self._newest = update
        self._published.notify()
        await self._call("load_weights", lambda workers: self._load(workers, update))

    async def _call(self, name: str, call: Callable[[ForwardWorkers], Awaitable[T]]) -> T:
        if self._caller is asyncio.current_task():
            return await self._repeated(name, call)
        async with self.lease():
            return await self._repeated(name, call)

    async def _restore(self, workers: ForwardWorkers) -> str:
        """Load the newest version; waits for a newer one if its file is gone."""
        while (newest := self._newest) is not None and not await self._load(workers, newest):
            await self._newer_than(newest)
        return "they hold the initial policy" if newest is None else f"they hold version {newest.version}"

    async def _load(self, workers: ForwardWorkers, update: WeightUpdate) -> bool:
        """Load a version; returns False if its file is gone."""
        await self._device_lease.acquire()
        try:
            await workers.load_weights(update)
        except TrainingError as error:
            if isinstance(error, LOST) or _has_file(update):
                raise
            logger.info("log-prob workers do not load version %d, whose file is gone", update.version)
            return False
        finally:
            self._device_lease.release()
        return True

    async def _newer_than(self, update: WeightUpdate) -> None:
        try:
            async with asyncio.timeout(_NEWER_VERSION_TIMEOUT_S):
                await self._published.until(lambda: self._newest is not update)
        except TimeoutError as error:
            raise TrainingError(
                f"new log-prob workers have no weights: the files of version {update.version} are gone, and no newer one came in "
                f"{_NEWER_VERSION_TIMEOUT_S:g} s. Continue with trainer.resume_mode=latest"
            ) from error


def _has_file(update: WeightUpdate) -> bool:
    return Path(update.path).exists()
