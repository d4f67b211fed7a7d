"""What the trainer needs of a generator: all samples of a prompt, as training rows. How it samples is its own business."""

from typing import Protocol

from skyrl_async.types import GroupRequest, Trajectory


class Generator(Protocol):
    """Plays prompts in environments; any harness that can be made to return ``Trajectory`` rows is one."""

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return ``request.num_samples`` trajectories. Cancellation must release what it holds.

        Whatever it raises becomes a failed rollout: counted, its prompt kept.
        """
        ...
