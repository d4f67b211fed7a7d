"""Groups of a step in, the same with one advantage per row, and marks, out: what cannot be known before the step is put together.

Flows in: groups as they are about to be trained. Flows out: copies with advantages, and marked tokens where the loss asks for them. Does
not know how they are trained.
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

TrainedPart = Callable[[Group], Group]
"""A group -> the same with the mask of what the staleness policy leaves of it."""


def _whole(group: Group) -> Group:
    return group


class StepAdvantages:
    """Advantages that depend on the other groups of the step, or on the step's penalty for divergence.

    Args:
        estimator: of one group or of all of a step; None: groups have their advantages from the reward stage.
        penalty: taken from rewards before.
        mark: marks tokens afterwards; None: no loss asks for it.
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

    def __call__(self, groups: Sequence[Group], masked_group: TrainedPart = _whole) -> Sequence[Group]:
        """Groups of one step, with advantages: all of them at once where estimator or marks need that; each once.

        Rewards, and the penalty, are of whole answers; tokens are counted and marked among those that are trained.
        """
        credited = groups if self._estimator is None else self._with_advantages(groups, masked_group)
        if self._mark is None:
            return credited
        marked = self._mark([masked_group(group) for group in credited])
        return [_with_marks_of(*pair) for pair in zip(credited, marked, strict=True)]

    def _with_advantages(self, groups: Sequence[Group], masked_group: TrainedPart) -> Sequence[Group]:
        rewards = [self._rewards_of(group, masked_group(group)) for group in groups]
        live = [index for index, of_one in enumerate(rewards) if of_one.rewards]
        found = dict(zip(live, self._advantages([rewards[index] for index in live]), strict=True))
        return [_credited(group, found.get(index, ())) for index, group in enumerate(groups)]

    def _advantages(self, rewards: Sequence[GroupRewards]) -> Sequence[Sequence[float]]:
        """Of groups that have samples."""
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
        """The step is made; returns figures of it."""
        return {} if self._penalty is None else self._penalty.end_step()

    @property
    def kl_coef(self) -> float | None:
        """Of the penalty in the next step, for checkpoints; None without one."""
        return None if self._penalty is None else self._penalty.controller.coefficient

    def restore(self, kl_coef: float | None) -> None:
        """Go on with the coefficient of a checkpoint, where it follows a target: one that is fixed is the configuration's."""
        if kl_coef is not None and self._penalty is not None and self._penalty.controller.target is not None:
            self._penalty.controller.coefficient = kl_coef


def _credited(group: Group, of_samples: Sequence[float]) -> Group:
    return replace(group, advantages=tuple(row_advantages(group.trajectories, lambda _: of_samples)))


def _with_marks_of(group: Group, marked: Group) -> Group:
    rows = zip(group.trajectories, marked.trajectories, strict=True)
    return replace(group, trajectories=tuple(replace(row, marks=of.marks) for row, of in rows))
