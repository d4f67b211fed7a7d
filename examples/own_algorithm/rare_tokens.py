"""An advantage estimator of tokens: ``rloo`` for the tokens of an answer that were hard to foresee, nothing for the others.

Most tokens of an answer follow from those before. The few that do not decide what it becomes (Wang et al., "Beyond the 80/20 Rule",
arXiv 2506.01939, choose them by entropy; here the engine's log-prob of the sampled token tells them apart).
"""

from collections.abc import Sequence

import numpy as np

from skyrl_async.algorithms.advantages import register_advantage_estimator
from skyrl_async.algorithms.credit import SampleCredit
from skyrl_async.algorithms.estimators.outcome import rloo_advantages
from skyrl_async.algorithms.settings import AdvantageConstants

MAX_PROBABILITY = 0.8
"""The most that a token which counts may have."""


@register_advantage_estimator("rare_tokens", unit="token")
def rare_tokens(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[np.ndarray]:
    """(N,) per sample: its advantage at each token that its sampler found less likely than ``MAX_PROBABILITY``, 0 at the others."""
    advantages = rloo_advantages([sample.reward for sample in samples])
    return [
        np.where(np.exp(sample.logprobs) < MAX_PROBABILITY, advantage, 0.0)
        for sample, advantage in zip(samples, advantages, strict=True)
    ]
