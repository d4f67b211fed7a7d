"""Stages that share devices take turns on them.

    placement.groups ──> a line per group ──> policy, ref, logp: one at a time, first come first served

Flows in: reserved devices, a policy, the work of stages. Flows out: the same, each in its turn. Generation takes no turns: its engines
share their devices with whatever else is placed there. Knows nothing of what is done in a turn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from skyrl_async.composition.bundles import Bundles
from skyrl_async.device_turns import DeviceGroup, groups_by_member
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.training.protocol import Policy
from skyrl_async.types import Group, LogprobModel, RowLogprobs, Trajectory, WeightUpdate

_TAKE_TURNS = ("policy", "ref", "logp")


def device_groups(bundles: Bundles | None) -> Mapping[str, DeviceGroup]:
    """The stages that take turns, and on which devices; a stage that has its devices for itself is left out."""
    if bundles is None:
        return {}
    shared = [
        members
        for group in bundles.plan.groups
        if len(members := [stage for stage in _TAKE_TURNS if stage in group.sizes]) > 1
    ]
    return groups_by_member(shared)


def prepare_in_turn(works: Mapping[str, Prepare], groups: Mapping[str, DeviceGroup]) -> dict[str, Prepare]:
    """The works of the stages ``ref_logp`` and ``logp`` that have workers of their own, in turn."""
    members = {"ref_logp": "ref", "logp": "logp"}
    return {
        name: _in_turn(work, groups[members[name]], members[name]) if members[name] in groups else work
        for name, work in works.items()
    }


def _in_turn(work: Prepare, group: DeviceGroup, member: str) -> Prepare:
    async def prepare(given: Group) -> Group:
        async with group.turn(member):
            return await work(given)

    return prepare


def policy_in_turn(policy: Policy, groups: Mapping[str, DeviceGroup]) -> Policy:
    """The policy, which computes in its turns; as it is where it has its devices for itself."""
    return PolicyInTurn(policy, groups["policy"]) if "policy" in groups else policy


class PolicyInTurn:
    """A ``Policy`` that takes a turn for whatever computes; what only reads or writes files goes on beside others'."""

    def __init__(self, policy: Policy, group: DeviceGroup) -> None:
        self._policy = policy
        self._group = group

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        """See ``Policy``."""
        async with self._group.turn("policy"):
            return await self._policy.forward_backward(trajectories, advantages, version)

    async def step(self, num_tokens: float) -> dict[str, float]:
        """See ``Policy``."""
        async with self._group.turn("policy"):
            return await self._policy.step(num_tokens)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See ``Policy``."""
        async with self._group.turn("policy"):
            return await self._policy.logprobs(token_ids)

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """See ``Policy``."""
        async with self._group.turn("policy"):
            return await self._policy.logprobs_of(trajectories, model)

    async def gather_weights(self, version: int) -> int:
        """See ``Policy``."""
        async with self._group.turn("policy"):
            return await self._policy.gather_weights(version)

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """See ``Policy``."""
        return await self._policy.send_weights(version, directory, bucket_bytes)

    async def save(self, directory: Path) -> None:
        """See ``Policy``."""
        await self._policy.save(directory)

    async def load(self, directory: Path) -> None:
        """See ``Policy``."""
        await self._policy.load(directory)

    async def export_hf(self, directory: Path) -> None:
        """See ``Policy``."""
        await self._policy.export_hf(directory)

    async def close(self) -> None:
        """See ``Policy``."""
        await self._policy.close()
