"""Algorithms as users write them, and mistakes that they may make."""

import statistics
from collections.abc import Sequence

import numpy as np
import torch

from skyrl_async.algorithms.advantages import register_advantage_estimator
from skyrl_async.algorithms.credit import GroupRewards, SampleCredit, WeightedAdvantages
from skyrl_async.algorithms.estimators.gae import gae_advantages
from skyrl_async.algorithms.losses import LossTokens, TokenLoss, importance_ratio, register_policy_loss
from skyrl_async.algorithms.settings import AdvantageConstants, LossConstants
from skyrl_async.columns import Values


@register_advantage_estimator("own_median", needs_groups=False)
def median_advantages(rewards: Sequence[float]) -> list[float]:
    return [reward - statistics.median(rewards) for reward in rewards]


@register_advantage_estimator("own_mini_batch", needs_mini_batch=True)
def mini_batch_advantages(groups: Sequence[GroupRewards]) -> list[list[float]]:
    best = max(reward for group in groups for reward in group.rewards)
    return [[reward - best for reward in group.rewards] for group in groups]


@register_advantage_estimator("own_weighed_gae", unit="token", needs_groups=False, needs_values=True)
def weighed_gae(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[WeightedAdvantages]:
    """Counts tokens the more the less their sampler expected them."""
    return [
        WeightedAdvantages(advantages=advantages, weights=1.5 - np.exp(sample.logprobs))
        for sample, advantages in zip(samples, gae_advantages(samples, constants), strict=True)
    ]


def spread_advantages(rewards: Sequence[float]) -> list[float]:
    """Divides by a spread that may be 0."""
    return [reward / statistics.pstdev(rewards) for reward in rewards]


def baseline_of_others_advantages(rewards: Sequence[float]) -> list[float]:
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


def valued_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[Values]:
    return [sample.reward - sample.values for sample in samples]  # type: ignore[operator]


@register_advantage_estimator("own_unvalued", unit="token")
def unvalued_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[Values]:
    """Nobody was told that it reads values."""
    return valued_advantages(samples, constants)


@register_advantage_estimator("own_recomputed_ratios", unit="token", needs_groups=False, needs_old_logprobs=True)
def ratio_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[Values]:
    return [sample.reward * np.exp(sample.log_ratios) for sample in samples]  # type: ignore[arg-type]


@register_advantage_estimator("own_unasked_ratios", unit="token", needs_groups=False)
def unasked_ratio_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[Values]:
    """Nobody was told that it reads recomputed log-probs."""
    return ratio_advantages(samples, constants)


@register_advantage_estimator("own_turns_as_tokens", unit="turn")
def token_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[Values]:
    return [sample.logprobs * sample.reward for sample in samples]


@register_advantage_estimator("own_based", needs_mini_batch=True)
def based_advantages(groups: Sequence[GroupRewards]) -> list[list[float]]:
    """Nobody was told that it reads baselines."""
    return [[reward - group.baseline for reward in group.rewards] for group in groups]  # type: ignore[operator]


def alone_advantages(groups: Sequence[GroupRewards]) -> list[list[float]]:
    """Nobody was told that it reads all groups of a mini-batch."""
    return [[reward for reward in group.rewards] for group in groups]


def unregistered_advantages(rewards: Sequence[float]) -> list[float]:
    return [2 * reward for reward in rewards]


@register_policy_loss("own_half")
def half_importance(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """Half of ``rollout_is``."""
    ratio = importance_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs)
    loss = -0.5 * ratio.clamp(max=constants.tis_cap) * tokens.advantages * tokens.logprobs
    return TokenLoss(loss=loss, is_clipped=ratio > constants.tis_cap)


@register_policy_loss("own_recomputed", needs_old_logprobs=True)
def recomputed(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    assert tokens.old_logprobs is not None
    ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs)
    return TokenLoss(loss=-ratio * tokens.advantages, is_clipped=torch.zeros_like(ratio, dtype=torch.bool))


def loss_of_recomputed(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """Nobody was told that it needs them."""
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()  # type: ignore[operator]
    return TokenLoss(loss=-ratio * tokens.advantages, is_clipped=torch.zeros_like(ratio, dtype=torch.bool))


def loss_of_marked(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """As ``clip_cov``, without a marker."""
    loss = -importance_ratio(tokens.logprobs, tokens.behavior_logprobs) * tokens.advantages
    return TokenLoss(loss=loss * ~tokens.is_marked, is_clipped=tokens.is_marked)  # type: ignore[operator, arg-type]


def loss_of_recomputed_where_there_are(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    anchor = tokens.behavior_logprobs if tokens.old_logprobs is None else tokens.old_logprobs
    ratio = importance_ratio(tokens.logprobs, anchor)
    return TokenLoss(loss=-ratio * tokens.advantages, is_clipped=torch.zeros_like(ratio, dtype=torch.bool))


def too_few_advantages(rewards: Sequence[float]) -> list[float]:
    return list(rewards[1:])


def loss_that_is_a_mean(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    loss = -(tokens.advantages * tokens.logprobs).mean()
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


def loss_of_other_rows(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    weight = torch.softmax(tokens.logprobs, 0)
    return TokenLoss(loss=-weight * tokens.advantages, is_clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


def loss_that_is_not_linear(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    loss = -(tokens.advantages**3) * tokens.logprobs
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


def loss_without_gradient(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    loss = -(tokens.advantages * tokens.logprobs).detach()
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


def loss_of_skyrl(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return (log_probs - old_log_probs).exp() * advantages, {}


def loss_that_returns_a_tensor(tokens: LossTokens, constants: LossConstants) -> torch.Tensor:
    return -tokens.advantages * tokens.logprobs


def loss_that_raises(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    raise KeyError("no such thing")


def loss_that_counts_rows(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    """There is no largest index where there are no tokens."""
    num_tokens = torch.zeros(int(tokens.row_indices.max()) + 1).index_add(
        0, tokens.row_indices, torch.ones_like(tokens.logprobs)
    )
    loss = -tokens.advantages * tokens.logprobs / num_tokens[tokens.row_indices]
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


def loss_that_forgets_the_policy_without_tokens(tokens: LossTokens, constants: LossConstants) -> TokenLoss:
    losses = [-a * p for a, p in zip(tokens.advantages, tokens.logprobs, strict=True)]
    loss = torch.stack(losses) if losses else torch.empty(0)
    return TokenLoss(loss=loss, is_clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


NOT_A_FUNCTION = 3
