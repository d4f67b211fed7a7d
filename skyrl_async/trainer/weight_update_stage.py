"""Brings the weights of each trained step to the engines, as a stage of its own.

    train: step, gather ──TrainedStep──> WeightUpdateStage: send, load, checkpoint, new version, log ──version──> validation
             ^  the next step waits ──────────────────┘

Knows when each of these is due, not how it is done. Loading overlaps all of the next step; sending overlaps all but its optimizer step.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from skyrl_async.errors import PublishError
from skyrl_async.metrics.step import StepFigures
from skyrl_async.rollout.staleness import Admission
from skyrl_async.runtime.shutdown import GRACE_S, ShutdownRequested
from skyrl_async.runtime.stages import Channel, run_stage
from skyrl_async.trainer.run import Run, is_due
from skyrl_async.trainer.run_state import RunSaver
from skyrl_async.trainer.validation import Validation
from skyrl_async.weight_sync.publisher import PublishTimes, WeightPublisher

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TrainedStep:
    """An optimizer step on its way to the engines."""

    version: int
    """Trained version after the step."""
    figures: StepFigures
    policy_values: dict[str, float]
    """The policy's values of the step, by metric name."""
    gathered_at: float | None = None
    """When copying its weights began, in seconds of the loop; None where it is not published."""
    is_published: bool = False
    """Whether every engine serves it."""


