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
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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
from skyrl_async.training.protocol import WAIT_SECONDS, SendingPolicy, SharedWeights
from skyrl_async.training.workers.journal import CallJournal, GradientsCall, RecoveryDirectory
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate

if TYPE_CHECKING:
    from skyrl_async.weights.transfer_group import GroupPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOST = (WorkerDiedError, DeadlineError)
"""Failures that new workers mend. They mend neither numbers that are not finite, nor full disks, nor checkpoints of another model."""


@dataclass(slots=True, kw_only=True)
class _Gathered:
    """A copy of the weights that waits to be sent."""

    version: int
    holder: SendingPolicy
    """The workers that hold the copy in their memory."""
    is_current: bool = True
    """Whether no step was made since."""


class RecoveringPolicy:
    """Implements ``training.protocol.SendingPolicy``. ``start`` makes it, ``close`` ends it."""

    def __init__(
        self,
        start: Callable[[], Awaitable[SendingPolicy]],
        *,
        max_restarts: int,
        directory: Path,
        max_journal_bytes: int,
    ) -> None:
        self._policy: SendingPolicy | None = None
        self._start = start
        self._lock = asyncio.Lock()
        self._num_calls = 0
        """Calls that run or wait for the lock."""
        self._max_restarts = max_restarts
        self._own = RecoveryDirectory(directory)
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
        """Start the first workers; start them again if one dies meanwhile. Any other failure is raised as it is.

        Args:
            start: starts workers with the initial policy. Called again for each restart, after the previous workers are closed.
            max_restarts: >= 0, over all calls. A restart that fails counts too.
            directory: for a checkpoint of the policy alone, written if the journal outgrows ``max_journal_bytes`` before there is
                another; removed by ``close``.
            max_journal_bytes: about 20 per token trained.
        """
        policy = cls(start, max_restarts=max_restarts, directory=directory, max_journal_bytes=max_journal_bytes)
        try:
            policy._policy = await start()
        except WorkerDiedError as error:
            await policy._recover(error, "start")
        return policy

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        """As ``Policy``."""
        figures = await self._timed_call(
            "forward_backward", lambda p: p.forward_backward(trajectories, advantages, version)
        )
        if self._can_restart:
            self._journal.add_gradients(trajectories, advantages, version)
        return figures

    async def step(self, denominator: float) -> dict[str, float]:
        """As ``Policy``."""
        if self._gathered is not None:
            self._gathered.is_current = False
        figures = await self._timed_call("step", lambda p: p.step(denominator))
        if self._can_restart:
            self._journal.add_step(denominator, figures["grad_norm"])
            if self._journal.is_full:
                await self._replace_journal()
        return figures

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """As ``Policy``."""
        return await self._call("logprobs", lambda p: p.logprobs(token_ids))

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """As ``Policy``."""
        return await self._call("logprobs_of", lambda p: p.logprobs_of(trajectories, model))

    async def gather_weights(self, version: int) -> int:
        """As ``Policy``."""

        async def gather(policy: SendingPolicy) -> int:
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
            if gathered.holder is self._policy:
                try:
                    return await gathered.holder.send_weights(version, directory, bucket_bytes)
                except LOST as error:
                    lost = error
            await self._gather_again(gathered, lost)

    async def _gather_again(self, gathered: _Gathered, lost: SkyRLAsyncError | None) -> None:
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

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> "GroupPlace":
        """As ``SendingPolicy``. If the workers are lost, waits for new ones: these can send the files of the lost ones."""
        if self._policy is not None:
            with contextlib.suppress(*LOST):
                return await self._policy.open_transfer(num_receivers, backend, timeout_s)
        return await self._call("open_transfer", lambda p: p.open_transfer(num_receivers, backend, timeout_s))

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """As ``SendingPolicy``, beside other calls. Fails if the workers are lost; the next call replaces them."""
        if self._policy is None:
            raise WeightsTransferError(f"{path} was not sent: the policy workers are being replaced")
        try:
            await self._policy.broadcast_weights(path, bucket_bytes)
        except LOST as error:
            raise WeightsTransferError(f"{path} was not sent: {error}") from error

    async def share_weights(self, version: int) -> SharedWeights:
        """As ``SendingPolicy``. Empty if the workers that held the copies are lost."""
        gathered = self._gathered
        if gathered is not None and gathered.holder is self._policy:
            with contextlib.suppress(*LOST):
                return await gathered.holder.share_weights(version)
        return {}

    async def unshare_weights(self) -> None:
        """As ``SendingPolicy``."""
        if self._policy is not None:
            with contextlib.suppress(*LOST):
                await self._policy.unshare_weights()

    async def save(self, directory: Path) -> None:
        """As ``Policy``. New workers begin with it only after ``checkpoint_written``, which tells where it is."""
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

        async def delete_partial() -> None:
            await asyncio.wait([self._own.delete(directory)])

        await self._call("save", lambda p: p.save(directory), before_repeating=delete_partial)
        return self._journal.last_step

    async def _replace_journal(self) -> None:
        """Write a checkpoint of our own and empty the journal. If it cannot be written, go on without restarts."""
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
        """Make a call and return its figures, with ``WAIT_SECONDS`` if others came first."""
        if not self._num_calls:
            return await self._call(name, call)
        clock = asyncio.get_running_loop().time
        asked, begun = clock(), list[float]()

        async def timed(policy: SendingPolicy) -> dict[str, float]:
            begun.append(clock())
            return await call(policy)

        figures = await self._call(name, timed)
        return figures | {WAIT_SECONDS: begun[0] - asked}

    async def _call(
        self,
        name: str,
        call: Callable[[SendingPolicy], Awaitable[T]],
        *,
        before_repeating: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Make a call, with new workers as often as it takes. Calls run one at a time, in the order in which they came."""
        self._num_calls += 1
        try:
            async with self._lock:
                while True:
                    if self._policy is None:
                        assert not self._is_closed, "the policy is closed"
                        gone = WorkerDiedError("the policy workers are gone: replacing them was cut off")
                        await self._recover(gone, name)
                    assert self._policy is not None
                    try:
                        return await call(self._policy)
                    except LOST as error:
                        await self._recover(error, name)
                        if before_repeating is not None:
                            await before_repeating()
        finally:
            self._num_calls -= 1

    async def _recover(self, lost: SkyRLAsyncError, name: str) -> None:
        """Start new workers in the state of the lost ones, again if that fails; raises ``lost`` if no restart is left."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        failure = lost
        while True:
            if not self._can_restart:
                why = self._why_not or f"trainer.max_restarts={self._max_restarts} are used up"
                raise type(lost)(f"{lost}; not restarted: {why}. Continue with trainer.resume_mode=latest") from failure
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
        if not self._can_restart:  # no restart is left that could need them
            self._journal.clear()
            if deletions := self._own.remove():
                await asyncio.wait(deletions)

    async def _restart(self) -> float:
        """Start new workers in the state of the lost ones; returns the largest relative difference of a step's gradient norm."""
        lost, self._policy = self._policy, None
        if lost is not None:
            await lost.close()
        policy = await self._start()
        try:
            difference = await self._restore(policy)
        except BaseException:  # also when cancelled: nobody may use workers in a state between
            await policy.close()
            raise
        self._policy = policy
        return difference

    async def _restore(self, policy: SendingPolicy) -> float:
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
