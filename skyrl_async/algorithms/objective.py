"""The loss of a micro-batch: the policy loss of its tokens, their divergence from the reference and from a teacher, and their entropies.

The loss is a sum, never a mean. The caller divides the mini-batch's gradient once, so that neither micro-batches, ranks nor streaming
change it.
"""

from dataclasses import dataclass

from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.divergences import DivergenceFn, reverse_kl
from skyrl_async.algorithms.kl import KlEstimatorFn
from skyrl_async.algorithms.losses import LossTokens, PolicyLossFn, TokenLoss
from skyrl_async.algorithms.off_policy import Corrected, OffPolicyCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """The loss of one micro-batch, with its parts."""

    total: Tensor
    """() float32, to be minimised: the sum over tokens of the policy loss, of ``kl_coef`` and ``teacher_coef`` times the divergences, less
    ``entropy_coef`` times the entropy.
    """
    tokens: TokenLoss
    """The policy loss alone, corrected."""
    ref_kl: Tensor | None
    """(N,) float32, nats, without gradient; None without a reference."""
    teacher_kl: Tensor | None = None
    """(N,) float32, nats, without gradient: the divergence over the teacher's likeliest tokens, or without those ``log student - log
    teacher`` of the sampled token. None without a teacher."""
    corrected: Corrected | None = None
    """Effect of the off-policy correction; None without one."""

    def figures(self) -> dict[str, float]:
        """Return ``ref_kl_sum`` and ``teacher_kl_sum`` over tokens, as far as there are a reference and a teacher."""
        sums = {"ref_kl_sum": self.ref_kl, "teacher_kl_sum": self.teacher_kl}
        return {name: of_tokens.double().sum().item() for name, of_tokens in sums.items() if of_tokens is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The corrected policy loss, plus ``kl_coef`` times the divergence from the reference and ``teacher_coef`` times that from the teacher,
    minus ``entropy_coef`` times the entropy.

    Each token counts by its weight, with that of its row. The entropy bonus is that of A3C (arXiv 1602.01783, section 4), computed at the
    positions of sampled tokens and at the temperature of sampling.
    """

    policy_loss: PolicyLossFn
    kl_estimator: KlEstimatorFn | None = None
    """None: no divergence from a reference."""
    kl_coef: float = 0.0
    """>= 0."""
    entropy_coef: float = 0.0
    """>= 0; with 0 no entropies are needed."""
    correction: OffPolicyCorrection | None = None
    """Correction of the policy loss; the divergences are not corrected."""
    teacher_divergence: DivergenceFn = reverse_kl
    teacher_coef: float = 0.0
    """>= 0; with 0 the teacher's likeliest tokens are not needed."""

    def __call__(
        self,
        logprobs: Tensor,
        batch: MicroBatch,
        ref_logprobs: Tensor | None,
        entropies: Tensor | None = None,
        top_logprobs: Tensor | None = None,
    ) -> MicroBatchLoss:
        """Return the loss of one micro-batch.

        Args:
            logprobs: (N,) float32, nats, of the policy, with gradients.
            batch: the same tokens.
            ref_logprobs: (N,) float32, nats, of the reference; used with a ``kl_estimator``.
            entropies: (N,) float32, nats, of the policy, with gradients; used with an ``entropy_coef``.
            top_logprobs: as ``batch.teacher_top_logprobs``, of the policy, with gradients; used with a ``teacher_coef``.
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
        ref_kl, teacher_kl = None, self._from_teacher(logprobs, batch, top_logprobs)
        if self.kl_estimator is not None:
            assert ref_logprobs is not None, "split_work requires a reference"
            ref_kl = self.kl_estimator(logprobs, ref_logprobs)
        for coef, kl in ((self.kl_coef, ref_kl), (self.teacher_coef, teacher_kl)):
            if coef and kl is not None:
                total = total + coef * (batch.weights * kl).sum()
        return MicroBatchLoss(
            total=total,
            tokens=tokens,
            ref_kl=None if ref_kl is None else ref_kl.detach(),
            teacher_kl=None if teacher_kl is None else teacher_kl.detach(),
            corrected=corrected,
        )

    def _from_teacher(self, logprobs: Tensor, batch: MicroBatch, top_logprobs: Tensor | None) -> Tensor | None:
        """``MicroBatchLoss.teacher_kl``, with gradients. An idle micro-batch has no likeliest tokens, and no part in the sum."""
        if not self.teacher_coef:
            return None if batch.teacher_logprobs is None else logprobs - batch.teacher_logprobs
        if batch.teacher_top_logprobs is None or top_logprobs is None:
            return None
        return self.teacher_divergence(top_logprobs, batch.teacher_top_logprobs)
