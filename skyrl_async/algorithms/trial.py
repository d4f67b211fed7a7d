"""Tries a user's algorithm on a few numbers before anything starts.

It raises ``ConfigError`` within a second for a mistake that would otherwise end a run after its first mini-batch, or train it wrongly.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_async.algorithms.advantages import AdvantageEstimator, GroupCredit
from skyrl_async.algorithms.credit import GroupRewards, SampleCredit
from skyrl_async.algorithms.losses import LossTokens, PolicyLossFn, TokenLoss
from skyrl_async.algorithms.reward_shaping import RewardShape, shaped_rewards
from skyrl_async.columns import VersionSpans, fields_of
from skyrl_async.errors import ConfigError, GenerationError, TrainingError
from skyrl_async.registries import LossEntry, Unit
from skyrl_async.samples import Sample
from skyrl_async.types import Trajectory

_ESTIMATOR = "trainer.algorithm.advantage_estimator"
_LOSS = "trainer.algorithm.policy_loss_type"
_SHAPING = "trainer.algorithm.reward_shaping"
_HOW_TO_ASK = {
    "old_logprobs": "recomputed log-probs are there for a loss that says so: decorate it with "
    "@register_policy_loss(<name>, needs_old_logprobs=True), or read tokens.behavior_logprobs",
    "is_marked": "marks are there for a loss that has a marker: register it by POLICY_LOSSES.register(<name>, LossEntry(path=..., "
    "marker=...)) of skyrl_async.registries, or start from clip_cov or kl_cov",
}
"""Field of ``LossTokens`` that is None unless the loss's registry entry asks for it -> how to ask."""
_DECLARATIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"needs_values": True}, "needs_values=True, without which samples have values=None"),
    ({"needs_old_logprobs": True}, "needs_old_logprobs=True, without which samples have log_ratios=None"),
    ({"needs_values": True, "needs_old_logprobs": True}, "needs_values=True and needs_old_logprobs=True"),
    ({"needs_baseline": True}, "needs_baseline=True, without which groups have baseline=None"),
    ({"needs_mini_batch": True}, "needs_mini_batch=True, without which it gets one group"),
    ({"unit": Unit.TURN}, "unit='turn', without which it gives one advantage per sample or token"),
    ({"unit": Unit.TOKEN}, "unit='token', without which it gives one advantage per sample or turn"),
)
"""What an estimator may have forgotten to say, and in words."""


def try_estimator(name: str, estimator: AdvantageEstimator, *, has_lone_samples: bool = False) -> None:
    """Raise ``ConfigError`` unless each sample, turn or token gets one finite advantage, also if rewards do not differ.

    The error says what to declare where that alone is missing.

    Args:
        name: its name in the configuration.
        estimator: the estimator to try.
        has_lone_samples: a group may be left with one sample.
    """
    try:
        _try(name, estimator, has_lone_samples)
    except ConfigError as error:
        raise ConfigError(f"{error}{_forgotten(name, estimator, has_lone_samples)}") from error.__cause__


def _forgotten(name: str, estimator: AdvantageEstimator, has_lone_samples: bool) -> str:
    """What the estimator would pass with, in words; empty if there is no such declaration."""
    for declared, words in _DECLARATIONS:
        with contextlib.suppress(ConfigError):
            _try(name, replace(estimator, **declared), has_lone_samples)
            return f"; it passes if @register_advantage_estimator(<name>, ...) says {words}"
    return ""


def _try(name: str, estimator: AdvantageEstimator, has_lone_samples: bool) -> None:
    tried = [(1.0, 0.0, 0.5, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0), *([(1.0,)] if has_lone_samples else [])]
    groups = [_seen(estimator, rewards) for rewards in tried]
    for batch in [groups, groups[2:3]] if estimator.needs_mini_batch else [[group] for group in groups]:
        _try_on(name, estimator, batch)


