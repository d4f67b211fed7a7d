"""Which stages share which devices of the cluster: a plan of the placement section, checked before anything starts.

    groups, ratios or devices ──> devices per group ──> bundles (reserved in Ray at once) ──> resources per actor

Knows neither Ray nor what a stage does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from skyrl_async.config.schema.fields import require
from skyrl_async.config.schema.run import PlacementConfig
from skyrl_async.errors import ConfigError, did_you_mean

STAGES = ("policy", "logp", "ref", "teacher", "critic", "generate")
_OTHER_NAMES = {
    **dict.fromkeys(("actor", "actor-train", "actor_train", "train"), "policy"),
    **dict.fromkeys(("ref_logp", "reference"), "ref"),
    **{"old_log_prob": "logp", "rollout": "generate"},
}
"""What other systems call them."""
_RATIO_TOLERANCE = 1e-6
_RAY_PRECISION = 10_000
"""Ray counts in ten-thousandths; thirds that are rounded up would not fit together."""


class Unit(Enum):
    """What a device is; the value is Ray's name of the resource."""

    gpu = "GPU"
    cpu_slot = "CPU"

    def count(self, number: int) -> str:
        """Such as "2 GPUs" or "1 CPU slot"."""
        name = "GPU" if self is Unit.gpu else "CPU slot"
        return f"{number} {name}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSize:
    """The actors that a stage has of its own."""

    num_actors: int
    """>= 1 in a plan."""
    num_key: str
    """The key that says so."""
    devices_per_actor: int = 1
    """>= 1; where devices are CPU slots, each actor may get a multiple of it."""
    per_actor_key: str | None = None
    """The key that says so; None: nothing can be changed about it."""

    def text(self) -> str:
        """For the table."""
        text = f"{self.num_key}={self.num_actors}"
        return text if self.per_actor_key is None else f"{text}, {self.per_actor_key}={self.devices_per_actor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """Devices, and the stages that share them."""

    stages: tuple[str, ...]
    num_devices: int
    sizes: Mapping[str, StageSize]
    """Stage with actors of its own -> their sizes."""

    @property
    def label(self) -> str:
        """As on the command line."""
        return _label(self.stages)

    @property
    def bundle_size(self) -> int:
        """Devices that lie on one machine: those of the largest actor, so that none is cut in two.

        Not more, because Ray would put the fractions of two ranks on one GPU of a bundle of two.
        """
        return math.lcm(*(self.devices_of_actor(stage) for stage in self.sizes))

    @property
    def num_bundles(self) -> int:
        """They hold the group's devices between them."""
        return self.num_devices // self.bundle_size

    def devices_of_actor(self, stage: str) -> int:
        """Devices that one of the stage's actors uses, be it alone or with others."""
        return self.num_devices // self.sizes[stage].num_actors

    def reservation(self, stage: str) -> float:
        """What one of the stage's actors reserves, in devices: an equal part with those that it shares them with."""
        return math.floor(self.devices_of_actor(stage) / len(self.sizes) * _RAY_PRECISION) / _RAY_PRECISION

    def bundle_of_actor(self, stage: str, index: int) -> int:
        """Which of the group's bundles an actor is in; ``index`` counts the stage's actors from 0."""
        return index * self.devices_of_actor(stage) // self.bundle_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Every group of a run; made by ``resolve``."""

    unit: Unit
    num_available: int
    """Devices of the cluster."""
    groups: tuple[PlannedGroup, ...]
    on_policy_workers: frozenset[str] = frozenset()
    """Stages that are placed and that the policy's workers compute."""
    unused: frozenset[str] = frozenset()
    """Stages that are placed and that the run does without."""

    def group_of(self, stage: str) -> PlannedGroup:
        """The group that a placed stage is in."""
        return next(group for group in self.groups if stage in group.stages)

    def table(self) -> str:
        """For people: a line, and one per group."""
        rows = [(group.label, str(group.num_devices), self._what_runs_in(group)) for group in self.groups]
        label_width, num_width = (max(len(row[i]) for row in rows) for i in (0, 1))
        total = f"{sum(group.num_devices for group in self.groups)} of {self.unit.count(self.num_available)}"
        lines = [f"  {label:<{label_width}}  {num:>{num_width}}  {what}".rstrip() for label, num, what in rows]
        return "\n".join([f"placement: {total}", *lines])

    def _what_runs_in(self, group: PlannedGroup) -> str:
        parts = [f"{stage}: {size.text()}" for stage, size in group.sizes.items()]
        for whose, what in ((self.on_policy_workers, "on the policy's workers"), (self.unused, "not used by this run")):
            stages = [stage for stage in group.stages if stage in whose]
            parts += [f"{', '.join(stages)}: {what}"] if stages else []
        return "; ".join(parts)


