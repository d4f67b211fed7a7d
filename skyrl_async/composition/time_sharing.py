"""Leases for stages that share devices.

    placement.groups ──> a queue per group ──> policy, ref, logp, engines: one at a time, first come first served

Does not know what is computed under a lease.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from skyrl_async.rollout.preparation import OnSharedDevices, Prepare
from skyrl_async.runtime.device_leases import DeviceGroup, DeviceLease, LeaseDevices
from skyrl_async.training.protocol import Policy


def lease_values(groups: Mapping[str, DeviceGroup]) -> dict[str, float]:
    """Return leases and seconds of each stage so far, by metric name."""
    values = {}
    for member, group in groups.items():
        leases = group.statistics()
        values[f"devices/{member}/leases"] = float(leases.num_leases[member])
        values[f"timing/devices/{member}/held"] = leases.seconds_held[member]
        values[f"timing/devices/{member}/waited"] = leases.seconds_waited[member]
    return values


def lease_of(member: str, groups: Mapping[str, DeviceGroup]) -> DeviceLease:
    """Make a lease for ``policy``, ``ref``, ``logp`` or ``critic``; it never waits where the member has its devices for itself."""
    return DeviceLease(groups.get(member), member)


def on_leased_devices(
    work: Prepare, member: str, groups: Mapping[str, DeviceGroup], lease_devices: LeaseDevices | None = None
) -> Prepare:
    """Let a stage's work take one lease for all groups that wait; unchanged where the member has its devices for itself.

    Args:
        work: computes on the member's devices.
        member: owner of the workers: ``policy``, ``ref``, ``logp`` or ``critic``.
        groups: member -> its devices.
        lease_devices: leases the devices for these workers; None: a lease that the task holds covers their calls.
    """
    if member not in groups:
        return work
    return OnSharedDevices(work=work, lease_devices=lease_devices or partial(groups[member].lease, member))


def leasing_policy(policy: Policy, groups: Mapping[str, DeviceGroup]) -> Policy:
    """Let the policy lease its devices while it computes; unchanged where it has them for itself."""
    return cast(Policy, LeasingPolicy(policy, groups["policy"])) if "policy" in groups else policy


class LeasingPolicy:
    """A policy that leases its devices for calls that compute; calls that only read or write files need no lease."""

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
