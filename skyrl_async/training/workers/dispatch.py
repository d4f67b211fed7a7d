"""Deals one call's trajectories to ranks as micro-batches, and joins the ranks' log-probs again.

Pure functions, shared by ``PolicyWorkers`` and ``InProcessPolicy``, so that both compute the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.algorithms.batching import Row, plan_micro_batches
from skyrl_async.errors import TrainingError
from skyrl_async.registries import POLICY_LOSSES
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of a ``forward_backward``."""

    micro_batches: tuple[tuple[Row, ...], ...]
    """Every rank has as many; an empty one is an idle forward."""
    version: int
    """Policy version being trained."""
    has_gradient: bool
    """False if every advantage is 0, no token is marked and the loss has no other term. The gradient is then exactly 0; only figures are
    computed.
    """
    runs_reference: bool = False
    """Whether every rank computes reference log-probs of all its rows: some row, on any rank, came without."""


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
        TrainingError: the loss needs log-probs that a row lacks and the ranks cannot compute.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"advantages must hold one value per trajectory ({len(trajectories)}), got {len(advantages)}")
    rows = [
        Row(trajectory=trajectory, advantage=advantage)
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
        if trajectory.num_sampled_tokens > 0
    ]
    runs_reference = _runs_reference(rows, settings)
    has_gradient = any(row.advantage != 0 or any(row.trajectory.marks or ()) for row in rows) or (
        bool(rows) and (settings.kl_coef > 0 or settings.entropy_coef > 0)
    )
    return [
        RankWork(
            micro_batches=_picked(rows, plan),
            version=version,
            has_gradient=has_gradient,
            runs_reference=runs_reference,
        )
        for plan in _plans(rows, settings, num_ranks)
    ]


def _picked(rows: Sequence[Row], plan: Sequence[Sequence[int]]) -> tuple[tuple[Row, ...], ...]:
    return tuple(tuple(rows[index] for index in indices) for indices in plan)


def _plans(rows: Sequence[Row], settings: TrainingSettings, num_ranks: int) -> list[list[list[int]]]:
    return plan_micro_batches(
        [row.num_tokens for row in rows],
        micro_batch_tokens=settings.micro_batch_tokens,
        overhead_tokens=settings.micro_batch_overhead_tokens,
        is_packed=settings.use_sample_packing,
        num_ranks=num_ranks,
    )


def _runs_reference(rows: Sequence[Row], settings: TrainingSettings) -> bool:
    """Whether the ranks compute reference log-probs. Raises ``TrainingError`` if a row lacks what they cannot compute."""
    loss = POLICY_LOSSES.entry(settings.policy_loss)
    if loss.needs_old_logprobs and any(row.trajectory.old_logprobs is None for row in rows):
        raise TrainingError(
            f"trainer.algorithm.policy_loss_type={settings.policy_loss} needs trajectories with old_logprobs, recomputed when they "
            "were finished; some have none"
        )
    if loss.marker is not None and any(row.trajectory.marks is None for row in rows):
        raise TrainingError(
            f"trainer.algorithm.policy_loss_type={settings.policy_loss} needs trajectories with marks, chosen among all of a step; some "
            "have none"
        )
    if settings.kl_estimator is None or all(row.trajectory.ref_logprobs is not None for row in rows):
        return False
    if not settings.has_reference:
        raise TrainingError(
            "trainer.algorithm.use_kl_loss needs trajectories with ref_logprobs, or policy workers with a reference; some have none"
        )
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobWork:
    """One rank's part of a ``logprobs_of``."""

    micro_batches: tuple[tuple[Row, ...], ...]
    """Every rank has as many; an empty one is an idle forward."""
    model: LogprobModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDispatch:
    """One ``logprobs_of`` over ranks: each rank's part, and how to join the answers."""

    trajectories: tuple[Trajectory, ...]
    works: tuple[LogprobWork, ...]
    """One per rank."""
    positions: tuple[tuple[int, ...], ...]
    """Per rank, the positions of its rows in ``trajectories``, in the order of its micro-batches."""

    @classmethod
    def of(
        cls, trajectories: Sequence[Trajectory], model: LogprobModel, *, settings: TrainingSettings, num_ranks: int
    ) -> "LogprobDispatch":
        """Deal the trajectories that have sampled tokens to ``num_ranks`` ranks."""
        positions = [index for index, trajectory in enumerate(trajectories) if trajectory.num_sampled_tokens]
        rows = [Row(trajectory=trajectories[position], advantage=0.0) for position in positions]
        plans = _plans(rows, settings, num_ranks)
        return cls(
            trajectories=tuple(trajectories),
            works=tuple(LogprobWork(micro_batches=_picked(rows, plan), model=model) for plan in plans),
            positions=tuple(tuple(positions[i] for indices in plan for i in indices) for plan in plans),
        )

    def join(self, answers: Sequence[RowLogprobs]) -> RowLogprobs:
        """Put the ranks' values (per row, one per sampled token) at their tokens, zeros elsewhere.

        Raises ``TrainingError`` if ranks hold different versions.
        """
        versions = {answer.version for answer in answers}
        if len(versions) != 1:
            raise TrainingError(f"workers hold different versions of the weights: {sorted(versions)}")
        values: list[tuple[float, ...]] = [(0.0,) * len(row.response_token_ids) for row in self.trajectories]
        for positions, answer in zip(self.positions, answers, strict=True):
            for position, sampled in zip(positions, answer.values, strict=True):
                found = iter(sampled)
                mask = self.trajectories[position].loss_mask
                values[position] = tuple(next(found) if is_sampled else 0.0 for is_sampled in mask)
        return RowLogprobs(values=tuple(values), version=versions.pop())
