"""Prepares finished groups for training while others are generated and trained: one stage after another.

    GroupBuffer.put ──> reward ──> ref_logp ──> logp ──> GroupBuffer.put_prepared

Groups get their advantages and the log-probs that the loss needs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skyrl_async.algorithms.advantages import AdvantageEstimator, with_advantages
from skyrl_async.algorithms.reward_shaping import RewardShape, shape_rewards
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.runtime.device_leases import LeaseDevices
from skyrl_async.runtime.stages import Channel, StageBoard, run_stage
from skyrl_async.types import Group

Prepare = Callable[[Group], Awaitable[Group]]
"""Returns the group with something added to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSharedDevices:
    """A stage's work on shared devices: one lease serves all groups that wait, with one call each."""

    work: Prepare
    """Calls inside a lease belong to it; a call outside takes a lease of its own."""
    lease_devices: LeaseDevices

    async def __call__(self, group: Group) -> Group:
        return await self.work(group)


def reward_with(estimator: AdvantageEstimator | None, reward_shapes: Sequence[RewardShape] = ()) -> Prepare:
    """Return the reward stage's work: shape a group's rewards and compute its advantages.

    With ``estimator=None`` the optimizer step computes them.
    """

    async def reward(group: Group) -> Group:
        group = shape_rewards(group, reward_shapes)
        return group if estimator is None else with_advantages([group], estimator)[0]

    return reward


class Preparation:
    """The stages between a finished group and training.

    Args:
        buffer: source and destination of the groups.
        steps: name of the stage -> work, in order; at least one.
        board: shows the stages.
    """

    def __init__(self, buffer: GroupBuffer, steps: dict[str, Prepare], board: StageBoard) -> None:
        self._buffer = buffer
        self._steps = steps
        self._board = board

    async def run(self) -> None:
        """Consumes finished groups; produces prepared ones; waits for groups and for room in the next stage; unblocked by both.

        Returns when the buffer is closed and every group is prepared. Raises the first error of a stage's work.
        """
        async with asyncio.TaskGroup() as tasks:
            inputs = self._buffer.finished
            *_, last = self._steps
            for name, following in pairwise(self._steps):
                outputs = Channel[Group](self._room_between(name, following))
                tasks.create_task(self._run_stage(name, inputs, outputs.put, outputs.close), name=name)
                inputs = outputs
            tasks.create_task(self._run_stage(last, inputs, self._buffer.put_prepared, lambda: None), name=last)

    def _room_between(self, *stages: str) -> int:
        """Capacity of the channel. A lease serves only groups that have arrived, so channels at shared devices have room for all."""
        is_shared = any(isinstance(self._steps[name], OnSharedDevices) for name in stages)
        return self._buffer.max_groups if is_shared else 1

    async def _run_stage(
        self, name: str, inputs: Channel[Group], output: Callable[[Group], Awaitable[None]], close: Callable[[], None]
    ) -> None:
        work = self._steps[name]
        lease_devices = work.lease_devices if isinstance(work, OnSharedDevices) else None
        stage = self._board.stage(name)
        await run_stage(stage, inputs, work, output, name_of=lambda group: group.uid, lease_devices=lease_devices)
        close()
