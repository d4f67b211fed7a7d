"""Log-probs of sampled tokens in, one loss per token out, with the figures that say how far off-policy they are.

Every loss is a pure function of (N,) tensors, one entry per sampled token: the policy's log-probs ``log pi``, the
behavior log-probs ``log mu`` of the engine that sampled the token, advantages, and for some the log-probs
``log pi_prox`` of a policy in between. Nothing here reduces over tokens: the caller sums, and divides by the
mini-batch's token count once, so that neither micro-batches nor ranks change the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from skyrl_async.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, so that ``exp`` stays finite; the gradient past it is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What a policy loss says of each token."""

    loss: Tensor
    """(N,) float32, to be minimised; its gradient flows to the policy's log-probs."""
    is_clipped: Tensor
    """(N,) bool: the importance ratio was cut."""


class PolicyLossFn(Protocol):
    """A loss with its constants. A token whose advantage is 0 must have no gradient."""

    def __call__(
        self, logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, old_logprobs: Tensor | None = None, /
    ) -> TokenLoss:
        """(log pi, log mu, advantages, log pi_prox) -> TokenLoss; the last is None where ``needs_old_logprobs`` is false."""
        ...


def importance_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """``pi / mu`` per token, from log-probs in nats, each (N,)."""
    return (logprobs - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> TokenLoss:
    """``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)`` with ``r = pi / mu``.

    PPO (arXiv 1707.06347), equation 7, anchored on the policy that sampled; two bounds as in DAPO (arXiv 2503.14476),
    section 3.1.

    Args:
        logprobs: (N,) float32, nats, of the policy being trained.
        behavior_logprobs: (N,) float32, nats, from the engine.
        advantages: (N,) float32.
        eps_low: in [0, 1).
        eps_high: >= 0.
    """
    ratio = importance_ratio(logprobs, behavior_logprobs)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return TokenLoss(loss=-torch.minimum(unclipped, clipped), is_clipped=clipped.detach() < unclipped.detach())


def rollout_is(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, cap: float) -> TokenLoss:
    """``-sg(min(r, cap)) A log pi`` with ``r = pi / mu`` and ``sg`` stopping the gradient: token-level truncated
    importance sampling, anchored on the rollout.

    The truncated weight is IMPALA's (arXiv 1802.01561, section 4.1); on a REINFORCE loss per token it is CISPO
    (MiniMax-M1, arXiv 2506.13585, section 3.1). With ``cap`` infinite the gradient's mean under mu is the exact policy
    gradient of one token.

    Args:
        logprobs: (N,) float32, nats, of the policy being trained.
        behavior_logprobs: (N,) float32, nats, from the engine.
        advantages: (N,) float32.
        cap: largest weight, > 0.
    """
    ratio = importance_ratio(logprobs.detach(), behavior_logprobs)
    return TokenLoss(loss=-ratio.clamp(max=cap) * advantages * logprobs, is_clipped=ratio > cap)


def decoupled_ppo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    cap: float,
) -> TokenLoss:
    """``-sg(min(w, cap)) min(u A, clip(u, 1 - eps_low, 1 + eps_high) A)`` with ``u = pi / pi_prox`` and ``w = pi_prox / mu``.

    The decoupled objective of AReaL (arXiv 2505.24298), section 5.2, after Hilton et al. (arXiv 2110.00641): steps are
    clipped around a recent policy, and how far that is from the one that sampled is an importance weight, hence unbiased while
    ``cap`` does not act. The paper has no cap; AReaL's code leaves tokens out past one (``behav_imp_weight_cap``), here
    they are trained with ``cap``, as in truncated importance sampling.

    With ``pi_prox = mu`` it is ``ppo_clip``; with ``pi_prox = pi`` its gradient is that of ``rollout_is``.

    Args:
        logprobs: (N,) float32, nats, of the policy being trained.
        behavior_logprobs: (N,) float32, nats, from the engine.
        advantages: (N,) float32.
        old_logprobs: (N,) float32, nats, of the proximal policy: a version of the policy, frozen.
        eps_low: in [0, 1).
        eps_high: >= 0.
        cap: largest weight, > 0.
    """
    weight = importance_ratio(old_logprobs, behavior_logprobs)
    proximal = ppo_clip(logprobs, old_logprobs, advantages, eps_low=eps_low, eps_high=eps_high)
    return TokenLoss(loss=weight.clamp(max=cap) * proximal.loss, is_clipped=proximal.is_clipped | (weight > cap))


_WITH_OLD_LOGPROBS = frozenset({"decoupled_ppo"})


