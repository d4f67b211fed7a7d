"""Turn credit: the advantage of the whole sample, moved between its turns towards those before a reward."""

import math
from collections.abc import Sequence

from skyrl_async.algorithms.credit import SampleCredit
from skyrl_async.algorithms.estimators.outcome import rloo_advantages
from skyrl_async.algorithms.settings import AdvantageConstants


def turn_credit_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[list[float]]:
    """``A_ik = A_i + credit_weight (c_ik - mean over the tokens of i of c_i)``: prime-rl's ``turn_credit`` (pull request 3282).

    ``A_i`` is the sample's advantage, here ``rloo``'s. The reward of turn l, its progress, is split over turn l and those before it by
    weights ``credit_decay ** d`` at distance d that sum to 1; ``c_ik`` is what turn k gets of all. The mean is taken away, so that the
    advantages of a sample's tokens add up to what ``A_i`` alone would give. prime-rl takes scores of the state after each turn and
    trains on their differences; here the environment's rewards are these differences.

    The mean over the tokens depends on how long the sample's turns are, which the policy decides: the mean is not the policy gradient
    (``benchmarks.estimator_bias``).

    Args:
        samples: samples of one group.
        constants: ``credit_decay``, ``credit_weight``.

    Returns:
        (K,) per sample. Samples of equal rewards still differ in their turns.
    """
    levels = rloo_advantages([one.reward for one in samples])
    return [
        [level + constants.credit_weight * credit for credit in _centred(one, constants.credit_decay)]
        for level, one in zip(levels, samples, strict=True)
    ]


def _centred(sample: SampleCredit, decay: float) -> list[float]:
    credits, following = [], 0.0
    for num_before, reward in reversed(list(enumerate(sample.rewards, start=1))):
        following = reward / math.fsum(decay**d for d in range(num_before)) + decay * following
        credits.append(following)
    credits.reverse()
    num_tokens = sum(sample.num_tokens)
    if not num_tokens:
        return [0.0] * len(credits)
    mean = math.fsum(credit * num for credit, num in zip(credits, sample.num_tokens, strict=True)) / num_tokens
    return [credit - mean for credit in credits]
