"""Stages that share devices take turns on them.

    placement.groups ──> a line per group ──> policy, ref, logp, engines: one at a time, first come first served

Flows in: a device plan, a policy, engines. Flows out: the same, each in its turn. Knows nothing of what is done in a turn.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from skyrl_async.config.rules.device_plan import DevicePlan, PlannedGroup
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.preparation import OnSharedDevices, Prepare
from skyrl_async.runtime.device_leases import DeviceGroup, DeviceLease, LeaseDevices, groups_by_member
from skyrl_async.training.protocol import Policy
from skyrl_async.weight_sync.engine_time_sharing import GENERATE, EngineTimeSharing

_WITH_WORKERS = ("policy", "ref", "logp")


def device_groups(plan: DevicePlan | None) -> Mapping[str, DeviceGroup]:
    """The stages that take turns, and on which devices; a stage that has its devices for itself is left out."""
    if plan is None:
        return {}
    shared = [members for group in plan.groups if len(members := members_of(group)) > 1]
    return groups_by_member(shared)


def members_of(group: PlannedGroup) -> list[str]:
    """Who computes on its devices: stages with workers of their own, and engines, wherever they run."""
    members = [stage for stage in _WITH_WORKERS if stage in group.sizes]
    return members + [GENERATE] * (GENERATE in group.stages)


def engine_time_sharing(
    groups: Mapping[str, DeviceGroup],
    client: InferenceEngineClient,
    *,
    shortest_s: float,
    is_busy: Callable[[], bool],
    trace: Trace,
    clock: Callable[[], float],
) -> EngineTimeSharing | None:
    """Generation's turns; None where engines have their devices for themselves. For the arguments see ``EngineTimeSharing``."""
    if GENERATE not in groups:
        return None
    return EngineTimeSharing(client, groups[GENERATE], shortest_s=shortest_s, is_busy=is_busy, trace=trace, clock=clock)


def lease_values(groups: Mapping[str, DeviceGroup]) -> dict[str, float]:
    """What the turns of each stage came to so far, as metrics."""
    values = {}
    for member, group in groups.items():
        turns = group.statistics()
        values[f"devices/{member}/leases"] = float(turns.num_leases[member])
        values[f"timing/devices/{member}/held"] = turns.seconds_held[member]
        values[f"timing/devices/{member}/waited"] = turns.seconds_waited[member]
    return values


def lease_of(member: str, groups: Mapping[str, DeviceGroup]) -> DeviceLease:
    """A turn over several calls of ``policy``, ``ref`` or ``logp``; nothing is waited for where it has its devices for itself."""
    return DeviceLease(groups.get(member), member)


def on_leased_devices(
    work: Prepare, member: str, groups: Mapping[str, DeviceGroup], lease_devices: LeaseDevices | None = None
) -> Prepare:
    """A stage's work that takes one turn for all groups that wait; as it is where the member has its devices for itself.

    Args:
        work: computes on the member's devices.
        member: whose workers compute: ``policy``, ``ref`` or ``logp``.
        groups: member -> its devices.
        lease_devices: the workers' own; None where their calls are parts of any turn that the task holds.
    """
    if member not in groups:
        return work
    return OnSharedDevices(work=work, lease_devices=lease_devices or partial(groups[member].lease, member))


def leasing_policy(policy: Policy, groups: Mapping[str, DeviceGroup]) -> Policy:
    """The policy, which computes in its turns; as it is where it has its devices for itself."""
    return cast(Policy, LeasingPolicy(policy, groups["policy"])) if "policy" in groups else policy


class LeasingPolicy:
    """A policy that holds a lease on its devices while it computes; what only reads or writes files goes on beside others' leases."""

    _COMPUTES = frozenset({"forward_backward", "step", "logprobs", "logprobs_of", "gather_weights"})

    def __init__(self, policy: Policy, group: DeviceGroup) -> None:
        self._policy = policy
        self._group = group

    def __getattr__(self, name: str) -> Any:
        """A method of the policy, under a lease where it computes."""
        method = getattr(self._policy, name)
        if name not in self._COMPUTES:
            return method

        async def leasing(*args: Any) -> Any:
            async with self._group.lease_unless_held("policy"):
                return await method(*args)

        return leasing
