"""The samples of a group, put together from its rows: most are one row, a session whose history was rewritten is several.

Flows in: trajectories. Flows out: samples with what counts once for each. Does not know where rows come from or go to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One try at a prompt."""

    rows: tuple[Trajectory, ...]
    """At least one; all have the same reward."""

    @property
    def reward(self) -> float:
        return self.rows[0].reward

    @property
    def shaped_reward(self) -> float:
        """What advantages are computed of: the reward, where nothing shapes it."""
        shaped = self.rows[0].shaped_reward
        return self.reward if shaped is None else shaped

    @property
    def is_overlong(self) -> bool:
        """Nothing of it is trained, since a length limit cut it; its reward is reported, and no part of the baseline."""
        return self.rows[0].is_overlong

    @property
    def is_abandoned(self) -> bool:
        """Nothing of it is trained, and its reward counts for nothing."""
        return self.rows[0].is_abandoned

    @property
    def is_truncated(self) -> bool:
        return any(row.is_truncated for row in self.rows)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(row.num_sampled_tokens for row in self.rows)

    @property
    def num_turns(self) -> int:
        return sum(row.num_turns for row in self.rows)


def samples_of(trajectories: Sequence[Trajectory]) -> tuple[Sample, ...]:
    """The samples in order of their first row."""
    rows: dict[int, list[Trajectory]] = {}
    for position, row in enumerate(trajectories):
        # Rows without an index are samples of their own; they never meet indexed ones in a group.
        key = position if row.sample_index is None else row.sample_index
        rows.setdefault(key, []).append(row)
    return tuple(Sample(rows=tuple(of_one)) for of_one in rows.values())


def rewarded_samples_of(trajectories: Sequence[Trajectory]) -> tuple[Sample, ...]:
    """The samples that were not abandoned."""
    return tuple(sample for sample in samples_of(trajectories) if not sample.is_abandoned)


def live_samples_of(trajectories: Sequence[Trajectory]) -> tuple[Sample, ...]:
    """Of these, the samples that are trained: those that make up the group's baseline."""
    return tuple(sample for sample in rewarded_samples_of(trajectories) if not sample.is_overlong)
