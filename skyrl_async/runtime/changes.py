"""Waiting for a condition without a lock: state changes synchronously, and each change wakes all waiting tasks."""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes tasks that wait for a condition.

    changes = Changes()
    await changes.until(lambda: not self._queue)      # one task
    self._queue.clear(); changes.notify()             # another one
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiting tasks: the state may have changed."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()

    async def next(self) -> None:
        """Wait for the next change."""
        await self._next.wait()

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until ``is_true()``; returns at once where it is. Tasks are not woken in order: for an order use ``Channel``."""
        while not is_true():
            await self.next()
