"""The progress of groups and of their samples while they are generated: for the next try, and for checkpoints.

    generator ──track, finish──> SampleStates ──snapshot──> checkpoint ──> SampleStates of the next run ──restore──> generator

A checkpoint holds finished groups with their rows, and running groups with the states of their samples, as JSON in which numpy columns are
values. Does not know files, nor what a generator's own state means.
"""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from skyrl_async.columns import fields_of
from skyrl_async.rollout.staleness import Admission
from skyrl_async.types import Group, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleState:
    """The progress of one sample. With neither rows nor state the sample restarts."""

    rows: tuple[Trajectory, ...] | None = None
    """Training rows of a finished sample; empty if nothing was sampled. None: not finished."""
    state: dict[str, Any] | None = None
    """JSON, with numpy columns as values, from which the generator continues the sample."""
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
        self.failed: dict[int, tuple[Trajectory, ...]] = {}
        """What failed samples had sampled, for the record: of the newest try in which they sampled something, or of the last one."""
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

    def finish(self, index: int, rows: Sequence[Trajectory]) -> None:
        """Keep a finished sample: neither another try nor a resumed run samples it again.

        Args:
            index: in ``request.indices``.
            rows: as ``generate`` would return them; empty if nothing was sampled.
        """
        self.forget([index])
        self.failed.pop(index, None)
        self._finished[index] = SampleState(rows=tuple(rows), num_tokens=sum(row.num_sampled_tokens for row in rows))

    def fail(self, index: int, rows: Sequence[Trajectory], why: str) -> None:
        """Keep for the record what a sample had sampled when it failed; none of it is trained. Part of no checkpoint."""
        if index in self.failed and not any(len(row.response_token_ids) for row in rows):
            return
        self.failed[index] = tuple(
            replace(
                row,
                sample_index=index,
                loss_mask=np.zeros_like(row.loss_mask),
                is_abandoned=True,
                logs=row.logs | {"failure": why},
            )
            for row in rows
        )

    def restore_finished(self, index: int) -> tuple[Trajectory, ...] | None:
        """Return the rows of a sample that was finished in the checkpoint; None for a sample that must be generated."""
        saved = self._saved.get(index)
        if saved is None or saved.rows is None:
            return None
        self.restore(index)
        self.finish(index, saved.rows)
        return saved.rows

    @property
    def finished(self) -> dict[int, tuple[Trajectory, ...]]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGroup:
    """A group that was unfinished when the checkpoint was taken."""

    epoch: int
    uid: str
    admission_index: int
    scheduled_version: int
    generation_seconds: float
    """Seconds since its admission."""
    num_samples: int
    sampling: dict[str, Any]
    """``SamplingParams`` of the request, as JSON."""
    samples: dict[int, SampleState]
    """Sample index -> state; a missing sample restarts."""

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens known to be sampled so far."""
        return sum(sample.num_tokens for sample in self.samples.values())

    @property
    def num_kept(self) -> int:
        """Samples that can be continued or are finished."""
        return sum(sample.is_kept for sample in self.samples.values())

    def has_settings(self, num_samples: int, sampling: SamplingParams) -> bool:
        """Whether the group was requested with these values; otherwise its tokens do not fit this run."""
        now = sampling_to_json(sampling)
        return num_samples == self.num_samples and all(now.get(name) == self.sampling[name] for name in self.sampling)


OpenGroup = Group | RunningGroup
"""A group that is admitted and not yet trained."""


def admission_of(group: OpenGroup) -> Admission:
    return Admission(index=group.admission_index, scheduled_version=group.scheduled_version)


def sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters as ``json.loads`` would return them."""
    return json.loads(json.dumps(asdict(sampling)))


def group_to_json(group: Group) -> dict[str, Any]:
    """JSON of a finished group, without what it took, and without what is computed again: advantages, returns, weights of tokens, marks,
    and what the reference and the teacher say, which do not change.

    Old log-probs are kept with their version: a resumed run no longer has the policy of that version.
    """
    found, rows = fields_of(group), list(map(row_to_json, group.trajectories))
    del found["advantages"], found["returns"], found["work"]
    for row in rows:
        del row["ref_logprobs"], row["teacher_logprobs"], row["teacher_top"], row["marks"], row["token_weights"]
    return {**found, "trajectories": rows}


def row_to_json(row: Trajectory) -> dict[str, Any]:
    """A row's fields; columns stay columns."""
    return {
        **fields_of(row),
        "versions": fields_of(row.versions),
        "turn_spans": list(map(fields_of, row.turn_spans)),
        "messages": list(map(asdict, row.messages)),
    }


def running_to_json(group: RunningGroup) -> dict[str, Any]:
    samples = {index: fields_of(sample) for index, sample in group.samples.items()}
    for of_sample in samples.values():
        of_sample["rows"] = of_sample["rows"] and list(map(row_to_json, of_sample["rows"]))
    return {**fields_of(group), "samples": samples}


_UNFIT_FIELDS = {"missing": "is missing", "unexpected_keyword_argument": "is not known to this version"}
"""Kind of pydantic's error -> what is wrong with the field."""


def from_json(kind: Any, saved: Any, name: str = "") -> Any:
    """Convert JSON to the annotation ``kind``, such as ``tuple[Group, ...]``.

    Any kind of number is accepted, since generators and environments are the user's. Fields with a default may be missing.

    Args:
        kind: built from dataclasses, tuples, lists, dictionaries, numbers, text, ``Any`` and ``None``.
        saved: a value from ``json.loads``.
        name: path of the value in its file.

    Raises ``ValueError`` with the path of the first field that is missing, unknown or of another type.
    """
    try:
        (value,) = _reader_of(kind).validate_python((saved,))
    except ValidationError as error:
        first = error.errors()[0]
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"][1:])
        reason = _UNFIT_FIELDS.get(first["type"], f"is {reprlib.repr(first['input'])}: {first['msg']}")
        raise ValueError(f"{(name + path).removeprefix('.') or 'all of it'} {reason}") from error
    return value


@cache
def _reader_of(kind: Any) -> TypeAdapter[Any]:
    # A tuple, because a dataclass alone takes no configuration.
    return TypeAdapter(tuple[kind], config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
