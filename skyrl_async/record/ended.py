"""Groups whose samples will not change any more, and what became of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from skyrl_async.types import Group


class Outcome(StrEnum):
    """What became of a sample."""

    TRAINED = "trained"
    """Its tokens are in a gradient; a reason says why no step was taken with that."""
    MASKED = "masked"
    """Part of a trained group, but a length limit cut it, or all of its tokens are older than the bound: no token is in a gradient."""
    ABANDONED = "abandoned"
    """Its harness ended without a reward."""
    FILTERED = "filtered"
    """Its group had no difference in reward."""
    DROPPED = "dropped"
    """Its group became older than the bound; the prompt is drawn again."""
    FAILED = "failed"
    """It failed, or other samples of its group did and the group cannot be trained."""
    HELD_OUT = "held_out"
    """A sample of an evaluation."""


OTHERS_FAILED = "other samples of its group failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroup:
    """A group at its end."""

    group: Group
    """Its finished samples. In an evaluation ``admission_index`` is -1, and ``scheduled_version`` the version served at its start."""
    outcome: Outcome
    """Outcome of all samples, but for the abandoned and masked ones of a trained group."""
    step: int
    """The step that trained it, or that was in progress at its end; in an evaluation the version served."""
    reason: str | None = None
    """Why it was not trained."""
    failed: Sequence[int] = ()
    """Indices of the samples that failed; ``failure`` says why."""
    failure: Exception | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the record: one per training row, and one per failed sample."""
        return len(self.group.trajectories) + len(self.failed)


class RecordsSamples(Protocol):
    """Takes groups at their end. ``SampleRecord`` writes them to files."""

    @property
    def num_rows(self) -> int:
        """Rows recorded so far, over all resumptions: part of a checkpoint."""

    def restore(self, num_rows: int, evaluated_version: int) -> None:
        """Continue after a checkpoint's ``num_rows`` rows and, of evaluations, after those up to ``evaluated_version``."""

    def add(self, ended: EndedGroup) -> None:
        """Record a group. Never waits."""

    def end_step(self) -> None:
        """Begin to write what was added. Never waits."""

    async def flush(self) -> None:
        """Wait until what was added is on disk, or has failed to get there."""


class CountsSamples:
    """Counts rows and keeps none."""

    def __init__(self) -> None:
        self.num_rows = 0

    def restore(self, num_rows: int, evaluated_version: int) -> None:
        self.num_rows = num_rows

    def add(self, ended: EndedGroup) -> None:
        self.num_rows += ended.num_rows

    def end_step(self) -> None:
        """There is nothing to write."""

    async def flush(self) -> None:
        """There is nothing to write."""
