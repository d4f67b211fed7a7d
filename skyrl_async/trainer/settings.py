"""The schedule of a training run, as values."""

from dataclasses import dataclass, field

from skyrl_async.algorithms.aggregation import Aggregation
from skyrl_async.rollout.staleness_policies import StalenessPolicy
from skyrl_async.rollout.worker import RolloutSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSettings:
    """When held-out prompts are played, and how many; ``config.schema.run.EvaluationConfig`` says what each value means."""

    interval_steps: int = 0
    """Between evaluations while training; 0: none."""
    num_prompts: int = 0
    """Before and after training."""
    num_prompts_while_training: int = 0
    pins_version: bool = True
    """No other version is published while one is evaluated."""
    before_training: bool = True
    at_the_end: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """When groups are admitted; arguments of ``_AsyncStalenessManager``."""

    max_concurrent_groups: int
    max_staleness_steps: int
    limits_buffered_groups: bool = False
    admits_whole_batches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The schedule; ``config.schema.trainer.TrainerConfig`` says what each value means."""

    admission: AdmissionSettings
    rollout: RolloutSettings

    mini_batch_size: int
    num_steps: int | None
    staleness_policy: StalenessPolicy
    stream_mini_batch: bool
    deterministic: bool
    validation: ValidationSettings
    checkpoint_interval_steps: int
    check_interval_steps: int
    """Steps between proofs that engines hold the trained weights."""
    publish_every_steps: int = 1
    """Optimizer steps between publishes; at most ``max_staleness_steps + 1``, or training would wait for ever."""
    publishes_between_batches: bool = False
    """Weights change only when no group is being generated and none may be admitted: which version samples which token then
    depends on nothing that is measured in seconds."""
    stall_warning_s: float | None = None
    """Seconds after which what still does the same is named; None: never."""
    validates_only: bool = False
    """Nothing is trained."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses of tokens become one."""


def is_due(interval: int, version: int) -> bool:
    """Whether what is done every ``interval`` steps is done after step ``version``; 0 is never."""
    return bool(interval) and version % interval == 0
