"""The fully asynchronous training loop: groups in, policy versions out.

    dataloader ──> generate ──> rollout ──> reward ──> ref_logp, logp ──> train ──> param_update ──> validation
        ^                         (GenerationWorkers)   (Preparation)    group by     │ new policy version
        └─────── _AsyncStalenessManager <───────────────────────────────  group ──────┘

Each of them is a stage in one task group. Flows in: finished groups. Flows out: versions, metrics, checkpoints, evaluations. Knows
how they hang together and how a run ends, and nothing of what each does.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from skyrl_async.algorithms.overlong import Shape
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.checkpoint.run_state import RunSaver
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.errors import CheckpointError, GenerationError, InferenceError, PublishError
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.step import RunTotals, StepFigures
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.preparation import Preparation, Prepare, reward_with
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.rollout.watchdog import Watchdog
from skyrl_async.rollout.worker import GenerationWorkers
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.runtime.stage_board import StageBoard
from skyrl_async.runtime.stages import Channel, StageStatus
from skyrl_async.runtime.tasks import first_failure
from skyrl_async.trainer.evaluator import EvaluationResult, Evaluator
from skyrl_async.trainer.mini_batches import MiniBatches
from skyrl_async.trainer.settings import TrainerSettings
from skyrl_async.trainer.train_stage import TrainStage
from skyrl_async.trainer.validation import Validation
from skyrl_async.trainer.weight_update_stage import Publisher, TrainedStep, WeightUpdateStage
from skyrl_async.training.protocol import Policy
from skyrl_async.types import Group

logger = logging.getLogger(__name__)

__all__ = ["FullyAsyncTrainer", "TrainerSettings"]

_NOT_OF_TRAINING = (GenerationError, InferenceError, PublishError)
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
        stop: ShutdownRequest | None = None,
        watchdog: Watchdog | None = None,
        prepare: Mapping[str, Prepare] | None = None,
        board: StageBoard | None = None,
        turn: DeviceLease | None = None,
        credit: StepAdvantages | None = None,
    ) -> None:
        self._settings = settings
        self._dataloader = dataloader
        self._staleness = staleness
        self._buffer = buffer
        self._workers = workers
        self._policy = policy
        self._trace = trace
        self._watchdog = watchdog
        self._recorder = Recorder(log=log, trace=trace, log_groups=log_groups, generation_counts=lambda: workers.counts)
        self._stop = stop or ShutdownRequest()
        credit, turn = credit or StepAdvantages(), turn or DeviceLease()
        self._saver = RunSaver(
            dataloader=dataloader,
            staleness=staleness,
            buffer=buffer,
            workers=workers,
            recorder=self._recorder,
            checkpointer=checkpointer,
            credit=credit,
            stop=self._stop,
        )
        self._board = board or StageBoard()
        self._preparation = Preparation(
            buffer, {"reward": reward_with(advantages, reward_shapes), **(prepare or {})}, self._board
        )
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
            turn=turn,
            credit=credit,
        )
        self._param_update = WeightUpdateStage(
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
        self._train_stage = TrainStage(
            settings=settings,
            policy=policy,
            mini_batches=self._mini_batches,
            param_update=self._param_update,
            dataloader=dataloader,
            staleness=staleness,
            credit=credit,
            recorder=self._recorder,
            stop=self._stop,
            turn=turn,
            validation_seconds=lambda: self._board.stage("validation").statistics()["processing_seconds"],
        )
        self.first_evaluation: EvaluationResult | None = None
        """Of this process, before it trains."""
        self.reward_after: float | None = None
        self.is_complete = False
        """Whether training has come to its end, and only the last evaluation may follow."""
        self.evaluation_failure: Exception | None = None
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
        return self._train_stage.throughput_beside_validation

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
        return self._train_stage.step

    async def resume(self, checkpoint: Path, *, evaluated_versions: Collection[int] = ()) -> None:
        """Take up a checkpoint, before ``run``. Raises ``CheckpointError``; see ``RunSaver.restore``.

        ``evaluated_versions`` are those whose evaluations are on record, perhaps since the checkpoint was written: one that was due
        and is on none is made up for.
        """
        await self._saver.restore(self._policy, checkpoint, holds_bound=self._settings.staleness_policy.bounds_groups)
        self._train_stage.policy_step = self._saver.step
        known = (version for version in evaluated_versions if version <= self.trained_step)
        self.totals.evaluated_version = max([self.totals.evaluated_version, *known])

    async def run(self) -> None:
        """Publish, evaluate, train to the end, evaluate again.

        Consumes finished groups; produces versions; waits for groups; unblocked by the workers. Whatever fails first ends the run
        with that error, every task with it; what fails after that is logged.

        Once ``stop`` is asked for, the step in progress is finished if its groups come in time, a checkpoint is written, and
        nothing new begins; a step that is left keeps its groups, finished and untrained, in the checkpoint. What it was asked for
        because of is raised then.
        """
        try:
            async with self._watchdog.watching() if self._watchdog else nullcontext():
                await self._run()
                if self.evaluation_failure is None:
                    self._board.stage("validation").finish()
        except Exception as error:
            self._stop.remember(error)
            if self._stop.failure in (None, error):
                raise
            logger.warning("after that: %r", error)
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
                trained = Channel[TrainedStep](1)

                def start(name: str, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                    return tasks.create_task(self._failing_between_steps(running), name=name)

                generating = start("generation", self._workers.run(on_failure=self._stop.remember))
                preparing = start("preparation", self._preparation.run())
                updating = start("param_update", self._param_update.run(self._board.stage("param_update"), trained))
                start("validation", self._validation.run(validation_stage))
                await self._failing_between_steps(self._train_stage.run(self._board.stage("train"), trained))
                await updating
                await self._param_update.publish_the_rest()
                await self._save_at_the_end()
                generating.cancel()
                preparing.cancel()
        except BaseExceptionGroup as failures:
            last = first_failure(failures)
            failure = self._stop.failure or last
            if last is not failure:
                logger.warning("after that: %r", last)
            if isinstance(failure, _NOT_OF_TRAINING):
                await self._save_what_is_trained()
            raise failure from failure.__cause__
        finally:
            await self._workers.requeue()
        if self._stop.is_requested or self._stop.failure is not None:
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
        """What fails is remembered at once. What fails elsewhere waits then for an optimizer step in progress: one that is cut off would
        leave nothing to save.
        """
        try:
            await running
        except Exception as failure:
            root = first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure
            assert isinstance(root, Exception)
            self._stop.remember(root)
            if isinstance(root, _NOT_OF_TRAINING):
                await self._saver.collect_open_tokens()
                await self._param_update.stepping.acquire()
            raise

    async def _save_at_the_end(self) -> None:
        """Write a last checkpoint with what is still being generated; of a run that is stopped, whatever the interval."""
        step = self.trained_step
        is_due = self._settings.checkpoint_interval_steps and self._saver.step != step
        if self._stop.is_requested or is_due:
            with self._trace.span("checkpoint", track="training", step=step):
                await self._saver.write(
                    self._policy, step, self._mini_batches.taken, unless_known=self._stop.is_requested
                )

    async def _save_what_is_trained(self) -> None:
        """Write a checkpoint where engines or rollouts failed and not the training, unless an optimizer step was cut off by that.

        It holds what is in flight, where engines left it. What fails here is logged: the run ends with what it failed of before.
        """
        step = self._train_stage.policy_step
        try:
            self._param_update.log_the_rest()
            if self._settings.checkpoint_interval_steps and step is not None:
                await self._saver.write(self._policy, step, self._mini_batches.taken, unless_known=True)
        except Exception:
            logger.exception("no checkpoint was written of step %s", step)

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
