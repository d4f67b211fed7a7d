"""Waiting until a state is true, without a lock: states change synchronously, and each change wakes whoever waits."""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes tasks that wait for a state.

    changes = Changes()
    await changes.until(lambda: not self._queue)      # one task
    self._queue.clear(); changes.notify()             # another one
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """The state may be another one now."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()

    async def next(self) -> None:
        """Wait for the next change."""
        await self._next.wait()

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until ``is_true``; returns at once where it is. Nobody comes first: for an order use ``Channel``."""
        while not is_true():
            await self.next()
