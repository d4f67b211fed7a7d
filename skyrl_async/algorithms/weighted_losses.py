"""Policy losses whose importance weight is cut or softened: every token keeps a gradient, or a part of it.

Flows in: ``LossTokens`` and ``LossConstants``. Flows out: ``TokenLoss``. Each is a pure function; ratios are to the log-probs of the engine
that sampled the token, whichever version that was, unless a formula says otherwise.
"""

import torch
from torch import Tensor

from skyrl_async.algorithms.loss_constants import LossConstants
from skyrl_async.algorithms.losses import LossTokens, TokenLoss, importance_ratio


def rollout_is(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-sg(min(r, tis_cap)) A log pi`` with ``r = pi / mu`` and ``sg`` stopping the gradient: token-level truncated
    importance sampling, anchored on the rollout.

    The truncated weight is IMPALA's (arXiv 1802.01561, section 4.1). With the cap infinite the gradient's mean under mu is the exact
    policy gradient of one token.
    """
    ratio = importance_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs)
    weight = ratio.clamp(max=constants.tis_cap)
    return TokenLoss(loss=-weight * tokens.advantages * tokens.logprobs, is_clipped=ratio > constants.tis_cap)


def cispo(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-sg(clip(r, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)) A log pi`` with ``r = pi / mu``.

    CISPO (MiniMax-M1, arXiv 2506.13585), section 3.1, anchored on the rollout. The paper has no lower bound, which is a
    ``cispo_eps_clip_low`` of 1; one of 0 raises every weight to at least 1.
    """
    return _cispo(tokens, tokens.behavior_logprobs, constants)


def cispo_old(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """The same with ``r = pi / pi_prox``, of the policy when the row was finished: SkyRL's anchor.

    How far that is from the engine's log-probs is left to off-policy corrections.
    """
    assert tokens.old_logprobs is not None, "split_work sees to it that rows have them"
    return _cispo(tokens, tokens.old_logprobs, constants)


def _cispo(tokens: LossTokens, anchor_logprobs: Tensor, constants: LossConstants) -> TokenLoss:
    ratio = importance_ratio(tokens.logprobs.detach(), anchor_logprobs)
    weight = ratio.clamp(1 - constants.cispo_eps_clip_low, 1 + constants.cispo_eps_clip_high)
    return TokenLoss(loss=-weight * tokens.advantages * tokens.logprobs, is_clipped=weight != ratio)


def sapo(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-(4 / tau) sigmoid(tau (r - 1)) A`` with ``r = pi / mu``, and tau as ``A > 0`` or not.

    SAPO (arXiv 2511.20347), the soft gate in place of clipping: at r = 1 its gradient is that of ``r A``, and falls off on both sides, the
    faster the larger tau. The paper takes the mean over sequences (``trainer.algorithm.loss_reduction=sequence_mean``).
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    tau = torch.full_like(ratio, constants.sapo_tau_neg).masked_fill(tokens.advantages > 0, constants.sapo_tau_pos)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * tokens.advantages
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(ratio, dtype=torch.bool))
