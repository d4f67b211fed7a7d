"""The loss of a micro-batch: the policy loss of its tokens, their divergence from the reference, and their entropies.

The loss is a sum, never a mean. The caller divides the mini-batch's gradient once, so that neither micro-batches, ranks nor streaming
change it.
"""

from dataclasses import dataclass

from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.kl import KlEstimatorFn
from skyrl_async.algorithms.losses import LossTokens, PolicyLossFn, TokenLoss
from skyrl_async.algorithms.off_policy import Corrected, OffPolicyCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """The loss of one micro-batch, with its parts."""

    total: Tensor
    """() float32, to be minimised: the sum over tokens of the policy loss, and of ``kl_coef`` times the divergence, less ``entropy_coef``
    times the entropy.
    """
    tokens: TokenLoss
    """The policy loss alone, corrected."""
    ref_kl: Tensor | None
    """(N,) float32, nats, without gradient; None without a reference."""
    corrected: Corrected | None = None
    """Effect of the off-policy correction; None without one."""

    def figures(self) -> dict[str, float]:
        """Return ``ref_kl_sum`` over tokens if there is a reference, else nothing."""
        return {} if self.ref_kl is None else {"ref_kl_sum": self.ref_kl.double().sum().item()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The corrected policy loss, plus ``kl_coef`` times the divergence from the reference, minus ``entropy_coef`` times the entropy.

    Each token counts by the weight of its row. The entropy bonus is that of A3C (arXiv 1602.01783, section 4), computed at the positions of
    sampled tokens and at the temperature of sampling.
    """

    policy_loss: PolicyLossFn
    kl_estimator: KlEstimatorFn | None = None
    """None: no divergence from a reference."""
    kl_coef: float = 0.0
    """>= 0."""
    entropy_coef: float = 0.0
    """>= 0; with 0 no entropies are needed."""
    correction: OffPolicyCorrection | None = None
    """Correction of the policy loss; the divergence is not corrected."""

    def __call__(
        self, logprobs: Tensor, batch: MicroBatch, ref_logprobs: Tensor | None, entropies: Tensor | None = None
    ) -> MicroBatchLoss:
        """Return the loss of one micro-batch.

        Args:
            logprobs: (N,) float32, nats, of the policy, with gradients.
            batch: the same tokens.
            ref_logprobs: (N,) float32, nats, of the reference; used with a ``kl_estimator``.
            entropies: (N,) float32, nats, of the policy, with gradients; used with an ``entropy_coef``.
        """
        corrected = None if self.correction is None else self.correction(logprobs, batch)
        given = LossTokens(
            logprobs=logprobs,
            behavior_logprobs=batch.behavior_logprobs if corrected is None else corrected.anchor_logprobs,
            advantages=batch.advantages,
            row_indices=batch.row_indices,
            old_logprobs=batch.old_logprobs,
            weights=batch.weights,
            is_marked=batch.is_marked,
        )
        tokens = self.policy_loss(given)
        if corrected is not None:
            tokens = corrected.applied_to(tokens)
        total = tokens.loss.sum()
        if self.entropy_coef:
            assert entropies is not None, "the rank computes them if entropy_coef is set"
            total = total - self.entropy_coef * (batch.weights * entropies).sum()
        if self.kl_estimator is None:
            return MicroBatchLoss(total=total, tokens=tokens, ref_kl=None, corrected=corrected)
        assert ref_logprobs is not None, "split_work requires a reference"
        kl = self.kl_estimator(logprobs, ref_logprobs)
        if self.kl_coef:
            total = total + self.kl_coef * (batch.weights * kl).sum()
        return MicroBatchLoss(total=total, tokens=tokens, ref_kl=kl.detach(), corrected=corrected)
