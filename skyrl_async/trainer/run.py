"""What every stage of a training run uses, put together.

dataloader, client, generator, configuration ──make_run──> Run: staleness manager, buffer, workers, stages, recorder, watchdog
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import Schedule
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.recorder import Recorder, no_log
from skyrl_async.metrics.trace import Trace, trace_stages
from skyrl_async.record.ended import CountsSamples, RecordsSamples
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.generator import Generator
from skyrl_async.rollout.staleness import STALENESS_POLICIES, StalenessPolicy, _AsyncStalenessManager
from skyrl_async.rollout.watchdog import Watchdog
from skyrl_async.rollout.worker import GenerationWorkers
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.runtime.stages import StageBoard
from skyrl_async.trainer.step_gate import StepGate
from skyrl_async.types import Group


def is_due(interval: int, version: int, num_steps: int) -> bool:
    """Whether something done every ``interval`` steps is due after the ``num_steps`` steps that end with ``version``; 0: never."""
    return bool(interval) and version // interval > (version - num_steps) // interval


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCallbacks:
    """Functions that receive what a trainer reports."""

    log: Callable[[int, dict[str, float]], None]
    """Takes (step, values by metric name)."""
    flush_log: Callable[[], Awaitable[None]] = no_log
    """Waits until what was logged is on disk, or has failed to get there."""
    record: RecordsSamples = field(default_factory=CountsSamples)
    """Takes every group at its end."""
    show_stalls: Callable[[Sequence[str]], None] = lambda lines: None
    """Takes one line per rollout or stage without progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts that exist once in a run and that several stages share."""

    config: Config
    dataloader: _AsyncDataloader
    staleness: _AsyncStalenessManager
    """Admits groups, and holds the two version numbers: trained, and served by every engine."""
    buffer: GroupBuffer
    workers: GenerationWorkers
    recorder: Recorder
    board: StageBoard
    gate: StepGate = field(default_factory=StepGate)
    """Says when the next optimizer step may begin."""
    groups_in_step: list[Group] = field(default_factory=list)
    """Finished and untrained groups of the step in progress: part of a checkpoint."""
    shutdown: ShutdownRequest = field(default_factory=ShutdownRequest)
    """Ends the run early."""
    watchdog: Watchdog | None = None
    """Reports rollouts and stages without progress; None: nothing is reported."""

    @property
    def staleness_policy(self) -> StalenessPolicy:
        """What is done with groups older than the bound."""
        return STALENESS_POLICIES[self.config.trainer.staleness_policy.name]


def make_run(
    config: Config,
    *,
    dataloader: _AsyncDataloader,
    client: InferenceEngineClient,
    generator: Generator,
    callbacks: TrainerCallbacks,
    trace: Trace,
    evaluation_statuses: Callable[[], list[list[RolloutStatus]]] = list,
    shutdown: ShutdownRequest | None = None,
    make_buffer: Callable[[int], GroupBuffer] = GroupBuffer,
) -> Run:
    """Put the parts of a run together, for real and simulated runs alike.

    Args:
        config: checked.
        dataloader: yields prompts.
        client: sends requests to the engines, and keeps the tokens of aborted groups.
        generator: generates a group over the client.
        callbacks: take metrics, samples and stalls.
        trace: gets one span per stage, group and timed part of a step.
        evaluation_statuses: returns the activity of rollouts of evaluations, which are watched too.
        shutdown: ends the run early; None makes one.
        make_buffer: takes the most groups to hold at a time.
    """
    trainer, batch_size, num_steps = config.trainer, config.trainer.batch_size, config.trainer.steps_per_batch
    staleness = _AsyncStalenessManager(
        trainer.max_concurrent_generation_groups(config.num_group_places),
        batch_size,
        trainer.staleness_bound,
        None if trainer.num_steps is None else trainer.num_steps // num_steps * batch_size,
        limits_buffered_groups=trainer.count_buffered_as_in_flight and not trainer.publishes_between_batches,
        admits_whole_batches=trainer.schedule is Schedule.one_step_off,
        steps_per_version=num_steps,
        window_groups=trainer.window_groups,
    )
    buffer = make_buffer(trainer.most_open_groups)
    board = StageBoard(on_left=trace_stages(trace))
    workers = GenerationWorkers(
        dataloader=dataloader,
        staleness=staleness,
        buffer=buffer,
        generator=generator,
        client=client,
        config=config,
        trace=trace,
        board=board,
        record=callbacks.record,
    )
    watchdog = None
    if math.isfinite(trainer.stall_warning_s):
        watchdog = Watchdog(
            rollouts=lambda: [*workers.statuses(), *evaluation_statuses()],
            stages=trace.open_spans,
            threshold_s=trainer.stall_warning_s,
            log=lambda values: callbacks.log(staleness.served_version, values),
            show=callbacks.show_stalls,
        )
    recorder = Recorder(
        log=callbacks.log,
        flush_log=callbacks.flush_log,
        trace=trace,
        record=callbacks.record,
        generation_counts=lambda: workers.counts,
    )
    return Run(
        config=config,
        dataloader=dataloader,
        staleness=staleness,
        buffer=buffer,
        workers=workers,
        recorder=recorder,
        board=board,
        shutdown=shutdown or ShutdownRequest(),
        watchdog=watchdog,
    )
