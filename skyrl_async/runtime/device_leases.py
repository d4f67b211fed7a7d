"""Turns on devices that several stages share: one holder at a time, first come first served.

    stage ──turn()──> in line ──> holds the devices ──> lets go ──> the next in line holds them

Flows in: members that want the devices. Flows out: at most one holder per group. A group knows nothing of the others, whose turns overlap
its own freely, and nothing of what is done in a turn.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyrl_async.errors import StateError

LeaseDevices = Callable[[], contextlib.AbstractAsyncContextManager[None]]
"""In the block a member has its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatistics:
    """Of one group, now."""

    holder: str | None
    """Member whose turn it is."""
    held_s: float
    """Seconds of that turn so far; 0 without one."""
    waiting: tuple[str, ...]
    """Members in line, the next one first."""
    seconds_held: Mapping[str, float]
    """Member -> seconds of all its turns, the current one included."""
    seconds_waited: Mapping[str, float]
    """Member -> seconds in line, those who are in it included."""
    num_turns: Mapping[str, int]
    """Member -> turns begun."""


@dataclass(slots=True, eq=False)
class QueuedLease:
    """Somebody's place in line."""

    member: str
    since: float
    """When it entered the line, and then when its turn began, in seconds."""


class LeaseQueue:
    """A line whose first holds; no I/O, times are the caller's, in seconds."""

    def __init__(self, members: Sequence[str]) -> None:
        self._line: list[QueuedLease] = []
        self._seconds_held = dict.fromkeys(members, 0.0)
        self._seconds_waited = dict.fromkeys(members, 0.0)
        self._num_turns = dict.fromkeys(members, 0)

    @property
    def holder(self) -> QueuedLease | None:
        """Whose turn it is."""
        return self._line[0] if self._line else None

    @property
    def waiting(self) -> tuple[QueuedLease, ...]:
        """Who is in line, the next one first."""
        return tuple(self._line[1:])

    def enter(self, member: str, now: float) -> QueuedLease:
        """Get in line, or hold at once where there is none. Raises ``StateError`` when it is not of this group."""
        if member not in self._num_turns:
            raise StateError(f"expected one of {', '.join(self._num_turns)}, whose devices these are, got {member!r}")
        place = QueuedLease(member, now)
        self._line.append(place)
        if self.holder is place:
            self._begin(place, now)
        return place

    def leave(self, place: QueuedLease, now: float) -> None:
        """Let go, or give up waiting; the next in line holds. Raises ``StateError`` when it has left already."""
        if place not in self._line:
            raise StateError(f"{place.member} has left the line already")
        has_held = self.holder is place
        self._line.remove(place)
        seconds = self._seconds_held if has_held else self._seconds_waited
        seconds[place.member] += now - place.since
        if has_held and self.holder is not None:
            self._begin(self.holder, now)

    def _begin(self, place: QueuedLease, now: float) -> None:
        self._seconds_waited[place.member] += now - place.since
        self._num_turns[place.member] += 1
        place.since = now

    def statistics(self, now: float) -> LeaseStatistics:
        """Of everything so far."""
        held, waited = dict(self._seconds_held), dict(self._seconds_waited)
        if self.holder is not None:
            held[self.holder.member] += now - self.holder.since
        for place in self.waiting:
            waited[place.member] += now - place.since
        return LeaseStatistics(
            holder=None if self.holder is None else self.holder.member,
            held_s=0.0 if self.holder is None else now - self.holder.since,
            waiting=tuple(place.member for place in self.waiting),
            seconds_held=held,
            seconds_waited=waited,
            num_turns=dict(self._num_turns),
        )


class _Waiter:
    """A task that holds the devices, or waits for them."""

    def __init__(self, place: QueuedLease) -> None:
        self.place = place
        self.task = asyncio.current_task()
        self.begun = asyncio.Event()


class DeviceGroup:
    """Devices that the members of a group use in turns.

    Args:
        members: names of the stages.
    """

    def __init__(self, members: Sequence[str]) -> None:
        self._line = LeaseQueue(members)
        self._turns: dict[QueuedLease, _Waiter] = {}
        self._entered = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lease(self, member: str) -> AsyncIterator[None]:
        """Hold the devices in the block, after all who asked before; leaving it in any way lets go, at once.

        Raises ``StateError`` when the member is not of this group, and when the task holds the devices already: it would wait for
        itself.
        """
        turn = await self._begun(member)
        try:
            yield
        finally:
            self._leave(turn)

    @contextlib.asynccontextmanager
    async def lease_unless_held(self, member: str) -> AsyncIterator[None]:
        """The same; in a turn of the member that this task holds already, the block is a part of that one."""
        if self._is_held_here(member):
            yield
            return
        async with self.lease(member):
            yield

    async def wanted(self) -> None:
        """Wait until a member is in line behind the holder. Unblocked by one that asks for a turn."""
        while not self._line.waiting:
            self._entered.clear()
            await self._entered.wait()

    def statistics(self) -> LeaseStatistics:
        """Who holds, who waits, and for how long; seconds of the running loop."""
        return self._line.statistics(asyncio.get_running_loop().time())

    async def _begun(self, member: str) -> _Waiter:
        turn = self._enter(member)
        try:
            await turn.begun.wait()
        except BaseException:
            self._leave(turn)
            raise
        return turn

    def _enter(self, member: str) -> _Waiter:
        holder = self._line.holder
        if holder is not None and self._is_held_here(holder.member):
            raise StateError(
                f"{member} asks for a turn inside of one of {holder.member}, of the same task: one is enough"
            )
        place = self._line.enter(member, asyncio.get_running_loop().time())
        turn = self._turns[place] = _Waiter(place)
        self._entered.set()
        self._tell()
        return turn

    def _is_held_here(self, member: str) -> bool:
        """Whether the running task holds the devices as this member."""
        holder = self._line.holder
        if holder is None or holder.member != member:
            return False
        return self._turns[holder].task is asyncio.current_task()

    def _leave(self, turn: _Waiter) -> None:
        self._line.leave(turn.place, asyncio.get_running_loop().time())
        del self._turns[turn.place]
        self._tell()

    def _tell(self) -> None:
        """Let the holder know that it is."""
        if self._line.holder is not None:
            self._turns[self._line.holder].begun.set()


class DeviceLease:
    """A lease on a device group that one task holds across calls. Release it before waiting for anything.

    Args:
        group: whose devices; None where the member has them for itself: then nothing is waited for.
        member: name of the stage.
    """

    def __init__(self, group: DeviceGroup | None = None, member: str = "") -> None:
        self._group = group
        self._member = member
        self._turn: _Waiter | None = None

    @property
    def is_held(self) -> bool:
        """Whether there is nothing to wait for before computing."""
        return self._group is None or self._turn is not None

    async def acquire(self) -> None:
        """Hold the devices, after all who asked before; nothing to do where they are held. Raises what ``DeviceGroup.turn`` raises."""
        if self._group is not None and self._turn is None:
            self._turn = await self._group._begun(self._member)

    def release(self) -> None:
        """Let go. Idempotent."""
        turn, self._turn = self._turn, None
        if self._group is not None and turn is not None:
            self._group._leave(turn)


def groups_by_member(groups: Iterable[Sequence[str]]) -> dict[str, DeviceGroup]:
    """One ``DeviceGroup`` per list of members, for each of these."""
    found: dict[str, DeviceGroup] = {}
    for members in groups:
        group = DeviceGroup(members)
        found.update(dict.fromkeys(members, group))
    return found
