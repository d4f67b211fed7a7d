"""One call's trajectories in, each rank's micro-batches out, and the ranks' figures joined again.

Shared by the Ray workers and the in-process policy, so that both compute the same numbers. A pure function of its
arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.algorithms.batching import Row, plan_micro_batches
from skyrl_async.training.settings import TrainingSettings
from skyrl_async.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank does in one ``forward_backward``."""

    micro_batches: tuple[tuple[Row, ...], ...]
    """Equally many on every rank; an empty one is an idle forward."""
    version: int
    """Policy version being trained."""
    has_gradient: bool
    """False when every advantage is 0: the gradient is exactly zero, and only figures are computed."""


def split_work(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    version: int,
    *,
    settings: TrainingSettings,
    num_ranks: int,
) -> list[RankWork]:
    """Deal the trajectories that have sampled tokens to ``num_ranks`` ranks.

    Raises:
        ValueError: there is not one advantage per trajectory.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"advantages must hold one value per trajectory ({len(trajectories)}), got {len(advantages)}")
    rows = [
        Row(trajectory=trajectory, advantage=advantage)
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        if trajectory.num_sampled_tokens > 0
    ]
    plans = plan_micro_batches(
        [row.num_tokens for row in rows],
        micro_batch_tokens=settings.micro_batch_tokens,
        overhead_tokens=settings.micro_batch_overhead_tokens,
        num_ranks=num_ranks,
    )
    has_gradient = any(row.advantage != 0 for row in rows)
    return [
        RankWork(
            micro_batches=tuple(tuple(rows[index] for index in indices) for indices in plan),
            version=version,
            has_gradient=has_gradient,
        )
        for plan in plans
    ]
