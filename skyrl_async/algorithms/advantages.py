"""Advantage estimators, and groups with advantages: rewards in, one advantage per sample out.

An estimator sees neither tokens nor tensors, only a handful of floats, either of one group or of all groups of a mini-batch. The
configuration names it; it is looked up once.

The reward stage computes advantages that depend on the rewards of one group alone (``rollout.preparation``). ``StepAdvantages`` computes
the others, and marks, when a step is put together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_async.errors import TrainingError
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, AdvantageEntry, path_of
from skyrl_async.samples import live_samples_of, per_row
from skyrl_async.types import Group, Trajectory

if TYPE_CHECKING:
    from skyrl_async.algorithms.kl import KlPenalty
    from skyrl_async.algorithms.policy_losses import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """One group as an estimator over a mini-batch sees it: its samples without abandoned ones."""

    rewards: tuple[float, ...]
    """One finite reward per sample."""
    num_tokens: tuple[int, ...]
    """Trained tokens per sample, >= 0."""


ComputeAdvantages = Callable[[Sequence[float]], Sequence[float]]
"""The rewards of one group, at least one -> one advantage each."""
ComputeMiniBatchAdvantages = Callable[[Sequence[GroupRewards]], Sequence[Sequence[float]]]
"""All groups of a mini-batch that have a sample, at least one group -> per group one advantage per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An estimator over groups: all groups of a mini-batch -> per group one advantage per sample."""

    compute: Callable[[Any], Sequence[Any]]
    """``ComputeMiniBatchAdvantages`` if it ``needs_mini_batch``, else ``ComputeAdvantages``."""
    needs_mini_batch: bool = False

    def __call__(self, groups: Sequence[GroupRewards]) -> Sequence[Sequence[float]]:
        """Return per group one advantage per sample. Each group has a sample."""
        if self.needs_mini_batch:
            return self.compute(groups) if groups else ()
        return [self.compute(group.rewards) for group in groups]


def _zero_where_equal(compute: Callable[[Sequence[float]], list[float]]) -> Callable[[Sequence[float]], list[float]]:
    """Give exact zeros to a group whose rewards do not differ, or of one sample; refuse rewards that are not finite."""

    @wraps(compute)
    def of_group(rewards: Sequence[float]) -> list[float]:
        _require_finite(rewards)
        if not rewards or min(rewards) == max(rewards):
            return [0.0] * len(rewards)
        return compute(rewards)

    return of_group


def _require_finite(rewards: Sequence[float]) -> None:
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] must be finite, got {reward}; correct the environment's reward")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@_zero_where_equal
def dr_grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = r_i - mean(r)``: Dr. GRPO (arXiv 2503.20783), section 3.2. It does not favour groups with little variance.

    Over a group of n, the mean of advantages times scores is ``(n - 1) / n`` times the policy gradient, because every sample is part of
    its own baseline.

    Args:
        rewards: one finite reward per sample of one group.

    Returns:
        One advantage per reward; zeros if all rewards are equal, as in a group of one, which has no baseline.

    Raises:
        ValueError: a reward is not finite.
    """
    mean = _mean(rewards)
    return [reward - mean for reward in rewards]


@_zero_where_equal
def grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = (r_i - mean(r)) / (std(r) + 1e-6)``: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.

    The standard deviation is the unbiased estimate. Arguments, result and errors as in ``dr_grpo_advantages``.
    """
    mean = _mean(rewards)
    centred = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) for c in centred]


@_zero_where_equal
def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = r_i - mean of the others = n / (n - 1) (r_i - mean(r))``: RLOO (arXiv 2402.14740), after Kool et al. (2019).

    The mean of advantages times scores is the policy gradient, for every n >= 2. Arguments, result and errors as in
    ``dr_grpo_advantages``.
    """
    mean, share = _mean(rewards), len(rewards) / (len(rewards) - 1)
    return [share * (reward - mean) for reward in rewards]


