"""Leases on devices that several stages share: one holder at a time, first come first served.

    stage ──lease()──> queue ──> holds the devices ──> releases them ──> the next in the queue holds them

A group of devices knows nothing of other groups, whose leases overlap its own, and nothing of what is computed under a lease.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyrl_async.errors import StateError
from skyrl_async.runtime.tasks import Changes

LeaseDevices = Callable[[], contextlib.AbstractAsyncContextManager[None]]
"""Makes a context in which a member holds its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatistics:
    """Who holds the devices of one group, who waits for them, and for how long."""

    holder: str | None
    """Member that holds the devices."""
    waiting: tuple[str, ...]
    """Members in the queue, the next one first."""
    seconds_held: Mapping[str, float]
    """Member -> seconds of all its leases, the current one included."""
    seconds_waited: Mapping[str, float]
    """Member -> seconds in the queue, the current wait included."""
    num_leases: Mapping[str, int]
    """Member -> leases begun."""


@dataclass(slots=True, eq=False)
class QueuedLease:
    """A lease that is held or waited for."""

    member: str
    since: float
    """When it entered the queue, and later when it began, in seconds."""
    task: asyncio.Task[object] | None = None
    """The task that asked for it."""


class LeaseQueue:
    """A queue whose first lease is held; no I/O, times are the caller's, in seconds."""

    def __init__(self, members: Sequence[str]) -> None:
        self._queue: list[QueuedLease] = []
        self._seconds_held = dict.fromkeys(members, 0.0)
        self._seconds_waited = dict.fromkeys(members, 0.0)
        self._num_leases = dict.fromkeys(members, 0)

    @property
    def holder(self) -> QueuedLease | None:
        """The lease that is held."""
        return self._queue[0] if self._queue else None

    @property
    def waiting(self) -> tuple[QueuedLease, ...]:
        """The leases that are waited for, the next one first."""
        return tuple(self._queue[1:])

    def enter(self, member: str, now: float) -> QueuedLease:
        """Queue for the devices, or hold them at once where nobody does. Raises ``StateError`` when the member is not of this group."""
        if member not in self._num_leases:
            raise StateError(f"expected one of {', '.join(self._num_leases)}, whose devices these are, got {member!r}")
        lease = QueuedLease(member, now)
        self._queue.append(lease)
        if self.holder is lease:
            self._begin(lease, now)
        return lease

    def leave(self, lease: QueuedLease, now: float) -> None:
        """Release the devices, or stop waiting for them; the next in the queue holds them. Raises ``StateError`` when it left before."""
        if lease not in self._queue:
            raise StateError(f"{lease.member} has left the queue already")
        was_held = self.holder is lease
        self._queue.remove(lease)
        seconds = self._seconds_held if was_held else self._seconds_waited
        seconds[lease.member] += now - lease.since
        if was_held and self.holder is not None:
            self._begin(self.holder, now)

    def _begin(self, lease: QueuedLease, now: float) -> None:
        self._seconds_waited[lease.member] += now - lease.since
        self._num_leases[lease.member] += 1
        lease.since = now

    def statistics(self, now: float) -> LeaseStatistics:
        """Return what the leases came to so far."""
        held, waited = dict(self._seconds_held), dict(self._seconds_waited)
        for lease in self._queue:
            seconds = held if lease is self.holder else waited
            seconds[lease.member] += now - lease.since
        return LeaseStatistics(
            holder=self.holder.member if self.holder else None,
            waiting=tuple(lease.member for lease in self.waiting),
            seconds_held=held,
            seconds_waited=waited,
            num_leases=dict(self._num_leases),
        )


class DeviceGroup:
    """Devices that the members of a group use one after another.

    Args:
        members: names of the stages.
    """

    def __init__(self, members: Sequence[str]) -> None:
        self._queue = LeaseQueue(members)
        self._changes = Changes()

    @contextlib.asynccontextmanager
    async def lease(self, member: str) -> AsyncIterator[None]:
        """Hold the devices in the block, after all who asked before; leaving the block in any way releases them at once.

        Raises ``StateError`` when the member is not of this group, and when the task holds the devices already: it would wait for
        itself.
        """
        lease = await self.acquire(member)
        try:
            yield
        finally:
            self.release(lease)

    @contextlib.asynccontextmanager
    async def lease_unless_held(self, member: str) -> AsyncIterator[None]:
        """Like ``lease``; where this task holds the devices as this member already, the block is part of that lease."""
        if self._is_held_here(member):
            yield
            return
        async with self.lease(member):
            yield

    async def wanted(self) -> None:
        """Wait until a member waits for the holder. Unblocked by one that asks for a lease."""
        await self._changes.until(lambda: bool(self._queue.waiting))

    def statistics(self) -> LeaseStatistics:
        """Return who holds, who waits, and for how long; seconds of the running loop."""
        return self._queue.statistics(asyncio.get_running_loop().time())

    async def acquire(self, member: str) -> QueuedLease:
        """Wait until the member holds the devices; ``release`` the lease then. Raises what ``lease`` raises."""
        holder = self._queue.holder
        if holder is not None and self._is_held_here(holder.member):
            raise StateError(
                f"{member} asks for a lease inside of one of {holder.member}, of the same task: one is enough"
            )
        lease = self._queue.enter(member, asyncio.get_running_loop().time())
        lease.task = asyncio.current_task()
        self._changes.notify()
        try:
            await self._changes.until(lambda: self._queue.holder is lease)
        except BaseException:
            self.release(lease)
            raise
        return lease

    def release(self, lease: QueuedLease) -> None:
        """Let the next in the queue have the devices. Raises ``StateError`` when the lease was released before."""
        self._queue.leave(lease, asyncio.get_running_loop().time())
        self._changes.notify()

    def _is_held_here(self, member: str) -> bool:
        """Whether the running task holds the devices as this member."""
        holder = self._queue.holder
        return holder is not None and holder.member == member and holder.task is asyncio.current_task()


class DeviceLease:
    """A lease on a device group that one task holds across calls. Release it before waiting for anything.

    Args:
        group: the devices; None where the member has them for itself: nothing is waited for then.
        member: name of the stage.
    """

    def __init__(self, group: DeviceGroup | None = None, member: str = "") -> None:
        self._group = group
        self._member = member
        self._lease: QueuedLease | None = None

    @property
    def is_held(self) -> bool:
        """Whether there is nothing to wait for before computing."""
        return self._group is None or self._lease is not None

    async def acquire(self) -> None:
        """Hold the devices, after all who asked before; no-op where they are held. Raises what ``DeviceGroup.lease`` raises."""
        if self._group is not None and self._lease is None:
            self._lease = await self._group.acquire(self._member)

    def release(self) -> None:
        """Release the devices. No-op where they are not held."""
        lease, self._lease = self._lease, None
        if self._group is not None and lease is not None:
            self._group.release(lease)


def groups_by_member(groups: Iterable[Sequence[str]]) -> dict[str, DeviceGroup]:
    """Make one ``DeviceGroup`` per list of members; returns the group of each member."""
    found: dict[str, DeviceGroup] = {}
    for members in groups:
        group = DeviceGroup(members)
        found.update(dict.fromkeys(members, group))
    return found
