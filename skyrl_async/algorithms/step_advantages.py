"""Advantages and marks that are computed when a step is put together, because they depend on all of its groups.

The reward stage computes advantages that depend on one group alone (``rollout.preparation``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_async.algorithms.advantages import AdvantageEstimator, GroupRewards, row_advantages
from skyrl_async.samples import live_samples_of
from skyrl_async.types import Group

if TYPE_CHECKING:
    from skyrl_async.algorithms.covariance import Mark
    from skyrl_async.algorithms.kl import KlPenalty

MaskGroup = Callable[[Group], Group]
"""A group -> the group with the tokens masked that the staleness policy leaves out."""


def _whole(group: Group) -> Group:
    return group


class StepAdvantages:
    """Computes advantages that depend on the other groups of the step, or on the KL penalty of the step.

    Args:
        estimator: None if groups have their advantages from the reward stage.
        penalty: subtracted from rewards first; None for no penalty.
        mark: marks tokens afterwards; None if the loss needs no marks.
    """

    def __init__(
        self,
        estimator: AdvantageEstimator | None = None,
        penalty: "KlPenalty | None" = None,
        mark: "Mark | None" = None,
    ) -> None:
        self._estimator = estimator
        self._penalty = penalty
        self._mark = mark

    def __call__(self, groups: Sequence[Group], masked_group: MaskGroup = _whole) -> Sequence[Group]:
        """Return groups of one step with advantages and marks. Each group is passed once.

        All groups of a step must be passed in one call if the estimator or the marks depend on all of them. Rewards and the penalty cover
        whole answers; only trained tokens are counted and marked.
        """
        with_advantages = groups if self._estimator is None else self._with_advantages(groups, masked_group)
        if self._mark is None:
            return with_advantages
        marked = self._mark([masked_group(group) for group in with_advantages])
        return [_with_marks(*pair) for pair in zip(with_advantages, marked, strict=True)]

    def _with_advantages(self, groups: Sequence[Group], masked_group: MaskGroup) -> Sequence[Group]:
        rewards = [self._rewards_of(group, masked_group(group)) for group in groups]
        live = [index for index, of_one in enumerate(rewards) if of_one.rewards]
        found = dict(zip(live, self._advantages([rewards[index] for index in live]), strict=True))
        return [_with_advantages_of(group, found.get(index, ())) for index, group in enumerate(groups)]

    def _advantages(self, rewards: Sequence[GroupRewards]) -> Sequence[Sequence[float]]:
        assert self._estimator is not None
        if self._estimator.of_mini_batch is not None:
            return self._estimator.of_mini_batch(rewards) if rewards else ()
        assert self._estimator.of_group is not None, "an estimator is of one of both"
        return [self._estimator.of_group(of_one.rewards) for of_one in rewards]

    def _rewards_of(self, group: Group, part: Group) -> GroupRewards:
        samples = live_samples_of(group.trajectories)
        return GroupRewards(
            rewards=tuple(s.shaped_reward if self._penalty is None else self._penalty.penalised(s) for s in samples),
            num_tokens=tuple(sample.num_sampled_tokens for sample in live_samples_of(part.trajectories)),
        )

    def end_step(self) -> dict[str, float]:
        """Called after each optimizer step; returns the figures of its penalty."""
        return {} if self._penalty is None else self._penalty.end_step()

    @property
    def kl_coef(self) -> float | None:
        """Coefficient of the penalty in the next step, for checkpoints; None without a penalty."""
        return None if self._penalty is None else self._penalty.controller.coefficient

    def restore(self, kl_coef: float | None) -> None:
        """Restore a checkpoint's coefficient if it follows a target. A fixed coefficient always comes from the configuration."""
        if kl_coef is not None and self._penalty is not None and self._penalty.controller.target is not None:
            self._penalty.controller.coefficient = kl_coef


def _with_advantages_of(group: Group, of_samples: Sequence[float]) -> Group:
    return replace(group, advantages=tuple(row_advantages(group.trajectories, lambda _: of_samples)))


def _with_marks(group: Group, marked: Group) -> Group:
    rows = zip(group.trajectories, marked.trajectories, strict=True)
    return replace(group, trajectories=tuple(replace(row, marks=of.marks) for row, of in rows))
