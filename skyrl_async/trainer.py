"""The fully asynchronous training loop: groups in, policy versions out.

    dataloader ──> generate ──> rollout ──> reward ──> ref_logp, logp ──> train ──> param_update ──> validation
        ^                         (GenerationWorkers)   (Preparation)    group by     │ new policy version
        └─────── _AsyncStalenessManager <───────────────────────────────  group ──────┘

Each of them is a stage in one task group. Flows in: finished groups. Flows out: versions, metrics, checkpoints, evaluations. Knows
when each happens, and nothing of how.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from skyrl_async.algorithms.crediting import Credit
from skyrl_async.checkpoint import Checkpointer
from skyrl_async.concurrency import first_failure
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.device_turns import Sitting
from skyrl_async.errors import CheckpointError, GenerationError, NoEngineError, PublishError, SkyRLAsyncError
from skyrl_async.evaluation import EvaluationResult, Evaluator
from skyrl_async.metrics.overlap import OverlapThroughput
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.step import RunTotals, StepFigures
from skyrl_async.metrics.trace import Trace
from skyrl_async.mini_batches import MiniBatches
from skyrl_async.param_update import ParamUpdate, Publisher, TrainedStep
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.overlong import Shape
from skyrl_async.rollout.preparation import Preparation, Prepare, reward_with
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.rollout.watchdog import Watchdog
from skyrl_async.rollout.worker import GenerationWorkers
from skyrl_async.saving import RunSaver
from skyrl_async.stage_board import StageBoard
from skyrl_async.stages import Channel, Lane, StageStatus
from skyrl_async.stopping import StopAsked, StopRequest
from skyrl_async.trainer_settings import TrainerSettings, is_due
from skyrl_async.training.protocol import WAIT_SECONDS, Policy
from skyrl_async.types import Group
from skyrl_async.validation import Validation

logger = logging.getLogger(__name__)

__all__ = ["FullyAsyncTrainer", "TrainerSettings"]

_NOT_OF_TRAINING = (GenerationError, NoEngineError, PublishError)
"""Failures that leave what is trained as it is."""


class FullyAsyncTrainer:
    """Trains while generation goes on.

    Args:
        settings: the schedule.
        dataloader, staleness, buffer, workers: generation's side.
        policy, publisher: training's side.
        evaluator: plays held-out prompts; None evaluates nothing.
        checkpointer: None writes none.
        advantages: rewards of a group -> one advantage per sample; the work of the reward stage. None: ``credit`` gives them.
        reward_shapes: make the rewards that advantages are computed of, one after the other.
        credit: gives advantages to groups as they are trained: to one at a time, or without streaming to all of a step. None: the
            reward stage does.
        prepare: further stages between a finished group and training: name -> work, in order.
        board: of the stages, those of generation included.
        turn: the devices that training shares with others; None: with nobody.
        log: takes (step, values) for each step.
        trace: one span per stage.
        log_groups: takes (policy version trained at, groups) of each step.
        stop: ends the run early; see ``run``.
        watchdog: names what takes too long; None leaves that to others.
    """

    def __init__(
        self,
        *,
        settings: TrainerSettings,
        dataloader: _AsyncDataloader,
        staleness: _AsyncStalenessManager,
        buffer: GroupBuffer,
        workers: GenerationWorkers,
        policy: Policy,
        publisher: Publisher,
        evaluator: Evaluator | None,
        checkpointer: Checkpointer | None,
        advantages: Callable[[Sequence[float]], Sequence[float]] | None,
        reward_shapes: Sequence[Shape] = (),
        log: Callable[[int, dict[str, float]], None],
        trace: Trace,
        log_groups: Callable[[int, Sequence[Group]], None] = lambda version, groups: None,
        stop: StopRequest | None = None,
        watchdog: Watchdog | None = None,
        prepare: Mapping[str, Prepare] | None = None,
        board: StageBoard | None = None,
        turn: Sitting | None = None,
        credit: Credit | None = None,
    ) -> None:
        self._settings = settings
        self._dataloader = dataloader
        self._staleness = staleness
        self._buffer = buffer
        self._workers = workers
        self._policy = policy
        self._trace = trace
        self._credit = credit or Credit()
        self._watchdog = watchdog
        self._recorder = Recorder(log=log, trace=trace, log_groups=log_groups, generation_counts=lambda: workers.counts)
        self._stop = stop or StopRequest()
        self._saver = RunSaver(
            dataloader=dataloader,
            staleness=staleness,
            buffer=buffer,
            workers=workers,
            recorder=self._recorder,
            checkpointer=checkpointer,
            credit=self._credit,
            stop=self._stop,
        )
        self._board = board or StageBoard()
        self._preparation = Preparation(
            buffer, {"reward": reward_with(advantages, reward_shapes), **(prepare or {})}, self._board
        )
        self._trained = Channel[TrainedStep](1)
        self._turn = turn or Sitting()
        self._validation = Validation(
            evaluator=evaluator,
            settings=settings.validation,
            staleness=staleness,
            recorder=self._recorder,
            stop=self._stop,
        )
        self._mini_batches = MiniBatches(
            settings=settings,
            buffer=buffer,
            staleness=staleness,
            workers=workers,
            recorder=self._recorder,
            stop=self._stop,
            turn=self._turn,
            credit=self._credit,
        )
        self._param_update = ParamUpdate(
            settings=settings,
            policy=policy,
            publisher=publisher,
            staleness=staleness,
            workers=workers,
            mini_batches=self._mini_batches,
            validation=self._validation,
            saver=self._saver,
            recorder=self._recorder,
            stop=self._stop,
            values=self._state_values,
        )
        self._policy_step: int | None = 0
        """Optimizer steps that the policy holds; None in the midst of one."""
        self._beside_validation = OverlapThroughput(
            lambda: self._board.stage("validation").statistics()["processing_seconds"]
        )
        self._newest: list[TrainedStep] = []
        """Completed optimizer steps that were perhaps not logged yet."""
        self.first_evaluation: EvaluationResult | None = None
        """Of this process, before it trains."""
        self.reward_after: float | None = None
        self.is_complete = False
        """Whether training has come to its end, and only the last evaluation may follow."""
        self.evaluation_failure: SkyRLAsyncError | None = None
        """Of the last evaluation; it leaves the run complete."""

    @property
    def totals(self) -> RunTotals:
        """Of the run, over its resumptions."""
        return self._recorder.totals

    def stages(self) -> list[StageStatus]:
        """Where each stage is now, in the order of the data's flow."""
        return self._board.statuses()

    @property
    def throughput_beside_validation(self) -> float | None:
        """Tokens trained per second while held-out prompts were played, over those per second without; None where unknown."""
        return self._beside_validation.ratio

    @property
    def checkpoint_failure(self) -> CheckpointError | None:
        """Why the last checkpoint was not written; None when it was."""
        return self._saver.failure

    @property
    def newest_checkpoint(self) -> Path | None:
        """The one written or taken up last."""
        return self._saver.newest

    @property
    def step(self) -> int:
        """Policy version: completed optimizer steps that the engines have acknowledged."""
        return self._staleness.version

    @property
    def trained_step(self) -> int:
        """Completed optimizer steps: one more than ``step`` where the last one was not published."""
        return self.step if self._policy_step is None else self._policy_step

    async def resume(self, checkpoint: Path, *, evaluated_versions: Collection[int] = ()) -> None:
        """Take up a checkpoint, before ``run``. Raises ``CheckpointError``; see ``RunSaver.take_up``.

        ``evaluated_versions`` are those whose evaluations are on record, perhaps since the checkpoint was written: one that was due
        and is on none is made up for.
        """
        await self._saver.take_up(self._policy, checkpoint, holds_bound=self._settings.staleness_policy.bounds_groups)
        self._policy_step = self._saver.step
        known = (version for version in evaluated_versions if version <= self.trained_step)
        self.totals.evaluated_version = max([self.totals.evaluated_version, *known])

    async def run(self) -> None:
        """Publish, evaluate, train to the end, evaluate again.

        Consumes finished groups; produces versions; waits for groups; unblocked by the workers. Whatever fails ends the run
        with that error, every task with it.

        Once ``stop`` is asked for, the step in progress is finished if its groups come in time, a checkpoint is written, and
        nothing new begins; a step that is left keeps its groups, finished and untrained, in the checkpoint. What it was asked for
        because of is raised then.
        """
        try:
            async with self._watchdog.watching() if self._watchdog else nullcontext():
                await self._run()
                if self.evaluation_failure is None:
                    self._board.stage("validation").finish()
        except SkyRLAsyncError as error:
            if self._stop.failure is None:
                raise
            logger.warning("after that: %s", error)
        if self._stop.failure is not None:
            if not self.is_complete:
                raise self._stop.failure
            self.evaluation_failure = self._stop.failure

    async def _run(self) -> None:
        await self._param_update.publish_first(self.step)
        validation_stage = self._board.stage("validation")
        if self._settings.validates_only or self.totals.reward_before is None:
            self.first_evaluation = await self._validation.before_training(validation_stage)
        if self._settings.validates_only:
            return
        if self.first_evaluation is not None:
            self.totals.reward_before = self.first_evaluation.reward
        try:
            async with asyncio.TaskGroup() as tasks:
                self._recorder.start()
                generating = tasks.create_task(self._failing_between_steps(self._workers.run()), name="generation")
                preparing = tasks.create_task(self._preparation.run(), name="preparation")
                updating = tasks.create_task(
                    self._param_update.run(self._board.stage("param_update"), self._trained), name="param_update"
                )
                validating = self._validation.run(validation_stage)
                tasks.create_task(self._failing_between_steps(validating), name="validation")
                await self._train()
                await updating
                await self._param_update.publish_the_rest()
                await self._save_at_the_end()
                generating.cancel()
                preparing.cancel()
        except BaseExceptionGroup as failures:
            failure = first_failure(failures)
            if isinstance(failure, _NOT_OF_TRAINING):
                self._log_what_is_trained()
                await self._save_what_is_trained()
            raise failure from failure.__cause__
        finally:
            await self._workers.give_back()
        if self._stop.is_asked:
            return
        self.is_complete = True
        self._recorder.count_generation()
        self.totals.wasted_tokens += sum(group.num_sampled_tokens for group in self._buffer.snapshot())
        try:
            if after := await self._validation.at_the_end(validation_stage):
                self.reward_after = after.reward
        except _NOT_OF_TRAINING as error:
            logger.exception("the last evaluation failed; training is complete")
            self.evaluation_failure = error

    async def _failing_between_steps(self, running: Coroutine[Any, Any, None]) -> None:
        """What fails elsewhere waits for an optimizer step in progress: one that is cut off would leave nothing to save."""
        try:
            await running
        except Exception as failure:
            root = first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure
            if isinstance(root, _NOT_OF_TRAINING):
                await self._saver.collect_open_tokens()
                await self._param_update.stepping.acquire()
            raise

    def _is_done(self) -> bool:
        return self._settings.num_steps is not None and self.trained_step >= self._settings.num_steps

    async def _train(self) -> None:
        """Consumes prepared groups; produces trained steps, gathered; waits for groups, and until the copy of the step before is sent."""
        stage = self._board.stage("train")
        with stage.lane() as lane:
            lane.wait_for_input()
            self._beside_validation.lap()
            figures = self._next_figures()
            while not self._is_done() and not self._stop.is_asked:
                try:
                    trained = await self._train_step(lane, figures)
                finally:
                    self._turn.leave()
                    self._beside_validation.lap()
                if trained is None:
                    break
                lane.wait_for_output()
                figures = self._next_figures()
                await self._hand_on(trained, figures)
                lane.wait_for_input()
        stage.finish()
        self._trained.close()

    def _next_figures(self) -> StepFigures:
        """Of the step that begins now."""
        return StepFigures(
            version=self.trained_step,
            max_staleness_steps=self._staleness.max_staleness_steps,
            began_at=asyncio.get_running_loop().time(),
        )

    async def _hand_on(self, trained: TrainedStep, upcoming: StepFigures) -> None:
        """Wait until a step may follow those on their way to the engines, and that one is saved where it is due.

        That is a part of the ``upcoming`` step, but for the checkpoint.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self._trained.put(trained)
        if is_due(self._settings.checkpoint_interval_steps, trained.version):
            await self._trained.join()
        checkpoint_seconds = trained.figures.seconds.get("checkpoint", 0.0)
        upcoming.add_seconds("wait_for_publish", loop.time() - started - checkpoint_seconds)
        upcoming.began_at += checkpoint_seconds

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
        except StopAsked:
            logger.warning("step %d is left: %d of its groups were there", version, len(self._mini_batches.taken))
            return None
        if not figures.groups:
            return None
        await self._take_turn(figures)
        lane.process(f"step {version}", is_counted=False)
        async with self._param_update.stepping:
            policy_values = await self._step(figures)
            trained = TrainedStep(version=version, figures=figures, policy_values=policy_values)
            self._newest = [*(step for step in self._newest if not self._param_update.has_logged(step)), trained]
            try:
                trained.gathered_at = await self._param_update.gather(version)
            finally:
                figures.add_seconds("step", asyncio.get_running_loop().time() - figures.began_at)
                self.totals.add_step(figures)
        return trained

    async def _step(self, figures: StepFigures) -> dict[str, float]:
        """The optimizer step, with its gradients all in; returns what the policy says of it."""
        version = figures.version + 1
        self._policy_step = None
        with self._recorder.timed(figures, "optimizer_step", track="training"):
            policy_values = await self._policy.step(figures.loss_denominator)
            _set_wait_apart(figures, "optimizer_step", policy_values)
        await self._dataloader.mark_consumed_uids([(g.epoch, g.uid) for g in figures.groups])
        self._recorder.log_groups(figures.version, figures.groups)
        self._policy_step = version
        policy_values |= self._credit.end_step()
        await self._staleness.notify_step(version)
        self._mini_batches.taken.clear()
        return policy_values

    async def _add_gradients(self, whole: Group, figures: StepFigures) -> None:
        """Train on a group, or on what the staleness policy leaves of it."""
        version = figures.version
        group = self._settings.staleness_policy.trained_part(whole, version, figures.max_staleness_steps)
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
        """Weights stay as they are until their copy is sent, and compared where that is due. Raises ``StopAsked`` when it was given up."""
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
        if self._stop.is_asked and self._param_update.is_cut:
            raise StopAsked

    async def _save_at_the_end(self) -> None:
        """Write a last checkpoint with what is still being generated; of a run that is stopped, whatever the interval."""
        step = self.trained_step
        is_due = self._settings.checkpoint_interval_steps and self._saver.step != step
        if self._stop.is_asked or is_due:
            with self._trace.span("checkpoint", track="training", step=step):
                await self._saver.write(self._policy, step, self._mini_batches.taken, unless_known=self._stop.is_asked)

    def _log_what_is_trained(self) -> None:
        """Steps that wait to be published will not be, and a checkpoint holds them."""
        for trained in self._newest:
            if not self._param_update.has_logged(trained):
                self._param_update.log(trained)

    async def _save_what_is_trained(self) -> None:
        """Write a checkpoint where engines or rollouts failed and not the training, unless an optimizer step was cut off by that.

        It holds what is in flight, where engines left it.
        """
        if not self._settings.checkpoint_interval_steps or self._policy_step is None:
            return
        try:
            await self._saver.write(self._policy, self._policy_step, self._mini_batches.taken, unless_known=True)
        except SkyRLAsyncError:
            logger.exception("no checkpoint was written of step %d", self._policy_step)

    def _state_values(self, figures: StepFigures) -> dict[str, float]:
        return {
            "async/buffer_groups": float(len(self._buffer)),
            "async/running_groups": float(self._staleness.num_running),
            "checkpoint/failures": float(self._saver.num_failures),
            "trainer/epoch": float(self._dataloader.epoch),
            **(self._watchdog.values() if self._watchdog else {}),
            **self._board.values(),
            "trainer/idle_share": figures.seconds.get("wait_for_groups", 0.0) / max(figures.seconds["step"], 1e-9),
        }


def _set_wait_apart(figures: StepFigures, name: str, answer: dict[str, float]) -> None:
    """Seconds that a call of the policy, timed under ``name``, waited for other calls are no computing; they leave the answer."""
    if waited := answer.pop(WAIT_SECONDS, 0.0):
        figures.add_seconds(name, -waited)
        figures.add_seconds("wait_for_devices", waited)
