"""Generalized advantage estimation over tokens or turns, from a critic's values, with returns that are corrected for staleness."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_async.algorithms.credit import SampleCredit, with_log_ratios
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.registries import Unit


def gae_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[NDArray[np.float64]]:
    """``A_t = d_t + gamma lambd w_(t+1) A_(t+1)`` with ``d_t = r_t + gamma V_(t+1) - V_t`` over the trained tokens t of a sample.

    With ``w = 1`` this is GAE (arXiv 1506.02438, equation 16). ``lambd = gamma = 1`` gives the return less the value: unbiased, however
    wrong values are that depend only on what is before their token. With ``lambd < 1`` what the values get wrong becomes bias. After the
    last token V is 0. The environment's tokens are no steps: the token after an observation follows the one before it.

    ``w_t = min(vtrace_clip, pi(t) / mu(t))`` corrects what follows a token for the policy that sampled it: V-trace (IMPALA, arXiv
    1802.01561, equation 1) with both of its bounds at ``vtrace_clip`` and its traces times ``lambd``. Its target of the value is
    ``V_t + w_t A_t`` (``credit.returns_of``), which leads to the values of the policy in proportion to ``min(vtrace_clip mu, pi)``
    (section 4.1): those of ``pi`` with an infinite bound only. The weight of token t itself is the policy loss's. A token that the policy
    itself has sampled weighs exactly 1, whatever numerical differences there are between engine and trainer: their product over a long
    answer would cut off its reward.

    Args:
        samples: samples of one group, with ``values``. They are not compared with each other.
        constants: ``gamma``, ``lambd``, ``vtrace_clip``.

    Returns:
        (N,) per sample.
    """
    return [_advantages(one, Unit.TOKEN, constants) for one in samples]


def turn_gae_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[NDArray[np.float64]]:
    """``gae_advantages`` with turns as steps: V_k is the value before the first token of turn k, r_k what the turn earned.

    All tokens of a turn have its advantage, as in the turn-level MDP of agents (ArCHer, arXiv 2402.19446, section 3.1), and values are
    trained at the first tokens alone. ``w_k`` is the product over the turn's tokens, cut. ``gamma`` and ``lambd`` count per turn, so that
    they do not fade over long turns.

    Args:
        samples: as above.
        constants: as above.

    Returns:
        (K,) per sample; 0 for turns that are not trained.
    """
    found = []
    for one in samples:
        of_turns = np.zeros(len(one.rewards))
        of_turns[np.array(one.num_tokens) > 0] = _advantages(one, Unit.TURN, constants)
        found.append(of_turns)
    return found


def _advantages(sample: SampleCredit, unit: Unit, constants: AdvantageConstants) -> NDArray[np.float64]:
    """(N,) or (J,): of the tokens or turns that are trained."""
    assert sample.values is not None, "the registration asks for them"
    values = sample.values.astype(np.float64)
    if unit is Unit.TURN:
        values = values[sample.first_tokens]
    following = np.append(values[1:], 0.0)[: len(values)]
    differences = sample.action_rewards(unit) + constants.gamma * following - values
    weights = np.append(with_log_ratios(sample).weights(unit, constants.vtrace_clip)[1:], 0.0)[: len(values)]
    return _discounted_sums(differences, constants.gamma * constants.lambd * weights)


def _discounted_sums(terms: NDArray[np.float64], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """``y_t = x_t + f_t y_(t+1)``, 0 past the end, in log2(N) passes of numpy: a loop over 128k tokens would hold the driver for 30 ms."""
    sums, factors, distance = terms.copy(), factors.copy(), 1
    while distance < len(sums) and factors.any():
        sums[:-distance] += factors[:-distance] * sums[distance:]
        factors[:-distance] *= factors[distance:]
        factors[-distance:] = 0.0
        distance *= 2
    return sums