@_zero_where_equal
def maxrl_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = (r_i - mean(r)) / mean(r)``: MaxRL (arXiv 2602.02710), for rewards of 0 and 1.

    With p the probability of reward 1, the mean of advantages times scores is the gradient of ``log p``, expanded in ``1 - p`` and
    truncated: ``sum over k = 1 .. n - 1 of (1 - p)^(k - 1) grad p``. Arguments and result as in ``dr_grpo_advantages``.

    Raises:
        ValueError: a reward is not finite, or negative.
    """
    if min(rewards) < 0:
        raise ValueError(
            f"rewards must be >= 0 with trainer.algorithm.advantage_estimator=maxrl, which divides by their mean, got {min(rewards)}; "
            "shift them, or choose another estimator"
        )
    mean = _mean(rewards)
    return [(reward - mean) / mean for reward in rewards]


def reinforce_pp_advantages(groups: Sequence[GroupRewards]) -> list[list[float]]:
    """``A_i = (r_i - mean(r)) / (std(r) + 1e-8)`` over all tokens of the mini-batch: REINFORCE++ (arXiv 2501.03262).

    Each sample counts once per trained token; mean and standard deviation are taken over these tokens. Nothing is computed per prompt, so
    that groups of one sample work. With KL in the reward every token gets the KL of the whole answer; in the paper it gets the KL from
    that token on. Before normalisation both have the same mean; this one has more variance (``kl.KlPenalty``).

    Args:
        groups: all groups of one mini-batch.

    Returns:
        Per group one advantage per sample; zeros if all rewards are equal.

    Raises:
        ValueError: a reward is not finite.
    """
    for group in groups:
        _require_finite(group.rewards)
    return _normalised([list(group.rewards) for group in groups], groups)


def reinforce_pp_baseline_advantages(groups: Sequence[GroupRewards]) -> list[list[float]]:
    """``reinforce_pp_advantages`` of ``r_i - mean over its group``: REINFORCE++ with baseline (arXiv 2501.03262).

    The group's mean removes the difficulty of its prompt; the mini-batch's standard deviation sets the scale. Arguments, result and errors
    as in ``reinforce_pp_advantages``.
    """
    return _normalised([dr_grpo_advantages(group.rewards) for group in groups], groups)


def _normalised(values: Sequence[Sequence[float]], groups: Sequence[GroupRewards]) -> list[list[float]]:
    """Subtract the mean over tokens, and divide by the standard deviation over tokens."""
    counted = [
        (value, num)
        for of_group, group in zip(values, groups, strict=True)
        for value, num in zip(of_group, group.num_tokens, strict=True)
        if num
    ]
    if not counted or min(counted)[0] == max(counted)[0]:
        return [[0.0] * len(of_group) for of_group in values]
    num_tokens = sum(num for _, num in counted)
    mean = math.fsum(value * num for value, num in counted) / num_tokens
    std = math.sqrt(math.fsum((value - mean) ** 2 * num for value, num in counted) / num_tokens)
    return [[(value - mean) / (std + 1e-8) for value in of_group] for of_group in values]


def row_advantages(trajectories: Sequence[Trajectory], compute: ComputeAdvantages) -> list[float]:
    """Give every row of a group the advantage of its sample. Abandoned and overlong samples get 0 and are not in the baseline.

    Args:
        trajectories: the group's rows.
        compute: (shaped) rewards of the live samples -> one advantage per sample; not called if there are none.

    Raises:
        TrainingError: ``compute`` does not return one finite advantage per reward.
    """
    live = live_samples_of(trajectories)
    rewards = [sample.shaped_reward for sample in live]
    of_sample = list(compute(rewards)) if live else []
    if len(of_sample) != len(live) or not all(map(math.isfinite, of_sample)):
        raise TrainingError(
            f"trainer.algorithm.advantage_estimator must return one finite advantage per reward of {rewards}, got {of_sample}"
        )
    return per_row(trajectories, zip(live, of_sample, strict=True), 0.0)


def with_advantages(group: Group, compute: ComputeAdvantages) -> Group:
    """Return the group with ``row_advantages``."""
    return replace(group, advantages=tuple(row_advantages(group.trajectories, compute)))


MaskGroup = Callable[[Group], Group]
"""A group -> the group with the tokens masked that the staleness policy leaves out."""


@dataclass(frozen=True)
class StepAdvantages:
    """Computes advantages that depend on the other groups of the step, or on the KL penalty of the step."""

    estimator: AdvantageEstimator | None = None
    """None if groups have their advantages from the reward stage."""
    penalty: "KlPenalty | None" = None
    """Subtracted from rewards first; None for no penalty."""
    mark: "Mark | None" = None
    """Marks tokens afterwards; None if the loss needs no marks."""

    def __call__(self, groups: Sequence[Group], masked_group: MaskGroup = lambda group: group) -> Sequence[Group]:
        """Return groups of one step with advantages and marks. Each group is passed once.

        All groups of a step must be passed in one call if the estimator or the marks depend on all of them. Rewards and the penalty cover
        whole answers; only trained tokens are counted and marked.
        """
        if self.estimator is not None:
            rewards = [self._rewards_of(group, masked_group(group)) for group in groups]
            live = [index for index, of_one in enumerate(rewards) if of_one.rewards]
            found = dict(zip(live, self.estimator([rewards[index] for index in live]), strict=True))
            groups = [_with_these(group, found.get(index, ())) for index, group in enumerate(groups)]
        if self.mark is None:
            return groups
        marked = self.mark([masked_group(group) for group in groups])
        return [_with_marks(*pair) for pair in zip(groups, marked, strict=True)]

    def _rewards_of(self, group: Group, part: Group) -> GroupRewards:
        samples = live_samples_of(group.trajectories)
        return GroupRewards(
            rewards=tuple(s.shaped_reward if self.penalty is None else self.penalty.penalised(s) for s in samples),
            num_tokens=tuple(sample.num_sampled_tokens for sample in live_samples_of(part.trajectories)),
        )

    def end_step(self) -> dict[str, float]:
        """Called after each optimizer step; returns the figures of its penalty."""
        return {} if self.penalty is None else self.penalty.end_step()

    @property
    def need_mini_batch(self) -> bool:
        """Whether they are computed for all groups of a step at once."""
        return self.mark is not None or (self.estimator is not None and self.estimator.needs_mini_batch)

    @property
    def kl_coef(self) -> float | None:
        """Coefficient of the penalty in the next step, for checkpoints; None without a penalty."""
        return None if self.penalty is None else self.penalty.controller.coefficient

    def restore(self, kl_coef: float | None) -> None:
        """Restore a checkpoint's coefficient if it follows a target. A fixed coefficient always comes from the configuration."""
        if kl_coef is not None and self.penalty is not None and self.penalty.controller.target is not None:
            self.penalty.controller.coefficient = kl_coef


