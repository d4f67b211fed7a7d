"""A policy over ranks: deals one call's trajectories to them as micro-batches, and joins their answers.

``PolicyWorkers`` and ``InProcessPolicy`` differ only in how they reach their ranks, and compute the same numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_async.algorithms.batching import Row, plan_micro_batches
from skyrl_async.algorithms.figures import merge_figures
from skyrl_async.columns import Advantages, Logprobs, TokenIds, TopTokens
from skyrl_async.errors import TrainingError
from skyrl_async.registries import POLICY_LOSSES
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.protocol import LOGPROBS
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate

MicroBatches = tuple[tuple[Row, ...], ...]
"""A rank's rows. Every rank has as many micro-batches; an empty one is an idle forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of a ``forward_backward``."""

    micro_batches: MicroBatches
    version: int
    """Policy version being trained."""
    has_gradient: bool
    """False if every advantage is 0, no token is marked and a policy's loss has no other term. The gradient is then exactly 0; only figures
    are computed.
    """
    runs_reference: bool = False
    """Whether every rank computes reference log-probs of all its rows: some row, on any rank, came without."""


def split_work(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | Advantages],
    version: int,
    *,
    settings: TrainingSettings,
    num_ranks: int,
) -> list[RankWork]:
    """Deal the trajectories that have sampled tokens to ``num_ranks`` ranks.

    Raises:
        ValueError: there is not one advantage per trajectory, or a column that is not as long as the response.
        TrainingError: the loss needs log-probs that a row lacks and the ranks cannot compute.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"advantages must hold one value per trajectory ({len(trajectories)}), got {len(advantages)}")
    pairs = zip(trajectories, advantages, strict=True)
    rows = [_row(trajectory, values) for trajectory, values in pairs if trajectory.num_sampled_tokens > 0]
    runs_reference = _runs_reference(rows, settings)
    has_marks = any(row.trajectory.marks is not None and row.trajectory.marks.any() for row in rows)
    coefs = (settings.kl_coef, settings.entropy_coef, settings.teacher_coef)
    has_other_terms = bool(rows) and (settings.is_critic or any(coefs))
    has_gradient = has_marks or has_other_terms or any(row.advantages.any() for row in rows)
    return [
        RankWork(
            micro_batches=_picked(rows, plan),
            version=version,
            has_gradient=has_gradient,
            runs_reference=runs_reference,
        )
        for plan in _plans(rows, settings, num_ranks)
    ]


def _row(trajectory: Trajectory, advantages: float | Advantages) -> Row:
    given, shape = np.asarray(advantages, np.float32), (len(trajectory.response_token_ids),)
    if given.shape not in ((), shape):
        raise ValueError(f"advantages must hold one value per response token {shape}, or one number, got {given.shape}")
    return Row(trajectory=trajectory, advantages=np.broadcast_to(given, shape))


def _of_responses(trajectories: Sequence[Trajectory], sampled: Iterable[tuple[Row, Logprobs]]) -> tuple[Logprobs, ...]:
    """A column per trajectory with one value per response token, from rows' values per sampled token; 0.0 elsewhere."""
    columns = {id(row.trajectory): _of_response(row, values) for row, values in sampled}
    return tuple(
        columns[id(row)] if id(row) in columns else np.zeros(len(row.response_token_ids), np.float32)
        for row in trajectories
    )


def _of_response(row: Row, sampled: NDArray[Any]) -> NDArray[Any]:
    """(T, ...) of what each sampled token has, zero elsewhere."""
    column = np.zeros((len(row.trajectory.response_token_ids), *sampled.shape[1:]), sampled.dtype)
    column[row.trajectory.loss_mask] = sampled
    return column


def _picked(rows: Sequence[Row], plan: Sequence[Sequence[int]]) -> MicroBatches:
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
    if settings.is_critic:
        return False
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
    if settings.teacher_coef and any(row.trajectory.teacher_top is None for row in rows):
        raise TrainingError(
            "trainer.algorithm.distillation.top_k needs trajectories with teacher_top, which the stage teacher_logp gives; some have none"
        )
    if settings.kl_estimator is None or all(row.trajectory.ref_logprobs is not None for row in rows):
        return False
    if not settings.has_reference:
        raise TrainingError(
            "trainer.algorithm.use_kl_loss needs trajectories with ref_logprobs, or policy workers with a reference; some have none"
        )
    return True


