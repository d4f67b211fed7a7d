"""Finished groups between generation and training: the oldest admitted first, bounded, closable.

    put ──> (preparing: a channel to the stages that prepare groups ──> put_prepared) ──> get

Flows in: groups in the order they finish. Flows out: groups in the order they were admitted, each when it is prepared and the
consumer's rule lets it go. Does not know versions or the bound, that is the rule's business; nor what preparing is.
"""

import asyncio
import heapq
from collections.abc import Callable

from skyrl_async.errors import StateError
from skyrl_async.runtime.changes import Changes
from skyrl_async.runtime.stages import Channel
from skyrl_async.types import Group


class GroupBuffer:
    """One consumer, any number of producers.

    Args:
        max_groups: most groups held; the staleness credits guarantee it, so one more is a broken invariant.
    """

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._heap: list[tuple[int, Group]] = []
        self._unprepared: dict[int, Group] = {}
        self._preparing: Channel[Group] | None = None
        self._is_closed = False
        self._changes = Changes()
        self._held_seconds = 0.0

    def prepare(self) -> Channel[Group]:
        """Have every group that is put from now on prepared: it comes out of this channel, and goes to ``put_prepared``."""
        self._preparing = self._preparing or Channel(self._max_groups)
        return self._preparing

    def put(self, group: Group) -> None:
        """Add a finished group. Raises ``StateError`` when closed or full."""
        if self._is_closed:
            raise StateError(f"group {group.admission_index} ({group.uid}) came after the buffer was closed")
        if len(self) >= self._max_groups:
            raise StateError(f"the buffer holds {len(self)} groups, which is all that the staleness credits allow")
        if self._preparing is None:
            heapq.heappush(self._heap, (group.admission_index, group))
        else:
            self._unprepared[group.admission_index] = group
            self._preparing.put_nowait(group)
        self.notify()

    async def put_prepared(self, group: Group) -> None:
        """A group that was put is prepared: ``group`` takes its place. Raises ``StateError`` when it was not put. Never waits."""
        if self._unprepared.pop(group.admission_index, None) is None:
            raise StateError(f"group {group.admission_index} ({group.uid}) was not being prepared")
        heapq.heappush(self._heap, (group.admission_index, group))
        self.notify()

    def close(self) -> None:
        """No group will follow: what is held can still be taken. Idempotent."""
        self._is_closed = True
        if self._preparing is not None:
            self._preparing.close()
        self.notify()

    def notify(self) -> None:
        """What the consumer's rule depends on has changed: let it look again."""
        self._changes.notify()

    async def get(self, is_allowed: Callable[[Group], bool]) -> Group | None:
        """Wait for the oldest admitted group held and for ``is_allowed`` to let it go; None when closed and empty.

        A closed buffer of which every group is prepared gives them out without asking. Unblocked by ``put``, ``notify`` and ``close``.
        """
        loop = asyncio.get_running_loop()
        while not self.can_give(is_allowed):
            is_held_back = bool(self._heap)
            started = loop.time()
            try:
                await self._changes.next()
            finally:
                if is_held_back:
                    self._held_seconds += loop.time() - started
        return self._pop() if self._heap else None

    async def emptied(self) -> None:
        """Wait until the last group held is taken. Unblocked by ``get``."""
        await self._changes.until(lambda: not len(self))

    def can_give(self, is_allowed: Callable[[Group], bool]) -> bool:
        """Whether ``get`` would return at once."""
        return self._may_give(is_allowed) or (self._is_closed and not len(self))

    def _pop(self) -> Group:
        group = heapq.heappop(self._heap)[1]
        self._changes.notify()
        return group

    def _may_give(self, is_allowed: Callable[[Group], bool]) -> bool:
        is_all_there = self._is_closed and not self._unprepared
        return bool(self._heap) and (is_all_there or is_allowed(self._oldest))

    def snapshot(self) -> tuple[Group, ...]:
        """The groups held, oldest admitted first, for a checkpoint."""
        groups = (*(group for _, group in self._heap), *self._unprepared.values())
        return tuple(sorted(groups, key=lambda group: group.admission_index))

    @property
    def max_groups(self) -> int:
        """Most groups held."""
        return self._max_groups

    @property
    def held_seconds(self) -> float:
        """Seconds the consumer waited although a group was there, since it was not allowed to take it."""
        return self._held_seconds

    def __len__(self) -> int:
        return len(self._heap) + len(self._unprepared)

    def statistics(self) -> dict[str, float]:
        """Groups held, and seconds the consumer was held back from them."""
        return {"buffer_groups": float(len(self)), "held_seconds": self._held_seconds}

    @property
    def _oldest(self) -> Group:
        return self._heap[0][1]
