"""The progress of each sample of a group while the group is generated: for the next try, and for checkpoints.

    generator ──track, finish──> SampleStates ──snapshot──> checkpoint ──> SampleStates of the next run ──restore──> generator

Does not know what a generator's own state means.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_async.types import Trajectory


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, not copied: ``dataclasses.asdict`` copies every token, which takes longer than writing them."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleState:
    """The progress of one sample. With neither rows nor state the sample restarts."""

    rows: "tuple[Trajectory, ...] | None" = None
    """Training rows of a finished sample; empty if nothing was sampled. None: not finished."""
    state: dict[str, Any] | None = None
    """JSON from which the generator continues the sample."""
    num_tokens: int = 0
    """Tokens sampled so far; sampled again if the sample restarts."""

    @property
    def is_kept(self) -> bool:
        """Whether the sample can be continued or is finished."""
        return self.rows is not None or self.state is not None


@dataclass(slots=True)
class ResumeCounts:
    """What became of the samples that were unfinished in the checkpoint."""

    resumed_trajectories: int = 0
    restarted_trajectories: int = 0
    lost_tokens: int = 0
    """Tokens from before the checkpoint that were sampled again."""


class SampleStates:
    """The states of one group's samples.

    Args:
        saved: the states in the checkpoint.
        num_samples: size of the group; samples that ``saved`` does not keep count as restarted.
        counts: totals of the run.
    """

    def __init__(
        self,
        saved: Mapping[int, SampleState] | None = None,
        *,
        num_samples: int = 0,
        counts: ResumeCounts | None = None,
    ) -> None:
        saved = saved or {}
        self._counts = counts or ResumeCounts()
        self._saved = {i: sample for i, sample in saved.items() if sample.is_kept and i < num_samples}
        self._restored: dict[int, SampleState] = {}
        self._live: dict[int, Callable[[], SampleState | None]] = {}
        self._finished: dict[int, SampleState] = {}
        self._counts.restarted_trajectories += num_samples - len(self._saved)
        self._counts.lost_tokens += sum(sample.num_tokens for i, sample in saved.items() if i not in self._saved)

    def restore(self, index: int) -> SampleState | None:
        """Return the sample's state in the checkpoint, once; None if there is none or it was restored before."""
        saved = self._saved.pop(index, None)
        if saved is not None:
            self._restored[index] = saved
            self._counts.resumed_trajectories += 1
        return saved

    def discard(self, index: int) -> None:
        """The state that ``restore`` returned is unusable: the sample restarts."""
        self._counts.resumed_trajectories -= 1
        self._count_restart(self._restored.pop(index))

    def count_resampled(self, num_tokens: int) -> None:
        """Count tokens of a resumed sample that are sampled again."""
        self._counts.lost_tokens += num_tokens

    def track(self, index: int, read: Callable[[], SampleState | None]) -> None:
        """Have checkpoints call ``read`` for the sample's state, between two steps of the event loop."""
        self._restored.pop(index, None)
        self._live[index] = read

    def finish(self, index: int, rows: "Sequence[Trajectory]") -> None:
        """Keep a finished sample: neither another try nor a resumed run samples it again.

        Args:
            index: in ``request.indices``.
            rows: as ``generate`` would return them; empty if nothing was sampled.
        """
        self.forget([index])
        self._finished[index] = SampleState(rows=tuple(rows), num_tokens=sum(row.num_sampled_tokens for row in rows))

    def restore_finished(self, index: int) -> "tuple[Trajectory, ...] | None":
        """Return the rows of a sample that was finished in the checkpoint; None for a sample that must be generated."""
        saved = self._saved.get(index)
        if saved is None or saved.rows is None:
            return None
        self.restore(index)
        self.finish(index, saved.rows)
        return saved.rows

    @property
    def finished(self) -> "dict[int, tuple[Trajectory, ...]]":
        """Rows of the finished samples."""
        return {index: sample.rows for index, sample in self._finished.items() if sample.rows is not None}

    def forget(self, indices: Iterable[int]) -> None:
        """Drop the states of samples that failed."""
        for index in indices:
            for states in (self._restored, self._live, self._finished):
                states.pop(index, None)

    def snapshot(self) -> dict[int, SampleState]:
        """Current states. A sample is missing if it has not begun or its generator does not track it."""
        live = {index: state for index, read in self._live.items() if (state := read()) is not None}
        return self._saved | self._restored | live | self._finished

    def close(self) -> None:
        """The group has ended: count states that the generator did not restore as restarts."""
        for saved in self._saved.values():
            self._count_restart(saved)
        self._saved.clear()

    def _count_restart(self, saved: SampleState) -> None:
        self._counts.restarted_trajectories += 1
        self._counts.lost_tokens += saved.num_tokens