def check_groups(placement: PlacementConfig, needed: Collection[str]) -> None:
    """Raise ``ConfigError`` unless the section is complete and says each thing once, whatever the cluster.

    ``needed`` stages have to be placed; the others may be.
    """
    groups = placement.groups
    if groups is None:
        for key in ("ratios", "devices"):
            value = getattr(placement, key)
            require(value is None, f"placement.{key}", "null without placement.groups", value)
        return
    _check_stages(groups, needed)
    given = {key: numbers for key in ("ratios", "devices") if (numbers := getattr(placement, key)) is not None}
    if len(given) != 1:
        found = "both" if given else "neither"
        raise ConfigError(
            f"placement.ratios or placement.devices must be set with placement.groups, one of them, got {found}"
        )
    ((key, numbers),) = given.items()
    if len(numbers) != len(groups):
        expected = f"one entry for each of the {len(groups)} groups of placement.groups"
        raise ConfigError(f"placement.{key} must have {expected}, got {_list(numbers)}")
    require(all(number > 0 for number in numbers), f"placement.{key}", "> 0 each", _list(numbers))
    total = math.fsum(numbers)
    if key == "ratios" and abs(total - 1) > _RATIO_TOLERANCE:
        raise ConfigError(f"placement.ratios must sum to 1, got {_list(numbers)}, which sum to {total:g}")


def _check_stages(groups: Sequence[Sequence[str]], needed: Collection[str]) -> None:
    written = _list([_label(group) for group in groups])
    require(bool(groups) and all(groups), "placement.groups", "lists of one stage or more", written)
    of_stage: dict[str, list[str]] = {}
    for group in groups:
        for stage in group:
            if stage not in STAGES:
                hint = did_you_mean(_OTHER_NAMES.get(stage, stage), STAGES)
                raise ConfigError(f"placement.groups knows {', '.join(STAGES)}, got {stage!r}{hint}")
            of_stage.setdefault(stage, []).append(_label(group))
    for stage, labels in of_stage.items():
        if len(labels) > 1:
            raise ConfigError(
                f"placement.groups must name each stage once, got {stage} in {' and '.join(labels)}: leave it in one"
            )
    missing = [stage for stage in STAGES if stage in needed and stage not in of_stage]
    if missing:
        raise ConfigError(
            f"placement.groups must place {' and '.join(missing)}, which this run needs, got {written}: add "
            f"{', '.join(f'[{stage}]' for stage in missing)}, or name it in a group to share its devices"
        )


def resolve(
    placement: PlacementConfig,
    *,
    sizes: Mapping[str, StageSize],
    needed: Collection[str],
    on_policy_workers: Collection[str] = (),
    unit: Unit,
    num_available: int,
) -> DevicePlan:
    """The plan of a section that has groups. Raises ``ConfigError`` when it cannot be on such a cluster.

    Args:
        sizes: of the stages with actors of their own; one without uses another stage's, or reserves devices for nothing.
        needed: stages that have to be placed.
        on_policy_workers: stages that the policy's workers compute, where they are placed.
        num_available: devices of the cluster.
    """
    check_groups(placement, needed)
    assert placement.groups is not None
    numbers = placement.devices or _devices_of(placement.ratios or [], placement.groups, unit, num_available)
    if sum(numbers) > num_available:
        more = ", or raise placement.num_cpu_slots" if unit is Unit.cpu_slot else ""
        raise ConfigError(
            f"placement.devices must sum to at most the {unit.count(num_available)} of the cluster, got "
            f"{_list(numbers)}, which sum to {sum(numbers)}: give groups less{more}"
        )
    groups = tuple(
        PlannedGroup(
            stages=tuple(stages), num_devices=number, sizes={stage: sizes[stage] for stage in stages if stage in sizes}
        )
        for stages, number in zip(placement.groups, numbers, strict=True)
    )
    for group in groups:
        for stage in group.sizes:
            _check_size(group, stage, unit)
        _check_sharing(group, unit)
    placed = {stage for group in groups for stage in group.stages}
    return DevicePlan(
        unit=unit,
        num_available=num_available,
        groups=groups,
        on_policy_workers=frozenset(placed & set(on_policy_workers)),
        unused=frozenset(placed - set(needed) - set(on_policy_workers)),
    )


