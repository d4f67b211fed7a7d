"""One call of a surface, carried out for everyone who waits for it: the request that asked, and its resends.

Flows in: a coroutine that emits events or returns a reply. Flows out: both, to any number of followers, again and again. When
the last follower leaves before the end the work is cancelled: nobody samples for nobody. Does not know HTTP or sessions.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from skyrl_async.errors import InferenceError

logger = logging.getLogger(__name__)

Event = Mapping[str, Any]
Emit = Callable[[Event], None]
"""Sends one event on its way."""
Produce = Callable[[Emit], Coroutine[Any, Any, Event | None]]
"""Emits events, and returns the whole reply where there is one."""

_running: set["asyncio.Task[Event | None]"] = set()
"""Keeps tasks alive that everybody has left: they still have generations to cancel."""


class SharedRequest:
    """Runs ``produce`` from the first follower's coming to the last one's leaving, at the longest.

    Args:
        produce: what is to be done, once.
        on_delivered: called once, when a follower says that a client has everything.
        on_left: called when nobody follows any more though no client has everything; the work is cancelled then.
    """

    def __init__(
        self,
        produce: Produce,
        *,
        on_delivered: Callable[["SharedRequest"], None] = lambda _: None,
        on_left: Callable[["SharedRequest"], None] = lambda _: None,
    ) -> None:
        self._produce = produce
        self._on_delivered = on_delivered
        self._on_left = on_left
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[Event | None] | None = None
        self._num_followers = 0
        self._is_delivered = False
        self._ended_by: Exception | None = None

    @property
    def is_done(self) -> bool:
        """It has ended, well or not."""
        return self._task is not None and self._task.done()

    @property
    def has_failed(self) -> bool:
        """It has ended, and not well: ``reply`` raises."""
        task = self._task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Keep the work going within the block."""
        task = self._task = self._task or self._start()
        self._num_followers += 1
        try:
            yield
        finally:
            self._num_followers -= 1
            if self._num_followers == 0 and not self._is_delivered:
                task.cancel()
                self._on_left(self)

    async def reply(self) -> Event | None:
        """What ``produce`` returned. Raises what it raised, or the reason it was ended for."""
        assert self._task is not None
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            follower = asyncio.current_task()
            if follower is not None and follower.cancelling():
                raise
            raise self._ended_by or InferenceError("the work on this request was cancelled from inside") from None

    async def events(self, num_seen: int, timeout_s: float) -> list[Event]:
        """The events after the first ``num_seen``, as soon as there is one; none when the work has ended, or after ``timeout_s``."""
        if len(self._events) == num_seen and not self.is_done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        return self._events[num_seen:]

    def end(self, reason: Exception) -> None:
        """Cut it off for all followers, unless it has ended: their ``reply`` raises ``reason``."""
        self._ended_by = reason
        if self._task is not None:
            self._task.cancel()

    def delivered(self) -> None:
        """A client has the whole of it, which it has only of work that ended well."""
        if not self._is_delivered:
            self._is_delivered = True
            self._on_delivered(self)

    def recorded(self) -> Produce:
        """The outcome again, without what made it. Only of work that has ended well."""
        assert self._task is not None
        events, reply = tuple(self._events), self._task.result()

        async def replay(emit: Emit) -> Event | None:
            for event in events:
                emit(event)
            return reply

        return replay

    def _start(self) -> "asyncio.Task[Event | None]":
        # Followers come and go in tasks of their own, none of which can own this one; the last to leave ends it.
        task = asyncio.create_task(self._produce(self._emit), name="endpoint-work")
        _running.add(task)
        task.add_done_callback(self._on_done)
        if self._ended_by is not None:
            task.cancel()
        return task

    def _on_done(self, task: "asyncio.Task[Event | None]") -> None:
        _running.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            traceback.clear_frames(failure.__traceback__)  # they hold the request, and the task holds them
        if failure is not None and not self._num_followers:
            logger.info("a request failed after its client had left: %r", failure)
        self._notify()

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
