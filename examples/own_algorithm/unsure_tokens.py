"""An advantage estimator that weighs tokens: ``rloo``, with the loss of each token multiplied by how unsure its sampler was of it.

The weight ``1 - p`` is the focal loss's (arXiv 1708.02002, section 3.2, gamma = 1), with p the probability of the sampled token. In
contrast to ``rare_tokens`` it is smooth, and holds divergences and the entropy back from sure tokens as well.
"""

from collections.abc import Sequence

import numpy as np

from skyrl_async.algorithms.advantages import register_advantage_estimator
from skyrl_async.algorithms.credit import SampleCredit, WeightedAdvantages
from skyrl_async.algorithms.estimators.outcome import rloo_advantages
from skyrl_async.algorithms.settings import AdvantageConstants


@register_advantage_estimator("unsure_tokens", unit="token")
def unsure_tokens(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[WeightedAdvantages]:
    """Per sample (N,) its advantage at each token, and (N,) weights in [0, 1]."""
    advantages = rloo_advantages([sample.reward for sample in samples])
    return [
        WeightedAdvantages(
            advantages=np.full(len(sample.logprobs), advantage), weights=-np.expm1(np.minimum(sample.logprobs, 0.0))
        )
        for sample, advantage in zip(samples, advantages, strict=True)
    ]
