"""Holds an optimizer step back whose tokens are worth few fresh ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """How far a step may move the policy, by the effective sample size of its answers.

    The effective share s of n answers is ``(sum w)^2 / (n sum w^2)`` over their importance ratios ``w = pi / mu``, in (0, 1]
    (``off_policy.sample_size_figures``). A gradient of n answers has the variance of one of s n answers that the policy itself has
    sampled. For Adam the learning rate that goes with a batch grows with the square root of its size (Malladi et al., arXiv 2205.10287), so
    that a step of share s takes ``sqrt(s)`` of it: the step scaling of VCPO (arXiv 2602.17616).
    """

    scales_lr: bool = False
    """Multiply the learning rate of a step by ``sqrt(s)``."""
    min_ess: float = 0.0
    """Refuse a step whose s is smaller."""

    def lr_scale(self, shares: Mapping[str, float]) -> float:
        """Factor of the learning rate, in [0, 1]; 0 refuses the step.

        Args:
            shares: ``metrics.step.effective_shares`` of the step's tokens; 1 is returned if they are not known.
        """
        share = shares.get("policy/sequence_ess")
        if share is None:
            return 1.0
        if share < self.min_ess:
            return 0.0
        return math.sqrt(share) if self.scales_lr else 1.0
