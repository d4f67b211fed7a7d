"""Puts a run's state into checkpoints, and restores it.

Flows in: where the parts of a run stand. Flows out: a ``TrainerState`` in which they fit together; or the parts, standing where one
was taken. Does not know files, nor when a checkpoint is due.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState, read_state
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.errors import CheckpointError
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.step import RunTotals
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.group_state import RestoredGroups, RunningGroup, admission_of
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.rollout.worker import GenerationWorkers
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.runtime.shutdown import GRACE_S, ShutdownRequest, ShutdownRequested
from skyrl_async.training.protocol import Policy
from skyrl_async.types import Group

logger = logging.getLogger(__name__)


class RunSaver:
    """Saves and restores the parts of one run.

    Args:
        dataloader, staleness, buffer, workers, recorder: the parts, besides the policy.
        checkpointer: None writes nothing.
        step_advantages: holds the KL coefficient, where that follows a target.
        shutdown: once it is requested, no engine is waited for.
    """

    def __init__(
        self,
        *,
        dataloader: _AsyncDataloader,
        staleness: _AsyncStalenessManager,
        buffer: GroupBuffer,
        workers: GenerationWorkers,
        recorder: Recorder,
        checkpointer: Checkpointer | None,
        step_advantages: StepAdvantages,
        shutdown: ShutdownRequest,
    ) -> None:
        self._dataloader = dataloader
        self._staleness = staleness
        self._buffer = buffer
        self._workers = workers
        self._recorder = recorder
        self.checkpointer = checkpointer
        self._step_advantages = step_advantages
        self._shutdown = shutdown
        self.newest: Path | None = None
        """The checkpoint written or restored last."""
        self.step: int | None = None
        """Its step."""
        self._known = (0, 0, 0)

    @property
    def num_failures(self) -> int:
        """Checkpoints that could not be written."""
        return self.checkpointer.num_failures if self.checkpointer is not None else 0

    @property
    def failure(self) -> CheckpointError | None:
        """Why the last checkpoint was not written; None when it was."""
        return self.checkpointer.failure if self.checkpointer is not None else None

    async def restore(self, policy: Policy, checkpoint: Path, *, holds_bound: bool) -> None:
        """Have every part stand where the checkpoint was taken. Raises ``CheckpointError``.

        With another mini-batch size or staleness bound than the checkpoint's, groups that no longer fit are drawn again.
        """
        reading = DaemonThreads("checkpoint")  # no exit waits for a disk that hangs
        state = await asyncio.get_running_loop().run_in_executor(reading, read_state, checkpoint)
        await policy.load(checkpoint / "policy")
        await self._dataloader.load_state_from_checkpoint(state.dataloader)
        self._recorder.totals = totals = RunTotals(**state.totals)
        self._step_advantages.restore(state.kl_coef)
        self._dataloader.check_running([(group.epoch, group.uid) for group in state.running])
        admissions = await self._staleness.load_state_from_checkpoint(
            state.step,
            state.next_admission_index,
            [admission_of(group) for group in state.groups],
            running=[admission_of(group) for group in state.running],
            holds_bound=holds_bound,
        )
        restored = RestoredGroups.of(state.groups, state.running, admissions)
        self._workers.restore(restored.running)
        for finished in restored.finished:
            await self._workers.finished_groups.put(finished)
        self._workers.finished_groups.restore(state.filtered_in_a_row)
        for dropped in reversed(restored.dropped):
            await self._dataloader.requeue((dropped.epoch, dropped.uid))
        totals.wasted_tokens += restored.num_dropped_tokens
        self.newest, self.step = checkpoint, state.step
        self._known = self._progress(state.step, self._workers.running_groups())
        logger.info("resumed %s: %s", checkpoint.name, restored)

    async def write(
        self,
        policy: Policy,
        step: int,
        groups_in_step: Sequence[Group],
        *,
        unless_known: bool = False,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the state after ``step`` steps, of which the engines have acknowledged the last one.

        It is taken in one step of the event loop, whatever goes on: what is sampled later is sampled again when it is resumed. A
        disk that cannot take it does not end the run.

        Args:
            policy: after ``step`` steps.
            step: completed optimizer steps.
            groups_in_step: finished and untrained groups of the step in progress.
            unless_known: write nothing where the last checkpoint holds all there is.
            on_taken: called when the state is taken, before any of it is written.
        """
        if self.checkpointer is None:
            on_taken()
            return
        await self.collect_open_tokens()
        on_taken()
        self._recorder.count_generation()
        state = self._state(step, groups_in_step)
        progress = self._progress(step, state.running)
        if unless_known and progress == self._known:
            return
        path = await self.checkpointer.try_write(policy, state)
        if path is not None:
            self.newest, self.step, self._known = path, step, progress
            logger.info("wrote %s", path)

    async def collect_open_tokens(self) -> None:
        """Have open generations know all of their tokens, as far as engines answer in time once a stop was asked for."""
        with suppress(ShutdownRequested):
            async with self._shutdown.interruptible(grace_s=GRACE_S):
                await self._workers.collect_open_tokens()

    def _state(self, step: int, groups_in_step: Sequence[Group]) -> TrainerState:
        return TrainerState(
            step=step,
            next_admission_index=self._staleness.next_index,
            dataloader=self._dataloader.state_for_checkpoint(),
            groups=tuple(sorted((*groups_in_step, *self._buffer.snapshot()), key=lambda group: group.admission_index)),
            running=self._workers.running_groups(),
            totals=asdict(self._recorder.totals),
            kl_coef=self._step_advantages.kl_coef,
            filtered_in_a_row=self._workers.finished_groups.filtered_in_a_row,
        )

    def _progress(self, step: int, running: Sequence[RunningGroup]) -> tuple[int, int, int]:
        """Steps, finished groups, and tokens of running ones: what a checkpoint is worth writing for."""
        return step, self._workers.counts["groups"], sum(group.num_tokens for group in running)
