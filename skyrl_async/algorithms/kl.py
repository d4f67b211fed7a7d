"""Log-probs under the policy and under a frozen reference in, one estimate of their divergence per token out.

Every estimator is a pure function of two (N,) tensors, one entry per sampled token, cut at ``MAX_ESTIMATE``. Nothing here reduces over
tokens.
"""

from collections.abc import Callable

from torch import Tensor

from skyrl_async.algorithms.losses import MAX_LOG_RATIO
from skyrl_async.errors import ConfigError

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
