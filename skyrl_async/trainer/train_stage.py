"""Trains on prepared groups, one optimizer step after another, as a stage of its own.

    GroupBuffer ──group by group──> gradients ──> optimizer step, gather ──TrainedStep──> WeightUpdateStage
                      └ the devices are this stage's, until it waits for groups or engines

Knows neither how groups are generated nor how weights reach the engines.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from skyrl_async.algorithms.aggregation import Aggregation
from skyrl_async.algorithms.guard import Guard
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.columns import Logprobs
from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.trainer import Schedule
from skyrl_async.metrics.overlap import OverlapThroughput
from skyrl_async.metrics.step import StepFigures, effective_shares
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.runtime.shutdown import ShutdownRequested
from skyrl_async.runtime.stages import Channel, Lane, StageState
from skyrl_async.runtime.tasks import task_group
from skyrl_async.trainer.critic import CriticTraining
from skyrl_async.trainer.run import Run, is_due
from skyrl_async.trainer.weight_update_stage import TrainedStep, WeightUpdateStage
from skyrl_async.training.protocol import LOGPROBS, POLICY_COLUMNS, WAIT_SECONDS, Policy
from skyrl_async.types import Group

logger = logging.getLogger(__name__)


class TrainStage:
    """Takes optimizer steps until the data or the run ends.

    Args:
        run: its settings say how many steps, and what is saved when; its shutdown request ends the stage.
        policy: the model to train.
        weight_update: copies the weights of each step.
        lease: a lease on the training devices.
        step_advantages: computes advantages; notified after each optimizer step.
        critic: trained beside the policy; None: there is none.
    """

    def __init__(
        self,
        run: Run,
        *,
        policy: Policy,
        weight_update: WeightUpdateStage,
        lease: DeviceLease,
        step_advantages: StepAdvantages,
        critic: CriticTraining | None,
    ) -> None:
        self._run = run
        self._config = config = run.config.trainer
        is_whole = config.stream_mini_batch is False or step_advantages.need_mini_batch or config.steps_per_batch > 1
        self._streams = config.schedule is Schedule.fully_async and not is_whole
        self._aggregation = Aggregation(
            name=config.algorithm.loss_reduction.name,
            max_seq_len=config.algorithm.max_seq_len,
            splits_samples=config.algorithm.split_sample_weight,
        )
        self._guard = from_section(Guard, config.guard, scales_lr=config.guard.scale_lr_by_ess)
        self._policy = policy
        self._weight_update = weight_update
        self._lease = lease
        self._step_advantages = step_advantages
        self._critic = critic
        self.beside_validation = OverlapThroughput(
            lambda: run.board.stage("validation").seconds_in(StageState.PROCESSING)
        )
        """Training throughput during validation, relative to the throughput without."""
        self.is_torn = False
        """Whether the steps of a batch have begun and not ended: the policy holds no version then."""

    async def run(self, steps: Channel[TrainedStep]) -> None:
        """Consumes prepared groups; produces trained steps with copied weights; waits for groups and for the gate; unblocked by both."""
        stage = self._run.board.stage("train")
        with stage.lane() as lane:
            lane.wait_for_input()
            self.beside_validation.lap()
            figures = self._next_figures()
            while not self._is_done() and not self._run.shutdown.is_requested:
                try:
                    trained = await self._train_step(lane, figures)
                finally:
                    self._lease.release()
                    self.beside_validation.lap()
                if trained is None:
                    break
                lane.wait_for_output()
                figures = self._next_figures()
                await self._hand_on(steps, trained, figures)
                lane.wait_for_input()
        stage.finish()
        steps.close()

    def _is_done(self) -> bool:
        return self._config.num_steps is not None and self._run.staleness.trained_version >= self._config.num_steps

    def _next_figures(self) -> StepFigures:
        """Begin the figures of the next step."""
        return StepFigures(
            trained_version=self._run.staleness.trained_version,
            max_staleness_steps=self._run.staleness.max_staleness_steps,
            num_steps=self._config.steps_per_batch,
            window_steps=self._run.staleness.window_steps,
            began_at=asyncio.get_running_loop().time(),
        )

    async def _hand_on(self, steps: Channel[TrainedStep], trained: TrainedStep, upcoming: StepFigures) -> None:
        """Hand a step on and wait until the next one may begin. The wait counts for the ``upcoming`` step, without the checkpoint."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._run.gate.handed_on()
        steps.put_nowait(trained)
        await self._run.gate.until_may_begin(
            all_are_through=is_due(
                self._config.checkpoint_interval_steps, trained.version, self._config.steps_per_batch
            )
        )
        checkpoint_seconds = trained.figures.seconds.get("checkpoint", 0.0)
        upcoming.add_seconds("wait_for_publish", loop.time() - started - checkpoint_seconds)
        upcoming.began_at += checkpoint_seconds
        self.beside_validation.lap(left_out_s=checkpoint_seconds)

    async def _train_step(self, lane: Lane, figures: StepFigures) -> TrainedStep | None:
        """Take the optimizer steps of the next batch, most often one; None when no group is left, or on a shutdown."""
        version, batch = figures.version, list[Group]()
        async with AsyncExitStack() as stepping:
            try:
                async for group in self._groups(figures):
                    if self._is_mini_batch(batch):
                        await self._step_within_batch(lane, figures, stepping)
                    batch.append(group)
                    await self._train_group(lane, group, figures)
                await self._train_again(lane, batch, figures, stepping)
                if figures.groups:
                    await self._begin_to_step(lane, figures, stepping)
            except ShutdownRequested:
                num_groups = len(self._run.groups_in_step)
                logger.warning("step %d is left: %d of its groups had arrived", version, num_groups)
                return None
            if not figures.groups:
                return None
            lane.process(f"step {version}", is_counted=False)
            policy_values = await self._step(figures)
            trained = TrainedStep(version=version, figures=figures, policy_values=policy_values)
            try:
                await self._weight_update.gather(trained)
            finally:
                figures.add_seconds("step", asyncio.get_running_loop().time() - figures.began_at)
                self._run.recorder.totals.add_step(figures)
        return trained

    def _num_missing_steps(self, num_groups: int) -> int:
        """Optimizer steps that a batch of so few groups, at the end of the data, does not take."""
        num_steps = self._config.update_epochs_per_batch * math.ceil(num_groups / self._config.policy_mini_batch_size)
        return self._config.steps_per_batch - num_steps

    def _is_mini_batch(self, groups: Sequence[Group]) -> bool:
        """Whether these groups of a batch end with a whole mini-batch."""
        return bool(groups) and len(groups) % self._config.policy_mini_batch_size == 0

    async def _train_again(
        self, lane: Lane, batch: Sequence[Group], figures: StepFigures, stepping: AsyncExitStack
    ) -> None:
        """The passes over a batch after its first one, without the last optimizer step."""
        for _ in range(1, self._config.update_epochs_per_batch):
            for index, group in enumerate(batch):
                if index % self._config.policy_mini_batch_size == 0:
                    await self._step_within_batch(lane, figures, stepping)
                await self._train_group(lane, group, figures, is_again=True)

    async def _train_group(self, lane: Lane, group: Group, figures: StepFigures, *, is_again: bool = False) -> None:
        await self._lease_devices(figures)
        with lane.processing(group.uid, is_counted=not is_again):
            await self._add_gradients(group, figures, is_again=is_again)

    async def _step_within_batch(self, lane: Lane, figures: StepFigures, stepping: AsyncExitStack) -> None:
        """Take an optimizer step that others of its batch follow. All groups of the batch are there: a shutdown lets it end."""
        await self._begin_to_step(lane, figures, stepping)
        await self._optimizer_step(figures)

    async def _begin_to_step(self, lane: Lane, figures: StepFigures, stepping: AsyncExitStack) -> None:
        """Before a batch's first optimizer step: wait until the weights may change. From here on the batch ends, whatever fails elsewhere.

        Raises ``ShutdownRequested`` where a shutdown has cut the last publish short.
        """
        if not self.is_torn:
            await self._wait_for_publish(lane, figures)
            await self._lease_devices(figures)
            await stepping.enter_async_context(self._run.gate.stepping())

    async def _groups(self, figures: StepFigures) -> AsyncIterator[Group]:
        """Yield the groups of the step, each as soon as it may be trained (all at once without streaming). Raises ``ShutdownRequested``."""
        collected: list[Group] = []
        for num_taken in range(self._config.batch_size):
            with self._run.recorder.timed(figures, "wait_for_groups", track="waiting"):
                async with self._run.shutdown.interruptible(wait_for_step=True):
                    group = await self._next_group(self._config.batch_size - num_taken, figures)
            if group is None:
                break
            self._run.groups_in_step.append(group)
            await self._run.staleness.on_rollout_trained(group.admission_index)
            collected.append(group)
            if self._streams:
                yield self._with_advantages([collected.pop()], figures)[0]
        if not self._streams:
            figures.num_skipped_steps = self._num_missing_steps(len(collected))
        for group in self._with_advantages(sorted(collected, key=lambda g: g.admission_index), figures):
            yield group

    def _with_advantages(self, groups: Sequence[Group], figures: StepFigures) -> Sequence[Group]:
        """Groups with advantages. Token counts exclude tokens masked for staleness."""
        return self._step_advantages(groups, lambda group: self._masked(group, figures)) if groups else ()

    def _masked(self, group: Group, figures: StepFigures) -> Group:
        """The group without the tokens that the staleness policy masks."""
        policy = self._run.staleness_policy
        return policy.masked_group(group, figures.last_version, figures.max_staleness_steps)

    async def _next_group(self, num_free: int, figures: StepFigures) -> Group | None:
        """Return the oldest finished group that may be trained; requeue groups that the staleness policy drops."""
        run, policy = self._run, self._run.staleness_policy

        def is_allowed(group: Group) -> bool:
            if self._config.deterministic:
                return group.admission_index == run.staleness.first_open_index()
            return policy.may_train(group, run.staleness, num_free)

        while True:
            held_before, must_wait = run.buffer.held_seconds, not run.buffer.can_give(is_allowed)
            if must_wait:
                self._lease.release()
            await run.staleness.notify_trainer_waiting(must_wait)
            group = await run.buffer.get(is_allowed)
            await run.staleness.notify_trainer_waiting(False)
            held_seconds = run.buffer.held_seconds - held_before
            if held_seconds and group and not self._config.deterministic:
                figures.add_wait(group, held_seconds)
            if group is None or not policy.is_dropped(group.scheduled_version, run.staleness):
                return group
            await run.workers.requeue_finished(group)

    async def _step(self, figures: StepFigures) -> dict[str, float]:
        """Take the batch's last optimizer step after all gradients are added; returns the policy's values, by metric name."""
        policy_values = await self._optimizer_step(figures)
        await self._run.dataloader.mark_consumed_uids([(g.epoch, g.uid) for g in figures.groups])
        self._run.recorder.record_step(figures)
        self.is_torn = False
        policy_values |= self._step_advantages.end_step()
        await self._run.staleness.notify_step(figures.version)
        self._run.groups_in_step.clear()
        return policy_values

    async def _optimizer_step(self, figures: StepFigures) -> dict[str, float]:
        """Have the policy, and the critic, take a step with the gradients that were added; returns the policy's values."""
        self.is_torn = True
        lr_scale = self._guard.lr_scale(effective_shares(figures.step_sums))
        if self._critic is not None and figures.current_version < self._critic.warmup_steps:
            lr_scale = 0.0
        elif not lr_scale:
            version, figures.num_refused_steps = figures.current_version + 1, figures.num_refused_steps + 1
            logger.warning("step %d is refused: its effective sample size is below trainer.guard.min_ess", version)
        figures.num_untaken_steps += not lr_scale
        async with self._beside_critic(figures, CriticTraining.step):
            with self._run.recorder.timed(figures, "optimizer_step", track="training"):
                policy_values = await self._policy.step(figures.loss_denominator, lr_scale)
                _set_wait_apart(figures, "optimizer_step", policy_values)
        policy_values["lr_scale"] = figures.lr_scale = min(figures.lr_scale, lr_scale)
        figures.end_optimizer_step()
        return policy_values

    async def _add_gradients(self, group: Group, figures: StepFigures, *, is_again: bool) -> None:
        """Train on a group, without the tokens that the staleness policy masks."""
        masked = self._masked(group, figures)
        reduced = self._aggregation(masked.trajectories)
        timed = self._run.recorder.timed(figures, "forward_backward", track="training")
        piece = self.beside_validation.piece(masked.num_sampled_tokens)
        async with self._beside_critic(figures, lambda critic, figures: critic.add_gradients(masked, figures)):
            with timed, piece:
                rows = [row.with_only(*POLICY_COLUMNS) for row in reduced.trajectories]
                sums = await self._policy.forward_backward(rows, masked.advantages, figures.current_version)
                _set_wait_apart(figures, "forward_backward", sums)
        logprobs = sums.pop(LOGPROBS, None)
        if is_again:
            figures.add_pass(masked, sums, reduced.denominator)
            return
        masked = _with_logprobs(masked.without_teacher_top(), logprobs, figures.current_version)
        num_masked_tokens = group.num_sampled_tokens - masked.num_sampled_tokens
        figures.add_group(masked, sums, num_masked_tokens, reduced.denominator)

    @asynccontextmanager
    async def _beside_critic(
        self, figures: StepFigures, call: Callable[[CriticTraining, StepFigures], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Make a call of the critic, where there is one, while the block runs; ends with both."""
        if (critic := self._critic) is None:
            yield
            return

        async def timed() -> None:
            with self._run.recorder.timed(figures, "critic", track="critic"):
                await call(critic, figures)

        async with task_group() as tasks:
            tasks.create_task(timed(), name="critic")
            yield

    async def _lease_devices(self, figures: StepFigures) -> None:
        """Hold the devices until the stage waits for groups or engines, or has taken the step."""
        if not self._lease.is_held:
            with self._run.recorder.timed(figures, "wait_for_devices", track="waiting"):
                await self._lease.acquire()

    async def _wait_for_publish(self, lane: Lane, figures: StepFigures) -> None:
        """Wait until the gate lets the step begin. Raises ``ShutdownRequested`` where a shutdown has cut the publish short."""
        if self._run.gate.may_step:
            figures.add_seconds("wait_for_publish", 0.0)
        else:
            lane.process(f"step {figures.version}", is_counted=False)
            lane.wait_for_output()
            self._lease.release()
            with self._run.recorder.timed(figures, "wait_for_publish", track="waiting"):
                await self._run.staleness.notify_trainer_waiting(True)
                await self._run.gate.until_may_step()
                await self._run.staleness.notify_trainer_waiting(False)
        if self._run.shutdown.is_requested and self._weight_update.is_cut:
            raise ShutdownRequested


def _with_logprobs(group: Group, logprobs: Sequence[Logprobs] | None, version: int) -> Group:
    """The group with the trainer's log-probs in the rows whose algorithm has not asked for them before."""
    if logprobs is None:
        return group
    rows = zip(group.trajectories, logprobs, strict=True)
    return replace(
        group,
        trajectories=tuple(
            row if row.old_logprobs is not None else replace(row, old_logprobs=values, old_version=version)
            for row, values in rows
        ),
    )


def _set_wait_apart(figures: StepFigures, name: str, answer: dict[str, float]) -> None:
    """Count the seconds that a policy call, timed under ``name``, waited for other calls as waiting; remove them from the answer."""
    if waited := answer.pop(WAIT_SECONDS, 0.0):
        figures.add_seconds(name, -waited)
        figures.add_seconds("wait_for_devices", waited)