def needs_old_logprobs(name: str) -> bool:
    """Whether the loss called ``name`` is made of recomputed log-probs too."""
    return name in _WITH_OLD_LOGPROBS


def make_policy_loss(name: str, *, eps_clip_low: float, eps_clip_high: float, tis_cap: float) -> PolicyLossFn:
    """The loss called ``name`` with its constants. Raises ``ConfigError`` listing the known ones."""
    losses: dict[str, PolicyLossFn] = {
        "ppo_clip": _anchored_on_behavior(partial(ppo_clip, eps_low=eps_clip_low, eps_high=eps_clip_high)),
        "rollout_is": _anchored_on_behavior(partial(rollout_is, cap=tis_cap)),
        "decoupled_ppo": _anchored_on_both(
            partial(decoupled_ppo, eps_low=eps_clip_low, eps_high=eps_clip_high, cap=tis_cap)
        ),
    }
    if name not in losses:
        known = ", ".join(sorted(losses))
        raise ConfigError(f"trainer.algorithm.policy_loss_type must be one of {known}, got {name!r}")
    return losses[name]


def _anchored_on_behavior(loss: Callable[[Tensor, Tensor, Tensor], TokenLoss]) -> PolicyLossFn:
    def of_tokens(
        logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, old_logprobs: Tensor | None = None, /
    ) -> TokenLoss:
        return loss(logprobs, behavior_logprobs, advantages)

    return of_tokens


def _anchored_on_both(loss: Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]) -> PolicyLossFn:
    def of_tokens(
        logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, old_logprobs: Tensor | None = None, /
    ) -> TokenLoss:
        assert old_logprobs is not None, "split_work sees to it that rows have them"
        return loss(logprobs, behavior_logprobs, advantages, old_logprobs)

    return of_tokens


@torch.no_grad()
def token_figures(
    token_loss: TokenLoss, logprobs: Tensor, behavior_logprobs: Tensor, token_lags: Tensor
) -> dict[str, float]:
    """Sums (``_sum``) and maxima (``_max``) over N >= 1 sampled tokens, and ``num_tokens``.

    ``behavior_kl`` is the k3 estimate of KL(mu, pi), ``r - 1 - log r`` (Schulman, "Approximating KL divergence",
    2020), whose mean under mu is exact and whose every term is >= 0. ``lag<k>_...`` are the same figures of the
    tokens sampled k versions before the one being trained. ``lag0_logprob_gap_max`` is where engine and trainer disagree about the
    same weights: rounding, or weights that the engine does not hold.

    Args:
        token_loss: of the same tokens.
        logprobs: (N,) float32, nats.
        behavior_logprobs: (N,) float32, nats.
        token_lags: (N,) int64, >= 0: version being trained minus version sampled under.
    """
    ratio = importance_ratio(logprobs, behavior_logprobs).double()
    kl = ratio - 1 - ratio.log()
    is_clipped = token_loss.is_clipped.double()
    gaps = (logprobs - behavior_logprobs).abs()
    per_lag = torch.stack([torch.bincount(token_lags, weights=w) for w in (torch.ones_like(kl), kl, is_clipped)])
    overall = torch.stack(
        [
            token_loss.loss.double().sum(),
            is_clipped.sum(),
            ratio.sum(),
            kl.sum(),
            token_lags.sum().double(),
            ratio.max(),
            gaps.max().double(),
        ]
    )
    names = ("loss_sum", "clipped_sum", "ratio_sum", "behavior_kl_sum", "token_lag_sum", "ratio_max", "logprob_gap_max")
    figures = dict(zip(names, overall.tolist(), strict=True))
    figures["num_tokens"] = float(logprobs.numel())
    for lag, (num_tokens, kl_sum, clipped_sum) in enumerate(per_lag.T.tolist()):
        if num_tokens:
            figures[f"lag{lag}_tokens_sum"] = num_tokens
            figures[f"lag{lag}_behavior_kl_sum"] = kl_sum
            figures[f"lag{lag}_clipped_sum"] = clipped_sum
            figures["token_lag_max"] = float(lag)
    if (is_fresh := token_lags == 0).any():
        figures["lag0_logprob_gap_max"] = float(gaps[is_fresh].max())
    return figures


def merge_figures(parts: list[dict[str, float]]) -> dict[str, float]:
    """Join figures of disjoint sets of tokens: keys in ``_max`` take the largest, all others add up."""
    merged: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            if key not in merged:
                merged[key] = value
            elif key.endswith("_max"):
                merged[key] = max(merged[key], value)
            else:
                merged[key] += value
    return merged