class WeightUpdateStage:
    """Publishes trained steps.

    Args:
        run: its configuration says when what is due; its staleness manager and workers learn of each served version.
        publisher: brings the weights to the engines.
        validation: evaluates served versions.
        saver: writes checkpoints.
    """

    def __init__(self, run: Run, *, publisher: WeightPublisher, validation: Validation, saver: RunSaver) -> None:
        self._run = run
        self._config = run.config.trainer
        self._publisher = publisher
        self._validation = validation
        self._saver = saver
        self._unlogged: list[TrainedStep] = []
        """Steps on their way, oldest first: they are logged in this order."""
        self._owes_version = False
        """Whether a version was lost on its way: the next one is published whatever the interval."""
        self.is_cut = False
        """Whether a shutdown has cut a publish short."""

    async def publish_first(self, version: int) -> None:
        """Make every engine serve the version that training begins with, and check it."""
        times = await self._publisher.publish(version)
        self._run.recorder.totals.pauses.append(times.pause)
        await self._check(version, is_first=True)

    async def gather(self, trained: TrainedStep) -> None:
        """Copy a step's weights if they are to be published; on return they may change."""
        self._unlogged.append(trained)
        self._publisher.trained(trained.version)
        if self._is_to_be_published(trained.version):
            started = asyncio.get_running_loop().time()
            await self._publisher.gather(trained.version)
            trained.gathered_at = started
            self._run.gate.copied(trained.version)

    def _is_to_be_published(self, version: int) -> bool:
        """Whether a publish is due: at its interval, at the end, and before an evaluation, check or checkpoint of the version."""
        config = self._config
        intervals = (
            config.publish_every_steps,
            config.logprob_probe_interval_steps,
            config.checkpoint_interval_steps,
            config.eval_interval_steps,
        )
        is_needed = self._owes_version or version == config.num_steps
        return is_needed or any(self._is_due(interval, version) for interval in intervals)

    def _is_due(self, interval: int, version: int) -> bool:
        return is_due(interval, version, self._config.steps_per_batch)

    async def run(self, steps: Channel[TrainedStep]) -> None:
        """Consumes trained steps; produces policy versions; waits for engines. The work of later steps overlaps it."""
        self._validation.request_if_owed(self._run.staleness.served_version)  # what the resumed run did not finish
        stage = self._run.board.stage("param_update")
        await run_stage(
            stage, steps, self._bring_to_engines, self._finish, name_of=lambda trained: f"version {trained.version}"
        )
        self._validation.close()

    async def _bring_to_engines(self, trained: TrainedStep) -> TrainedStep:
        """Publish a step, log it, and save it where that is due."""
        version = trained.version
        values: dict[str, float] = {}
        try:
            if trained.gathered_at is not None:
                async with self._run.shutdown.interruptible(wait_for_step=True):
                    trained.is_published = await self._publish_step(trained, trained.gathered_at)
                if trained.is_published and self._is_due(self._config.logprob_probe_interval_steps, version):
                    with suppress(ShutdownRequested):
                        async with self._run.shutdown.interruptible(wait_for_step=True):
                            values = await self._check(version)
        except ShutdownRequested:
            self._cut(version)
            self._log(trained, values)
        except BaseException:
            self._log(trained, values)
            raise
        else:
            await self._log_and_save(trained, values)
            if trained.is_published:
                await self._run.staleness.notify_capacity_change(version)
            with suppress(ShutdownRequested):
                async with self._run.shutdown.interruptible(grace_s=GRACE_S):
                    await self._run.workers.abort_and_requeue(self._is_dropped)
        self._run.gate.sent(version)
        return trained

    async def _finish(self, trained: TrainedStep) -> None:
        if trained.is_published:
            self._validation.request_if_owed(trained.version)
        self._run.gate.through(trained.version)

    async def _publish_step(self, trained: TrainedStep, gathered_at: float) -> bool:
        """Make every engine serve a trained step; False where the copy was lost."""
        times, figures = await self._publish(trained.version), trained.figures
        if times is None:
            return False
        for name in ("gather", "send", "stage", "acknowledge", "load", "pause"):
            figures.add_seconds(name, getattr(times, name))
        figures.add_seconds("publish", asyncio.get_running_loop().time() - gathered_at)
        return True

    async def _publish(self, version: int) -> PublishTimes | None:
        """Make every engine serve a copied version; None where the copy was lost."""
        if not self._publisher.double_buffer:
            await self._until_version_may_change()  # after that no engine could start with the version that they need
        self._owes_version = not await self._publisher.send(version)
        if self._owes_version:
            return None
        if not self._is_due(self._config.logprob_probe_interval_steps, version):
            self._run.gate.sent(version)
        if self._publisher.double_buffer:
            await self._until_version_may_change()
        times = await self._publisher.load()
        assert times is not None, "it was sent"
        self._run.recorder.totals.pauses.append(times.pause)
        return times

    async def _until_version_may_change(self) -> None:
        """Wait for evaluations and groups that must end under the version served now; unblocked by the engines that serve it."""
        await self._validation.release_version()
        if self._config.publishes_between_batches:
            await self._run.staleness.drained()

    async def publish_the_rest(self) -> None:
        """Publish the last version where the data ended between two publishes, or its copy was lost; not in a shutdown."""
        version = self._run.staleness.trained_version
        if self._run.staleness.served_version == version or self._run.shutdown.is_requested:
            return
        try:
            async with self._run.shutdown.interruptible(wait_for_step=True):
                await self._publisher.gather(version)
                if await self._publish(version) is None:
                    raise PublishError(f"version {version} is lost, and no step follows it")
        except ShutdownRequested:
            self._cut(version)
        else:
            await self._run.staleness.notify_capacity_change(version)

    def _cut(self, version: int) -> None:
        self.is_cut = True
        logger.warning("step %d is trained and not published", version)

    async def _check(self, version: int, *, is_first: bool = False) -> dict[str, float]:
        """Compare the engines with the policy, which still holds the same version."""
        with self._run.recorder.trace.span("check", track="publish", version=version):
            return await self._publisher.verifier.check(version, is_first=is_first)

    async def _log_and_save(self, trained: TrainedStep, values: dict[str, float]) -> None:
        """Log before saving: a run killed in between trains the step again, a run killed later has its record."""
        if not self._is_due(self._config.checkpoint_interval_steps, trained.version):
            self._log(trained, values)
            return
        with self._run.recorder.timed(trained.figures, "checkpoint", track="training"):
            await self._saver.write(on_taken=lambda: self._log(trained, values))
        seconds, num_failures = trained.figures.seconds["checkpoint"], float(self._saver.num_failures)
        self._run.recorder.log(trained.version, {"timing/checkpoint": seconds, "checkpoint/failures": num_failures})

    def _log(self, trained: TrainedStep, values: dict[str, float]) -> None:
        self._unlogged.remove(trained)
        run, seconds = self._run, trained.figures.seconds
        state = {
            "async/buffer_groups": float(len(run.buffer)),
            "async/running_groups": float(run.staleness.num_running),
            "async/max_running_groups": float(run.staleness.max_concurrent_generation_groups),
            "checkpoint/failures": float(self._saver.num_failures),
            "trainer/epoch": float(run.dataloader.epoch),
            **(run.watchdog.values() if run.watchdog else {}),
            **run.board.values(),
            "trainer/idle_frac": seconds.get("wait_for_groups", 0.0) / max(seconds["step"], 1e-9),
        }
        run.recorder.log_step(trained.figures, trained.policy_values, {**values, **state})

    def log_the_rest(self) -> None:
        """Log the steps that will not be published because the run ends; a checkpoint holds them."""
        for trained in tuple(self._unlogged):
            self._log(trained, {})

    def _is_dropped(self, admission: Admission) -> bool:
        return self._run.staleness_policy.is_dropped(admission.scheduled_version, self._run.staleness)
