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
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.metrics.overlap import OverlapThroughput
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.step import StepFigures
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.runtime.shutdown import ShutdownRequest, ShutdownRequested
from skyrl_async.runtime.stages import Channel, Lane, Stage
from skyrl_async.trainer.mini_batches import MiniBatches
from skyrl_async.trainer.settings import TrainerSettings, is_due
from skyrl_async.trainer.weight_update_stage import TrainedStep, WeightUpdateStage
from skyrl_async.training.protocol import WAIT_SECONDS, Policy
from skyrl_async.types import Group

logger = logging.getLogger(__name__)


class TrainStage:
    """Takes optimizer steps until the data or the run ends.

    Args:
        settings: how many steps, and what is saved when.
        policy: is trained.
        mini_batches: the groups.
        param_update: gathers each step, and lets the next one follow.
        dataloader, staleness: are told what is trained.
        credit: is told when a step ends.
        recorder: times the step.
        stop: ends the stage; a step that is left keeps its groups in ``mini_batches.taken``.
        turn: the devices that training shares with others.
        validation_seconds: for how long held-out prompts have been played so far.
    """

    def __init__(
        self,
        *,
        settings: TrainerSettings,
        policy: Policy,
        mini_batches: MiniBatches,
        param_update: WeightUpdateStage,
        dataloader: _AsyncDataloader,
        staleness: _AsyncStalenessManager,
        credit: StepAdvantages,
        recorder: Recorder,
        stop: ShutdownRequest,
        turn: DeviceLease,
        validation_seconds: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._mini_batches = mini_batches
        self._param_update = param_update
        self._dataloader = dataloader
        self._staleness = staleness
        self._credit = credit
        self._recorder = recorder
        self._stop = stop
        self._turn = turn
        self._beside_validation = OverlapThroughput(validation_seconds)
        self.policy_step: int | None = 0
        """Optimizer steps that the policy holds; None in the midst of one. Set it before ``run`` to go on."""

    @property
    def throughput_beside_validation(self) -> float | None:
        """See ``FullyAsyncTrainer.throughput_beside_validation``."""
        return self._beside_validation.ratio

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._staleness.version if self.policy_step is None else self.policy_step

    async def run(self, stage: Stage, steps: Channel[TrainedStep]) -> None:
        """Consumes prepared groups; produces trained steps, gathered; waits for groups, and until the copy of the step before is sent."""
        with stage.lane() as lane:
            lane.wait_for_input()
            self._beside_validation.lap()
            figures = self._next_figures()
            while not self._is_done() and not self._stop.is_requested:
                try:
                    trained = await self._train_step(lane, figures)
                finally:
                    self._turn.leave()
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
        return self._settings.num_steps is not None and self.step >= self._settings.num_steps

    def _next_figures(self) -> StepFigures:
        """Of the step that begins now."""
        return StepFigures(
            version=self.step,
            max_staleness_steps=self._staleness.max_staleness_steps,
            began_at=asyncio.get_running_loop().time(),
        )

    async def _hand_on(self, steps: Channel[TrainedStep], trained: TrainedStep, upcoming: StepFigures) -> None:
        """Wait until a step may follow those on their way to the engines, and that one is saved where it is due.

        That is a part of the ``upcoming`` step, but for the checkpoint.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        await steps.put(trained)
        if is_due(self._settings.checkpoint_interval_steps, trained.version):
            await steps.join()
        checkpoint_seconds = trained.figures.seconds.get("checkpoint", 0.0)
        upcoming.add_seconds("wait_for_publish", loop.time() - started - checkpoint_seconds)
        upcoming.began_at += checkpoint_seconds
        self._beside_validation.lap(left_out_s=checkpoint_seconds)

    async def _train_step(self, lane: Lane, figures: StepFigures) -> TrainedStep | None:
        """One optimizer step from the next mini-batch; None when no group is left, or the run is to end."""
        version = figures.version + 1
        try:
            async for whole in self._mini_batches.groups(figures):
                await self._take_turn(figures)
                lane.process(whole.uid)
                await self._add_gradients(whole, figures)
                lane.wait_for_input()
            if figures.groups:
                await self._wait_for_publish(lane, figures)
        except ShutdownRequested:
            logger.warning("step %d is left: %d of its groups were there", version, len(self._mini_batches.taken))
            return None
        if not figures.groups:
            return None
        await self._take_turn(figures)
        lane.process(f"step {version}", is_counted=False)
        async with self._param_update.stepping:
            policy_values = await self._step(figures)
            trained = TrainedStep(version=version, figures=figures, policy_values=policy_values)
            try:
                await self._param_update.gather(trained)
            finally:
                figures.add_seconds("step", asyncio.get_running_loop().time() - figures.began_at)
                self._recorder.totals.add_step(figures)
        return trained

    async def _step(self, figures: StepFigures) -> dict[str, float]:
        """The optimizer step, with its gradients all in; returns what the policy says of it."""
        version = figures.version + 1
        self.policy_step = None
        with self._recorder.timed(figures, "optimizer_step", track="training"):
            policy_values = await self._policy.step(figures.loss_denominator)
            _set_wait_apart(figures, "optimizer_step", policy_values)
        await self._dataloader.mark_consumed_uids([(g.epoch, g.uid) for g in figures.groups])
        self._recorder.log_groups(figures.version, figures.groups)
        self.policy_step = version
        policy_values |= self._credit.end_step()
        await self._staleness.notify_step(version)
        self._mini_batches.taken.clear()
        return policy_values

    async def _add_gradients(self, whole: Group, figures: StepFigures) -> None:
        """Train on a group, or on what the staleness policy leaves of it."""
        version = figures.version
        group = self._settings.staleness_policy.masked_group(whole, version, figures.max_staleness_steps)
        weighed = self._settings.aggregation(group.trajectories)
        timed = self._recorder.timed(figures, "forward_backward", track="training")
        with timed, self._beside_validation.piece(group.num_sampled_tokens):
            sums = await self._policy.forward_backward(weighed.trajectories, group.advantages, version)
            _set_wait_apart(figures, "forward_backward", sums)
        num_masked_tokens = whole.num_sampled_tokens - group.num_sampled_tokens
        figures.add_group(group, sums, num_masked_tokens, weighed.denominator)

    async def _take_turn(self, figures: StepFigures) -> None:
        """Have the devices, until groups or engines are waited for, or the step is made."""
        if not self._turn.is_held:
            with self._recorder.timed(figures, "wait_for_devices", track="waiting"):
                await self._turn.take()

    async def _wait_for_publish(self, lane: Lane, figures: StepFigures) -> None:
        """Keep the weights until their copy is sent, and compared where that is due. Raises ``ShutdownRequested``."""
        if self._param_update.may_step:
            figures.add_seconds("wait_for_publish", 0.0)
        else:
            lane.process(f"step {figures.version + 1}", is_counted=False)
            lane.wait_for_output()
            self._turn.leave()
            with self._recorder.timed(figures, "wait_for_publish", track="waiting"):
                await self._staleness.notify_trainer_waiting(True)
                await self._param_update.wait_until_step()
                await self._staleness.notify_trainer_waiting(False)
        if self._stop.is_requested and self._param_update.is_cut:
            raise ShutdownRequested


def _set_wait_apart(figures: StepFigures, name: str, answer: dict[str, float]) -> None:
    """Seconds that a call of the policy, timed under ``name``, waited for other calls are no computing; they leave the answer."""
    if waited := answer.pop(WAIT_SECONDS, 0.0):
        figures.add_seconds(name, -waited)
        figures.add_seconds("wait_for_devices", waited)
