"""Policy losses that hold back the tokens which take most of the policy's entropy away, of Cui et al. (arXiv 2505.22617).

Flows in: ``LossTokens`` of which some are marked (see ``covariance``), and ``LossConstants``. Flows out: ``TokenLoss``. Ratios are to the
log-probs of the engine that sampled the token.
"""

import torch
from torch import Tensor

from skyrl_async.algorithms.clipped_losses import ppo_clip
from skyrl_async.algorithms.loss_constants import LossConstants
from skyrl_async.algorithms.losses import LossTokens, TokenLoss, importance_ratio


def clip_cov(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``ppo_clip``, and marked tokens have no gradient: Clip-Cov (arXiv 2505.22617)."""
    once, is_marked = ppo_clip(tokens, constants), _marks_of(tokens)
    return TokenLoss(loss=torch.where(is_marked, once.loss.detach(), once.loss), is_clipped=once.is_clipped | is_marked)


def kl_cov(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-r A``, and for marked tokens ``+ ppo_kl_coef |log pi - log mu|``, with ``r = pi / mu``.

    KL-Cov (arXiv 2505.22617), with the estimate of the divergence that its listing takes.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    penalty = constants.ppo_kl_coef * (tokens.logprobs - tokens.behavior_logprobs).abs()
    if tokens.weights is not None:
        penalty = penalty * tokens.weights
    loss = -ratio * tokens.advantages + penalty * _marks_of(tokens)
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(ratio, dtype=torch.bool))


def _marks_of(tokens: LossTokens) -> Tensor:
    assert tokens.is_marked is not None, "split_work sees to it that rows have them"
    return tokens.is_marked
