"""What earlier samples of each prompt earned: rewards of trained groups in, a baseline per prompt out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_ALL = ""
"""Stands for all prompts; no prompt has this uid."""


@dataclass(kw_only=True, eq=False)
class PromptRewards:
    """Means in which the samples of a visit to a prompt count ``decay`` times as much as those of the visit after it.

    Rewards of a step count from the next step on, so that no sample is part of its own baseline.
    """

    decay: float
    """In [0, 1]."""
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    """Uid -> decayed sum of rewards, and decayed number of samples."""
    _of_step: list[tuple[int, str, tuple[float, ...]]] = field(default_factory=list, init=False)

    def baseline(self, uid: str) -> float:
        """Mean of the prompt's earlier samples; of all prompts' before its first; 0 before anybody's."""
        total, weight = self._sums.get(uid) or self._sums.get(_ALL) or (0.0, 0.0)
        return total / weight if weight else 0.0

    def add(self, admission_index: int, uid: str, rewards: Sequence[float]) -> None:
        """Note what a group of the step in progress earned."""
        self._of_step.append((admission_index, uid, tuple(rewards)))

    def end_step(self) -> None:
        """Count the rewards of the step, in the order of admission, whatever the order in which they were added."""
        for _, uid, rewards in sorted(self._of_step):
            self._count(uid, rewards)
        self._count(_ALL, [reward for _, _, rewards in sorted(self._of_step) for reward in rewards])
        self._of_step.clear()

    def _count(self, uid: str, rewards: Sequence[float]) -> None:
        """All of one visit are equally old."""
        if not rewards:
            return
        total, weight = self._sums.get(uid, (0.0, 0.0))
        self._sums[uid] = total * self.decay + math.fsum(rewards), weight * self.decay + len(rewards)

    def state(self) -> dict[str, tuple[float, float]]:
        """For a checkpoint, without what a step in progress has added: its groups are computed again."""
        return dict(self._sums)

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue a checkpoint's."""
        self._sums = {uid: (total, weight) for uid, (total, weight) in state.items()}