def _seen(estimator: AdvantageEstimator, rewards: Sequence[float]) -> GroupCredit:
    """A group of these rewards.

    Its samples have one turn, two, of which no row trains the first, three, rewarded by token, and one that no row trains.
    """
    if estimator.unit is Unit.SAMPLE:
        baseline = 0.25 if estimator.needs_baseline else None
        return GroupRewards(rewards=tuple(rewards), num_tokens=(2, 2, 2, 0)[: len(rewards)], baseline=baseline)
    of_turns = ((2,), (0, 2), (2, 2, 2), (0,))
    return tuple(_seen_sample(estimator, *pair) for pair in zip(rewards, of_turns, strict=False))


def _seen_sample(estimator: AdvantageEstimator, reward: float, num_tokens: tuple[int, ...]) -> SampleCredit:
    """The last turn earns the reward; with three turns each of its tokens earns a half."""
    num, num_turns = sum(num_tokens), len(num_tokens)
    by_token = np.array([0.0] * (num - 2) + [reward / 2] * 2, np.float32)
    return SampleCredit(
        rewards=(0.0,) * (num_turns - 1) + (reward,),
        num_tokens=num_tokens,
        token_rewards=by_token if num_turns == 3 else None,
        observations=tuple(b"seen %d" % turn if of_turn else b"" for turn, of_turn in enumerate(num_tokens)),
        logprobs=np.full(num, -1.0, np.float32),
        values=np.full(num, 0.5, np.float32) if estimator.needs_values else None,
        log_ratios=np.zeros(num, np.float32) if estimator.needs_old_logprobs else None,
    )


def _try_on(name: str, estimator: AdvantageEstimator, groups: Sequence[GroupCredit]) -> None:
    try:
        found = [list(of_group) for of_group in estimator(groups)]
        for seen, of_group in zip(groups, found, strict=True):
            estimator.check(seen, of_group)
    except TrainingError as error:
        raise ConfigError(f"{_ESTIMATOR}={name} {str(error).removeprefix(f'{_ESTIMATOR} ')}") from error
    except Exception as error:  # it is the user's
        rewards = [
            seen.rewards if isinstance(seen, GroupRewards) else tuple(one.rewards for one in seen) for seen in groups
        ]
        of_turns = [
            seen.num_tokens if isinstance(seen, GroupRewards) else tuple(one.num_tokens for one in seen)
            for seen in groups
        ]
        gets_tokens = estimator.needs_mini_batch or estimator.unit is not Unit.SAMPLE
        tokens = f" and num_tokens {of_turns}" if gets_tokens else ""
        raise ConfigError(
            f"{_ESTIMATOR}={name} raises {error!r} for groups of the rewards {rewards}{tokens}"
        ) from error


def try_shape(name: str, shape: RewardShape) -> None:
    """Raise ``ConfigError`` unless each of two samples gets one finite reward, also if their own rewards do not differ.

    A ``LookupError`` is accepted: the shape may read a figure of the environment (``metrics``), which the tried samples lack.
    """
    for rewards in ((1.0, 0.0), (0.0, 0.0)):
        samples = [Sample(rows=(_row(reward, 2 + index),)) for index, reward in enumerate(rewards)]
        try:
            shaped_rewards(shape, samples, f"2 samples of the rewards {rewards}", key=f"{_SHAPING}={name}")
        except GenerationError as error:
            if isinstance(error.__cause__, LookupError):
                return
            raise ConfigError(str(error)) from error.__cause__


