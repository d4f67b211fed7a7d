"""What every stage of a training run uses, put together.

dataloader, client, generator, settings ──make_run──> Run: staleness manager, buffer, workers, stages, recorder, watchdog
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyrl_async.algorithms.aggregation import Aggregation
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.recorder import Recorder
from skyrl_async.metrics.trace import Trace, trace_stages
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.generator import Generator
from skyrl_async.rollout.staleness import StalenessPolicy, _AsyncStalenessManager
from skyrl_async.rollout.watchdog import Watchdog
from skyrl_async.rollout.worker import GenerationWorkers, RolloutSettings
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.runtime.stages import StageBoard
from skyrl_async.trainer.step_gate import StepGate
from skyrl_async.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSettings:
    """When held-out prompts are evaluated, and how many; ``config.schema.run.EvaluationConfig`` documents the keys."""

    interval_steps: int = 0
    """Optimizer steps between evaluations while training; 0: none."""
    num_prompts: int = 0
    """Prompts of an evaluation before or after training."""
    num_prompts_while_training: int = 0
    pins_version: bool = True
    """Publish no other version during an evaluation."""
    before_training: bool = True
    at_the_end: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The schedule of a run; ``config.schema.trainer.TrainerConfig`` documents the keys."""

    rollout: RolloutSettings

    max_concurrent_groups: int
    max_staleness_steps: int
    mini_batch_size: int
    num_steps: int | None
    staleness_policy: StalenessPolicy
    stream_mini_batch: bool
    deterministic: bool
    validation: ValidationSettings
    checkpoint_interval_steps: int
    check_interval_steps: int
    """Steps between comparisons of the engines with the trained weights; 0: none."""
    limits_buffered_groups: bool = False
    """While the trainer is busy, finished groups count as in flight until they are trained."""
    is_one_step_off: bool = False
    """Each mini-batch is admitted at once, after the last group of the previous one has ended."""
    publish_every_steps: int = 1
    """Optimizer steps between publishes; at most ``max_staleness_steps + 1``, or training would wait for ever."""
    publishes_between_batches: bool = False
    """Weights change only when no group is being generated and none may be admitted: which version samples which token then does
    not depend on timing."""
    stall_warning_s: float | None = None
    """Seconds after which the watchdog reports a rollout or stage without progress; None: never."""
    validates_only: bool = False
    """Evaluate once and train nothing."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """Reduces token losses to one loss."""


def is_due(interval: int, version: int) -> bool:
    """Whether something done every ``interval`` steps is due after step ``version``; an interval of 0 never is."""
    return bool(interval) and version % interval == 0


LogGroups = Callable[[int, Sequence[Group]], None]
"""Takes (policy version trained at, groups) of each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCallbacks:
    """Functions that receive what a trainer reports."""

    log: Callable[[int, dict[str, float]], None]
    """Takes (step, values by metric name)."""
    log_groups: LogGroups = lambda version, groups: None
    show_stalls: Callable[[Sequence[str]], None] = lambda lines: None
    """Takes one line per rollout or stage without progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts that exist once in a run and that several stages share."""

    settings: TrainerSettings
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


def make_run(
    settings: TrainerSettings,
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
        settings: the schedule.
        dataloader: yields prompts.
        client: sends requests to the engines, and keeps the tokens of aborted groups.
        generator: generates a group over the client.
        callbacks: take metrics, trained groups and stalls.
        trace: gets one span per stage, group and timed part of a step.
        evaluation_statuses: returns the activity of rollouts of evaluations, which are watched too.
        shutdown: ends the run early; None makes one.
        make_buffer: takes the most groups to hold at a time.
    """
    mini_batch_size = settings.mini_batch_size
    staleness = _AsyncStalenessManager(
        settings.max_concurrent_groups,
        mini_batch_size,
        settings.max_staleness_steps,
        None if settings.num_steps is None else settings.num_steps * mini_batch_size,
        limits_buffered_groups=settings.limits_buffered_groups,
        admits_whole_batches=settings.is_one_step_off,
    )
    buffer = make_buffer(mini_batch_size * (settings.max_staleness_steps + 1))
    board = StageBoard(on_left=trace_stages(trace))
    workers = GenerationWorkers(
        dataloader=dataloader,
        staleness=staleness,
        buffer=buffer,
        generator=generator,
        client=client,
        settings=settings.rollout,
        trace=trace,
        board=board,
    )
    watchdog = None
    if settings.stall_warning_s is not None:
        watchdog = Watchdog(
            rollouts=lambda: [*workers.statuses(), *evaluation_statuses()],
            stages=trace.open_spans,
            threshold_s=settings.stall_warning_s,
            log=lambda values: callbacks.log(staleness.served_version, values),
            show=callbacks.show_stalls,
        )
    return Run(
        settings=settings,
        dataloader=dataloader,
        staleness=staleness,
        buffer=buffer,
        workers=workers,
        recorder=Recorder(
            log=callbacks.log,
            trace=trace,
            log_groups=callbacks.log_groups,
            generation_counts=lambda: workers.counts,
        ),
        board=board,
        shutdown=shutdown or ShutdownRequest(),
        watchdog=watchdog,
    )
