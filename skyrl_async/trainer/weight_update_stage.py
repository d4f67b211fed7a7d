"""Brings the weights of each trained step to the engines, as a stage of its own.

    train: step, gather ──TrainedStep──> WeightUpdateStage: send, load, checkpoint, new version, log ──version──> validation
             ^  the next step waits ──────────────────┘

Knows when each of these is due, not how it is done. Loading overlaps all of the next step; sending overlaps all but its optimizer step.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from skyrl_async.errors import PublishError
from skyrl_async.metrics.step import StepFigures
from skyrl_async.rollout.staleness import Admission
from skyrl_async.runtime.shutdown import GRACE_S, ShutdownRequested
from skyrl_async.runtime.stages import Channel, run_stage
from skyrl_async.trainer.run import Run, is_due
from skyrl_async.trainer.run_state import RunSaver
from skyrl_async.trainer.validation import Validation
from skyrl_async.weight_sync.publisher import PublishTimes

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """What the trainer needs of weight sync."""

    @property
    def keeps_served_version(self) -> bool:
        """Whether the served version stays loadable for a new engine while the next version is sent."""
        ...

    def trained(self, version: int) -> None:
        """Note that the policy holds ``version`` now, whether or not it will be published."""
        ...

    async def gather(self, version: int) -> None:
        """Copy the weights; on return they may change."""
        ...

    async def send(self, version: int) -> bool:
        """Send the copy to where engines load it; False where it is lost and a newer version has to follow."""
        ...

    async def load(self) -> PublishTimes | None:
        """Make every engine serve the version sent; None where they do already."""
        ...

    async def publish(self, version: int) -> PublishTimes:
        """Gather, send and load."""
        ...

    async def check(self, version: int, *, is_first: bool) -> dict[str, float]:
        """Compare the engines with the trained weights; returns values by metric name."""
        ...


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
        run: its settings say when what is due; its staleness manager and workers learn of each served version.
        publisher: brings the weights to the engines.
        validation: evaluates served versions.
        saver: writes checkpoints.
    """

    def __init__(
        self,
        run: Run,
        *,
        publisher: Publisher,
        validation: Validation,
        saver: RunSaver,
    ) -> None:
        self._run = run
        self._settings = run.settings
        self._publisher = publisher
        self._validation = validation
        self._saver = saver
        self._unlogged: list[TrainedStep] = []
        """Steps on their way, oldest first: they are logged in this order."""
        self._owes_version = False
        """Whether a version was lost on its way: the next one is published whatever the interval."""
        self.is_cut = False
        """Whether a shutdown has cut a publish short."""

    async def gather(self, trained: TrainedStep) -> None:
        """Copy a step's weights if they are to be published; on return they may change."""
        self._unlogged.append(trained)
        version = trained.version
        self._publisher.trained(version)
        if not self._is_to_be_published(version):
            return
        started = asyncio.get_running_loop().time()
        await self._publisher.gather(version)
        trained.gathered_at = started
        self._run.gate.copied(version)

    async def run(self, steps: Channel[TrainedStep]) -> None:
        """Consumes trained steps; produces policy versions; waits for engines. The work of later steps overlaps it."""
        await self._request_validation(
            self._run.staleness.served_version
        )  # an evaluation that the resumed run did not finish
        await run_stage(
            self._run.board.stage("param_update"),
            steps,
            self._bring_to_engines,
            self._finish,
            name_of=lambda trained: f"version {trained.version}",
        )
        self._validation.close()

    async def _bring_to_engines(self, trained: TrainedStep) -> TrainedStep:
        """Publish a step, log it, and save it where that is due."""
        version, figures = trained.version, trained.figures
        values: dict[str, float] = {}

        def log() -> None:
            self._log(trained, values)

        try:
            if trained.gathered_at is not None:
                async with self._run.shutdown.interruptible(wait_for_step=True):
                    trained.is_published = await self._send_and_load(version, trained.gathered_at, figures)
                    if trained.is_published:
                        values |= await self._check_if_due(version)
        except ShutdownRequested:
            trained.is_published, self.is_cut = False, True
            logger.warning("step %d is trained and not published", version)
            log()
        except BaseException:
            log()
            raise
        else:
            await self._log_and_save(version, figures, log)
            if trained.is_published:
                await self._run.staleness.notify_capacity_change(version)
            with suppress(ShutdownRequested):
                async with self._run.shutdown.interruptible(grace_s=GRACE_S):
                    await self._run.workers.abort_and_requeue(self._is_dropped)
        self._run.gate.sent(version)
        return trained

    async def _finish(self, trained: TrainedStep) -> None:
        if trained.is_published:
            await self._request_validation(trained.version)
        self._run.gate.through(trained.version)

    def _log(self, trained: TrainedStep, values: Mapping[str, float] = MappingProxyType({})) -> None:
        self._unlogged.remove(trained)
        self._run.recorder.log_step(
            trained.figures, trained.policy_values, {**values, **self._state_values(trained.figures)}
        )

    def _state_values(self, figures: StepFigures) -> dict[str, float]:
        run = self._run
        return {
            "async/buffer_groups": float(len(run.buffer)),
            "async/running_groups": float(run.staleness.num_running),
            "checkpoint/failures": float(self._saver.num_failures),
            "trainer/epoch": float(run.dataloader.epoch),
            **(run.watchdog.values() if run.watchdog else {}),
            **run.board.values(),
            "trainer/idle_frac": figures.seconds.get("wait_for_groups", 0.0) / max(figures.seconds["step"], 1e-9),
        }

    def log_the_rest(self) -> None:
        """Log the steps that will not be published because the run ends; a checkpoint holds them."""
        for trained in tuple(self._unlogged):
            self._log(trained)

    async def _send_and_load(self, version: int, gathered_at: float, figures: StepFigures) -> bool:
        """Make every engine serve a copied version; False where the copy was lost."""
        if not await self._send(version):
            self._owes_version = True
            return False
        if not is_due(self._settings.check_interval_steps, version):
            self._run.gate.sent(version)
        times = await self._load()
        for name in ("gather", "send", "stage", "acknowledge", "load", "pause"):
            figures.add_seconds(name, getattr(times, name))
        figures.add_seconds("publish", asyncio.get_running_loop().time() - gathered_at)
        return True

    async def _send(self, version: int) -> bool:
        """Send a copied version; False where the copy was lost."""
        if not self._publisher.keeps_served_version:
            await self._until_version_may_change()  # after that no engine could start with the version that they need
        return await self._publisher.send(version)

    async def _load(self) -> PublishTimes:
        """Make every engine serve the version sent."""
        if self._publisher.keeps_served_version:
            await self._until_version_may_change()
        times = await self._publisher.load()
        assert times is not None, "it was sent"
        self._owes_version = False
        self._run.recorder.totals.pauses.append(times.pause)
        return times

    async def _until_version_may_change(self) -> None:
        """Wait for evaluations and groups that must end under the version served now; unblocked by the engines that serve it."""
        await self._validation.release_version()
        if self._settings.publishes_between_batches:
            await self._run.staleness.drained()

    async def publish_the_rest(self) -> None:
        """Publish the last version where the data ended between two publishes, or its copy was lost; not in a shutdown."""
        version = self._run.staleness.trained_version
        if self._run.staleness.served_version == version or self._run.shutdown.is_requested:
            return
        try:
            async with self._run.shutdown.interruptible(wait_for_step=True):
                await self._publisher.gather(version)
                if not await self._send(version):
                    raise PublishError(f"version {version} is lost, and no step follows it")
                await self._load()
        except ShutdownRequested:
            self.is_cut = True
            logger.warning("step %d is trained and not published", version)
        else:
            await self._run.staleness.notify_capacity_change(version)

    async def _request_validation(self, version: int) -> None:
        is_left_to_the_end = version == self._settings.num_steps and self._validation.is_done_at_the_end
        if not is_left_to_the_end and self._validation.is_owed(version):
            self._validation.request(version)

    def _is_to_be_published(self, version: int) -> bool:
        """Whether a publish is due: at its interval, at the end, and before an evaluation, check or checkpoint of the version."""
        return (
            self._owes_version
            or is_due(self._settings.publish_every_steps, version)
            or is_due(self._settings.check_interval_steps, version)
            or is_due(self._settings.checkpoint_interval_steps, version)
            or self._validation.is_due(version)
            or version == self._settings.num_steps
        )

    async def _log_and_save(self, version: int, figures: StepFigures, log: Callable[[], None]) -> None:
        """Log before saving: a run killed in between trains the step again, a run killed later has its record."""
        if not is_due(self._settings.checkpoint_interval_steps, version):
            log()
            return
        with self._run.recorder.timed(figures, "checkpoint", track="training"):
            await self._saver.write(on_taken=log)
        self._run.recorder.log(
            version,
            {
                "timing/checkpoint": figures.seconds["checkpoint"],
                "checkpoint/failures": float(self._saver.num_failures),
            },
        )

    async def publish_first(self, version: int) -> None:
        """Make every engine serve the version that training begins with, and check it."""
        times = await self._publisher.publish(version)
        self._run.recorder.totals.pauses.append(times.pause)
        with self._run.recorder.trace.span("check", track="publish", version=version):
            await self._publisher.check(version, is_first=True)

    def _is_dropped(self, admission: Admission) -> bool:
        return self._settings.staleness_policy.is_dropped(admission.scheduled_version, self._run.staleness)

    async def _check_if_due(self, version: int) -> dict[str, float]:
        """Compare the engines with the policy, which still holds the same version."""
        if not is_due(self._settings.check_interval_steps, version):
            return {}
        with self._run.recorder.trace.span("check", track="publish", version=version):
            return await self._publisher.check(version, is_first=False)
