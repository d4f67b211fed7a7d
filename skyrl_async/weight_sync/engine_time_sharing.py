"""Time-sharing of devices between generation and whatever else computes on them: engines sample in some slices and stand still in others.

    lease ──> engines resumed ──somebody waits, the shortest slice is over, nobody needs them──> engines paused ──> lease again
                                                                                every one acknowledged ┘

Requests stay in the engines, with their keys and values. A publish is a block in which engines hold their devices. This module does not
know what the others compute.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.device_leases import DeviceGroup, DeviceLease
from skyrl_async.runtime.tasks import Changes, task_group
from skyrl_async.types import PauseMode
from skyrl_async.weight_sync.engine_updater import EngineWeightUpdater

GENERATE = "generate"
"""The engines' name as a member of a device group."""

HoldEngines = Callable[[], AbstractAsyncContextManager[None]]
"""Engines have their devices while its block lasts. Whoever is in the block may pause and resume them."""


@dataclass(eq=False)
class EngineTimeSharing:
    """Resumes engines while they hold a lease on their devices, and pauses them before it is released."""

    client: InferenceEngineClient
    """Knows the engines; its deadlines stand still while these do."""
    group: DeviceGroup
    """The devices they share; generation is its member ``generate``."""
    min_slice_s: float = field(kw_only=True)
    """Shortest time that busy engines keep the devices when others wait for them, in seconds, >= 0."""
    is_busy: Callable[[], bool] = field(kw_only=True)
    """Whether engines have requests; idle ones release the devices as soon as others want them."""
    trace: Trace = field(kw_only=True)
    """Gets a span for the time without the devices."""
    clock: Callable[[], float] = field(kw_only=True)
    """Seconds."""
    _have_devices: bool = field(default=False, init=False)
    _num_holders: int = field(default=0, init=False)
    _changes: Changes = field(default_factory=Changes, init=False)

    def __post_init__(self) -> None:
        # Requests are frozen: the weights stay the same, unless a publish comes, which pauses engines in a mode of its own.
        self._updater = EngineWeightUpdater(
            client=self.client, pause_mode=PauseMode.KEEP, trace=self.trace, clock=self.clock
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Share the devices while the block lasts. A failure ends the block."""
        async with task_group() as tasks:
            sharing = tasks.create_task(self._share(), name="generation leases")
            try:
                await self._changes.until(lambda: self._have_devices)  # engines boot running: the first slice is theirs
                yield
            finally:
                sharing.cancel()

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Wait until engines have their devices, and let them keep these until the block's end.

        The block must not wait for the lease of another member.
        """
        self._num_holders += 1
        try:
            await self._changes.until(lambda: self._have_devices)
            yield
        finally:
            self._num_holders -= 1
            self._changes.notify()

    async def _share(self) -> None:
        """Consumes leases; waits until others want the devices, then for its holders; unblocked by them."""
        lease = DeviceLease(self.group, GENERATE)
        try:
            while True:
                with self.trace.span("others compute", track="devices"):
                    await lease.acquire()
                await self._run_slice()
                lease.release()
        finally:
            lease.release()

    async def _run_slice(self) -> None:
        loop = asyncio.get_running_loop()
        await self._updater.resume(list(self.client.pool.sampling_engines))
        self.client.pool.deadlines.resume(GENERATE)
        self._have_devices = True
        self._changes.notify()
        began = loop.time()
        await self.group.wanted()
        if self.is_busy():
            await asyncio.sleep(began + self.min_slice_s - loop.time())
        await self._changes.until(lambda: not self._num_holders)
        self._have_devices = False
        self.client.pool.deadlines.suspend(GENERATE)
        await self._updater.pause(list(self.client.pool.sampling_engines))
