"""The fully asynchronous training loop: groups in, policy versions out.

    dataloader ──> generate ──> rollout ──> reward ──> ref_logp, logp ──> train ──> param_update ──> validation
        ^                         (GenerationWorkers)   (Preparation)    group by     │ new policy version
        └─────── _AsyncStalenessManager <───────────────────────────────  group ──────┘

Every stage is a task in one task group. This file knows how the stages are connected and how a run ends, not what each does.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.errors import (
    CheckpointError,
    GenerationError,
    InferenceError,
    PublishError,
    SkyRLAsyncError,
    StateError,
)
from skyrl_async.metrics.alarms import ABANDONED, FAILED
from skyrl_async.metrics.run_totals import RunTotals
from skyrl_async.rollout.preparation import Preparation, Prepare
from skyrl_async.runtime.device_leases import DeviceLease
from skyrl_async.runtime.stages import Channel, StageStatus
from skyrl_async.runtime.tasks import first_failure
from skyrl_async.trainer.critic import CriticTraining
from skyrl_async.trainer.run import Run
from skyrl_async.trainer.run_state import RunSaver
from skyrl_async.trainer.step_gate import MAX_OPEN_STEPS
from skyrl_async.trainer.train_stage import TrainStage
from skyrl_async.trainer.validation import EvaluationResult, Evaluator, Validation
from skyrl_async.trainer.weight_update_stage import TrainedStep, WeightUpdateStage
from skyrl_async.training.protocol import Policy
from skyrl_async.weight_sync.publisher import WeightPublisher

logger = logging.getLogger(__name__)

_ENGINE_FAILURES = (GenerationError, InferenceError, PublishError)
"""Failures of engines and rollouts; the last evaluation may fail with them."""


class FullyAsyncTrainer:
    """Trains while generation continues.

    Args:
        run: the parts that the stages share.
        policy: the model to train.
        publisher: brings the weights to the engines.
        prepare: stages between a finished group and training: name -> work, in order; the first one is the reward.
        evaluator: runs held-out prompts.
        checkpointer: writes checkpoints; None writes none.
        step_advantages: computes advantages when groups are trained: group by group, or all groups of a step at once where
            mini-batches are not streamed. The default keeps the advantages of the reward stage.
        lease: a lease on the training devices, where other stages share them.
        critic: trained beside the policy, where the advantages are of values.
    """

    def __init__(
        self,
        run: Run,
        *,
        policy: Policy,
        publisher: WeightPublisher,
        prepare: Mapping[str, Prepare],
        evaluator: Evaluator,
        checkpointer: Checkpointer | None = None,
        step_advantages: StepAdvantages | None = None,
        lease: DeviceLease | None = None,
        critic: CriticTraining | None = None,
    ) -> None:
        self._run = run
        self._config = run.config.trainer
        step_advantages, lease = step_advantages or StepAdvantages(), lease or DeviceLease()
        self._saver = RunSaver(
            run=run,
            policy=policy,
            critic=critic.critic if critic else None,
            checkpointer=checkpointer,
            step_advantages=step_advantages,
        )
        self._preparation = Preparation(run.buffer, dict(prepare), run.board)
        self._validation = Validation(run, evaluator)
        self._weight_update = WeightUpdateStage(
            run, publisher=publisher, validation=self._validation, saver=self._saver
        )
        self._train_stage = TrainStage(
            run,
            policy=policy,
            weight_update=self._weight_update,
            lease=lease,
            step_advantages=step_advantages,
            critic=critic,
        )
        self.first_evaluation: EvaluationResult | None = None
        """Evaluation of this process before it trains."""
        self.reward_after: float | None = None
        self.is_complete = False
        """Whether training is complete; only the last evaluation may follow."""
        self.evaluation_failure: Exception | None = None
        """Why the last evaluation failed; the run is complete all the same."""

    @property
    def totals(self) -> RunTotals:
        """Totals of the run, over all its resumptions."""
        return self._run.recorder.totals

    def stages(self) -> list[StageStatus]:
        """Return what each stage does now, in the order of the data's flow."""
        return self._run.board.statuses()

    def failure_reasons(self) -> dict[str, list[str]]:
        """Return why the newest failed groups failed and samples were abandoned, the newest last, by the metric of each."""
        return {FAILED: self._run.workers.failure_reasons, ABANDONED: list(self._run.workers.abandon_reasons)}

    @property
    def throughput_beside_validation(self) -> float | None:
        """Training throughput during validation, relative to the throughput without; None where unknown."""
        return self._train_stage.beside_validation.ratio

    @property
    def checkpoint_failure(self) -> CheckpointError | None:
        """Why the last checkpoint was not written; None when it was."""
        checkpointer = self._saver.checkpointer
        return None if checkpointer is None else checkpointer.failure

    @property
    def newest_checkpoint(self) -> Path | None:
        """The checkpoint written or restored last."""
        return self._saver.newest

    @property
    def served_version(self) -> int:
        """Completed optimizer steps that every engine has acknowledged."""
        return self._run.staleness.served_version

    @property
    def trained_version(self) -> int:
        """Completed optimizer steps: more than ``served_version`` where the last ones were not published."""
        return self._run.staleness.trained_version

    async def resume(self, checkpoint: Path, *, evaluated_versions: Collection[int] = ()) -> None:
        """Restore a checkpoint, before ``run``. Raises ``CheckpointError``.

        Args:
            checkpoint: its directory.
            evaluated_versions: versions whose evaluations are on record, also later ones than the checkpoint's. An evaluation that
                was due and is not on record is done next.
        """
        await self._saver.restore(checkpoint, evaluated_versions)

    async def run(self) -> None:
        """Publish, evaluate, train to the end, evaluate again.

        Consumes finished groups; produces versions; waits for groups; unblocked by the workers. The first failure cancels every task
        and is raised; later failures are logged.

        Once a shutdown is requested, nothing new begins. The step in progress is finished if its groups arrive in time, and a
        checkpoint is written; a step that lacks groups leaves those it has in the checkpoint, finished and untrained. A failure that
        requested the shutdown is raised then.
        """
        try:
            async with self._run.watchdog.watching() if self._run.watchdog else nullcontext():
                await self._train()
                if self.evaluation_failure is None:
                    self._run.board.stage("validation").finish()
        except Exception as error:
            self._run.shutdown.remember(error)
            if self._run.shutdown.failure in (None, error):
                raise
            logger.warning("a later failure: %r", error)
        if self._run.shutdown.failure is not None:
            if not self.is_complete:
                raise self._run.shutdown.failure
            self.evaluation_failure = self._run.shutdown.failure

    async def _train(self) -> None:
        await self._weight_update.publish_first(self.served_version)
        is_first = self.totals.reward_before is None
        if self._config.eval_only or (is_first and self._config.eval_before_train):
            self.first_evaluation = await self._validation.evaluate_alone()
        if self._config.eval_only:
            return
        if self.first_evaluation is not None:
            self.totals.reward_before = self.first_evaluation.reward
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run_stages(tasks)
        except BaseExceptionGroup as failures:
            last = first_failure(failures)
            failure = self._run.shutdown.failure or last
            if last is not failure:
                logger.warning("a later failure: %r", last)
            if _may_save_after(failure):
                await self._save_what_is_trained()
            raise failure from failure.__cause__
        finally:
            await self._run.workers.requeue()
        if self._run.shutdown.is_requested or self._run.shutdown.failure is not None:
            return
        self.is_complete = True
        self._run.recorder.count_generation()
        self.totals.wasted_tokens += sum(group.num_wasted_tokens for group in self._run.buffer.snapshot())
        try:
            if self._config.eval_at_end and (after := await self._validation.evaluate_alone()):
                self.reward_after = after.reward
        except _ENGINE_FAILURES as error:
            logger.exception("the last evaluation failed; training is complete")
            self.evaluation_failure = error

    async def _run_stages(self, tasks: asyncio.TaskGroup) -> None:
        """Train until the data or the run ends, publish and save the last version, and end the other stages."""
        self._run.recorder.start()
        trained = Channel[TrainedStep](MAX_OPEN_STEPS + 1)

        def start(name: str, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return tasks.create_task(self._failing_between_steps(running), name=name)

        generating = start("generation", self._run.workers.run(on_failure=self._remember))
        preparing = start("preparation", self._preparation.run())
        updating = start("param_update", self._weight_update.run(trained))
        start("validation", self._validation.run())
        await self._failing_between_steps(self._train_stage.run(trained))
        await updating
        await self._weight_update.publish_the_rest()
        await self._save_at_the_end()
        generating.cancel()
        preparing.cancel()

    async def _failing_between_steps(self, running: Coroutine[Any, Any, None]) -> None:
        """Remember a failure at once. Raise it after the optimizer steps of the batch in progress: a batch that is cut off leaves nothing
        to save.
        """
        try:
            await running
        except Exception as failure:
            root = first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure
            assert isinstance(root, Exception)
            await self._remember(root)
            if _may_save_after(root):
                await self._run.gate.close()
            raise

    async def _remember(self, failure: Exception) -> None:
        """Note a failure, and collect what engines have sampled before it cuts them off."""
        self._run.shutdown.remember(failure)
        if _may_save_after(failure):
            await self._saver.collect_open_tokens()

    async def _save_at_the_end(self) -> None:
        """Write a last checkpoint where one is due, and always in a shutdown; it includes groups that are being generated."""
        step = self.trained_version
        is_due = self._config.checkpoint_interval_steps and self._saver.step != step
        if self._run.shutdown.is_requested or is_due:
            with self._run.recorder.trace.span("checkpoint", track="training", step=step):
                await self._saver.write(unless_known=self._run.shutdown.is_requested)

    async def _save_what_is_trained(self) -> None:
        """Write a checkpoint after a failure, unless it cut off an optimizer step.

        Groups in flight are saved with the tokens sampled so far. A failure in here, as of workers that have died for good, is only
        logged: the run ends with the first one.
        """
        step = self.trained_version
        try:
            self._weight_update.log_the_rest()
            if self._config.checkpoint_interval_steps and not self._train_stage.is_torn:
                await self._saver.write(unless_known=True)
        except Exception as error:
            is_unexpected = not isinstance(error, SkyRLAsyncError)
            logger.warning("no checkpoint was written of step %d: %s", step, error, exc_info=is_unexpected)


def _may_save_after(failure: BaseException) -> bool:
    """Whether what is trained may be saved: where groups are counted wrongly the checkpoint would be wrong too."""
    return isinstance(failure, Exception) and not isinstance(failure, StateError | AssertionError)
