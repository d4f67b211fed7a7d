"""The divergence from a frozen reference: estimates per token, and the penalty that takes them from rewards.

Every estimator is a pure function of two (N,) tensors, one entry per sampled token, cut at ``MAX_ESTIMATE``. It does not reduce over
tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_async.algorithms.losses import MAX_LOG_RATIO
from skyrl_async.errors import ConfigError, TrainingError
from skyrl_async.samples import Sample

MAX_ESTIMATE = 10.0
"""Nats of either sign at which each token's estimate is cut, as AReaL does (``KLEstimator``), and SkyRL and verl with k3. Past it a token
has no gradient; up to it that of k3 is at most 12.6, of k2 4.5, of the others 1, so that one token can dominate neither a step nor the
reward of its answer.
"""

KlEstimatorFn = Callable[[Tensor, Tensor], Tensor]
"""(log pi, log ref) -> (N,) nats; its gradient flows to the policy's log-probs."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log pi - log ref``: unbiased for KL(pi, ref), of either sign.

    Schulman, "Approximating KL divergence" (2020). As a loss it does nothing in the mean: its gradient is the score
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
    """``|log pi - log ref|``: a distance of log-probs and no estimate of KL; every token pulls alike. Arguments as in ``k1``."""
    return _cut((logprobs - ref_logprobs).abs())


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log ref - log pi``, cut where its exponential would no longer be finite."""
    return (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _cut(estimate: Tensor) -> Tensor:
    return estimate.clamp(-MAX_ESTIMATE, MAX_ESTIMATE)


_ESTIMATORS: dict[str, KlEstimatorFn] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def get_kl_estimator(name: str) -> KlEstimatorFn:
    """The estimator called ``name``. Raises ``ConfigError`` listing the known ones."""
    if name not in _ESTIMATORS:
        raise ConfigError(f"trainer.algorithm.kl_estimator_type must be one of {', '.join(_ESTIMATORS)}, got {name!r}")
    return _ESTIMATORS[name]


@dataclass(slots=True, kw_only=True)
class KlController:
    """The coefficient of the divergence: fixed, or led towards a target by a proportional rule."""

    coefficient: float
    """> 0 where there is a target."""
    target: float | None = None
    """Nats per token, > 0; None: fixed."""
    horizon: int = 10_000
    """Samples; at least those of a step, or one step moves the coefficient by more than a fifth, from five times as many below 0."""

    def update(self, divergence: float, num_samples: int) -> None:
        """After a step on ``num_samples`` samples whose mean divergence was ``divergence``, nats per token.

        ``b <- b (1 + e num_samples / horizon)`` with ``e = clip(divergence / target - 1, -0.2, 0.2)``: Ziegler et al. (arXiv 1909.08593),
        section 2.2, with the gain of their code, as in TRL and SkyRL. They take the divergence of whole answers, SkyRL, and this, the
        mean over tokens.
        """
        if self.target is not None:
            error = min(max(divergence / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * num_samples / self.horizon


class KlPenalty:
    """What divergence takes from rewards: ``r - b sum over tokens of kl(log mu, log ref)``.

    With k1, samples of the policy itself and no estimate cut (``kl.MAX_ESTIMATE``), advantages of these rewards have the gradient of
    ``E[r] - b KL(pi, ref)`` as their mean (Ziegler et al., arXiv 1909.08593, equation 2). ``mu`` is the engine's, of the version that
    sampled each token; where the engine leaves tokens out (top_p, top_k, min_p, a grammar) it is not of the whole vocabulary, as ``ref``
    is, and the sum grows with the length.

    Every token of an answer bears the sum over all of it. REINFORCE++ (arXiv 2501.03262) takes from a token the divergence of those from
    it on: before advantages are normalised the mean is the same, as the mean of a token's score given what came before it is 0, and the
    variance here is larger as a rule.

    A reward acts by the score alone, not by the gradient of the estimate. What another estimator takes from the gradient of ``E[r]`` is
    therefore not that of a divergence (arXiv 2510.01555, 2512.21852), ``KL_t`` being a token's given those before it:

        k2    grad E[k2] - E[grad KL_t(pi, ref)]
        k3    grad KL(pi, ref) - E[grad KL_t(ref, pi)]
        abs   grad E[abs] - E[sum over tokens of sign(log pi / ref) grad log pi]

    The first two are next to nothing near the reference, where both terms are the same to first order; all three may push away from it.

    Args:
        estimator: per token, nats.
        controller: its coefficient.
    """

    def __init__(self, estimator: KlEstimatorFn, controller: KlController) -> None:
        self._estimator = estimator
        self.controller = controller
        self._of_step: list[float] = []

    def penalised(self, sample: Sample) -> float:
        """The (shaped) reward of a sample less its divergence, at the coefficient of the step.

        Raises ``TrainingError`` without ``ref_logprobs``.
        """
        divergences = [
            value for row in sample.rows for value in self._of_row(row.logprobs, row.ref_logprobs, row.loss_mask)
        ]
        if divergences:
            self._of_step.append(math.fsum(divergences) / len(divergences))
        return sample.shaped_reward - self.controller.coefficient * math.fsum(divergences)

    def _of_row(
        self, logprobs: tuple[float, ...], ref_logprobs: tuple[float, ...] | None, loss_mask: tuple[int, ...]
    ) -> list[float]:
        if ref_logprobs is None:
            raise TrainingError(
                "trainer.algorithm.use_kl_in_reward needs trajectories with ref_logprobs; some have none"
            )
        kept = torch.tensor(loss_mask, dtype=torch.bool)
        sampled, reference = (torch.tensor(of, dtype=torch.float64)[kept] for of in (logprobs, ref_logprobs))
        return self._estimator(sampled, reference).tolist()

    def end_step(self) -> dict[str, float]:
        """The samples since the last call were those of a step; returns ``reward_kl`` and the ``reward_kl_coef`` that it was trained with.

        In whatever order they came, the coefficient is the same to the last bit.
        """
        mean, coefficient = math.fsum(self._of_step) / max(1, len(self._of_step)), self.controller.coefficient
        if self._of_step:
            self.controller.update(mean, len(self._of_step))
        self._of_step.clear()
        return {"reward_kl": mean, "reward_kl_coef": coefficient}
