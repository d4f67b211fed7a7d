"""The built-in policy losses: ``LossTokens`` and ``LossConstants`` in, one ``TokenLoss`` out.

Each loss is a pure function of one micro-batch. ``mu`` is the engine's probability of a token, under the version that sampled it. Ratios
are taken to ``mu`` unless a formula says otherwise.

Three families: losses with a bound past which a token has no gradient that would take the policy further (``ppo_clip``, ``dual_clip``,
``gspo``, ``decoupled_ppo``, ``dppo``); losses whose importance weight is cut or softened, so that every token keeps some gradient
(``rollout_is``, ``cispo``, ``cispo_old``, ``sapo``); and losses that hold back marked tokens, which would take most of the policy's
entropy away (``clip_cov``, ``kl_cov``).

``clip_cov_marks`` and ``kl_cov_marks`` mark tokens for the last family, among all groups of a mini-batch. A step changes the entropy of a
softmax policy by about minus the covariance of log-probs and advantages: likely tokens that did well, and unlikely tokens that did badly,
make it fall (Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617, section 3).
Over the N trained tokens of a mini-batch, a token contributes (the paper's ``Cov(y_i)``)

    cov_i = (log mu_i - mean log mu) (A_i - mean A)

with ``mu`` the engine's probability of the token under the version that sampled it. The paper uses the policy's probability at the step.
Both are the same if the policy itself has sampled, but the policy's is known only once the step is computed. With ``mu`` marks are known
beforehand: they depend on neither micro-batches nor ranks, and are the same if a step is repeated.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from skyrl_async.algorithms.corrections import Rows
from skyrl_async.algorithms.losses import MAX_LOG_RATIO, LossTokens, TokenLoss, importance_ratio
from skyrl_async.algorithms.settings import LossConstants
from skyrl_async.columns import Mask
from skyrl_async.types import Group

_LEAST = 1e-12
"""Least probability of all other tokens together; keeps logarithms finite."""


def ppo_clip(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A)`` with ``r = pi / mu``.

    PPO (arXiv 1707.06347), equation 7, anchored on the policy that sampled. With the upper bound larger than the lower one it is the
    clip-higher of DAPO (arXiv 2503.14476), section 3.1.
    """
    return _clipped(importance_ratio(tokens.logprobs, tokens.behavior_logprobs), tokens.advantages, constants)


def _clipped(ratio: Tensor, advantages: Tensor, constants: LossConstants) -> TokenLoss:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - constants.eps_clip_low, 1 + constants.eps_clip_high) * advantages
    return TokenLoss(loss=-torch.minimum(unclipped, clipped), is_clipped=clipped.detach() < unclipped.detach())


