"""The samples of a group, assembled from its rows: most have one row, a session with a rewritten history has several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from skyrl_async.types import Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to a prompt."""

    rows: tuple[Trajectory, ...]
    """At least one; all have the same reward."""

    @property
    def reward(self) -> float:
        return self.rows[0].reward

    @property
    def shaped_reward(self) -> float:
        """The reward from which advantages are computed; the plain reward if it is not shaped."""
        shaped = self.rows[0].shaped_reward
        return self.reward if shaped is None else shaped

    @property
    def is_overlong(self) -> bool:
        """Masked because a length limit cut it; the reward is reported, but excluded from the baseline."""
        return self.rows[0].is_overlong

    @property
    def is_abandoned(self) -> bool:
        """Masked, and its reward ignored."""
        return self.rows[0].is_abandoned

    @property
    def is_live(self) -> bool:
        """Trained and part of the group's baseline: neither abandoned nor overlong."""
        return not (self.is_abandoned or self.is_overlong)

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
        # Rows without an index are one sample each; a group never mixes them with indexed rows.
        key = position if row.sample_index is None else row.sample_index
        rows.setdefault(key, []).append(row)
    return tuple(Sample(rows=tuple(of_sample)) for of_sample in rows.values())


def live_samples_of(trajectories: Sequence[Trajectory]) -> tuple[Sample, ...]:
    """The samples that are trained and form the group's baseline."""
    return tuple(sample for sample in samples_of(trajectories) if sample.is_live)


def per_row(trajectories: Sequence[Trajectory], of_samples: Iterable[tuple[Sample, T]], default: T) -> list[T]:
    """One value per row: that of its sample, or ``default`` if ``of_samples`` lacks the sample.

    The samples hold the very objects in ``trajectories``.
    """
    of_row = {id(row): value for sample, value in of_samples for row in sample.rows}
    return [of_row.get(id(row), default) for row in trajectories]
