"""REINFORCE with a baseline per prompt: the mean of what its earlier samples earned. A prompt needs one sample only."""

from collections.abc import Sequence

from skyrl_async.algorithms.estimators.outcome import require_finite


def running_mean_advantages(rewards: Sequence[float], baseline: float) -> list[float]:
    """``A_i = r_i - b`` with b from earlier steps (``history.PromptRewards``), as in single-stream policy optimization (arXiv 2509.13232).

    Earlier samples are independent of this one, so that the mean of advantages times scores is the policy gradient (Williams, "Simple
    statistical gradient-following algorithms", 1992, section 4), however old and wrong b is.

    Args:
        rewards: one finite reward per sample of one group.
        baseline: the same for all.

    Raises:
        ValueError: a reward is not finite.
    """
    require_finite(rewards)
    return [reward - baseline for reward in rewards]
