"""REINFORCE++: whole samples, normalised over the tokens of a mini-batch."""

import math
from collections.abc import Sequence

from skyrl_async.algorithms.credit import GroupRewards
from skyrl_async.algorithms.estimators.outcome import dr_grpo_advantages, require_finite


def reinforce_pp_advantages(groups: Sequence[GroupRewards]) -> list[list[float]]:
    """``A_i = (r_i - mean(r)) / (std(r) + 1e-8)`` over all tokens of the mini-batch: REINFORCE++ (arXiv 2501.03262).

    Each sample counts once per trained token; mean and standard deviation are taken over these tokens. A sample is part of both, a longer
    one more, so that the mean of advantages times scores is not the policy gradient. The angle between the two shrinks with the number of
    samples (``benchmarks.estimator_bias``).

    Nothing is computed per prompt, so that groups of one sample work. With KL in the reward every token gets the KL of the whole answer;
    in the paper it gets the KL from that token on. Before normalisation both have the same mean; this one has more variance
    (``kl.KlPenalty``).

    Args:
        groups: all groups of one mini-batch.

    Returns:
        Per group one advantage per sample; zeros if all rewards are equal.

    Raises:
        ValueError: a reward is not finite.
    """
    for group in groups:
        require_finite(group.rewards)
    return _normalised([list(group.rewards) for group in groups], groups)


def reinforce_pp_baseline_advantages(groups: Sequence[GroupRewards]) -> list[list[float]]:
    """``reinforce_pp_advantages`` of ``r_i - mean over its group``: REINFORCE++ with baseline (arXiv 2501.03262).

    The group's mean removes the difficulty of its prompt; the mini-batch's standard deviation sets the scale. Arguments, result and errors
    as in ``reinforce_pp_advantages``.
    """
    return _normalised([dr_grpo_advantages(group.rewards) for group in groups], groups)


def _normalised(values: Sequence[Sequence[float]], groups: Sequence[GroupRewards]) -> list[list[float]]:
    """Subtract the mean over tokens, and divide by the standard deviation over tokens."""
    counted = [
        (value, num)
        for of_group, group in zip(values, groups, strict=True)
        for value, num in zip(of_group, group.num_tokens, strict=True)
        if num
    ]
    if not counted or min(counted)[0] == max(counted)[0]:
        return [[0.0] * len(of_group) for of_group in values]
    num_tokens = sum(num for _, num in counted)
    mean = math.fsum(value * num for value, num in counted) / num_tokens
    std = math.sqrt(math.fsum((value - mean) ** 2 * num for value, num in counted) / num_tokens)
    return [[(value - mean) / (std + 1e-8) for value in of_group] for of_group in values]
