"""``Policy`` whose workers may die: new ones are brought to the exact state of the dead ones, and the call is repeated.

    trainer ──calls──> RecoveringPolicy ──calls──> workers ── die, hang, lose each other ──> new workers
                            │  journal of calls since the last checkpoint                        │
                            └──────────────── load that checkpoint, replay the journal ──────────┘

The trainer gets its answers as if nothing had happened. Engines, versions and groups are not touched, and generation goes on meanwhile.
Knows neither Ray nor torch, and publishes nothing.

On CPU the state is the same to the last bit: a call's result depends on its arguments and the state alone. On a GPU, sums may be taken in
another order.
"""

import asyncio
import contextlib
import itertools
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from skyrl_async.columns import Advantages, TokenIds
from skyrl_async.errors import (
    CheckpointError,
    DeadlineError,
    SkyRLAsyncError,
    TrainingError,
    WeightsLostError,
    WeightsTransferError,
    WorkerDiedError,
)
from skyrl_async.runtime.daemon_threads import NumberedDirectories
from skyrl_async.training.protocol import WAIT_SECONDS, Critic, SendingPolicy, SharedWeights
from skyrl_async.training.workers.journal import CallJournal
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate

if TYPE_CHECKING:
    from skyrl_async.weights.transfer_group import GroupPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")
W = TypeVar("W", bound="Workers")

LOST = (WorkerDiedError, DeadlineError)
"""Failures that new workers mend. They mend neither numbers that are not finite, nor full disks, nor checkpoints of another model."""


_COLLECTIVE = frozenset(
    {"forward_backward", "step", "logprobs", "logprobs_of", "values_of", "gather_weights", "export_hf"}
)
"""Calls in which ranks wait for each other: where one fails, the others may be left in the middle."""


class Workers(Protocol):
    """One group of workers."""

    async def close(self) -> None:
        """End every worker."""


class RestartedWorkers(ABC, Generic[W]):
    """Workers that are replaced when they die. Subclasses bring new ones to the state of the lost ones.

    Args:
        start: starts workers. Called again for each restart, after the previous workers are closed.
        max_restarts: >= 0, over all calls. A restart that fails counts too.
    """

    kind: str
    """What the log calls the workers."""
    retried_after: ClassVar[tuple[type[SkyRLAsyncError], ...]] = LOST
    """Failures of a restart that are answered by another one."""

    def __init__(self, start: Callable[[], Awaitable[W]], *, max_restarts: int) -> None:
        self._workers: W | None = None
        self._start = start
        self._max_restarts = max_restarts
        self._is_closed = False
        self.num_restarts = 0

    def _origin(self) -> str:
        """From what the state of new workers will be restored, for the log."""
        return ""

    @abstractmethod
    async def _restore(self, workers: W) -> str:
        """Bring new workers to the state of the lost ones; returns what was done, for the log."""

    @property
    def _why_not(self) -> str:
        """Why there is no further restart; empty if there may be one."""
        is_left = self.num_restarts < self._max_restarts
        return "" if is_left else f"trainer.max_restarts={self._max_restarts} are used up"

    async def started(self) -> Self:
        """Start the first workers, again if one dies meanwhile; any other failure is raised as it is. Returns this object."""
        try:
            self._workers = await self._start()
        except WorkerDiedError as error:
            await self._replace(error, "start")
        return self

    async def _repeated(self, name: str, call: Callable[[W], Awaitable[T]]) -> T:
        """Make a call, with new workers as often as it takes."""
        while True:
            assert not self._is_closed, "the workers are closed"
            if self._workers is None:
                await self._replace(WorkerDiedError("the workers are gone: replacing them was cut off"), name)
            assert self._workers is not None
            try:
                return await call(self._workers)
            except LOST as error:
                await self._replace(error, name)

    async def _replace(self, lost: SkyRLAsyncError, name: str) -> None:
        """Start new workers in the state of the lost ones, again if that fails; raises ``lost`` if no restart is left."""
        clock = asyncio.get_running_loop().time
        started, failure = clock(), lost
        while True:
            if why := self._why_not:
                raise type(lost)(f"{lost}; not restarted: {why}. Continue with trainer.resume_mode=latest") from failure
            self.num_restarts += 1
            attempt = f"restart {self.num_restarts} of at most trainer.max_restarts={self._max_restarts}"
            logger.warning("%s; %s of the %s%s", failure, attempt, self.kind, self._origin())
            try:
                done = await self._restart()
                break
            except self.retried_after as error:
                failure = error
        seconds = clock() - started
        logger.warning("the %s are back in %s after %.1f s (%s; %s)", self.kind, name, seconds, attempt, done)

    async def _restart(self) -> str:
        lost, self._workers = self._workers, None
        if lost is not None:
            await lost.close()
        workers = await self._start()
        try:
            done = await self._restore(workers)
        except BaseException:  # also when cancelled: nobody may use workers in a state between
            await workers.close()
            raise
        self._workers = workers
        return done

    async def close(self) -> None:
        """End every worker. Idempotent."""
        workers, self._workers, self._is_closed = self._workers, None, True
        if workers is not None:
            await workers.close()


