"""Groups of a step in, the same with one advantage per row out: what cannot be known before the step is put together.

Flows in: groups as they are about to be trained. Flows out: copies with advantages. Does not know how they are trained.
"""

from collections.abc import Sequence
from dataclasses import replace

from skyrl_async.algorithms.advantages import ComputeMiniBatchAdvantages, GroupRewards, row_advantages
from skyrl_async.samples import live_samples_of
from skyrl_async.types import Group


class MiniBatchCredit:
    """Advantages that depend on all groups of a mini-batch."""

    def __init__(self, compute: ComputeMiniBatchAdvantages) -> None:
        self._compute = compute

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of one mini-batch, with advantages."""
        found = self._compute([_rewards_of(group) for group in groups])
        return [_credited(group, of_group) for group, of_group in zip(groups, found, strict=True)]


def _rewards_of(group: Group) -> GroupRewards:
    samples = live_samples_of(group.trajectories)
    return GroupRewards(
        rewards=tuple(sample.shaped_reward for sample in samples),
        num_tokens=tuple(sample.num_sampled_tokens for sample in samples),
    )


def _credited(group: Group, of_samples: Sequence[float]) -> Group:
    return replace(group, advantages=tuple(row_advantages(group.trajectories, lambda _: of_samples)))
