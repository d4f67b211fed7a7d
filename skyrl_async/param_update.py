"""Brings the weights of each trained step to the engines, as a stage of its own.

    train ──TrainedStep──> ParamUpdate: publish, checkpoint, new version, log ──version──> validation

Flows in: trained steps. Flows out: policy versions that every engine serves, checkpoints, the record of each step. Knows when each is due,
and nothing of how.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from skyrl_async.errors import NoEngineError, PublishError
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.step import StepFigures
from skyrl_async.mini_batches import MiniBatches
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.rollout.worker import GenerationWorkers
from skyrl_async.saving import RunSaver
from skyrl_async.stages import Channel, Stage, run_stage
from skyrl_async.stopping import StopAsked, StopRequest
from skyrl_async.trainer_settings import TrainerSettings, is_due
from skyrl_async.training.protocol import Policy
from skyrl_async.validation import Validation
from skyrl_async.weight_sync.publisher import PublishTimes

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """What the trainer needs of weight sync."""

    async def publish(self, version: int) -> PublishTimes:
        """Make every engine serve ``version``."""
        ...

    async def check(self, version: int, *, is_first: bool) -> dict[str, float]:
        """Prove that engines hold what is trained; figures for the metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What the train stage hands to the next one."""

    version: int
    figures: StepFigures
    policy_values: dict[str, float]
    """What the policy said of its optimizer step."""


class ParamUpdate:
    """Publishes steps.

    Args:
        settings: when what is due.
        policy, publisher: the weights, and who brings them to the engines.
        staleness, workers, mini_batches: are told of new versions, or asked what is in the making.
        validation: is told which versions are served.
        saver: writes checkpoints.
        recorder: logs steps.
        stop: ends a publish early.
        values: of the run's state, logged with each step.
    """

    def __init__(
        self,
        *,
        settings: TrainerSettings,
        policy: Policy,
        publisher: Publisher,
        staleness: _AsyncStalenessManager,
        workers: GenerationWorkers,
        mini_batches: MiniBatches,
        validation: Validation,
        saver: RunSaver,
        recorder: Recorder,
        stop: StopRequest,
        values: Callable[[StepFigures], dict[str, float]],
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._publisher = publisher
        self._staleness = staleness
        self._workers = workers
        self._mini_batches = mini_batches
        self._validation = validation
        self._saver = saver
        self._recorder = recorder
        self._stop = stop
        self._values = values
        self.is_cut = False
        """Whether a stop has cut a publish short."""

    async def run(self, stage: Stage, steps: Channel[TrainedStep]) -> None:
        """Consumes trained steps; produces policy versions; waits for engines. The work of step k+1 overlaps it, but for its step."""
        await run_stage(
            stage,
            steps,
            self._bring_to_engines,
            self._request_validation,
            name_of=lambda trained: f"version {trained.version}",
        )
        self._validation.close()

    async def _bring_to_engines(self, trained: TrainedStep) -> int | None:
        """Publish a step, where one is due, and log it; returns the version that the engines now have."""
        version, figures = trained.version, trained.figures
        is_published = False
        values: dict[str, float] = {}
        try:
            if self._is_to_be_published(version):
                async with self._stop.cut_short(is_patient=True):
                    await self._validation.release_version()
                    if self._settings.publishes_between_batches:
                        await self._staleness.drained()
                    values |= await self.publish(version, figures=figures)
                is_published = True
            values |= await self._save_if_due(version, figures)
            if is_published:
                await self._staleness.notify_capacity_change(version)
            await self._workers.redraw(lambda admission: self._mini_batches.is_given_up(admission.scheduled_version))
        except StopAsked:
            self.is_cut = True
            logger.warning("step %d is trained and not published", version)
            values |= self._recorder.count_generation()
        except (NoEngineError, PublishError):
            await self._workers.collect_open_tokens()  # for the last checkpoint, while engines still hold them
            values |= self._recorder.count_generation()
            raise
        finally:
            self._recorder.log_step(figures, trained.policy_values, values | self._values(figures))
        return version if is_published else None

    async def publish_the_rest(self) -> None:
        """Where the data ended between two publishes."""
        version = self._staleness.trained_version
        if self._staleness.version < version and not self.is_cut:
            await self.publish(version)
            await self._staleness.notify_capacity_change(version)

    async def _request_validation(self, version: int | None) -> None:
        if version is not None and version != self._settings.num_steps:
            self._validation.request(version)

    def _is_to_be_published(self, version: int) -> bool:
        """Also before a checkpoint, and at the end: those hold what engines serve."""
        return (
            is_due(self._settings.publish_every_steps, version)
            or is_due(self._settings.checkpoint_interval_steps, version)
            or version == self._settings.num_steps
        )

    async def _save_if_due(self, version: int, figures: StepFigures) -> dict[str, float]:
        if not is_due(self._settings.checkpoint_interval_steps, version):
            return self._recorder.count_generation()
        with self._recorder.timed(figures, "checkpoint", track="training"):
            return await self._saver.write(self._policy, version, self._mini_batches.taken)

    async def publish(
        self, version: int, *, is_first: bool = False, figures: StepFigures | None = None
    ) -> dict[str, float]:
        """Make every engine serve ``version``, and prove it where that is due; returns the figures of the proof."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        times = await self._publisher.publish(version)
        self._recorder.totals.pauses.append(times.pause)
        if figures is not None:
            figures.add_seconds("gather", times.gather)
            figures.add_seconds("send", times.send)
            figures.add_seconds("stage", times.stage)
            figures.add_seconds("load", times.load)
            figures.add_seconds("pause", times.pause)
            figures.add_seconds("publish", loop.time() - started)
        if is_first or is_due(self._settings.check_interval_steps, version):
            with self._recorder.trace.span("check", track="publish", version=version):
                return await self._publisher.check(version, is_first=is_first)
        return {}
