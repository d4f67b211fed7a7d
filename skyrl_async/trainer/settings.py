"""The schedule of a training run, as values.

Flows in: nothing. Flows out: settings that the trainer and its stages read.
"""

from dataclasses import dataclass, field

from skyrl_async.algorithms.aggregation import Aggregation
from skyrl_async.rollout.staleness_policies import StalenessPolicy
from skyrl_async.trainer.validation import ValidationSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The schedule; see ``config.schema.TrainerConfig`` for what each means."""

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
    validates_only: bool = False
    """Nothing is trained."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How the losses of tokens become one."""


def is_due(interval: int, version: int) -> bool:
    """Whether what is done every ``interval`` steps is done after step ``version``; 0 is never."""
    return bool(interval) and version % interval == 0
