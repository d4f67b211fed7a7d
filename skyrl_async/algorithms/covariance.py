"""Marks the tokens that take most of the policy's entropy away: a mini-batch's groups in, the same groups with marks out.

A step changes the entropy of a softmax policy by about minus the covariance of log-probs and advantages: likely tokens that did well,
and unlikely tokens that did badly, make it fall (Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language
Models", arXiv 2505.22617, section 3). Over the N trained tokens of a mini-batch, a token contributes (the paper's ``Cov(y_i)``)

    cov_i = (log mu_i - mean log mu) (A_i - mean A)

with ``mu`` the engine's probability of the token under the version that sampled it. The paper uses the policy's probability at the step.
Both are the same if the policy itself has sampled, but the policy's is known only once the step is computed. With ``mu`` marks are known
beforehand: they depend on neither micro-batches nor ranks, and are the same if a step is repeated.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from skyrl_async.algorithms.settings import LossConstants
from skyrl_async.types import Group, Trajectory

Mark = Callable[[Sequence[Group]], Sequence[Group]]
"""All groups of a step, with advantages -> the same groups with ``marks`` in every row."""


def clip_cov_marks(groups: Sequence[Group], constants: LossConstants) -> Sequence[Group]:
    """Mark ``max(1, floor(clip_cov_ratio N))`` tokens, drawn evenly from those with ``clip_cov_lb < cov < clip_cov_ub``.

    Clip-Cov (arXiv 2505.22617). The draw depends only on the order in which the groups were admitted.
    """
    covariances = token_covariances(groups)
    within = (covariances > constants.clip_cov_lb) & (covariances < constants.clip_cov_ub)
    candidates = within.nonzero().flatten().tolist()
    num = max(1, int(constants.clip_cov_ratio * len(covariances)))
    drawn = random.Random(" ".join(str(group.admission_index) for group in groups))
    return _marked(groups, drawn.sample(candidates, min(num, len(candidates))))


def kl_cov_marks(groups: Sequence[Group], constants: LossConstants) -> Sequence[Group]:
    """Mark the ``max(1, floor(kl_cov_frac N))`` tokens of largest covariance, among those of positive covariance.

    KL-Cov (arXiv 2505.22617).
    """
    covariances = token_covariances(groups)
    num = min(max(1, int(constants.kl_cov_frac * len(covariances))), int((covariances > 0).sum()))
    return _marked(groups, covariances.topk(num).indices.tolist())


def token_covariances(groups: Sequence[Group]) -> Tensor:
    """(N,) float64, covariances of the sampled tokens of all rows, in order; empty without sampled tokens."""
    logprobs, advantages = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.float64)]
    for group in groups:
        for row, advantage in zip(group.trajectories, group.advantages, strict=True):
            of_row = torch.tensor(row.logprobs, dtype=torch.float64)[torch.tensor(row.loss_mask, dtype=torch.bool)]
            logprobs.append(of_row)
            advantages.append(torch.full_like(of_row, advantage))
    of_policy, of_reward = torch.cat(logprobs), torch.cat(advantages)
    return (of_policy - of_policy.mean()) * (of_reward - of_reward.mean())


def _marked(groups: Sequence[Group], chosen: Sequence[int]) -> list[Group]:
    """Mark the tokens whose indices among the sampled tokens of all rows are ``chosen``."""
    are_chosen, places = set(chosen), count()

    def marks(row: Trajectory) -> tuple[int, ...]:
        return tuple(int(bool(is_sampled) and next(places) in are_chosen) for is_sampled in row.loss_mask)

    return [
        replace(group, trajectories=tuple(replace(row, marks=marks(row)) for row in group.trajectories))
        for group in groups
    ]
