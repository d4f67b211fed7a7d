"""A model that does not train, on workers of its own: rows in, their log-probs out, whatever becomes of the workers.

    stage ──rows──> LogprobWorkers ──calls──> workers ── die, hang ──> new workers, at the newest version
                          ^
          published versions (of a policy; a reference takes none)

Knows neither Ray nor torch, nor who shares their devices. Workers hold nothing but weights, so that replacing them loses nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from skyrl_async.errors import SkyRLAsyncError, TrainingError, WorkerDiedError
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.training.workers.recovering import LOST
from skyrl_async.types import Group, LogprobModel, RowLogprobs, Trajectory, WeightUpdate

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NEWER_VERSION_TIMEOUT_S = 600.0


class ForwardWorkers(Protocol):
    """One group of ranks that do not train; ``PolicyWorkers`` and ``InProcessPolicy`` with ``trains=False`` are."""

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """See ``Policy``."""
        ...

    async def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by those of a published version. Raises ``TrainingError``; the version before stays."""
        ...

    async def close(self) -> None:
        """End every worker."""
        ...


class LogprobWorkers:
    """Made by ``start``, ended by ``close``. Calls follow one another.

    On devices that they share, workers compute and load in a turn, of a call or of several (``turn``). They are replaced, and wait for a
    version, in nobody's: engines that share these devices have to load it first.
    """

    def __init__(
        self,
        workers: ForwardWorkers | None,
        start: Callable[[], Awaitable[ForwardWorkers]],
        *,
        max_restarts: int,
        device_lease: DeviceLease,
    ) -> None:
        self._workers = workers
        self._start = start
        self._device_lease = device_lease
        self._calls = asyncio.Lock()
        self._caller: asyncio.Task[Any] | None = None
        self._max_restarts = max_restarts
        self._newest: WeightUpdate | None = None
        self._arrival = asyncio.Event()
        self._is_closed = False
        self.num_restarts = 0

    @classmethod
    async def start(
        cls,
        start: Callable[[], Awaitable[ForwardWorkers]],
        *,
        max_restarts: int,
        device_lease: DeviceLease | None = None,
    ) -> "LogprobWorkers":
        """Start the first workers, again where one dies meanwhile; whatever else keeps these from coming up is raised as it is.

        Args:
            start: starts workers with the weights of version 0. Called again for each restart, when the ones before are closed.
            max_restarts: >= 0; over all calls.
            device_lease: held while workers compute or load, by these workers alone; None where they have their devices for themselves.
        """
        workers = cls(None, start, max_restarts=max_restarts, device_lease=device_lease or DeviceLease())
        while workers._workers is None:
            try:
                workers._workers = await start()
            except WorkerDiedError as error:
                await workers._bury(error)
        return workers

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[None]:
        """In the block, which begins with it, this task's calls are in one turn; calls of others follow it."""
        async with self._calls:
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
            return await workers.logprobs_of(trajectories, LogprobModel.POLICY)

        return await self._call(compute)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Go on with a published version; workers that replace dead ones begin with it, even before it is their turn to load it.

        Where its files are gone by then (without ``weight_sync.double_buffer`` they make room for the next version), the workers stay at
        the version before, and new ones wait for the next.

        Raises:
            TrainingError: it cannot be read or is of another model; the version before stays.
        """
        self._newest = update
        self._arrival.set()
        await self._call(lambda workers: self._load(workers, update))

    async def close(self) -> None:
        """End every worker. Idempotent."""
        workers, self._workers, self._is_closed = self._workers, None, True
        if workers is not None:
            await workers.close()

    async def _call(self, call: Callable[[ForwardWorkers], Awaitable[T]]) -> T:
        if self._caller is asyncio.current_task():
            return await self._answered(call)
        async with self.lease():
            return await self._answered(call)

    async def _answered(self, call: Callable[[ForwardWorkers], Awaitable[T]]) -> T:
        while True:
            assert not self._is_closed, "the log-prob workers are closed"
            try:
                if self._workers is None:
                    self._workers = await self._start_anew()
                return await call(self._workers)
            except LOST as error:
                self._device_lease.release()
                await self._bury(error)

    async def _bury(self, error: SkyRLAsyncError) -> None:
        """End what is left of dead workers; raises where they may not be replaced."""
        lost, self._workers = self._workers, None
        if lost is not None:
            await lost.close()
        if self.num_restarts >= self._max_restarts:
            raise type(error)(
                f"{error}; not restarted: trainer.max_restarts={self._max_restarts} are used up. Continue with "
                "trainer.resume_mode=latest"
            ) from error
        self.num_restarts += 1
        logger.warning(
            "%s; restart %d of at most trainer.max_restarts=%d", error, self.num_restarts, self._max_restarts
        )

    async def _start_anew(self) -> ForwardWorkers:
        workers = await self._start()
        try:
            while (newest := self._newest) is not None and not await self._load(workers, newest):
                await self._newer_than(newest)
        except BaseException:  # cancelled or not, nobody may use what is half way there
            await workers.close()
            raise
        return workers

    async def _load(self, workers: ForwardWorkers, update: WeightUpdate) -> bool:
        """Whether its files were still there."""
        await self._device_lease.acquire()
        try:
            await workers.load_weights(update)
        except TrainingError as error:
            if isinstance(error, LOST) or _is_there(update):
                raise
            logger.info("log-prob workers do not load version %d, whose files are gone", update.version)
            return False
        finally:
            self._device_lease.release()
        return True

    async def _newer_than(self, update: WeightUpdate) -> None:
        try:
            async with asyncio.timeout(_NEWER_VERSION_TIMEOUT_S):
                while self._newest is update:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError as error:
            raise TrainingError(
                f"new log-prob workers have no weights: the files of version {update.version} are gone, and no newer one came in "
                f"{_NEWER_VERSION_TIMEOUT_S:g} s. Continue with trainer.resume_mode=latest"
            ) from error


def _is_there(update: WeightUpdate) -> bool:
    return all(Path(chunk["path"]).exists() for chunk in update.chunks)


ComputeLogprobs = Callable[[Sequence[Trajectory]], Awaitable[RowLogprobs]]
"""``LogprobWorkers.logprobs_of``, or ``Policy.logprobs_of`` of one model."""


class LogprobStageWork:
    """Fills in what rows lack: a group of a checkpoint comes with some.

    Args:
        compute: of the reference, or of the policy at its newest version.
        model: whose log-probs those are: ``ref_logprobs`` of the reference, ``old_logprobs`` with ``old_version`` of the policy.
    """

    def __init__(self, compute: ComputeLogprobs, model: LogprobModel) -> None:
        self._compute = compute
        self._model = model

    async def __call__(self, group: Group) -> Group:
        """The group with log-probs in every row; those that a row has stay."""
        lacking = [row for row in group.trajectories if self._known(row) is None]
        if not lacking:
            return group
        found = await self._compute(lacking)
        values = iter(found.values)
        rows = [
            row if self._known(row) is not None else self._filled(row, next(values), found.version)
            for row in group.trajectories
        ]
        return replace(group, trajectories=tuple(rows))

    def _known(self, row: Trajectory) -> tuple[float, ...] | None:
        return row.ref_logprobs if self._model is LogprobModel.REF else row.old_logprobs

    def _filled(self, row: Trajectory, values: tuple[float, ...], version: int) -> Trajectory:
        if self._model is LogprobModel.REF:
            return replace(row, ref_logprobs=values)
        return replace(row, old_logprobs=values, old_version=version)
