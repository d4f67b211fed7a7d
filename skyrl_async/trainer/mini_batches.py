"""Which groups the next optimizer step is made of, and when each may be trained.

GroupBuffer ──the staleness policy lets it go──> a group ──> ... ──> a mini-batch

"""

from collections.abc import AsyncIterator, Sequence

from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.metrics.step import StepFigures
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.trainer.run import Run
from skyrl_async.types import Group


class MiniBatches:
    """Takes groups out of the buffer.

    Args:
        run: size of a mini-batch, staleness policy, streaming and order are its settings; the groups come from its buffer.
        lease: on the devices of training; released while a group is waited for.
        step_advantages: computed for each group alone with streaming, else for all groups of a step.
    """

    def __init__(self, run: Run, *, lease: DeviceLease, step_advantages: StepAdvantages) -> None:
        self._run = run
        self._lease = lease
        self._step_advantages = step_advantages
        self.groups_in_step: list[Group] = []
        """Finished and untrained groups of the step in progress, for checkpoints; whoever trains them clears the list."""

    async def groups(self, figures: StepFigures) -> AsyncIterator[Group]:
        """The groups of the step, each as soon as it may be trained (all at once without streaming). Raises ``ShutdownRequested``."""
        collected: list[Group] = []
        for num_taken in range(self._run.settings.mini_batch_size):
            with self._run.recorder.timed(figures, "wait_for_groups", track="waiting"):
                async with self._run.shutdown.interruptible(wait_for_step=True):
                    group = await self._next_group(self._run.settings.mini_batch_size - num_taken, figures)
            if group is None:
                break
            self.groups_in_step.append(group)
            await self._run.staleness.on_rollout_trained(group.admission_index)
            if self._run.settings.stream_mini_batch:
                yield self._with_advantages([group], figures)[0]
            else:
                collected.append(group)
        if collected:
            for group in self._with_advantages(sorted(collected, key=lambda g: g.admission_index), figures):
                yield group

    def _with_advantages(self, groups: Sequence[Group], figures: StepFigures) -> Sequence[Group]:
        """Groups with advantages. Token counts exclude tokens masked for staleness."""

        def masked_group(group: Group) -> Group:
            return self._run.settings.staleness_policy.masked_group(group, figures.version, figures.max_staleness_steps)

        return self._step_advantages(groups, masked_group)

    async def _next_group(self, num_free: int, figures: StepFigures) -> Group | None:
        """The oldest finished group that the staleness policy lets be trained."""
        while (group := await self._next_finished(num_free, figures)) and self.is_dropped(group.scheduled_version):
            await self._run.workers.requeue_finished(group)
        return group

    async def _next_finished(self, num_free: int, figures: StepFigures) -> Group | None:
        """The oldest finished group that the staleness policy lets go."""

        def is_allowed(group: Group) -> bool:
            if self._run.settings.deterministic:
                return group.admission_index == self._run.staleness.first_open_index()
            return self._run.settings.staleness_policy.may_train(group, self._run.staleness, num_free)

        held_before = self._run.buffer.held_seconds
        must_wait = not self._run.buffer.can_give(is_allowed)
        if must_wait:
            self._lease.release()
        await self._run.staleness.notify_trainer_waiting(must_wait)
        group = await self._run.buffer.get(is_allowed)
        await self._run.staleness.notify_trainer_waiting(False)
        held_seconds = self._run.buffer.held_seconds - held_before
        if held_seconds and group and not self._run.settings.deterministic:
            figures.add_wait(group, held_seconds)
        return group

    def is_dropped(self, scheduled_version: int) -> bool:
        """Whether an open group admitted at this version is not to be waited for."""
        return self._run.settings.staleness_policy.is_dropped(scheduled_version, self._run.staleness)
