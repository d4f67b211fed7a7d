"""The divergence from a frozen reference: estimates per token, and the penalty that takes them from rewards.

Every estimator is a pure function of two (N,) tensors, one entry per sampled token, cut at ``MAX_ESTIMATE``. It does not reduce over
tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_async.algorithms.losses import MAX_LOG_RATIO
from skyrl_async.errors import TrainingError
from skyrl_async.samples import Sample
from skyrl_async.types import Trajectory

MAX_ESTIMATE = 10.0
"""Nats of either sign at which each token's estimate is cut, as in AReaL (``KLEstimator``), and with k3 in SkyRL and verl.

Past it a token has no gradient. Up to it the gradient is at most 12.6 for k3, 4.5 for k2, and 1 for the others, so that one token can
dominate neither a step nor the reward of its answer.
"""

KlEstimatorFn = Callable[[Tensor, Tensor], Tensor]
"""(log pi, log ref) -> (N,) nats; its gradient flows to the policy's log-probs."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log pi - log ref``: unbiased for KL(pi, ref), of either sign.

    Schulman, "Approximating KL divergence" (2020). As a loss it has no effect in the mean: its gradient is the score
    ``grad log pi``, whose mean under pi is 0 (Tang and Munos, arXiv 2506.09477).

    Args:
        logprobs: (N,) float32, nats, of the policy being trained.
        ref_logprobs: (N,) float32, nats, of the reference.
    """
    return _cut(logprobs - ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log pi - log ref)^2 / 2``: biased, never negative; its gradient's mean under pi is that of KL(pi, ref).

    Schulman, as above. Arguments as in ``k1``.
    """
    return _cut(_log_ratio(logprobs, ref_logprobs).square() / 2)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``r - 1 - log r`` with ``r = ref / pi``: unbiased for KL(pi, ref), never negative, of little variance.

    Schulman, as above; GRPO's (DeepSeekMath, arXiv 2402.03300), equation 4. Its gradient's mean under pi is that of
    KL(ref, pi). Arguments as in ``k1``.
    """
    log_ratio = _log_ratio(logprobs, ref_logprobs)
    return _cut(log_ratio.exp() - 1 - log_ratio)


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``|log pi - log ref|``: a distance of log-probs, not an estimate of KL; every token pulls equally. Arguments as in ``k1``."""
    return _cut((logprobs - ref_logprobs).abs())


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log ref - log pi``, cut so that its exponential stays finite."""
    return (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _cut(estimate: Tensor) -> Tensor:
    return estimate.clamp(-MAX_ESTIMATE, MAX_ESTIMATE)


KL_ESTIMATORS: dict[str, KlEstimatorFn] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
"""The values of ``trainer.algorithm.kl_estimator_type``."""


@dataclass(slots=True, kw_only=True)
class KlController:
    """The coefficient of the KL penalty: fixed, or adapted by a proportional rule so that the divergence reaches a target."""

    coefficient: float
    """> 0 if there is a target."""
    target: float | None = None
    """Nats per token, > 0; None: fixed."""
    horizon: int = 10_000
    """Samples; at least as many as a step has. With fewer one step changes the coefficient by more than a fifth, and with less than a fifth
    of them to below 0."""

    def update(self, divergence: float, num_samples: int) -> None:
        """Adapt the coefficient after a step on ``num_samples`` samples of mean divergence ``divergence``, nats per token.

        ``b <- b (1 + e num_samples / horizon)`` with ``e = clip(divergence / target - 1, -0.2, 0.2)``: Ziegler et al. (arXiv 1909.08593),
        section 2.2, with the gain of their code, as in TRL and SkyRL. They take the divergence of whole answers; SkyRL and this take the
        mean over tokens.
        """
        if self.target is not None:
            error = min(max(divergence / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * num_samples / self.horizon


class KlPenalty:
    """Subtracts the divergence from the reference from rewards: ``r - b sum over tokens of kl(log mu, log ref)``.

    With k1, with samples of the policy itself and with no estimate cut (``MAX_ESTIMATE``), the gradient has the mean of the gradient of
    ``E[r] - b KL(pi, ref)`` (Ziegler et al., arXiv 1909.08593, equation 2). ``mu`` is the engine's probability under the version that
    sampled each token. If the engine leaves tokens out (top_p, top_k, min_p, a grammar), ``mu`` does not cover the whole vocabulary, as
    ``ref`` does, and the sum grows with the length.

    Every token of an answer gets the sum over the whole answer. In REINFORCE++ (arXiv 2501.03262) a token gets the divergence of the tokens
    from it on. Before advantages are normalised the mean is the same, because the mean of a token's score given the tokens before it is 0.
    The variance here is larger as a rule.

    A reward acts through the score alone, not through the gradient of the estimate. Hence what another estimator subtracts from the
    gradient of ``E[r]`` is not the gradient of a divergence (arXiv 2510.01555, 2512.21852). With ``KL_t`` the divergence of a token given
    the tokens before it, it is

        k2    grad E[k2] - E[grad KL_t(pi, ref)]
        k3    grad KL(pi, ref) - E[grad KL_t(ref, pi)]
        abs   grad E[abs] - E[sum over tokens of sign(log pi / ref) grad log pi]

    The first two are almost nothing near the reference, where both terms agree to first order. All three may push away from it.

    Args:
        estimator: estimate per token, nats.
        controller: the coefficient b.
    """

    def __init__(self, estimator: KlEstimatorFn, controller: KlController) -> None:
        self._estimator = estimator
        self.controller = controller
        self._of_step: list[float] = []

    def penalised(self, sample: Sample) -> float:
        """Return the (shaped) reward of a sample minus its divergence, with the coefficient of the step.

        Raises ``TrainingError`` without ``ref_logprobs``.
        """
        divergences = [self._divergences(row) for row in sample.rows]
        total, num_tokens = math.fsum(float(of_row.sum()) for of_row in divergences), sum(map(len, divergences))
        if num_tokens:
            self._of_step.append(total / num_tokens)
        return sample.shaped_reward - self.controller.coefficient * total

    def _divergences(self, row: Trajectory) -> NDArray[np.float64]:
        """(n,) of the sampled tokens, nats."""
        if row.ref_logprobs is None:
            raise TrainingError(
                "trainer.algorithm.use_kl_in_reward needs trajectories with ref_logprobs; some have none"
            )
        of_both = (row.logprobs, row.ref_logprobs)
        sampled, reference = (torch.tensor(of[row.loss_mask], dtype=torch.float64) for of in of_both)
        return self._estimator(sampled, reference).numpy()

    def end_step(self) -> dict[str, float]:
        """End the step of the samples since the last call; returns ``reward_kl``, and the ``reward_kl_coef`` of that step.

        The new coefficient does not depend on the order of samples, to the last bit.
        """
        mean, coefficient = math.fsum(self._of_step) / max(1, len(self._of_step)), self.controller.coefficient
        if self._of_step:
            self.controller.update(mean, len(self._of_step))
        self._of_step.clear()
        return {"reward_kl": mean, "reward_kl_coef": coefficient}