def _row(reward: float, num_tokens: int) -> Trajectory:
    return Trajectory(
        prompt_token_ids=(1,),
        response_token_ids=(2,) * num_tokens,
        loss_mask=(1,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        versions=VersionSpans.constant(0, num_tokens),
        reward=reward,
    )


def try_policy_loss(name: str, loss: PolicyLossFn, entry: LossEntry) -> None:
    """Raise ``ConfigError`` unless the loss can be summed over micro-batches, also over empty ones, and weighted by row.

    Args:
        name: its name in the configuration.
        loss: the loss to try; it gets the fields that its entry asks for, as in a run.
        entry: its entry in the registry.
    """
    everything = LossTokens(
        logprobs=torch.tensor([-1.0, -0.4, -2.0, -0.9, -1.3], requires_grad=True),
        behavior_logprobs=torch.tensor([-1.1, -0.4, -1.7, -0.95, -1.2]),
        advantages=torch.tensor([0.5, 0.5, -1.0, -1.0, 0.0]),
        row_indices=torch.tensor([0, 0, 1, 1, 2]),
        old_logprobs=torch.tensor([-1.05, -0.45, -1.8, -0.9, -1.25]),
        weights=torch.ones(5),
        is_marked=torch.tensor([True, False, False, True, False]),
    )
    is_given = {"old_logprobs": entry.needs_old_logprobs, "is_marked": entry.marker is not None}
    tokens = replace(everything, **{field: None for field, given in is_given.items() if not given})
    _refuse_unasked(name, loss, tokens, everything)
    gradient = _gradient(name, loss, tokens)
    last = gradient[-1].item()
    _require(last == 0, name, f"leave a token without advantage alone, got a gradient of {last:g}")
    lighter = replace(tokens, advantages=tokens.advantages / 4, weights=torch.full((5,), 0.25))
    is_linear = torch.allclose(_gradient(name, loss, lighter), gradient / 4, atol=1e-6)
    _require(is_linear, name, "be linear in a positive factor of the advantages, which weighs rows; it is not")
    _require(
        torch.allclose(_gradient(name, loss, _first(2, tokens)), gradient[:2], atol=1e-6),
        name,
        "give a row the same gradient whatever other rows are in its micro-batch; return one loss per token, and divide by no count of "
        "them",
    )
    _gradient(name, loss, _first(0, tokens))


def _require(is_so: bool, name: str, expected: str) -> None:
    if not is_so:
        raise ConfigError(f"{_LOSS}={name} must {expected}")


def _refuse_unasked(name: str, loss: PolicyLossFn, tokens: LossTokens, everything: LossTokens) -> None:
    """Raise ``ConfigError`` for a loss that fails with ``tokens`` and works with ``everything``."""
    error = _raised(loss, tokens)
    if error is None or _raised(loss, everything) is not None:
        return
    lacking = [field for field in _HOW_TO_ASK if getattr(tokens, field) is None]
    needed = [field for field in lacking if _raised(loss, replace(everything, **{field: None})) is not None]
    field = (needed or lacking)[0]
    raise ConfigError(
        f"{_LOSS}={name} reads tokens.{field}, which a run leaves None, as its registration does not ask for it, and raises {error!r}; "
        f"{_HOW_TO_ASK[field]}"
    ) from error


def _raised(loss: PolicyLossFn, tokens: LossTokens) -> Exception | None:
    try:
        loss(tokens)
    except Exception as error:  # it is the user's
        return error
    return None


def _first(num: int, tokens: LossTokens) -> LossTokens:
    given = {key: value[:num].detach() for key, value in fields_of(tokens).items() if value is not None}
    given["logprobs"].requires_grad_()
    return LossTokens(**given)


def _gradient(name: str, loss: PolicyLossFn, tokens: LossTokens) -> Tensor:
    """(N,) gradient of the summed losses with respect to the log-probs."""
    try:
        found = loss(tokens)
    except Exception as error:  # it is the user's
        why = "" if len(tokens.logprobs) else ", no tokens: a policy worker without rows of its own calls it with none"
        raise ConfigError(f"{_LOSS}={name} raises {error!r} for {tokens}{why}") from error
    _require(isinstance(found, TokenLoss), name, f"return a TokenLoss, got {type(found).__name__}")
    expected, loss_shape, clipped_shape = (tuple(of.shape) for of in (tokens.logprobs, found.loss, found.is_clipped))
    _require(
        loss_shape == clipped_shape == expected,
        name,
        f"return one loss and one is_clipped per token, shape {expected}, got {loss_shape} and {clipped_shape}",
    )
    _require(found.loss.requires_grad, name, "have a gradient with respect to tokens.logprobs; it has none")
    (gradient,) = torch.autograd.grad(found.loss.sum(), tokens.logprobs)
    _require(bool(gradient.isfinite().all()), name, f"have a finite gradient, got {gradient.tolist()}")
    return gradient
