"""Groups as a checkpoint holds them: finished groups with their rows, running groups with the states of their samples.

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
    def num_tokens(self) -> int:
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

    def sample_states(self, num_samples: int, sampling: SamplingParams, counts: ResumeCounts) -> SampleStates:
        """States for the generator to continue from; all samples restart if the group was requested with other values."""
        saved = self.samples
        if not self.has_settings(num_samples, sampling):
            saved = {i: SampleState(num_tokens=sample.num_tokens) for i, sample in saved.items()}
        return SampleStates(saved, num_samples=num_samples, counts=counts)


OpenGroup = Group | RunningGroup
"""A group that is admitted and not yet trained."""


def admission_of(group: OpenGroup) -> Admission:
    return Admission(index=group.admission_index, scheduled_version=group.scheduled_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredGroups:
    """A checkpoint's open groups, oldest admitted first."""

    finished: tuple[Group, ...]
    """Groups to be trained."""
    running: tuple[RunningGroup, ...]
    """Groups whose generation continues."""
    dropped: tuple[OpenGroup, ...]
    """Groups that do not fit this run's mini-batch size and bound: their prompts are requeued."""

    @classmethod
    def of(cls, finished: Sequence[Group], running: Sequence[RunningGroup], restored: Sequence[Admission]) -> Self:
        """Drop the groups whose admissions were not ``restored``."""
        indices = {admission.index for admission in restored}
        open_groups: tuple[OpenGroup, ...] = (*finished, *running)
        dropped = [group for group in open_groups if group.admission_index not in indices]
        return cls(
            finished=tuple(group for group in finished if group.admission_index in indices),
            running=tuple(group for group in running if group.admission_index in indices),
            dropped=tuple(sorted(dropped, key=lambda group: group.admission_index)),
        )

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens known to be sampled for dropped groups."""
        return sum(g.num_tokens if isinstance(g, RunningGroup) else g.num_sampled_tokens for g in self.dropped)

    def __str__(self) -> str:
        num_samples, num_kept = sum(g.num_samples for g in self.running), sum(g.num_kept for g in self.running)
        kept = sum(s.num_tokens for group in self.running for s in group.samples.values() if s.is_kept)
        lost = sum(group.num_tokens for group in self.running) - kept
        return (
            f"{len(self.finished)} finished groups wait to be trained; of {num_samples} trajectories in {len(self.running)} running "
            f"groups {num_kept} go on after {kept} tokens, {num_samples - num_kept} begin anew ({lost} tokens lost); "
            f"{len(self.dropped)} groups no longer fit and are drawn again ({self.num_dropped_tokens} tokens lost)"
        )


def sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters as ``json.loads`` would return them."""
    fields = dataclasses.asdict(sampling)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def group_to_json(group: Group) -> dict[str, Any]:
    """JSON of a finished group, without advantages, marks and reference log-probs, which a resumed run computes again.

    Old log-probs are kept with their version: a resumed run no longer has the policy of that version.
    """
    fields = fields_of(group)
    del fields["advantages"]
    rows = [fields_of(row) for row in group.trajectories]
    for row in rows:
        del row["ref_logprobs"], row["marks"]
    return {**fields, "trajectories": rows}


def group_from_json(row: Mapping[str, Any]) -> Group:
    """The inverse of ``group_to_json``. Raises ``ValueError`` like ``from_json``."""
    group: Group = from_json(Group, row, "")
    return group


def running_to_json(group: RunningGroup) -> dict[str, Any]:
    return {**fields_of(group), "samples": {i: _sample_to_json(sample) for i, sample in group.samples.items()}}


def _sample_to_json(sample: SampleState) -> dict[str, Any]:
    return {**fields_of(sample), "rows": None if sample.rows is None else [fields_of(row) for row in sample.rows]}


def from_json(kind: Any, saved: Any, name: str) -> Any:
    """Convert JSON to the annotation ``kind``, such as ``tuple[Group, ...]``.

    Any kind of number is accepted, since generators and environments are the user's. Fields with a default may be missing.

    Args:
        kind: built from dataclasses, tuples, lists, dictionaries, numbers, text, ``Any`` and ``None``.
        saved: a value from ``json.loads``.
        name: path of the value in its file.

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
            return origin(saved)  # one value per token: too many to check one by one
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
    """JSON keys are text."""
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
    """Epoch in which its prompt was drawn."""
    prompt: Prompt
    started: float
    """Seconds on the loop's clock."""
    token_usage: TokenUsage = field(default_factory=TokenUsage)
    sample_states: SampleStates = field(default_factory=SampleStates)

    @property
    def key(self) -> tuple[int, str]:
        """(epoch, uid)."""
        return self.epoch, self.prompt.uid

    @classmethod
    def from_checkpoint(
        cls, group: RunningGroup, prompt: Prompt, num_samples: int, sampling: SamplingParams, counts: ResumeCounts
    ) -> Self:
        """Continue a group, requested with ``num_samples`` and ``sampling`` now; ``counts`` counts resumed and restarted samples."""
        return cls(
            admission=admission_of(group),
            epoch=group.epoch,
            prompt=prompt,
            started=asyncio.get_running_loop().time() - group.generation_seconds,
            sample_states=group.sample_states(num_samples, sampling, counts),
        )

    def for_checkpoint(self, num_samples: int, sampling: SamplingParams) -> RunningGroup:
        """The group's current state; it was requested with ``num_samples`` and ``sampling``."""
        return RunningGroup(
            epoch=self.epoch,
            uid=self.prompt.uid,
            admission_index=self.admission.index,
            scheduled_version=self.admission.scheduled_version,
            generation_seconds=asyncio.get_running_loop().time() - self.started,
            num_samples=num_samples,
            sampling=sampling_to_json(sampling),
            samples=self.sample_states.snapshot(),
        )