class PolicyOverRanks(ABC):
    """``training.protocol.Policy`` by calls of ``PolicyRank``'s methods.

    Args:
        settings: of every rank.
        num_ranks: >= 1.
    """

    def __init__(self, settings: TrainingSettings, num_ranks: int) -> None:
        self._settings = settings
        self._num_ranks = num_ranks

    @abstractmethod
    async def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``method`` on the first ranks, one per entry of ``arguments``; returns the answers by rank."""

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` on every rank with the same arguments."""
        return await self._call_each(method, [arguments] * self._num_ranks)

    async def _call_first(self, method: str, *arguments: Any) -> Any:
        """Call ``method`` on rank 0."""
        (answer,) = await self._call_each(method, [arguments])
        return answer

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float | Advantages], version: int
    ) -> dict[str, Any]:
        """As ``Policy``."""
        works = split_work(trajectories, advantages, version, settings=self._settings, num_ranks=self._num_ranks)
        answers: list[dict[str, Any]] = await self._call_each("forward_backward", [(work,) for work in works])
        logprobs = [answer.pop(LOGPROBS, ()) for answer in answers]
        figures: dict[str, Any] = {"num_tokens": 0.0} | merge_figures(answers)
        if self._settings.returns_logprobs:
            rows = chain.from_iterable(micro_batch for work in works for micro_batch in work.micro_batches)
            figures[LOGPROBS] = _of_responses(trajectories, zip(rows, chain.from_iterable(logprobs), strict=True))
        return figures

    async def step(self, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """As ``Policy``."""
        figures: list[dict[str, float]] = await self._call("step", denominator, lr_scale)
        return figures[0]

    async def logprobs(self, token_ids: Sequence[int] | TokenIds) -> list[float]:
        """As ``Policy``."""
        per_rank: list[list[float]] = await self._call("logprobs", token_ids)
        return per_rank[0]

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """As ``Policy``. Raises ``TrainingError`` if ranks hold different versions."""
        return await self._of_rows("logprobs_of", trajectories, model)

    async def values_of(self, trajectories: Sequence[Trajectory]) -> RowLogprobs:
        """As ``Critic``. Raises ``TrainingError`` if ranks hold different versions."""
        return await self._of_rows("values_of", trajectories)

    async def _of_rows(self, method: str, trajectories: Sequence[Trajectory], *arguments: Any) -> RowLogprobs:
        """Deal rows to the ranks, and join the columns that ``method`` returns for them."""
        trajectories = [row.with_only() for row in trajectories]
        rows = [_row(row, 0.0) for row in trajectories if row.num_sampled_tokens]
        plans = _plans(rows, self._settings, self._num_ranks)
        answers = await self._call_each(method, [(_picked(rows, plan), *arguments) for plan in plans])
        versions = {answer.version for answer in answers}
        if len(versions) != 1:
            raise TrainingError(f"workers hold different versions of the weights: {sorted(versions)}")
        dealt = [rows[index] for plan in plans for index in chain.from_iterable(plan)]
        values = chain.from_iterable(answer.values for answer in answers)
        top = {
            id(row.trajectory): TopTokens(ids=_of_response(row, of.ids), logprobs=_of_response(row, of.logprobs))
            for row, of in zip(dealt, chain.from_iterable(answer.top for answer in answers), strict=False)
        }
        return RowLogprobs(
            values=_of_responses(trajectories, zip(dealt, values, strict=True)),
            version=versions.pop(),
            top=tuple(top.get(id(row)) for row in trajectories) if top else (),
        )

    async def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by a published version's, on ranks that do not train."""
        await self._call("load_weights", update)

    async def gather_weights(self, version: int) -> int:
        """As ``Policy``."""
        num_bytes: list[int] = await self._call("gather_weights", version)
        return num_bytes[0]

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """As ``Policy``."""
        update: WeightUpdate = await self._call_first("send_weights", version, directory, bucket_bytes)
        return update

    async def save(self, directory: Path) -> None:
        """As ``Policy``."""
        await self._call("save", directory)

    async def load(self, directory: Path) -> None:
        """As ``Policy``."""
        await self._call("load", directory)

    async def export_hf(self, directory: Path) -> None:
        """As ``Policy``."""
        await self._call("export_hf", directory)