def dual_clip(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``ppo_clip``, but for ``A < 0`` at most ``-clip_ratio_c A``: dual-clip PPO (Ye et al., arXiv 1912.09729).

    A token of negative advantage that has become far likelier than it was has no gradient.
    """
    once = ppo_clip(tokens, constants)
    bound = -constants.clip_ratio_c * tokens.advantages
    is_bound = (tokens.advantages < 0) & (once.loss.detach() > bound)
    return TokenLoss(loss=torch.where(is_bound, bound, once.loss), is_clipped=once.is_clipped | is_bound)


def gspo(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``ppo_clip`` with one ratio per row, ``s = (pi(y) / mu(y)) ** (1 / |y|)``; |y| counts trained tokens.

    GSPO (arXiv 2507.18071), section 4.1, written per token as in its section 4.3: ``s_t = sg(s) pi_t / sg(pi_t)`` has the value of s, and
    the mean of its gradients over a row's tokens is the gradient of s. The paper takes the mean over sequences
    (``trainer.algorithm.loss_reduction=sequence_mean``) and bounds of some 1e-4.
    """
    log_ratio = (tokens.logprobs.detach() - tokens.behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    num_rows = int(tokens.row_indices.max()) + 1 if tokens.row_indices.numel() else 0
    rows = Rows(indices=tokens.row_indices, num_rows=num_rows)
    of_row = rows.each(rows.means(log_ratio))
    return _clipped((of_row + tokens.logprobs - tokens.logprobs.detach()).exp(), tokens.advantages, constants)


def decoupled_ppo(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-sg(min(w, tis_cap)) min(u A, clip(u, 1 - eps_clip_low, 1 + eps_clip_high) A)`` with ``u = pi / pi_prox`` and ``w = pi_prox / mu``.

    The decoupled objective of AReaL (arXiv 2505.24298), section 5.2, after Hilton et al. (arXiv 2110.00641). Steps are clipped around a
    recent policy; an importance weight corrects for the distance of that policy from the sampler. While the cap does not act, the weight
    is unbiased for a single token, and correct to first order for whole answers (``corrections.token_tis``). The paper has no cap.
    AReaL's code leaves out tokens past a cap (``behav_imp_weight_cap``); here they are trained with the cap as weight, as in truncated
    importance sampling.

    ``pi_prox`` is the newest policy at the time when the row was finished (``training.logprob_stage``), not the version being trained. With
    one optimizer step per mini-batch the latter is ``pi`` itself; u would be 1 and nothing would be clipped. AReaL takes the policy at
    the beginning of a training step, in which it makes several optimizer steps (``ppo_n_minibatches``).

    With ``pi_prox = mu`` it is ``ppo_clip``; with ``pi_prox = pi`` its gradient is that of ``rollout_is``.
    """
    assert tokens.old_logprobs is not None, "split_work requires them"
    weight = importance_ratio(tokens.old_logprobs, tokens.behavior_logprobs)
    proximal = _clipped(importance_ratio(tokens.logprobs, tokens.old_logprobs), tokens.advantages, constants)
    return TokenLoss(
        loss=weight.clamp(max=constants.tis_cap) * proximal.loss,
        is_clipped=proximal.is_clipped | (weight > constants.tis_cap),
    )


def dppo(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-M r A`` with ``r = pi / mu``; M is 0 if policy and sampler are past a bound and A would take them further apart, else 1.

    DPPO (arXiv 2602.04879): the bound is not on the ratio, which stops rare tokens early and common ones late, but on a divergence of
    policy and sampler as distributions over "this token" and "any other". With ``dppo_type=binary_tv`` it is the total variation
    ``|pi - mu|`` (equation 13), with ``binary_kl`` it is ``KL(mu, pi) = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))``
    (equation 14). ``dppo_delta_high`` bounds tokens that are raised (A > 0, r > 1), ``dppo_delta_low`` tokens that are lowered
    (A < 0, r < 1).
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    policy, behavior = tokens.logprobs.detach().double(), tokens.behavior_logprobs.double()
    change = policy.exp() - behavior.exp()
    distance = change.abs() if constants.dppo_type == "binary_tv" else _binary_kl(behavior, policy)
    is_out = ((tokens.advantages > 0) & (change > 0) & (distance > constants.dppo_delta_high)) | (
        (tokens.advantages < 0) & (change < 0) & (distance > constants.dppo_delta_low)
    )
    loss = -ratio * tokens.advantages
    return TokenLoss(loss=torch.where(is_out, loss.detach(), loss), is_clipped=is_out)


def _binary_kl(behavior_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(mu, pi) over a token and its absence, nats."""
    other_behavior, other = (1 - p.exp().clamp(max=1 - _LEAST) for p in (behavior_logprobs, logprobs))
    of_token = behavior_logprobs.exp() * (behavior_logprobs - logprobs)
    return of_token + other_behavior * (other_behavior.log() - other.log())


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

    CISPO (MiniMax-M1, arXiv 2506.13585), section 3.1, anchored on the rollout. The paper has no lower bound;
    ``cispo_eps_clip_low`` = 1 means that. A value of 0 raises every weight to at least 1.
    """
    return _cispo(tokens, tokens.behavior_logprobs, constants)


def cispo_old(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``cispo`` with ``r = pi / pi_prox``; ``pi_prox`` is the policy when the row was finished, as in SkyRL.

    Off-policy corrections may correct for the distance of ``pi_prox`` from the engine's log-probs.
    """
    assert tokens.old_logprobs is not None, "split_work requires them"
    return _cispo(tokens, tokens.old_logprobs, constants)


def _cispo(tokens: LossTokens, anchor_logprobs: Tensor, constants: LossConstants) -> TokenLoss:
    ratio = importance_ratio(tokens.logprobs.detach(), anchor_logprobs)
    weight = ratio.clamp(1 - constants.cispo_eps_clip_low, 1 + constants.cispo_eps_clip_high)
    return TokenLoss(loss=-weight * tokens.advantages * tokens.logprobs, is_clipped=weight != ratio)


def sapo(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-(4 / tau) sigmoid(tau (r - 1)) A`` with ``r = pi / mu``; tau depends on whether ``A > 0``.

    SAPO (arXiv 2511.20347), a soft gate in place of clipping: at r = 1 its gradient is that of ``r A``; it falls off on both sides, faster
    with a larger tau. The paper takes the mean over sequences (``trainer.algorithm.loss_reduction=sequence_mean``).
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    tau = torch.full_like(ratio, constants.sapo_tau_neg).masked_fill(tokens.advantages > 0, constants.sapo_tau_pos)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * tokens.advantages
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(ratio, dtype=torch.bool))


def clip_cov(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``ppo_clip`` without a gradient for marked tokens: Clip-Cov (arXiv 2505.22617)."""
    once, is_marked = ppo_clip(tokens, constants), _marks_of(tokens)
    return TokenLoss(loss=torch.where(is_marked, once.loss.detach(), once.loss), is_clipped=once.is_clipped | is_marked)


def kl_cov(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """``-r A`` with ``r = pi / mu``, plus ``ppo_kl_coef |log pi - log mu|`` for marked tokens.

    KL-Cov (arXiv 2505.22617), with the estimate of the divergence from its listing.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    penalty = constants.ppo_kl_coef * (tokens.logprobs - tokens.behavior_logprobs).abs()
    if tokens.weights is not None:
        penalty = penalty * tokens.weights
    loss = -ratio * tokens.advantages + penalty * _marks_of(tokens)
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(ratio, dtype=torch.bool))


def _marks_of(tokens: LossTokens) -> Tensor:
    assert tokens.is_marked is not None, "split_work requires them"
    return tokens.is_marked


Mark = Callable[[Sequence[Group]], Sequence[Group]]
"""All groups of a step, with advantages -> the same groups with ``marks`` in every row."""


def clip_cov_marks(groups: Sequence[Group], constants: LossConstants) -> Sequence[Group]:
    """Mark ``max(1, floor(clip_cov_ratio N))`` tokens, drawn evenly from those with ``clip_cov_lb < cov < clip_cov_ub``.

    Clip-Cov (arXiv 2505.22617). The draw depends only on the order in which the groups were admitted.
    """
    covariances = token_covariances(groups)
    within = (covariances > constants.clip_cov_lb) & (covariances < constants.clip_cov_ub)
    candidates = within.nonzero().flatten()
    num = max(1, int(constants.clip_cov_ratio * len(covariances)))
    drawn = random.Random(" ".join(str(group.admission_index) for group in groups))
    return _marked(groups, candidates[drawn.sample(range(len(candidates)), min(num, len(candidates)))])


def kl_cov_marks(groups: Sequence[Group], constants: LossConstants) -> Sequence[Group]:
    """Mark the ``max(1, floor(kl_cov_frac N))`` tokens of largest covariance, among those of positive covariance.

    KL-Cov (arXiv 2505.22617).
    """
    covariances = token_covariances(groups)
    num = min(max(1, int(constants.kl_cov_frac * len(covariances))), int((covariances > 0).sum()))
    return _marked(groups, covariances.topk(num).indices)


def token_covariances(groups: Sequence[Group]) -> Tensor:
    """(N,) float64, covariances of the sampled tokens of all rows, in order; empty without sampled tokens."""
    logprobs, advantages = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.float64)]
    for group in groups:
        for row, of_row in zip(group.trajectories, group.advantages, strict=True):
            logprobs.append(torch.tensor(row.logprobs[row.loss_mask], dtype=torch.float64))
            advantages.append(torch.tensor(of_row[row.loss_mask], dtype=torch.float64))
    of_policy, of_reward = torch.cat(logprobs), torch.cat(advantages)
    return (of_policy - of_policy.mean()) * (of_reward - of_reward.mean())


def _marked(groups: Sequence[Group], chosen: Tensor) -> list[Group]:
    """Mark the tokens whose indices among the sampled tokens of all rows are ``chosen``, int64."""
    masks = [row.loss_mask for group in groups for row in group.trajectories]
    are_marked: Mask = np.zeros(sum(map(len, masks)), dtype=np.bool_)
    are_marked[np.flatnonzero(np.concatenate([are_marked[:0], *masks]))[chosen.numpy()]] = True
    marks = iter(np.split(are_marked, np.cumsum(list(map(len, masks)), dtype=np.int64)))
    return [
        replace(group, trajectories=tuple(replace(row, marks=next(marks)) for row in group.trajectories))
        for group in groups
    ]
