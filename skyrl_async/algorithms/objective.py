"""What a micro-batch is trained on: the policy loss of its tokens, and their divergence from the reference.

Flows in: log-probs and a ``MicroBatch``. Flows out: one sum to be minimised, and figures. Sums, never means: the caller divides the
mini-batch's gradient once, so that neither micro-batches, ranks nor streaming change it.
"""

from dataclasses import dataclass

from torch import Tensor

from skyrl_async.algorithms.batching import MicroBatch
from skyrl_async.algorithms.kl import KlEstimatorFn
from skyrl_async.algorithms.losses import PolicyLossFn, TokenLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """Of one micro-batch."""

    total: Tensor
    """() float32, to be minimised: the sum over tokens of the policy loss, and of ``kl_coef`` times the divergence."""
    tokens: TokenLoss
    """The policy loss alone."""
    ref_kl: Tensor | None
    """(N,) float32, nats, without gradient; None without a reference."""

    def figures(self) -> dict[str, float]:
        """``ref_kl_sum`` over tokens, where there is a reference."""
        return {} if self.ref_kl is None else {"ref_kl_sum": self.ref_kl.double().sum().item()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The policy loss plus ``kl_coef`` times the divergence from the reference, each token by the weight of its row."""

    policy_loss: PolicyLossFn
    kl_estimator: KlEstimatorFn | None = None
    """None: no reference is asked for."""
    kl_coef: float = 0.0
    """>= 0."""

    def __call__(self, logprobs: Tensor, batch: MicroBatch, ref_logprobs: Tensor | None) -> MicroBatchLoss:
        """The loss of one micro-batch.

        Args:
            logprobs: (N,) float32, nats, of the policy, with gradients.
            batch: the same tokens.
            ref_logprobs: (N,) float32, nats, of the reference; read where there is a ``kl_estimator``.
        """
        tokens = self.policy_loss(logprobs, batch.behavior_logprobs, batch.advantages, batch.old_logprobs)
        total = tokens.loss.sum()
        if self.kl_estimator is None:
            return MicroBatchLoss(total=total, tokens=tokens, ref_kl=None)
        assert ref_logprobs is not None, "split_work sees to it that there is a reference"
        kl = self.kl_estimator(logprobs, ref_logprobs)
        if self.kl_coef:
            total = total + self.kl_coef * (batch.weights * kl).sum()
        return MicroBatchLoss(total=total, tokens=tokens, ref_kl=kl.detach())
