"""Groups as a checkpoint holds them: finished ones with their rows, running ones with where each of their samples stands.

Flows in: groups, and JSON read from a file. Flows out: JSON, and groups. Does not know files, nor what a generator's state means.
"""

import asyncio
import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import NoneType
from typing import Any, Self, get_args, get_origin, get_type_hints

from skyrl_async.rollout.sample_state import ResumeCounts, SampleState, SampleStates, fields_of
from skyrl_async.rollout.sampler import TokenUsage
from skyrl_async.rollout.staleness import Admission
from skyrl_async.types import Group, Prompt, SamplingParams, Trajectory


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

    def saved_samples(self, num_samples: int, sampling: SamplingParams, counts: ResumeCounts) -> SampleStates:
        """What its generator goes on from: nothing, where it is asked for otherwise than it was."""
        saved = self.samples
        if not self.has_settings(num_samples, sampling):
            saved = {i: SampleState(num_tokens=sample.num_tokens) for i, sample in saved.items()}
        return SampleStates(saved, num_samples=num_samples, counts=counts)


OpenGroup = Group | RunningGroup
"""Admitted and not trained."""


def admission_of(group: OpenGroup) -> Admission:
    """Under which it is open."""
    return Admission(index=group.admission_index, scheduled_version=group.scheduled_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredGroups:
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
    """What ``group_to_json`` was made of. Raises what ``from_json`` raises."""
    group: Group = from_json(Group, row, "")
    return group


def running_to_json(group: RunningGroup) -> dict[str, Any]:
    """A running group."""
    return {**fields_of(group), "samples": {i: _sample_to_json(sample) for i, sample in group.samples.items()}}


def _sample_to_json(sample: SampleState) -> dict[str, Any]:
    return {**fields_of(sample), "rows": None if sample.rows is None else [fields_of(row) for row in sample.rows]}


def from_json(kind: Any, saved: Any, name: str) -> Any:
    """What a file holds, as a value of the annotation ``kind``, such as ``tuple[Group, ...]``.

    Numbers may be of any kind, since generators and environments are somebody else's. Fields with a default may be missing.

    Args:
        kind: of dataclasses, tuples, lists, dictionaries, numbers, text, ``Any`` and ``None``.
        saved: as ``json.loads`` has it.
        name: where it is in its file.

    Raises ``ValueError`` with the path of the first field that is missing, unknown or of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (saved is None and NoneType in inner):
        return saved
    if NoneType in inner:
        (kind,) = (one for one in inner if one is not NoneType)
        return from_json(kind, saved, name)
    if dataclasses.is_dataclass(kind):
        return _dataclass_from_json(kind, saved, name)
    if origin in (tuple, list):
        _require(isinstance(saved, list | tuple), saved, "a list", name)
        if inner[0] in (int, float) and set(map(type, saved)) <= {int, float, bool}:
            return origin(saved)  # of one value per token
        return origin(from_json(inner[0], value, f"{name}[{i}]") for i, value in enumerate(saved))
    if origin is dict:
        _require(isinstance(saved, dict), saved, "an object", name)
        return {_key(inner[0], key, name): from_json(inner[1], value, f"{name}.{key}") for key, value in saved.items()}
    if kind is str:
        _require(isinstance(saved, str), saved, "text", name)
    else:
        is_whole = kind is not int or not isinstance(saved, float) or saved.is_integer()
        _require(isinstance(saved, int | float) and is_whole, saved, f"a number ({kind.__name__})", name)
    return saved


def _dataclass_from_json(kind: Any, saved: Any, name: str) -> Any:
    _require(isinstance(saved, Mapping), saved, "an object", name)
    fields, before = {field.name: field for field in dataclasses.fields(kind)}, f"{name}." if name else ""
    if unknown := sorted(saved.keys() - fields.keys()):
        raise ValueError(f"{', '.join(f'{before}{field}' for field in unknown)} is not known to this version")
    for known in fields.values():
        if known.name not in saved and known.default is known.default_factory is dataclasses.MISSING:
            raise ValueError(f"{before}{known.name} is missing")
    hints = _hints_of(kind)
    values = {field: from_json(hints[field], value, f"{before}{field}") for field, value in saved.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, localns={"Trajectory": Trajectory})


def _key(kind: type, key: str, name: str) -> Any:
    """JSON has no keys but text."""
    try:
        return kind(key)
    except ValueError as error:
        raise ValueError(f"{name}.{key} must have a whole number for its name") from error


def _require(is_so: bool, saved: Any, expected: str, name: str) -> None:
    if not is_so:
        raise ValueError(f"{name or 'all of it'} is {reprlib.repr(saved)}, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInFlight:
    """A group from its admission to its end."""

    admission: Admission
    epoch: int
    """In which its prompt was drawn."""
    prompt: Prompt
    started: float
    """Seconds on the loop's clock."""
    account: TokenUsage = field(default_factory=TokenUsage)
    """Of what its members were delivered."""
    saved: SampleStates = field(default_factory=SampleStates)
    """Where its samples stand."""

    @property
    def key(self) -> tuple[int, str]:
        """(epoch, uid)."""
        return self.epoch, self.prompt.uid

    @property
    def name(self) -> str:
        """Of its task."""
        return f"group-{self.admission.index}-{self.prompt.uid}"

    @classmethod
    def of_checkpoint(
        cls, group: RunningGroup, prompt: Prompt, num_samples: int, sampling: SamplingParams, counts: ResumeCounts
    ) -> Self:
        """A group that goes on, asked for with ``num_samples`` and ``sampling``; ``counts`` are told what becomes of its samples."""
        return cls(
            admission=admission_of(group),
            epoch=group.epoch,
            prompt=prompt,
            started=asyncio.get_running_loop().time() - group.generation_seconds,
            saved=group.saved_samples(num_samples, sampling, counts),
        )

    def for_checkpoint(self, num_samples: int, sampling: SamplingParams) -> RunningGroup:
        """The group as it stands now, asked for with ``num_samples`` and ``sampling``."""
        return RunningGroup(
            epoch=self.epoch,
            uid=self.prompt.uid,
            admission_index=self.admission.index,
            scheduled_version=self.admission.scheduled_version,
            generation_seconds=asyncio.get_running_loop().time() - self.started,
            num_samples=num_samples,
            sampling=sampling_to_json(sampling),
            samples=self.saved.samples(),
        )
