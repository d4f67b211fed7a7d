"""Estimators of a whole sample: the rewards of one group in, one advantage per sample out."""

import math
from collections.abc import Callable, Sequence
from functools import wraps


def _zero_where_equal(compute: Callable[[Sequence[float]], list[float]]) -> Callable[[Sequence[float]], list[float]]:
    """Give exact zeros to a group whose rewards do not differ, or of one sample; refuse rewards that are not finite."""

    @wraps(compute)
    def of_group(rewards: Sequence[float]) -> list[float]:
        require_finite(rewards)
        if not rewards or min(rewards) == max(rewards):
            return [0.0] * len(rewards)
        return compute(rewards)

    return of_group


def require_finite(rewards: Sequence[float]) -> None:
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] must be finite, got {reward}; correct the environment's reward")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@_zero_where_equal
def dr_grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = r_i - mean(r)``: Dr. GRPO (arXiv 2503.20783), section 3.2. It does not favour groups with little variance.

    Over a group of n, the mean of advantages times scores is ``(n - 1) / n`` times the policy gradient, because every sample is part of
    its own baseline.

    Args:
        rewards: one finite reward per sample of one group.

    Returns:
        One advantage per reward; zeros if all rewards are equal, as in a group of one, which has no baseline.

    Raises:
        ValueError: a reward is not finite.
    """
    mean = _mean(rewards)
    return [reward - mean for reward in rewards]


@_zero_where_equal
def grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = (r_i - mean(r)) / (std(r) + 1e-6)``: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.

    The standard deviation is the unbiased estimate. Arguments, result and errors as in ``dr_grpo_advantages``.
    """
    mean = _mean(rewards)
    centred = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) for c in centred]


@_zero_where_equal
def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = r_i - mean of the others = n / (n - 1) (r_i - mean(r))``: RLOO (arXiv 2402.14740), after Kool et al. (2019).

    The mean of advantages times scores is the policy gradient, for every n >= 2. Arguments, result and errors as in
    ``dr_grpo_advantages``.
    """
    mean, share = _mean(rewards), len(rewards) / (len(rewards) - 1)
    return [share * (reward - mean) for reward in rewards]


@_zero_where_equal
def maxrl_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = (r_i - mean(r)) / mean(r)``: MaxRL (arXiv 2602.02710), for rewards of 0 and 1.

    With p the probability of reward 1, the mean of advantages times scores is the gradient of ``log p``, expanded in ``1 - p`` and
    truncated: ``sum over k = 1 .. n - 1 of (1 - p)^(k - 1) grad p``. Arguments and result as in ``dr_grpo_advantages``.

    Raises:
        ValueError: a reward is not finite, or negative.
    """
    if min(rewards) < 0:
        raise ValueError(
            f"rewards must be >= 0 with trainer.algorithm.advantage_estimator=maxrl, which divides by their mean, got {min(rewards)}; "
            "shift them, or choose another estimator"
        )
    mean = _mean(rewards)
    return [(reward - mean) / mean for reward in rewards]
