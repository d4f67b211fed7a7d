"""Divergence from the reference as a part of the reward, and how much of it.

Flows in: samples with log-probs under their samplers and under the reference. Flows out: what their rewards lose, and a coefficient that
follows a target. Knows neither advantages nor steps.
"""

import math
from dataclasses import dataclass

import torch

from skyrl_async.algorithms.kl import KlEstimatorFn
from skyrl_async.errors import TrainingError
from skyrl_async.samples import Sample


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
