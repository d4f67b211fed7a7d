"""Rewards of a group in, one advantage per sample out.

Knows neither tokens nor tensors: an estimator sees a handful of floats. Which estimator runs is named by the configuration and
looked up once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skyrl_async.errors import ConfigError
from skyrl_async.samples import live_samples_of
from skyrl_async.types import Trajectory


class ComputeAdvantages(Protocol):
    """One group's rewards to its advantages."""

    def __call__(self, rewards: Sequence[float], *, norm_by_std: bool) -> list[float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """A named estimator and what the trainer must know to schedule it."""

    name: str
    compute: ComputeAdvantages
    needs_mini_batch: bool
    """True when a group's advantages depend on other groups, which turns streaming off."""


def grpo_advantages(rewards: Sequence[float], *, norm_by_std: bool, epsilon: float = 1e-6) -> list[float]:
    """Group-relative advantages: ``A_i = (r_i - mean(r)) / (std(r) + epsilon)``.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision; the standard deviation is the unbiased one.
    Without the division it is Dr. GRPO (arXiv 2503.20783), section 3.2, which does not favour groups of little
    variance.

    Args:
        rewards: one finite reward per trajectory of one group.
        norm_by_std: whether to divide by the standard deviation.
        epsilon: added to the standard deviation, > 0.

    Returns:
        One advantage per reward; zeros when all rewards are equal (also for a group of one, which has no baseline).

    Raises:
        ValueError: a reward is not finite.
    """
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] must be finite, got {reward}; correct the environment's reward")
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not norm_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + epsilon) for c in centred]


def row_advantages(
    trajectories: Sequence[Trajectory], compute: Callable[[Sequence[float]], Sequence[float]]
) -> list[float]:
    """One advantage per row of a group: its sample's. Abandoned and overlong samples are no part of the baseline, and get 0.

    Args:
        trajectories: the group's rows.
        compute: (shaped) rewards of its live samples -> one advantage per sample.
    """
    live = live_samples_of(trajectories)
    of_sample = compute([sample.shaped_reward for sample in live])
    of_row = {id(row): advantage for sample, advantage in zip(live, of_sample, strict=True) for row in sample.rows}
    return [of_row.get(id(row), 0.0) for row in trajectories]


_ESTIMATORS = {
    "grpo": AdvantageEstimator(name="grpo", compute=grpo_advantages, needs_mini_batch=False),
}


def get_advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator called ``name``. Raises ``ConfigError`` listing the known ones."""
    if name not in _ESTIMATORS:
        known = ", ".join(sorted(_ESTIMATORS))
        raise ConfigError(f"trainer.algorithm.advantage_estimator must be one of {known}, got {name!r}")
    return _ESTIMATORS[name]
