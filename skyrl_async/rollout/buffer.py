"""Finished groups between generation and training: the oldest admitted first, bounded, closable.

    put ──> finished: a channel to the stages that prepare groups ──> put_prepared ──> get

Groups come in the order they finish, and leave in the order they were admitted, each after it is prepared and the consumer's rule allows
it. Does not know versions, the bound, or the preparation.
"""

import asyncio
import heapq
from collections.abc import Callable

from skyrl_async.errors import StateError
from skyrl_async.runtime.stages import Channel
from skyrl_async.runtime.tasks import Changes
from skyrl_async.types import Group


class GroupBuffer:
    """One consumer, any number of producers.

    Args:
        max_groups: most groups held. The staleness manager admits no more, so one more is a broken invariant.
    """

    def __init__(self, max_groups: int) -> None:
        self.max_groups = max_groups
        self._heap: list[tuple[int, Group]] = []
        self._unprepared: dict[int, Group] = {}
        self.finished = Channel[Group](max_groups)
        """Groups to be prepared; ``put_prepared`` brings them back."""
        self._is_closed = False
        self._changes = Changes()
        self.held_seconds = 0.0
        """Seconds that the consumer waited although the buffer had a group, because the rule did not allow it."""

    def put(self, group: Group) -> None:
        """Add a finished group. Raises ``StateError`` when closed or full."""
        if self._is_closed:
            raise StateError(f"group {group.admission_index} ({group.uid}) came after the buffer was closed")
        if len(self) >= self.max_groups:
            raise StateError(f"the buffer holds {len(self)} groups, which is all that the staleness manager admits")
        self._unprepared[group.admission_index] = group
        self.finished.put_nowait(group)

    async def put_prepared(self, group: Group) -> None:
        """Replace a group that was put by the prepared one. Raises ``StateError`` if it was not put. Never waits."""
        if self._unprepared.pop(group.admission_index, None) is None:
            raise StateError(f"group {group.admission_index} ({group.uid}) was not being prepared")
        heapq.heappush(self._heap, (group.admission_index, group))
        self.notify()

    def close(self) -> None:
        """No group will follow; held groups can still be taken. Idempotent."""
        self._is_closed = True
        self.finished.close()
        self.notify()

    def notify(self) -> None:
        """The consumer's rule may have another answer now: ask it again."""
        self._changes.notify()

    async def get(self, is_allowed: Callable[[Group], bool]) -> Group | None:
        """Wait until ``is_allowed`` is true for the oldest admitted group held, and take it; None when closed and empty.

        After ``close``, once every group is prepared, the rule is not asked. Unblocked by ``put``, ``notify`` and ``close``.
        """
        loop = asyncio.get_running_loop()
        while not self.can_give(is_allowed):
            is_held_back, started = bool(self._heap), loop.time()
            await self._changes.next()
            self.held_seconds += (loop.time() - started) * is_held_back
        if not self._heap:
            return None
        group = heapq.heappop(self._heap)[1]
        self.notify()
        return group

    async def emptied(self) -> None:
        """Wait until the last group held is taken. Unblocked by ``get``."""
        await self._changes.until(lambda: not len(self))

    def can_give(self, is_allowed: Callable[[Group], bool]) -> bool:
        """Whether ``get`` would return at once."""
        is_complete = self._is_closed and not self._unprepared
        return is_complete or (bool(self._heap) and is_allowed(self._heap[0][1]))

    def snapshot(self) -> tuple[Group, ...]:
        """The groups held, oldest admitted first, for a checkpoint."""
        groups = (*(group for _, group in self._heap), *self._unprepared.values())
        return tuple(sorted(groups, key=lambda group: group.admission_index))

    def __len__(self) -> int:
        return len(self._heap) + len(self._unprepared)
