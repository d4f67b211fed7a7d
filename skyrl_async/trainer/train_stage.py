"""Trains on prepared groups, one optimizer step after another, as a stage of its own.

    MiniBatches ──group by group──> gradients ──> optimizer step, gather ──TrainedStep──> WeightUpdateStage
                      └ the devices are this stage's, until it waits for groups or engines

Flows in: groups that may be trained. Flows out: optimizer steps whose weights are copied. Does not know how groups come about, nor how
weights reach the engines.
"""

import asyncio
import logging
from collections.abc import Callable

from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.metrics.overlap import OverlapThroughput
from skyrl_async.metrics.step import StepFigures
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.runtime.shutdown import ShutdownRequested
from skyrl_async.runtime.stages import Channel, Lane, Stage
from skyrl_async.trainer.mini_batches import MiniBatches
from skyrl_async.trainer.run import Run, is_due
from skyrl_async.trainer.step_gate import StepGate
from skyrl_async.trainer.weight_update_stage import TrainedStep, WeightUpdateStage
from skyrl_async.training.protocol import WAIT_SECONDS, Policy
from skyrl_async.types import Group

logger = logging.getLogger(__name__)


class TrainStage:
    """Takes optimizer steps until the data or the run ends.

    Args:
        run: its settings say how many steps, and what is saved when; its shutdown request ends the stage.
        policy: is trained.
        mini_batches: the groups; a step that is left keeps its groups there.
        weight_update: gathers each step.
        gate: says when a step may begin.
        lease: on the devices of training.
        step_advantages: notified after each optimizer step.
        validation_seconds: for how long held-out prompts have been played so far.
    """

    def __init__(
        self,
        run: Run,
        *,
        policy: Policy,
        mini_batches: MiniBatches,
        weight_update: WeightUpdateStage,
        gate: StepGate,
        lease: DeviceLease,
        step_advantages: StepAdvantages,
        validation_seconds: Callable[[], float],
    ) -> None:
        self._run = run
        self._settings = run.settings
        self._policy = policy
        self._mini_batches = mini_batches
        self._weight_update = weight_update
        self._gate = gate
        self._lease = lease
        self._step_advantages = step_advantages
        self._beside_validation = OverlapThroughput(validation_seconds)
        self.is_torn = False
        """Whether the policy was left in the midst of an optimizer step: it holds no version."""

    @property
    def throughput_beside_validation(self) -> float | None:
        """See ``FullyAsyncTrainer.throughput_beside_validation``."""
        return self._beside_validation.ratio

    async def run(self, stage: Stage, steps: Channel[TrainedStep]) -> None:
        """Consumes prepared groups; produces trained steps, gathered; waits for groups, and until the copy of the step before is sent."""
        with stage.lane() as lane:
            lane.wait_for_input()
            self._beside_validation.lap()
            figures = self._next_figures()
            while not self._is_done() and not self._run.shutdown.is_requested:
                try:
                    trained = await self._train_step(lane, figures)
                finally:
                    self._lease.release()
                    self._beside_validation.lap()
                if trained is None:
                    break
                lane.wait_for_output()
                figures = self._next_figures()
                await self._hand_on(steps, trained, figures)
                lane.wait_for_input()
        stage.finish()
        steps.close()

    def _is_done(self) -> bool:
        return self._settings.num_steps is not None and self._run.staleness.trained_version >= self._settings.num_steps

    def _next_figures(self) -> StepFigures:
        """Of the step that begins now."""
        return StepFigures(
            version=self._run.staleness.trained_version,
            max_staleness_steps=self._run.staleness.max_staleness_steps,
            began_at=asyncio.get_running_loop().time(),
        )

    async def _hand_on(self, steps: Channel[TrainedStep], trained: TrainedStep, upcoming: StepFigures) -> None:
        """Hand a step on and wait until the next one may begin; that is a part of the ``upcoming`` step, but for the checkpoint."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._gate.handed_on()
        steps.put_nowait(trained)
        await self._gate.until_may_begin(
            all_are_through=is_due(self._settings.checkpoint_interval_steps, trained.version)
        )
        checkpoint_seconds = trained.figures.seconds.get("checkpoint", 0.0)
        upcoming.add_seconds("wait_for_publish", loop.time() - started - checkpoint_seconds)
        upcoming.began_at += checkpoint_seconds
        self._beside_validation.lap(left_out_s=checkpoint_seconds)

    async def _train_step(self, lane: Lane, figures: StepFigures) -> TrainedStep | None:
        """One optimizer step from the next mini-batch; None when no group is left, or the run is to end."""
        version = figures.version + 1
        try:
            async for group in self._mini_batches.groups(figures):
                await self._lease_devices(figures)
                lane.process(group.uid)
                await self._add_gradients(group, figures)
                lane.wait_for_input()
            if figures.groups:
                await self._wait_for_publish(lane, figures)
        except ShutdownRequested:
            logger.warning(
                "step %d is left: %d of its groups were there", version, len(self._mini_batches.groups_in_step)
            )
            return None
        if not figures.groups:
            return None
        await self._lease_devices(figures)
        lane.process(f"step {version}", is_counted=False)
        async with self._gate.stepping():
            policy_values = await self._step(figures)
            trained = TrainedStep(version=version, figures=figures, policy_values=policy_values)
            try:
                await self._weight_update.gather(trained)
            finally:
                figures.add_seconds("step", asyncio.get_running_loop().time() - figures.began_at)
                self._run.recorder.totals.add_step(figures)
        return trained

    async def _step(self, figures: StepFigures) -> dict[str, float]:
        """The optimizer step, with its gradients all in; returns what the policy says of it."""
        version = figures.version + 1
        self.is_torn = True
        with self._run.recorder.timed(figures, "optimizer_step", track="training"):
            policy_values = await self._policy.step(figures.loss_denominator)
            _set_wait_apart(figures, "optimizer_step", policy_values)
        await self._run.dataloader.mark_consumed_uids([(g.epoch, g.uid) for g in figures.groups])
        self._run.recorder.log_groups(figures.version, figures.groups)
        self.is_torn = False
        policy_values |= self._step_advantages.end_step()
        await self._run.staleness.notify_step(version)
        self._mini_batches.groups_in_step.clear()
        return policy_values

    async def _add_gradients(self, group: Group, figures: StepFigures) -> None:
        """Train on a group, without the tokens that the staleness policy masks."""
        version = figures.version
        masked = self._settings.staleness_policy.masked_group(group, version, figures.max_staleness_steps)
        reduced = self._settings.aggregation(masked.trajectories)
        timed = self._run.recorder.timed(figures, "forward_backward", track="training")
        with timed, self._beside_validation.piece(masked.num_sampled_tokens):
            sums = await self._policy.forward_backward(reduced.trajectories, masked.advantages, version)
            _set_wait_apart(figures, "forward_backward", sums)
        num_masked_tokens = group.num_sampled_tokens - masked.num_sampled_tokens
        figures.add_group(masked, sums, num_masked_tokens, reduced.denominator)

    async def _lease_devices(self, figures: StepFigures) -> None:
        """Have the devices, until groups or engines are waited for, or the step is made."""
        if not self._lease.is_held:
            with self._run.recorder.timed(figures, "wait_for_devices", track="waiting"):
                await self._lease.acquire()

    async def _wait_for_publish(self, lane: Lane, figures: StepFigures) -> None:
        """Keep the weights until the gate lets the step begin. Raises ``ShutdownRequested`` where a stop has cut the publish short."""
        if self._gate.may_step:
            figures.add_seconds("wait_for_publish", 0.0)
        else:
            lane.process(f"step {figures.version + 1}", is_counted=False)
            lane.wait_for_output()
            self._lease.release()
            with self._run.recorder.timed(figures, "wait_for_publish", track="waiting"):
                await self._run.staleness.notify_trainer_waiting(True)
                await self._gate.until_may_step()
                await self._run.staleness.notify_trainer_waiting(False)
        if self._run.shutdown.is_requested and self._weight_update.is_cut:
            raise ShutdownRequested


def _set_wait_apart(figures: StepFigures, name: str, answer: dict[str, float]) -> None:
    """Seconds that a call of the policy, timed under ``name``, waited for other calls are no computing; they leave the answer."""
    if waited := answer.pop(WAIT_SECONDS, 0.0):
        figures.add_seconds(name, -waited)
        figures.add_seconds("wait_for_devices", waited)
