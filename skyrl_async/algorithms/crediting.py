"""Groups of a step in, the same with one advantage per row out: what cannot be known before the step is put together.

Flows in: groups as they are about to be trained. Flows out: copies with advantages. Does not know how they are trained.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_async.algorithms.advantages import AdvantageEstimator, GroupRewards, row_advantages
from skyrl_async.samples import live_samples_of
from skyrl_async.types import Group

if TYPE_CHECKING:
    from skyrl_async.algorithms.kl_penalty import KlPenalty


class Credit:
    """Advantages that depend on the other groups of the step, or on the step's penalty for divergence.

    Args:
        estimator: of one group or of all of a step; None: groups have their advantages from the reward stage.
        penalty: taken from rewards before.
    """

    def __init__(self, estimator: AdvantageEstimator | None = None, penalty: "KlPenalty | None" = None) -> None:
        self._estimator = estimator
        self._penalty = penalty

    def __call__(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Groups of one step, with advantages: all of them at once where the estimator needs that; each once."""
        if self._estimator is None:
            return groups
        rewards = [self._rewards_of(group) for group in groups]
        if self._estimator.of_mini_batch is not None:
            found = self._estimator.of_mini_batch(rewards)
        else:
            assert self._estimator.of_group is not None, "an estimator is of one of both"
            found = [self._estimator.of_group(of_one.rewards) for of_one in rewards]
        return [_credited(group, of_group) for group, of_group in zip(groups, found, strict=True)]

    def _rewards_of(self, group: Group) -> GroupRewards:
        samples = live_samples_of(group.trajectories)
        return GroupRewards(
            rewards=tuple(s.shaped_reward if self._penalty is None else self._penalty.penalised(s) for s in samples),
            num_tokens=tuple(sample.num_sampled_tokens for sample in samples),
        )

    def end_step(self) -> dict[str, float]:
        """The step is made; returns figures of it."""
        return {} if self._penalty is None else self._penalty.end_step()

    @property
    def kl_coef(self) -> float | None:
        """Of the penalty in the next step, for checkpoints; None without one."""
        return None if self._penalty is None else self._penalty.controller.coefficient

    def take_up(self, kl_coef: float | None) -> None:
        """Go on with the coefficient of a checkpoint, where it follows a target: one that is fixed is the configuration's."""
        if kl_coef is not None and self._penalty is not None and self._penalty.controller.target is not None:
            self._penalty.controller.coefficient = kl_coef


def _credited(group: Group, of_samples: Sequence[float]) -> Group:
    return replace(group, advantages=tuple(row_advantages(group.trajectories, lambda _: of_samples)))
