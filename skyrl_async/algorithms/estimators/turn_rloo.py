"""Return-to-go of each turn, less what the other samples of the group earned from the same turn on."""

import math
from collections.abc import Sequence

from skyrl_async.algorithms.credit import SampleCredit
from skyrl_async.algorithms.settings import AdvantageConstants


def turn_rloo_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[list[float]]:
    """``A_ik = G_ik - mean over j != i of G_jk`` with ``G_ik = sum over l >= k of turn_discount ** (l - k) r_il``.

    A sample that ended before turn k counts with the return of its last turn: every baseline is a mean over all other samples, however
    many turns they took. Where the last turn alone is rewarded and nothing is discounted, this is ``rloo``. Rewards of earlier turns are
    left out of ``G``, because a turn cannot change them (Sutton and Barto, "Reinforcement Learning", 2nd edition, section 13.3). The
    baseline is that of RLOO (arXiv 2402.14740), after Kool et al. (2019).

    With ``turn_discount = 1`` the mean of advantages times scores is the policy gradient, for groups of any size >= 2. Samples are
    independent, so that the baseline of turn k does not depend on what sample i does in turn k, or whether it ends there. A baseline
    that adds up means of ``r_jl`` over the turns l that sample i still takes does depend on it: it pays for ending or for going on
    (verl issue 7244).

    Args:
        samples: samples of one group.
        constants: ``turn_discount``.

    Returns:
        (K,) per sample; zeros for a group of one, which has no baseline.
    """
    if len(samples) < 2:
        return [[0.0] * len(one.rewards) for one in samples]
    returns = [one.returns(constants.turn_discount) for one in samples]
    totals = [math.fsum(of[min(k, len(of) - 1)] for of in returns) for k in range(max(map(len, returns)))]
    num_others = len(samples) - 1
    return [[value - (totals[k] - value) / num_others for k, value in enumerate(of)] for of in returns]