def _with_these(group: Group, of_samples: Sequence[float]) -> Group:
    return with_advantages(group, lambda _: of_samples)


def _with_marks(group: Group, marked: Group) -> Group:
    rows = zip(group.trajectories, marked.trajectories, strict=True)
    return replace(group, trajectories=tuple(replace(row, marks=of.marks) for row, of in rows))


def make_advantage_estimator(name: str, *, grpo_norm_by_std: bool = True) -> AdvantageEstimator:
    """Return the estimator called ``name``, or at the path ``name``. Raises ``ConfigError`` with the known names."""
    entry = ADVANTAGE_ESTIMATORS.entry("dr_grpo" if name == "grpo" and not grpo_norm_by_std else name)
    return AdvantageEstimator(compute=ADVANTAGE_ESTIMATORS.load(entry), needs_mini_batch=entry.needs_mini_batch)


F = TypeVar("F", bound=Callable[..., object])


def register_advantage_estimator(
    name: str, *, needs_mini_batch: bool = False, needs_groups: bool = True
) -> Callable[[F], F]:
    """Decorator: let ``trainer.algorithm.advantage_estimator=name`` mean the decorated function.

    Args:
        name: without a colon; a known name is replaced.
        needs_mini_batch: the function takes all groups of a mini-batch (``ComputeMiniBatchAdvantages``), not the rewards of one group
            (``ComputeAdvantages``).
        needs_groups: a prompt's only sample has no advantage; ``generator.n_samples_per_prompt=1`` is refused.

    Raises:
        ConfigError: the function is not at the top of a module that can be imported.
    """

    def register(function: F) -> F:
        entry = AdvantageEntry(path=path_of(function), needs_mini_batch=needs_mini_batch, needs_groups=needs_groups)
        ADVANTAGE_ESTIMATORS.register(name, entry)
        return function

    return register
