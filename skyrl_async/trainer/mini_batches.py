"""Which groups the next optimizer step is made of, and when each may be trained.

    GroupBuffer ──the staleness policy lets it go──> a group ──> ... ──> a mini-batch

Flows in: prepared groups. Flows out: those of a step, oldest admitted first. Does not know what is done with them.
"""

from collections.abc import AsyncIterator, Sequence

from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.step import StepFigures
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.rollout.worker import GenerationWorkers
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.trainer.settings import TrainerSettings
from skyrl_async.types import Group


class MiniBatches:
    """Takes groups out of the buffer.

    Args:
        settings: size, staleness policy, streaming, order.
        buffer, staleness, workers: generation's side.
        recorder: times the waiting.
        stop: ends it early.
        turn: is left while a group is waited for.
        credit: gives advantages to groups, each alone with streaming, else to all of a step.
    """

    def __init__(
        self,
        *,
        settings: TrainerSettings,
        buffer: GroupBuffer,
        staleness: _AsyncStalenessManager,
        workers: GenerationWorkers,
        recorder: Recorder,
        stop: ShutdownRequest,
        turn: DeviceLease,
        credit: StepAdvantages,
    ) -> None:
        self._settings = settings
        self._buffer = buffer
        self._staleness = staleness
        self._workers = workers
        self._recorder = recorder
        self._stop = stop
        self._turn = turn
        self._credit = credit
        self.taken: list[Group] = []
        """Groups of the step in progress: finished and untrained, for checkpoints; whoever trains them clears it."""

    async def groups(self, figures: StepFigures) -> AsyncIterator[Group]:
        """The groups of the step, each as soon as it may be trained (all at once without streaming). Raises ``ShutdownRequested``."""
        collected: list[Group] = []
        for num_taken in range(self._settings.mini_batch_size):
            with self._recorder.timed(figures, "wait_for_groups", track="waiting"):
                async with self._stop.interruptible(wait_for_step=True):
                    group = await self._next_group(self._settings.mini_batch_size - num_taken, figures)
            if group is None:
                break
            self.taken.append(group)
            await self._staleness.on_rollout_trained(group.admission_index)
            if self._settings.stream_mini_batch:
                yield self._credited([group], figures)[0]
            else:
                collected.append(group)
        if collected:
            for group in self._credited(sorted(collected, key=lambda g: g.admission_index), figures):
                yield group

    def _credited(self, groups: Sequence[Group], figures: StepFigures) -> Sequence[Group]:
        """Whole groups; what the staleness policy leaves of them is what counts."""

        def masked_group(group: Group) -> Group:
            return self._settings.staleness_policy.masked_group(group, figures.version, figures.max_staleness_steps)

        return self._credit(groups, masked_group)

    async def _next_group(self, num_free: int, figures: StepFigures) -> Group | None:
        """The oldest finished group that the staleness policy lets be trained."""
        while (group := await self._next_finished(num_free, figures)) and self.is_dropped(group.scheduled_version):
            await self._workers.requeue_finished(group)
        return group

    async def _next_finished(self, num_free: int, figures: StepFigures) -> Group | None:
        """The oldest finished group that the staleness policy lets go."""

        def is_allowed(group: Group) -> bool:
            if self._settings.deterministic:
                return group.admission_index == self._staleness.first_open_index()
            return self._settings.staleness_policy.may_train(group, self._staleness, num_free)

        held_before = self._buffer.held_seconds
        must_wait = not self._buffer.can_give(is_allowed)
        if must_wait:
            self._turn.leave()
        await self._staleness.notify_trainer_waiting(must_wait)
        group = await self._buffer.get(is_allowed)
        await self._staleness.notify_trainer_waiting(False)
        held_seconds = self._buffer.held_seconds - held_before
        if held_seconds and group and not self._settings.deterministic:
            figures.add_wait(group, held_seconds)
        return group

    def is_dropped(self, scheduled_version: int) -> bool:
        """Whether an open group admitted at this version is not to be waited for."""
        return self._settings.staleness_policy.is_dropped(scheduled_version, self._staleness)
