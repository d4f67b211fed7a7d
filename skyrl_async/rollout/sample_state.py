"""Where the samples of a group stand while it is generated: told by its generator, for its next try and for checkpoints.

    generator ──follow, finish──> SampleStates ──samples──> checkpoint ──> SampleStates of the next run ──take──> generator

Flows in: what says where a sample stands. Flows out: that, as values a file can hold, and counts of what became of them. Does not
know what a generator's state means.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_async.types import Trajectory


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are: ``dataclasses.asdict`` copies every token, which takes longer than writing them."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleState:
    """Where one sample stands; with neither rows nor state it has to begin anew."""

    rows: "tuple[Trajectory, ...] | None" = None
    """Its training rows, once it is finished: none at all, where nothing was sampled."""
    state: dict[str, Any] | None = None
    """What its generator needs to go on with it, as JSON."""
    num_tokens: int = 0
    """Sampled for it so far: lost when it begins anew."""

    @property
    def is_kept(self) -> bool:
        """Whether there is something to go on from."""
        return self.rows is not None or self.state is not None


@dataclass(slots=True)
class ResumeCounts:
    """What became of the samples that were being played when a checkpoint was taken."""

    resumed_trajectories: int = 0
    """Taken up where they stood."""
    restarted_trajectories: int = 0
    """Begun anew."""
    lost_tokens: int = 0
    """Sampled before the checkpoint, and sampled again."""


class SampleStates:
    """The samples of one group.

    Args:
        saved: where they stood in the checkpoint that is resumed.
        num_samples: of the group; those that ``saved`` lacks or does not keep count as begun anew.
        counts: of the run.
    """

    def __init__(
        self,
        saved: Mapping[int, SampleState] | None = None,
        *,
        num_samples: int = 0,
        counts: ResumeCounts | None = None,
    ) -> None:
        self._counts = counts or ResumeCounts()
        self._saved = {i: sample for i, sample in (saved or {}).items() if sample.is_kept and i < num_samples}
        self._taken: dict[int, SampleState] = {}
        self._now: dict[int, Callable[[], SampleState | None]] = {}
        self._finished: dict[int, SampleState] = {}
        self._counts.restarted_trajectories += num_samples - len(self._saved)
        lost = [sample for i, sample in (saved or {}).items() if i not in self._saved]
        self._counts.lost_tokens += sum(sample.num_tokens for sample in lost)

    def take(self, index: int) -> SampleState | None:
        """Where the sample stood in the checkpoint; None for one that begins, and when it is asked for again."""
        saved = self._saved.pop(index, None)
        if saved is not None:
            self._taken[index] = saved
            self._counts.resumed_trajectories += 1
        return saved

    def discard(self, index: int) -> None:
        """What ``take`` returned cannot be gone on from: the sample begins anew."""
        self._counts.resumed_trajectories -= 1
        self._count_restart(self._taken.pop(index))

    def lose(self, num_tokens: int) -> None:
        """So many tokens of a sample that goes on are sampled again."""
        self._counts.lost_tokens += num_tokens

    def follow(self, index: int, where: Callable[[], SampleState | None]) -> None:
        """From now on ``where`` says where the sample stands; it is called at a checkpoint, between two steps of the event loop."""
        self._taken.pop(index, None)
        self._now[index] = where

    def finish(self, index: int, rows: "Sequence[Trajectory]") -> None:
        """The sample is finished: whatever becomes of the others, and of the run, it is not played again.

        Args:
            index: in ``request.indices``.
            rows: as ``generate`` would return them; none where nothing was sampled.
        """
        num_tokens = sum(row.num_sampled_tokens for row in rows)
        self._taken.pop(index, None)
        self._now.pop(index, None)
        self._finished[index] = SampleState(rows=tuple(rows), num_tokens=num_tokens)

    def finish_as_saved(self, index: int) -> "tuple[Trajectory, ...] | None":
        """Take a sample that was finished when the checkpoint was taken: its rows. None for any other, which is to be played."""
        saved = self._saved.get(index)
        if saved is None or saved.rows is None:
            return None
        self.take(index)
        self.finish(index, saved.rows)
        return saved.rows

    @property
    def finished(self) -> "dict[int, tuple[Trajectory, ...]]":
        """The rows of the samples that are finished."""
        return {index: sample.rows for index, sample in self._finished.items() if sample.rows is not None}

    def forget(self, indices: Iterable[int]) -> None:
        """These samples failed: where they stood is nothing to go on from."""
        for index in indices:
            for told in (self._taken, self._now, self._finished):
                told.pop(index, None)

    def samples(self) -> dict[int, SampleState]:
        """Where each sample stands; one that is missing has not begun, or its generator does not say."""
        told = {index: sample for index, where in self._now.items() if (sample := where()) is not None}
        return self._saved | self._taken | told | self._finished

    def close(self) -> None:
        """The group has ended: what its generator did not take was begun anew."""
        for saved in self._saved.values():
            self._count_restart(saved)
        self._saved.clear()

    def _count_restart(self, saved: SampleState) -> None:
        self._counts.restarted_trajectories += 1
        self._counts.lost_tokens += saved.num_tokens
