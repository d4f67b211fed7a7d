"""Tries an algorithm that a user wrote on a few numbers, before anything starts.

Flows in: a function, and the name by which the configuration knows it. Flows out: nothing, or ``ConfigError`` with what is wrong. What it
finds in a second would otherwise end a run after its first mini-batch, or train it wrongly.
"""

import math
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from skyrl_async.algorithms.advantages import AdvantageEstimator, GroupRewards
from skyrl_async.algorithms.losses import LossTokens, PolicyLossFn, TokenLoss
from skyrl_async.errors import ConfigError

_ESTIMATOR = "trainer.algorithm.advantage_estimator"
_LOSS = "trainer.algorithm.policy_loss_type"


def try_estimator(name: str, estimator: AdvantageEstimator) -> None:
    """Raises ``ConfigError`` unless each sample gets one finite advantage."""
    groups = [
        GroupRewards(rewards=(1.0, 0.0, 0.5), num_tokens=(3, 1, 2)),
        GroupRewards(rewards=(0.0, 1.0), num_tokens=(2, 2)),
    ]
    try:
        if estimator.of_mini_batch is not None:
            found = [list(of_group) for of_group in estimator.of_mini_batch(groups)]
        else:
            assert estimator.of_group is not None, "an estimator is of one of both"
            found = [list(estimator.of_group(group.rewards)) for group in groups]
        is_fine = [len(of_group) for of_group in found] == [3, 2] and all(map(math.isfinite, chain(*found)))
    except Exception as error:  # it is the user's
        raise ConfigError(f"{_ESTIMATOR}={name} raises {error!r} for rewards {groups[0].rewards}") from error
    if not is_fine:
        rewards = [group.rewards for group in groups]
        raise ConfigError(f"{_ESTIMATOR}={name} must return one finite advantage per reward of {rewards}, got {found}")


def try_policy_loss(name: str, loss: PolicyLossFn) -> None:
    """Raises ``ConfigError`` unless sums of it over micro-batches, times weights of rows, mean anything."""
    tokens = LossTokens(
        logprobs=torch.tensor([-1.0, -0.4, -2.0, -0.9, -1.3], requires_grad=True),
        behavior_logprobs=torch.tensor([-1.1, -0.4, -1.7, -0.95, -1.2]),
        advantages=torch.tensor([0.5, 0.5, -1.0, -1.0, 0.0]),
        row_indices=torch.tensor([0, 0, 1, 1, 2]),
        old_logprobs=torch.tensor([-1.05, -0.45, -1.8, -0.9, -1.25]),
    )
    gradient = _gradient(name, loss, tokens)
    if gradient[-1] != 0:
        raise ConfigError(
            f"{_LOSS}={name} must leave a token without advantage alone, got a gradient of {gradient[-1]:g}"
        )
    if not torch.allclose(
        _gradient(name, loss, replace(tokens, advantages=tokens.advantages / 4)), gradient / 4, atol=1e-6
    ):
        raise ConfigError(
            f"{_LOSS}={name} must be linear in a positive factor of the advantages, which weighs rows; it is not"
        )
    first = LossTokens(
        **{
            field: None
            if (values := getattr(tokens, field)) is None
            else values[:2].detach().requires_grad_(field == "logprobs")
            for field in ("logprobs", "behavior_logprobs", "advantages", "row_indices", "old_logprobs")
        }
    )
    if not torch.allclose(_gradient(name, loss, first), gradient[:2], atol=1e-6):
        raise ConfigError(
            f"{_LOSS}={name} must give a row the same gradient whatever other rows are in its micro-batch; return one loss per token, "
            "and divide by no count of them"
        )


def _gradient(name: str, loss: PolicyLossFn, tokens: LossTokens) -> Tensor:
    """(N,) Of the sum of the losses with respect to the log-probs."""
    try:
        found = loss(tokens)
    except Exception as error:  # it is the user's
        raise ConfigError(f"{_LOSS}={name} raises {error!r} for {tokens}") from error
    if not isinstance(found, TokenLoss):
        raise ConfigError(f"{_LOSS}={name} must return a TokenLoss, got {type(found).__name__}")
    expected = tokens.logprobs.shape
    if found.loss.shape != expected or found.is_clipped.shape != expected:
        raise ConfigError(
            f"{_LOSS}={name} must return one loss and one is_clipped per token, shape {tuple(expected)}, got "
            f"{tuple(found.loss.shape)} and {tuple(found.is_clipped.shape)}"
        )
    if not found.loss.requires_grad:
        raise ConfigError(f"{_LOSS}={name} must have a gradient with respect to tokens.logprobs; it has none")
    (gradient,) = torch.autograd.grad(found.loss.sum(), tokens.logprobs)
    if not gradient.isfinite().all():
        raise ConfigError(f"{_LOSS}={name} must have a finite gradient, got {gradient.tolist()}")
    return gradient
