"""Groups as a checkpoint holds them: finished ones with their rows, running ones with where each of their samples stands.

Flows in: groups, and JSON read from a file. Flows out: JSON, and groups. Does not know files, nor what a generator's state means.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from skyrl_async.resumption import ResumeCounts, SampleState, SavedSamples, fields_of
from skyrl_async.rollout.staleness import Admission
from skyrl_async.types import Group, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGroup:
    """A group admitted and not finished when the checkpoint was taken."""

    epoch: int
    uid: str
    admission_index: int
    scheduled_version: int
    generation_seconds: float
    """So far."""
    num_samples: int
    sampling: dict[str, Any]
    """``SamplingParams`` it was asked for with, as JSON."""
    samples: dict[int, SampleState]
    """By index; one that is missing begins anew."""

    @property
    def num_tokens(self) -> int:
        """Known to be sampled so far."""
        return sum(sample.num_tokens for sample in self.samples.values())

    @property
    def num_kept(self) -> int:
        """Samples there is something to go on from."""
        return sum(sample.is_kept for sample in self.samples.values())

    def has_settings(self, num_samples: int, sampling: SamplingParams) -> bool:
        """Whether it was asked for with these: only then do its tokens belong into a group of today."""
        now = sampling_to_json(sampling)
        return num_samples == self.num_samples and all(now.get(name) == self.sampling[name] for name in self.sampling)

    def saved_samples(self, num_samples: int, sampling: SamplingParams, counts: ResumeCounts) -> SavedSamples:
        """What its generator goes on from: nothing, where it is asked for otherwise than it was."""
        saved = self.samples
        if not self.has_settings(num_samples, sampling):
            saved = {i: SampleState(num_tokens=sample.num_tokens) for i, sample in saved.items()}
        return SavedSamples(saved, num_samples=num_samples, counts=counts)


OpenGroup = Group | RunningGroup
"""Admitted and not trained."""


def admission_of(group: OpenGroup) -> Admission:
    """Under which it is open."""
    return Admission(index=group.admission_index, scheduled_version=group.scheduled_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp:
    """What becomes of a checkpoint's open groups; oldest admitted first."""

    finished: tuple[Group, ...]
    """Wait to be trained."""
    running: tuple[RunningGroup, ...]
    """Are generated to their end."""
    dropped: tuple[OpenGroup, ...]
    """Do not fit this run's mini-batch size and bound, and are drawn again."""

    @classmethod
    def of(cls, finished: Sequence[Group], running: Sequence[RunningGroup], taken_up: Sequence[Admission]) -> Self:
        """Sort the groups by whether their admissions were taken up."""
        indices = {admission.index for admission in taken_up}
        open_groups: tuple[OpenGroup, ...] = (*finished, *running)
        dropped = [group for group in open_groups if group.admission_index not in indices]
        return cls(
            finished=tuple(group for group in finished if group.admission_index in indices),
            running=tuple(group for group in running if group.admission_index in indices),
            dropped=tuple(sorted(dropped, key=lambda group: group.admission_index)),
        )

    @property
    def num_dropped_tokens(self) -> int:
        """Known to be sampled for groups that are drawn again."""
        return sum(g.num_tokens if isinstance(g, RunningGroup) else g.num_sampled_tokens for g in self.dropped)

    def __str__(self) -> str:
        """For a log line."""
        num_samples, num_kept = sum(g.num_samples for g in self.running), sum(g.num_kept for g in self.running)
        kept = sum(s.num_tokens for group in self.running for s in group.samples.values() if s.is_kept)
        lost = sum(group.num_tokens for group in self.running) - kept
        return (
            f"{len(self.finished)} finished groups wait to be trained; of {num_samples} trajectories in {len(self.running)} running "
            f"groups {num_kept} go on after {kept} tokens, {num_samples - num_kept} begin anew ({lost} tokens lost); "
            f"{len(self.dropped)} groups no longer fit and are drawn again ({self.num_dropped_tokens} tokens lost)"
        )


def sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    """As it comes back from a file."""
    fields = dataclasses.asdict(sampling)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def group_to_json(group: Group) -> dict[str, Any]:
    """A finished group, without its advantages, marks and reference log-probs: they are computed again, by the run that resumes.

    Recomputed log-probs are kept with their version: the policy of that version is gone by then.
    """
    fields = fields_of(group)
    del fields["advantages"]
    rows = [fields_of(row) for row in group.trajectories]
    for row in rows:
        del row["ref_logprobs"], row["marks"]
    return {**fields, "trajectories": rows}


def group_from_json(row: Mapping[str, Any]) -> Group:
    """What ``group_to_json`` was made of."""
    return Group(**{**row, "trajectories": _rows(row["trajectories"])})


def running_to_json(group: RunningGroup) -> dict[str, Any]:
    """A running group."""
    return {**fields_of(group), "samples": {i: _sample_to_json(sample) for i, sample in group.samples.items()}}


def running_from_json(row: Mapping[str, Any]) -> RunningGroup:
    """What ``running_to_json`` was made of."""
    samples = {int(i): _sample(sample) for i, sample in row["samples"].items()}
    return RunningGroup(**{**row, "samples": samples})


def _sample_to_json(sample: SampleState) -> dict[str, Any]:
    return {**fields_of(sample), "rows": None if sample.rows is None else [fields_of(row) for row in sample.rows]}


def _sample(saved: Mapping[str, Any]) -> SampleState:
    return SampleState(**{**saved, "rows": None if saved["rows"] is None else _rows(saved["rows"])})


def _rows(rows: list[dict[str, Any]]) -> tuple[Trajectory, ...]:
    return tuple(_trajectory(fields) for fields in rows)


def _trajectory(fields: Mapping[str, Any]) -> Trajectory:
    """JSON has no tuples."""
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in fields.items()}
    return Trajectory(**values)
