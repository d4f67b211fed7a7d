"""The work of the stages ``ref_logp`` and ``logp``: a finished group in, the same group with its log-probs out.

Knows neither where the log-probs are computed nor when: whoever runs the stage gives it groups as soon as they are finished.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from skyrl_async.types import Group, LogprobModel, RowLogprobs, Trajectory

ComputeLogprobs = Callable[[Sequence[Trajectory]], Awaitable[RowLogprobs]]
"""``LogprobWorkers.logprobs_of``, or ``Policy.logprobs_of`` of one model."""


class LogprobStageWork:
    """Fills in what rows lack: a group of a checkpoint comes with some.

    Args:
        compute: of the reference, or of the policy at its newest version.
        model: whose log-probs those are: ``ref_logprobs`` of the reference, ``old_logprobs`` with ``old_version`` of the policy.
    """

    def __init__(self, compute: ComputeLogprobs, model: LogprobModel) -> None:
        self._compute = compute
        self._model = model

    async def __call__(self, group: Group) -> Group:
        """The group with log-probs in every row; those that a row has stay."""
        lacking = [row for row in group.trajectories if self._known(row) is None]
        if not lacking:
            return group
        found = await self._compute(lacking)
        values = iter(found.values)
        rows = [
            row if self._known(row) is not None else self._filled(row, next(values), found.version)
            for row in group.trajectories
        ]
        return replace(group, trajectories=tuple(rows))

    def _known(self, row: Trajectory) -> tuple[float, ...] | None:
        return row.ref_logprobs if self._model is LogprobModel.REF else row.old_logprobs

    def _filled(self, row: Trajectory, values: tuple[float, ...], version: int) -> Trajectory:
        if self._model is LogprobModel.REF:
            return replace(row, ref_logprobs=values)
        return replace(row, old_logprobs=values, old_version=version)
