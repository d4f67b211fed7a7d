"""Return-to-go of each token, less what the other samples of the group earned from the same turn on."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_async.algorithms.credit import SampleCredit
from skyrl_async.algorithms.settings import AdvantageConstants


def turn_rloo_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[NDArray[np.float64]]:
    """``A_it = G_ik - e_it - mean over j != i of G_jk`` with ``G_ik = sum over l >= k of turn_discount ** (l - k) r_il``.

    Token t is of turn k, and ``e_it`` is what the turn's tokens before it earned. Where rewards are known by turn alone it is 0, and all
    tokens of a turn have one advantage.

    A sample that ended before turn k counts with the return of its last turn: every baseline is a mean over all other samples, however
    many turns they took. Where the last turn alone is rewarded and nothing is discounted, this is ``rloo``. What earlier turns and tokens
    earned is left out, because a token cannot change it (Sutton and Barto, "Reinforcement Learning", 2nd edition, section 13.3). The
    baseline is that of RLOO (arXiv 2402.14740), after Kool et al. (2019).

    With ``turn_discount = 1`` the mean of advantages times scores is the policy gradient, for groups of any size >= 2. Samples are
    independent, so that the baseline of turn k does not depend on what sample i does in turn k, or whether it ends there. A baseline
    that adds up means of ``r_jl`` over the turns l that sample i still takes does depend on it: it pays for ending or for going on
    (verl issue 7244).

    Args:
        samples: samples of one group.
        constants: ``turn_discount``.

    Returns:
        (N,) per sample; zeros for a group of one, which has no baseline.
    """
    if len(samples) < 2:
        return [np.zeros(sum(one.num_tokens)) for one in samples]
    returns = [one.returns(constants.turn_discount) for one in samples]
    totals = [math.fsum(of[min(k, len(of) - 1)] for of in returns) for k in range(max(map(len, returns)))]
    num_others = len(samples) - 1
    of_turns = [[value - (totals[k] - value) / num_others for k, value in enumerate(of)] for of in returns]
    return [np.repeat(turns, one.num_tokens) - one.earned_before for turns, one in zip(of_turns, samples, strict=True)]
