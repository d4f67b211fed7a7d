"""What is computed when a step is put together: advantages that depend on its other groups, on its KL penalty, on earlier steps or on a
critic, their normalisation, and marks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from skyrl_async.algorithms.advantages import AdvantageEstimator, MaskGroup, with_advantages
from skyrl_async.algorithms.distillation import Distillation
from skyrl_async.algorithms.history import PromptRewards
from skyrl_async.columns import NO_LOGPROBS, Advantages, is_repeated, repeated
from skyrl_async.samples import Sample
from skyrl_async.types import Group

if TYPE_CHECKING:
    from skyrl_async.algorithms.kl import KlPenalty
    from skyrl_async.algorithms.policy_losses import Mark


def normalised(groups: Sequence[Group], masked_group: MaskGroup = lambda group: group) -> list[Group]:
    """The groups of a mini-batch with advantages of mean 0 and standard deviation 1 over their trained tokens.

    SkyRL's ``advantage_batch_normalize``, and what its and verl's ``gae`` always does, as PPO's implementations do (Andrychowicz et al.,
    arXiv 2006.05990, "per-minibatch advantage normalization"); of the standard deviation the unbiased estimate.
    Groups whose tokens all have one advantage get 0.
    """
    masks = [[row.loss_mask for row in masked_group(group).trajectories] for group in groups]
    pairs = [
        pair
        for group, of_group in zip(groups, masks, strict=True)
        for pair in zip(group.advantages, of_group, strict=True)
    ]
    trained = np.concatenate([NO_LOGPROBS, *(column[mask] for column, mask in pairs)]).astype(np.float64)
    if not len(trained):
        return list(groups)
    mean, std = trained.mean(), trained.std(ddof=1) if len(trained) > 1 else 0.0

    def scaled(column: Advantages) -> Advantages:
        if is_repeated(column) and len(column):
            return repeated(float((column[0] - mean) / (std + 1e-8)), len(column))
        return ((column - mean) / (std + 1e-8)).astype(np.float32)

    return [
        replace(
            group,
            advantages=tuple(
                scaled(column) if row.num_sampled_tokens else column
                for row, column in zip(group.trajectories, group.advantages, strict=True)
            ),
        )
        for group in groups
    ]


@dataclass(frozen=True)
class StepAdvantages:
    """Computes advantages that depend on the other groups of the step, or on the KL penalty of the step."""

    estimator: AdvantageEstimator | None = None
    """None if groups have their advantages from the reward stage."""
    penalty: "KlPenalty | None" = None
    """Subtracted from rewards first; None for no penalty."""
    history: PromptRewards | None = None
    """Gives baselines; None if the estimator needs none."""
    normalises: bool = False
    """Whether advantages are normalised over the mini-batch."""
    distillation: Distillation | None = None
    """Adds the teacher's share; None: there is no teacher."""
    mark: "Mark | None" = None
    """Marks tokens afterwards; None if the loss needs no marks."""

    def __call__(self, groups: Sequence[Group], masked_group: MaskGroup = lambda group: group) -> Sequence[Group]:
        """Return groups of one step with advantages and marks. Each group is passed once.

        All groups of a step must be passed in one call if the estimator or the marks depend on all of them. Rewards and the penalty cover
        whole answers; only trained tokens are counted and marked.
        """
        if self.estimator is not None:
            groups = with_advantages(groups, self.estimator, self._reward_of, masked_group, self.history)
        if self.normalises:
            groups = normalised(groups, masked_group)
        if self.distillation is not None:
            groups = [self.distillation(group) for group in groups]
        if self.mark is None:
            return groups
        marked = self.mark([masked_group(group) for group in groups])
        return [_with_marks(*pair) for pair in zip(groups, marked, strict=True)]

    def _reward_of(self, sample: Sample) -> float:
        return sample.shaped_reward if self.penalty is None else self.penalty.penalised(sample)

    def end_step(self) -> dict[str, float]:
        """Called after each optimizer step; returns the figures of its penalty."""
        if self.history is not None:
            self.history.end_step()
        return {} if self.penalty is None else self.penalty.end_step()

    @property
    def need_mini_batch(self) -> bool:
        """Whether they are computed for all groups of a step at once."""
        return (
            self.normalises or self.mark is not None or (self.estimator is not None and self.estimator.needs_mini_batch)
        )

    @property
    def kl_coef(self) -> float | None:
        """Coefficient of the penalty in the next step, for checkpoints; None if none follows a target."""
        controller = None if self.penalty is None else self.penalty.controller
        return None if controller is None or controller.target is None else controller.coefficient

    @property
    def prompt_rewards(self) -> dict[str, tuple[float, float]]:
        """What earlier samples of each prompt earned, for checkpoints; empty if nothing reads it."""
        return {} if self.history is None else self.history.state()

    def restore(self, kl_coef: float | None, prompt_rewards: Mapping[str, Sequence[float]]) -> None:
        """Restore a checkpoint's coefficient if it follows a target, and rewards. A fixed coefficient comes from the configuration."""
        if self.history is not None:
            self.history.restore(prompt_rewards)
        if kl_coef is not None and self.penalty is not None and self.penalty.controller.target is not None:
            self.penalty.controller.coefficient = kl_coef


def _with_marks(group: Group, marked: Group) -> Group:
    rows = zip(group.trajectories, marked.trajectories, strict=True)
    return replace(group, trajectories=tuple(replace(row, marks=of.marks) for row, of in rows))
