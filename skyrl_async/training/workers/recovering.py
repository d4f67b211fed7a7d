"""``Policy`` whose workers may die: new ones are brought to the very state the dead ones had, and the call is made again.

    trainer ──calls──> RecoveringPolicy ──calls──> workers ── die, hang, lose each other ──> new workers
                            │  journal of calls since the last checkpoint                        │
                            └──────────────── load that checkpoint, replay the journal ──────────┘

Flows in: the trainer's calls, and what starts workers. Flows out: their answers, as if nothing had happened: engines, versions,
groups and the ledger are not touched, and generation goes on meanwhile. Knows neither Ray nor torch, and publishes nothing.

The state is the same to the last bit where a call's result depends on its arguments and the state alone: on CPU. On a GPU sums
may be taken in another order.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from skyrl_async.errors import (
    CheckpointError,
    DeadlineError,
    SkyRLAsyncError,
    TrainingError,
    WeightsLostError,
    WeightsTransferError,
    WorkerDiedError,
)
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.training.protocol import WAIT_SECONDS, SendingPolicy, SharedWeights
from skyrl_async.training.workers.journal import CallJournal, GradientsCall
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate

if TYPE_CHECKING:
    from skyrl_async.weights.transfer_group import GroupPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOST = (WorkerDiedError, DeadlineError)
"""What new workers can mend. Not: numbers that stopped being numbers, full disks, checkpoints of another model."""


class RecoveringPolicy:
    """Implements ``training.protocol.SendingPolicy``; made by ``start``, ended by ``close``."""

    def __init__(
        self,
        policy: SendingPolicy | None,
        start: Callable[[], Awaitable[SendingPolicy]],
        *,
        max_restarts: int,
        directory: Path,
        max_journal_bytes: int,
    ) -> None:
        self._policy = policy
        self._start = start
        self._turn = asyncio.Lock()
        self._num_calls = 0
        """Under way, those that wait for their turn included."""
        self._max_restarts = max_restarts
        self._own = _OwnCheckpoints(directory)
        self._base: Path | None = None
        self._journal = CallJournal(max_journal_bytes)
        self._saved_position: int | None = None
        self._gathered: _Gathered | None = None
        self._why_not = "" if max_restarts else "trainer.max_restarts=0"
        self._is_closed = False
        self.num_restarts = 0

    @classmethod
    async def start(
        cls,
        start: Callable[[], Awaitable[SendingPolicy]],
        *,
        max_restarts: int,
        directory: Path,
        max_journal_bytes: int = 1 << 30,
    ) -> "RecoveringPolicy":
        """Start the first workers, again where one dies meanwhile; whatever else keeps these from coming up is raised as it is.

        Args:
            start: starts workers with the initial policy. Called again for each restart, when the ones before are closed.
            max_restarts: >= 0; over all calls. A restart that fails itself counts.
            directory: for a checkpoint of the policy alone, where the journal outgrows ``max_journal_bytes`` before there is
                another; removed by ``close``.
            max_journal_bytes: about 20 per token trained.
        """
        policy = cls(None, start, max_restarts=max_restarts, directory=directory, max_journal_bytes=max_journal_bytes)
        try:
            policy._policy = await start()
        except WorkerDiedError as error:
            await policy._recover(error, "start")
        return policy

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        """See ``Policy``."""
        figures = await self._timed_call(
            "forward_backward", lambda p: p.forward_backward(trajectories, advantages, version)
        )
        if self._can_restart:
            self._journal.add_gradients(trajectories, advantages, version)
        return figures

    async def step(self, denominator: float) -> dict[str, float]:
        """See ``Policy``."""
        if self._gathered is not None:
            self._gathered.is_current = False
        figures = await self._timed_call("step", lambda p: p.step(denominator))
        if self._can_restart:
            self._journal.add_step(denominator, figures["grad_norm"])
            if self._journal.is_full:
                await self._replace_journal()
        return figures

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See ``Policy``."""
        return await self._call("logprobs", lambda p: p.logprobs(token_ids))

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """See ``Policy``."""
        return await self._call("logprobs_of", lambda p: p.logprobs_of(trajectories, model))

    async def gather_weights(self, version: int) -> int:
        """See ``Policy``."""

        async def gather(policy: SendingPolicy) -> int:
            num_bytes = await policy.gather_weights(version)
            self._gathered = _Gathered(version=version, holder=policy)
            return num_bytes

        return await self._call("gather_weights", gather)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """See ``Policy``. Waits for its turn only where the copy was lost: it is gathered again unless there was a step since."""
        while True:
            gathered = self._gathered
            assert gathered is not None, "nothing was gathered"
            assert gathered.version == version, f"version {version} was not gathered"
            lost: SkyRLAsyncError | None = None
            if gathered.holder is self._policy:
                try:
                    return await gathered.holder.send_weights(version, directory, bucket_bytes)
                except LOST as error:
                    lost = error
            await self._gather_again(gathered, lost)

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> "GroupPlace":
        """See ``SendingPolicy``. Of new workers where the others are lost, which is waited for: what those wrote is there to be sent."""
        if self._policy is not None:
            with contextlib.suppress(*LOST):
                return await self._policy.open_transfer(num_receivers, backend, timeout_s)
        return await self._call("open_transfer", lambda p: p.open_transfer(num_receivers, backend, timeout_s))

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """See ``SendingPolicy``. Waits for no turn; lost workers end it, and are replaced with the next call."""
        if self._policy is None:
            raise WeightsTransferError(f"{path} was not sent: the policy workers are being replaced")
        try:
            await self._policy.broadcast_weights(path, bucket_bytes)
        except LOST as error:
            raise WeightsTransferError(f"{path} was not sent: {error}") from error

    async def share_weights(self, version: int) -> SharedWeights:
        """See ``SendingPolicy``. What lost workers held is not there any more."""
        gathered = self._gathered
        if gathered is None or gathered.holder is not self._policy:
            return {}
        try:
            return await gathered.holder.share_weights(version)
        except LOST:
            return {}

    async def unshare_weights(self) -> None:
        """See ``SendingPolicy``."""
        if self._policy is not None:
            with contextlib.suppress(*LOST):
                await self._policy.unshare_weights()

    async def _gather_again(self, gathered: "_Gathered", lost: SkyRLAsyncError | None) -> None:
        async def gather(policy: SendingPolicy) -> None:
            if lost is not None and policy is gathered.holder:
                raise lost
            if not gathered.is_current:
                raise WeightsLostError(
                    f"the copy of version {gathered.version} is gone with the policy workers that held it, and later weights are "
                    "trained by now"
                )
            await policy.gather_weights(gathered.version)
            self._gathered = _Gathered(version=gathered.version, holder=policy)

        await self._call("send_weights", gather)

    async def save(self, directory: Path) -> None:
        """See ``Policy``. What was saved counts once ``checkpoint_written`` says where it is."""
        position = await self._save(directory)
        self._saved_position = position

    async def load(self, directory: Path) -> None:
        """See ``Policy``. From here on new workers begin with what is loaded."""
        self._gathered = None
        await self._call("load", lambda p: p.load(directory))
        self._journal.clear()
        self._begin_at(directory)

    async def export_hf(self, directory: Path) -> None:
        """See ``Policy``."""
        await self._call("export_hf", lambda p: p.export_hf(directory))

    def checkpoint_written(self, directory: Path) -> None:
        """What the last ``save`` wrote is complete, and stays at ``directory`` until another one is."""
        assert self._saved_position is not None, "nothing was saved"
        self._journal.cut(self._saved_position)
        self._begin_at(directory)

    async def close(self) -> None:
        """End every worker. Idempotent."""
        policy, self._policy, self._is_closed = self._policy, None, True
        try:
            if policy is not None:
                await policy.close()
        finally:
            self._own.close()

    @property
    def _can_restart(self) -> bool:
        return not self._why_not and self.num_restarts < self._max_restarts

    def _begin_at(self, base: Path) -> None:
        self._base, self._saved_position = base, None
        if self._max_restarts:
            self._why_not = ""
        self._own.remove(but=base)

    async def _save(self, directory: Path) -> int:
        """Save; returns the position of the journal up to which ``directory`` holds everything."""

        async def forget_the_half_done() -> None:
            await asyncio.wait([self._own.delete(directory)])

        await self._call("save", lambda p: p.save(directory), before_repeating=forget_the_half_done)
        return self._journal.last_step

    async def _replace_journal(self) -> None:
        """Save the policy in a place of our own, so that the journal can be emptied; where that fails, do without."""
        directory, num_bytes = self._own.next(), self._journal.num_bytes
        try:
            position = await self._save(directory)
        except LOST:
            raise
        except (TrainingError, CheckpointError, OSError) as error:
            self._why_not = f"no checkpoint was written since {directory} could not be"
            self._journal.clear()
            logger.warning(
                "%d MB of calls since the last checkpoint are forgotten, because %s cannot be written (%s): until there is a "
                "checkpoint, policy workers that die end the run; make room, or write checkpoints more often",
                num_bytes >> 20,
                directory,
                error,
            )
            return
        self._journal.cut(position)
        self._begin_at(directory)
        logger.info("wrote %s in place of %d MB of calls since the last checkpoint", directory, num_bytes >> 20)

    async def _timed_call(
        self, name: str, call: Callable[[SendingPolicy], Awaitable[dict[str, float]]]
    ) -> dict[str, float]:
        """The figures of a call, with ``WAIT_SECONDS`` where others had their turn first."""
        if not self._num_calls:
            return await self._call(name, call)
        loop = asyncio.get_running_loop()
        asked, begun = loop.time(), list[float]()

        async def noting(policy: SendingPolicy) -> dict[str, float]:
            begun.append(loop.time())
            return await call(policy)

        figures = await self._call(name, noting)
        return figures | {WAIT_SECONDS: begun[0] - asked}

    async def _call(
        self,
        name: str,
        call: Callable[[SendingPolicy], Awaitable[T]],
        *,
        before_repeating: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Make a call, with new workers as often as it takes; other calls wait for their turn meanwhile."""
        async with self._in_turn():
            while True:
                if self._policy is None:
                    assert not self._is_closed, "the policy is closed"
                    await self._recover(
                        WorkerDiedError("the policy workers are gone: replacing them was cut off"), name
                    )
                assert self._policy is not None
                try:
                    return await call(self._policy)
                except LOST as error:
                    await self._recover(error, name)
                    if before_repeating is not None:
                        await before_repeating()

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        self._num_calls += 1
        try:
            async with self._turn:
                yield
        finally:
            self._num_calls -= 1

    async def _recover(self, lost: SkyRLAsyncError, name: str) -> None:
        """Start workers until some are where the lost ones were; raises ``lost`` when there have been too many."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        failure = lost
        while True:
            if not self._can_restart:
                raise self._given_up(lost) from failure
            self.num_restarts += 1
            attempt = f"restart {self.num_restarts} of at most trainer.max_restarts={self._max_restarts}"
            origin = "the initial policy" if self._base is None else str(self._base)
            num_steps, num_calls = self._journal.num_steps, len(self._journal)
            logger.warning(
                "%s; %s of the policy workers, from %s with %d steps to do again", failure, attempt, origin, num_steps
            )
            try:
                difference = await self._restart()
                break
            except (TrainingError, DeadlineError) as error:
                failure = error
        logger.warning(
            "the policy workers are back in %s after %.1f s (%s; %d steps, %d calls done again, gradient norms differ by at most "
            "%.2g)",
            name,
            loop.time() - started,
            attempt,
            num_steps,
            num_calls,
            difference,
        )
        if not self._can_restart:  # nothing will be done again any more
            self._journal.clear()
            if deletions := self._own.remove():
                await asyncio.wait(deletions)

    def _given_up(self, lost: SkyRLAsyncError) -> SkyRLAsyncError:
        why = self._why_not or f"trainer.max_restarts={self._max_restarts} are used up"
        return type(lost)(f"{lost}; not restarted: {why}. Continue with trainer.resume_mode=latest")

    async def _restart(self) -> float:
        """New workers in the state of the lost ones; returns the largest relative difference of a step's gradient norm."""
        lost, self._policy = self._policy, None
        if lost is not None:
            await lost.close()
        policy = await self._start()
        try:
            difference = await self._bring_up(policy)
        except BaseException:  # cancelled or not, nobody may use what is half way there
            await policy.close()
            raise
        self._policy = policy
        return difference

    async def _bring_up(self, policy: SendingPolicy) -> float:
        if self._base is not None:
            await policy.load(self._base)
        difference = 0.0
        for call in self._journal:
            if isinstance(call, GradientsCall):
                await policy.forward_backward(*call.arguments())
            else:
                grad_norm = (await policy.step(call.denominator))["grad_norm"]
                difference = max(difference, abs(grad_norm - call.grad_norm) / max(abs(call.grad_norm), 1e-12))
        return difference


@dataclass(slots=True, kw_only=True)
class _Gathered:
    """A copy of the weights that waits to be sent."""

    version: int
    holder: SendingPolicy
    """The workers whose memory it is in."""
    is_current: bool = True
    """No step was made since."""


class _OwnCheckpoints:
    """Directories for what is saved in between; at most one of them is kept.

    They are as large as the policy and its optimizer, and deleted in a thread: generation goes on.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._threads = DaemonThreads("recovery")
        self.close()

    def next(self) -> Path:
        """A path where nothing is."""
        self._count += 1
        return self._directory / f"policy-{self._count}"

    def remove(self, *, but: Path | None = None) -> "list[asyncio.Future[None]]":
        """Begin to delete them all, ``but`` one."""
        return [self.delete(path) for path in self._directory.glob("*") if path != but]

    def delete(self, directory: Path) -> "asyncio.Future[None]":
        """Begin to delete one of them, or what else was begun."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, partial(shutil.rmtree, directory, ignore_errors=True))

    def close(self) -> None:
        """Leave nothing, here and now."""
        shutil.rmtree(self._directory, ignore_errors=True)
