"""GiGPO: whole samples compared with each other, and turns with the turns that saw the same."""

import math
from collections import defaultdict
from collections.abc import Sequence

from skyrl_async.algorithms.credit import SampleCredit
from skyrl_async.algorithms.settings import AdvantageConstants


def gigpo_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[list[float]]:
    """``A_ik = norm(r_i) + step_advantage_w norm(G_ik)``: GiGPO (arXiv 2505.10978), sections 4.1 to 4.3.

    ``r_i`` is the reward of sample i, normalised over the group. ``G_ik`` is its discounted return from turn k on, normalised over all
    turns of the group that were shown the same observation, the *anchor state*: in any sample, at any time. ``norm`` subtracts the mean,
    and divides by the standard deviation if ``norm_by_std``. A turn whose observation nobody else has seen has no second term.

    Observations are states only if what came before them does not matter. A sample that comes back to a state is part of its own
    baseline there. Hence the mean is not the policy gradient in general (``benchmarks.estimator_bias``).

    Args:
        samples: samples of one group, with ``observations``.
        constants: ``turn_discount``, ``step_advantage_w``, ``norm_by_std``.

    Returns:
        (K,) per sample; zeros where nothing differs.
    """
    of_episode = _normalised([one.reward for one in samples], constants.norm_by_std)
    returns = [one.returns(constants.turn_discount) for one in samples]
    anchors: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for i, one in enumerate(samples):
        for k, observation in enumerate(one.observations):
            if one.num_tokens[k]:
                anchors[observation].append((i, k))
    of_turn = {
        turn: value
        for turns in anchors.values()
        for turn, value in zip(
            turns, _normalised([returns[i][k] for i, k in turns], constants.norm_by_std), strict=True
        )
    }
    return [
        [of_episode[i] + constants.step_advantage_w * of_turn.get((i, k), 0.0) for k in range(len(one.rewards))]
        for i, one in enumerate(samples)
    ]


def _normalised(values: Sequence[float], by_std: bool) -> list[float]:
    """Zeros if the values are equal."""
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    centred = [value - mean for value in values]
    scale = math.sqrt(math.fsum(c * c for c in centred) / (len(values) - 1)) + 1e-6 if by_std else 1.0
    return [c / scale for c in centred]
