"""Generation's turns on devices that it shares: engines sample while nobody else wants them, and stand still while others compute.

    in line ──> engines resumed ──somebody waits, the shortest turn is over, nobody needs them──> engines paused ──> in line again
                                                                                 every one acknowledged ┘

Flows in: engines, a device group, blocks in which engines have to run. Flows out: engines that run in their turns alone. Requests stay in
the engines, with their keys and values. Does not know what the others compute, nor weights: a publish is a block in which engines run.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.changes import Changes
from skyrl_async.runtime.device_leases import DeviceGroup, DeviceLease
from skyrl_async.runtime.tasks import task_group
from skyrl_async.types import PauseMode
from skyrl_async.weight_sync.engine_updater import EngineWeightUpdater

GENERATE = "generate"
"""The member of a device group that engines are."""

HoldEngines = Callable[[], AbstractAsyncContextManager[None]]
"""In the block engines have their devices, and whoever holds them may pause and resume them."""


class EngineTimeSharing:
    """See the module.

    Args:
        client: knows the engines; its deadlines stand still while these do.
        group: whose devices they share; generation is its member ``generate``.
        shortest_s: seconds that a turn lasts at least where engines are busy when others begin to wait, >= 0.
        is_busy: whether engines have requests; without any their turn ends when others want it.
        trace: a span for the time without the devices.
        clock: seconds.
    """

    def __init__(
        self,
        client: InferenceEngineClient,
        group: DeviceGroup,
        *,
        shortest_s: float,
        is_busy: Callable[[], bool],
        trace: Trace,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._group = group
        self._shortest_s = shortest_s
        self._is_busy = is_busy
        self._trace = trace
        # What is frozen goes on where it was: the weights are the same, unless a publish comes, which pauses in a way of its own.
        self._switch = EngineWeightUpdater(client, pause_mode=PauseMode.KEEP, trace=trace, clock=clock)
        self._have_devices = False
        self._num_holders = 0
        self._changes = Changes()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take turns while the block lasts. What goes wrong in them ends the block with it."""
        async with task_group() as tasks:
            turns = tasks.create_task(self._take_turns(), name="generation turns")
            try:
                await self._changes.until(
                    lambda: self._have_devices
                )  # engines run until they are paused: the first turn is theirs
                yield
            finally:
                turns.cancel()

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """In the block engines have their devices; waits for generation's turn, which then lasts until the block's end.

        Whoever holds must not wait for a turn of another member.
        """
        self._num_holders += 1
        try:
            await self._changes.until(lambda: self._have_devices)
            yield
        finally:
            self._num_holders -= 1
            self._changes.notify()

    async def _take_turns(self) -> None:
        """Consumes turns; waits until others want the devices, then for its holders; unblocked by them."""
        lease = DeviceLease(self._group, GENERATE)
        try:
            while True:
                with self._trace.span("others compute", track="devices"):
                    await lease.acquire()
                await self._turn()
                lease.release()
        finally:
            lease.release()

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        await self._begin()
        begun = loop.time()
        await self._group.wanted()
        if self._is_busy():
            await asyncio.sleep(begun + self._shortest_s - loop.time())
        await self._changes.until(lambda: not self._num_holders)
        await self._end()

    async def _begin(self) -> None:
        await self._switch.resume(list(self._client.engines))
        self._client.pool.deadlines.resume(GENERATE)
        self._have_devices = True
        self._changes.notify()

    async def _end(self) -> None:
        self._have_devices = False
        self._client.pool.deadlines.suspend(GENERATE)
        await self._switch.pause(list(self._client.engines))