def _devices_of(ratios: Sequence[float], groups: Sequence[Sequence[str]], unit: Unit, num_available: int) -> list[int]:
    """Whole devices: each group's share rounded down, what is left to those that lost most by it, the first of them first."""
    shares = [ratio * num_available for ratio in ratios]
    numbers = [math.floor(share + _RATIO_TOLERANCE) for share in shares]
    by_loss = sorted(range(len(shares)), key=lambda i: numbers[i] - shares[i])
    for i in by_loss[: num_available - sum(numbers)]:
        numbers[i] += 1
    if 0 in numbers:
        more = ", or raise placement.num_cpu_slots" if unit is Unit.cpu_slot else ""
        raise ConfigError(
            f"placement.ratios must leave each group a device, got {_list(ratios)} of {unit.count(num_available)}, which is none "
            f"for {_label(groups[numbers.index(0)])}: have groups share devices{more}"
        )
    return numbers


def _check_size(group: PlannedGroup, stage: str, unit: Unit) -> None:
    """Raise ``ConfigError`` unless the stage's actors and the group's devices divide."""
    size, devices = group.sizes[stage], unit.count(group.num_devices)
    used = size.num_actors * size.devices_per_actor
    if group.num_devices % used == 0 and (unit is Unit.cpu_slot or group.num_devices == used):
        return
    give = _fitting_devices(group, unit)
    if group.num_devices % size.devices_per_actor:
        raise ConfigError(
            f"{size.per_actor_key} must divide the {devices} of {group.label}, got {size.devices_per_actor}: change it{give}"
        )
    fitting = group.num_devices // size.devices_per_actor
    each = f", {unit.count(size.devices_per_actor)} each" if unit is Unit.gpu else ""
    rule = f"be {fitting} for" if unit is Unit.gpu else "divide"
    suggested = fitting if unit is Unit.gpu else math.gcd(fitting, size.num_actors)
    raise ConfigError(
        f"{size.num_key} must {rule} the {devices} of {group.label}{each}, got {size.num_actors}: set {size.num_key}={suggested}{give}"
    )


def _fitting_devices(group: PlannedGroup, unit: Unit) -> str:
    """The fewest devices that suit every stage of the group, as the end of a sentence; empty where no number does."""
    used = {size.num_actors * size.devices_per_actor for size in group.sizes.values()}
    if unit is Unit.gpu and len(used) > 1:
        return ""
    return f", or give the group {math.lcm(*used)} with placement.devices"


def _check_sharing(group: PlannedGroup, unit: Unit) -> None:
    """Ray splits a GPU between actors, but not several of them at once."""
    if unit is not Unit.gpu or len(group.sizes) < 2:
        return
    for stage, size in group.sizes.items():
        if size.devices_per_actor > 1:
            others = " and ".join(other for other in group.sizes if other != stage)
            raise ConfigError(
                f"{size.per_actor_key} must be 1 where {stage} shares its GPUs with {others} (placement.groups has {group.label}), got "
                f"{size.devices_per_actor}: Ray splits single GPUs; set it to 1, or give {stage} a group of its own"
            )


def _label(stages: Sequence[str]) -> str:
    return f"[{','.join(stages)}]"


def _list(values: Sequence[object]) -> str:
    """As on the command line."""
    return f"[{','.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}]"
