"""Where finished groups go: to training, or out of it where they have nothing to teach.

Flows in: finished groups, of generation or of a checkpoint. Flows out: groups in the buffer; filtered ones in the ledger, their places
free for other prompts. Does not know how groups are generated or trained.
"""

from collections.abc import Mapping

from skyrl_async.algorithms.overlong import without_overlong
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.dynamic_sampling import NoSignal, SignalFilter
from skyrl_async.rollout.group_state import admission_of
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.types import Group


class FinishedGroupFilter:
    """Decides on each group in the moment in which it is finished.

    Args:
        dataloader, staleness: are told of filtered groups.
        buffer: takes the others.
        signal: filters; None keeps all.
        masks_overlong: samples that a length limit cut are masked, before anything is decided.
    """

    def __init__(
        self,
        dataloader: _AsyncDataloader,
        staleness: _AsyncStalenessManager,
        buffer: GroupBuffer,
        signal: SignalFilter | None,
        *,
        masks_overlong: bool = False,
    ) -> None:
        self._dataloader = dataloader
        self._staleness = staleness
        self._buffer = buffer
        self._signal = signal
        self._masks_overlong = masks_overlong
        self.counts = {"filtered_groups": 0, "filtered_tokens": 0} | {f"filtered/{reason}": 0 for reason in NoSignal}
        """Of filtered groups so far, and by reason."""

    async def put(self, group: Group) -> None:
        """Take a group that ledger and staleness manager know as finished. Contains no ``await`` that waits.

        Raises ``GenerationError`` when too many in a row are filtered.
        """
        num_tokens = group.num_sampled_tokens
        if self._masks_overlong:
            group = without_overlong(group)
        if self._signal is None or (reason := self._signal.judge(group.uid, group.trajectories)) is None:
            self._buffer.put(group)
            return
        await self._dataloader.mark_filtered_uids([(group.epoch, group.uid)])
        await self._staleness.on_rollout_filtered(admission_of(group))
        self._buffer.notify()
        self.counts["filtered_groups"] += 1
        self.counts[f"filtered/{reason}"] += 1
        self.counts["filtered_tokens"] += num_tokens
        self._signal.raise_if_too_many()

    @property
    def filtered_in_a_row(self) -> dict[str, int]:
        """What the last groups were filtered for, and how many, for checkpoints; empty where the last one was not, or nothing filters."""
        return {} if self._signal is None else self._signal.in_a_row

    def restore(self, filtered_in_a_row: Mapping[str, int]) -> None:
        """Go on from a checkpoint, after its finished groups were put."""
        if self._signal is not None:
            self._signal.restore(filtered_in_a_row)

    def raise_if_nothing_is_left(self) -> None:
        """The data has ended: raise ``GenerationError`` when every group of the run was filtered, before a resume or since."""
        is_any_filtered = self._dataloader.statistics()["filtered_total"] > 0
        if self._signal is not None and is_any_filtered and not self._staleness.num_accepted:
            self._signal.raise_for_no_group_at_all()
