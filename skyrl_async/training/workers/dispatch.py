"""One call's trajectories in, each rank's micro-batches out, and the ranks' log-probs joined again.

Shared by the Ray workers and the in-process policy, so that both compute the same numbers. A pure function of its
arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.algorithms.batching import Row, plan_micro_batches
from skyrl_async.algorithms.losses import needs_marks, needs_old_logprobs
from skyrl_async.errors import TrainingError
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank does in one ``forward_backward``."""

    micro_batches: tuple[tuple[Row, ...], ...]
    """Equally many on every rank; an empty one is an idle forward."""
    version: int
    """Policy version being trained."""
    has_gradient: bool
    """False when every advantage is 0, no token is marked and nothing else is in the loss: the gradient is exactly zero, only figures are
    computed.
    """
    runs_reference: bool = False
    """Some row of some rank came without reference log-probs: every rank computes those of all its rows."""


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
        TrainingError: the loss needs log-probs that a row lacks, and that the ranks cannot compute.
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
            micro_batches=tuple(tuple(rows[index] for index in indices) for indices in plan),
            version=version,
            has_gradient=has_gradient,
            runs_reference=runs_reference,
        )
        for plan in _plans(rows, settings, num_ranks)
    ]


def _plans(rows: Sequence[Row], settings: TrainingSettings, num_ranks: int) -> list[list[list[int]]]:
    return plan_micro_batches(
        [row.num_tokens for row in rows],
        micro_batch_tokens=settings.micro_batch_tokens,
        overhead_tokens=settings.micro_batch_overhead_tokens,
        is_packed=settings.use_sample_packing,
        num_ranks=num_ranks,
    )


def _runs_reference(rows: Sequence[Row], settings: TrainingSettings) -> bool:
    """Whether the ranks compute reference log-probs themselves. Raises ``TrainingError`` where they would have to and cannot."""
    if needs_old_logprobs(settings.policy_loss) and any(row.trajectory.old_logprobs is None for row in rows):
        raise TrainingError(
            f"trainer.algorithm.policy_loss_type={settings.policy_loss} needs trajectories with old_logprobs, recomputed when they "
            "were finished; some have none"
        )
    if needs_marks(settings.policy_loss) and any(row.trajectory.marks is None for row in rows):
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
    """What one rank does in one ``logprobs_of``."""

    micro_batches: tuple[tuple[Row, ...], ...]
    """Equally many on every rank; an empty one is an idle forward."""
    model: LogprobModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLogprobs:
    """What one rank found."""

    micro_batches: tuple[tuple[tuple[float, ...], ...], ...]
    """Per micro-batch and row of its work one value per sampled token, nats."""
    version: int
    """Of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDispatch:
    """One ``logprobs_of`` over ranks: what each does, and how their answers join."""

    trajectories: tuple[Trajectory, ...]
    works: tuple[LogprobWork, ...]
    """One per rank."""
    plans: tuple[tuple[tuple[int, ...], ...], ...]
    """Per rank and micro-batch the positions of its rows in ``trajectories``."""

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
            works=tuple(
                LogprobWork(micro_batches=tuple(tuple(rows[i] for i in indices) for indices in plan), model=model)
                for plan in plans
            ),
            plans=tuple(tuple(tuple(positions[i] for i in indices) for indices in plan) for plan in plans),
        )

    def join(self, answers: Sequence[RankLogprobs]) -> RowLogprobs:
        """Put the ranks' values where their tokens are. Raises ``TrainingError`` when ranks hold different versions."""
        versions = {answer.version for answer in answers}
        if len(versions) != 1:
            raise TrainingError(f"workers hold different versions of the weights: {sorted(versions)}")
        values = [[0.0] * len(trajectory.response_token_ids) for trajectory in self.trajectories]
        for plan, answer in zip(self.plans, answers, strict=True):
            for positions, rows in zip(plan, answer.micro_batches, strict=True):
                for position, sampled in zip(positions, rows, strict=True):
                    where = [i for i, is_sampled in enumerate(self.trajectories[position].loss_mask) if is_sampled]
                    for offset, value in zip(where, sampled, strict=True):
                        values[position][offset] = value
        return RowLogprobs(values=tuple(tuple(row) for row in values), version=versions.pop())