@dataclass(slots=True, kw_only=True)
class _Gathered:
    """A copy of the weights that waits to be sent."""

    version: int
    holder: SendingPolicy
    """The workers that hold the copy in their memory."""
    is_current: bool = True
    """Whether no step was made since."""


class TrainedWorkers(SendingPolicy, Critic, Protocol):
    """Workers with a policy, or a critic: ``TrainingSettings.is_critic`` says which calls they can answer."""


class RecoveringPolicy(RestartedWorkers[TrainedWorkers]):
    """Implements ``training.protocol.SendingPolicy``, or ``Critic``. ``started`` comes first, ``close`` last.

    Args:
        start: starts workers with the initial policy. Called again for each restart, after the previous workers are closed.
        max_restarts: >= 0, over all calls. A restart that fails counts too.
        directory: for a checkpoint of the policy alone, written if the journal outgrows ``max_journal_bytes`` before there is
            another; removed by ``close``.
        max_journal_bytes: ``training.workers.journal`` says how many a token takes.
        kind: what the log calls the workers.
    """

    retried_after = (TrainingError, DeadlineError)

    def __init__(
        self,
        start: Callable[[], Awaitable[TrainedWorkers]],
        *,
        max_restarts: int,
        directory: Path,
        max_journal_bytes: int = 1 << 30,
        kind: str = "policy workers",
    ) -> None:
        super().__init__(start, max_restarts=max_restarts)
        self.kind = kind
        self._lock = asyncio.Lock()
        self._num_calls = 0
        """Calls that run or wait for the lock."""
        shutil.rmtree(directory, ignore_errors=True)
        self._own = NumberedDirectories(directory, "recovery")
        self._base: Path | None = None
        self._journal = CallJournal(max_journal_bytes)
        self._saved_position: int | None = None
        self._gathered: _Gathered | None = None
        self._missing_state = ""
        """Why the state of lost workers cannot be restored; empty if it can."""
        self._failure: Exception | None = None
        """What new workers did not mend."""

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float | Advantages], version: int
    ) -> dict[str, Any]:
        """As ``Policy``."""
        figures = await self._timed_call(
            "forward_backward", lambda p: p.forward_backward(trajectories, advantages, version)
        )
        if not self._why_not:
            self._journal.add_gradients(trajectories, advantages, version)
        return figures

    async def step(self, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """As ``Policy``."""
        if self._gathered is not None:
            self._gathered.is_current = False
        figures = await self._timed_call("step", lambda p: p.step(denominator, lr_scale))
        if not self._why_not:
            self._journal.add_step(denominator, lr_scale, figures["grad_norm"])
            if self._journal.is_full:
                await self._replace_journal()
        return figures

    async def logprobs(self, token_ids: Sequence[int] | TokenIds) -> list[float]:
        """As ``Policy``."""
        return await self._call("logprobs", lambda p: p.logprobs(token_ids))

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """As ``Policy``."""
        return await self._call("logprobs_of", lambda p: p.logprobs_of(trajectories, model))

    async def values_of(self, trajectories: Sequence[Trajectory]) -> RowLogprobs:
        """As ``Critic``."""
        return await self._call("values_of", lambda p: p.values_of(trajectories))

    async def gather_weights(self, version: int) -> int:
        """As ``Policy``."""

        async def gather(policy: TrainedWorkers) -> int:
            num_bytes = await policy.gather_weights(version)
            self._gathered = _Gathered(version=version, holder=policy)
            return num_bytes

        return await self._call("gather_weights", gather)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """As ``Policy``, beside other calls. If the copy was lost, waits for them and gathers it again, unless there was a step since."""
        while True:
            gathered = self._gathered
            assert gathered is not None, "nothing was gathered"
            assert gathered.version == version, f"version {version} was not gathered"
            lost: SkyRLAsyncError | None = None
            if gathered.holder is self._workers:
                try:
                    return await gathered.holder.send_weights(version, directory, bucket_bytes)
                except LOST as error:
                    lost = error
            await self._gather_again(gathered, lost)

    async def _gather_again(self, gathered: _Gathered, lost: SkyRLAsyncError | None) -> None:
        async def gather(policy: TrainedWorkers) -> None:
            if lost is not None and policy is gathered.holder:
                raise lost
            if not gathered.is_current:
                raise WeightsLostError(
                    f"the copy of version {gathered.version} is gone with the policy workers that held it, and later weights are "
                    "trained by now"
                )
            await policy.gather_weights(gathered.version)
            self._gathered = _Gathered(version=gathered.version, holder=policy)

        await self._call("gather_weights", gather)

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> "GroupPlace":
        """As ``SendingPolicy``. If the workers are lost, waits for new ones: these can send the files of the lost ones."""
        if self._workers is not None:
            with contextlib.suppress(*LOST):
                return await self._workers.open_transfer(num_receivers, backend, timeout_s)
        return await self._call("open_transfer", lambda p: p.open_transfer(num_receivers, backend, timeout_s))

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """As ``SendingPolicy``, beside other calls. Fails if the workers are lost; the next call replaces them."""
        if self._workers is None:
            raise WeightsTransferError(f"{path} was not sent: the policy workers are being replaced")
        try:
            await self._workers.broadcast_weights(path, bucket_bytes)
        except LOST as error:
            raise WeightsTransferError(f"{path} was not sent: {error}") from error

    async def share_weights(self, version: int) -> SharedWeights:
        """As ``SendingPolicy``. Empty if the workers that held the copies are lost."""
        gathered = self._gathered
        if gathered is not None and gathered.holder is self._workers:
            with contextlib.suppress(*LOST):
                return await gathered.holder.share_weights(version)
        return {}

    async def unshare_weights(self) -> None:
        """As ``SendingPolicy``."""
        if self._workers is not None:
            with contextlib.suppress(*LOST):
                await self._workers.unshare_weights()

    async def save(self, directory: Path) -> None:
        """As ``Policy``. New workers begin with it only after ``checkpoint_written``, which tells where it is.

        Raises ``TrainingError`` after a failure that new workers did not mend: it would wait for them, or save what is no state.
        """
        if self._failure is not None:
            raise TrainingError(f"the {self.kind} have failed, and what they hold is not saved") from self._failure
        self._saved_position = await self._save(directory)

    async def load(self, directory: Path) -> None:
        """As ``Policy``. New workers begin with this checkpoint from now on."""
        self._gathered = None
        await self._call("load", lambda p: p.load(directory))
        self._journal.clear()
        self._begin_at(directory)

    async def export_hf(self, directory: Path) -> None:
        """As ``Policy``."""
        await self._call("export_hf", lambda p: p.export_hf(directory))

    def checkpoint_written(self, directory: Path) -> None:
        """Note that the last ``save`` is complete at ``directory``, and stays there until the next one is."""
        assert self._saved_position is not None, "nothing was saved"
        self._journal.cut(self._saved_position)
        self._begin_at(directory)

    async def close(self) -> None:
        """End every worker. Idempotent."""
        try:
            await super().close()
        finally:
            shutil.rmtree(self._own.root, ignore_errors=True)

    @property
    def _why_not(self) -> str:
        return super()._why_not or self._missing_state

    def _begin_at(self, base: Path) -> None:
        self._base, self._saved_position, self._missing_state = base, None, ""
        self._delete_own(but=base)

    def _delete_own(self, *, but: Path | None = None) -> None:
        for path in self._own.root.glob("*"):
            if path != but:
                self._own.delete(path)

    async def _save(self, directory: Path) -> int:
        """Save; returns the position of the journal up to which ``directory`` holds everything."""

        attempts = itertools.count()

        async def save(policy: TrainedWorkers) -> None:
            if next(attempts):
                self._own.delete(directory)  # lost workers have written a part of it
                await self._own.deleted()
            await policy.save(directory)

        await self._call("save", save)
        return self._journal.last_step

    async def _replace_journal(self) -> None:
        """Write a checkpoint of our own and empty the journal. If it cannot be written, go on without restarts."""
        directory, num_bytes = self._own.new("policy"), self._journal.num_bytes
        try:
            position = await self._save(directory)
        except LOST:
            raise
        except (TrainingError, CheckpointError, OSError) as error:
            self._missing_state = f"no checkpoint was written since {directory} could not be"
            self._journal.clear()
            self._delete_own()  # its parts, and the one before, would take the room of the run's next checkpoint
            logger.warning(
                "%d MB of calls since the last checkpoint are forgotten, because %s cannot be written (%s): until there is a "
                "checkpoint, %s that die end the run; make room, or write checkpoints more often",
                *(num_bytes >> 20, directory, error, self.kind),
            )
            return
        self._journal.cut(position)
        self._begin_at(directory)
        logger.info("wrote %s in place of %d MB of calls since the last checkpoint", directory, num_bytes >> 20)

    async def _timed_call(
        self, name: str, call: Callable[[TrainedWorkers], Awaitable[dict[str, float]]]
    ) -> dict[str, float]:
        """Make a call and return its figures, with ``WAIT_SECONDS`` if others came first."""
        clock = asyncio.get_running_loop().time
        asked, must_wait = clock(), self._num_calls > 0

        async def timed(policy: TrainedWorkers) -> dict[str, float]:
            waited = {WAIT_SECONDS: clock() - asked} if must_wait else {}
            return await call(policy) | waited

        return await self._call(name, timed)

    async def _call(self, name: str, call: Callable[[TrainedWorkers], Awaitable[T]]) -> T:
        """Make a call, with new workers as often as it takes. Calls run one at a time, in the order in which they came."""
        self._num_calls += 1
        try:
            async with self._lock:
                return await self._repeated(name, call)
        except Exception as error:
            is_torn = name in _COLLECTIVE and not isinstance(error, WeightsLostError)  # a lost copy stops no rank
            if is_torn or isinstance(error, LOST):
                self._failure = error
            raise
        finally:
            self._num_calls -= 1

    def _origin(self) -> str:
        origin = "the initial policy" if self._base is None else str(self._base)
        return f", from {origin} with {self._journal.num_steps} steps to do again"

    async def _restore(self, workers: TrainedWorkers) -> str:
        if self._base is not None:
            await workers.load(self._base)
        difference = await self._journal.replay(workers)
        done = f"{self._journal.num_steps} steps, {len(self._journal)} calls done again, gradient norms differ by at most {difference:.2g}"
        if self._why_not:  # no restart is left that could need them
            self._journal.clear()
            self._delete_own()
            await self._own.deleted()
        return done
