"""One request that is carried out once and answers several connections: its own, and those of its resends.

The work is cancelled when the last connection closes before the end: nothing is sampled for nobody. Does not know HTTP or sessions.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from skyrl_async.errors import InferenceError
from skyrl_async.runtime.tasks import Changes, is_being_cancelled

logger = logging.getLogger(__name__)

Event = Mapping[str, Any]
Emit = Callable[[Event], None]
"""Passes one event on."""
Produce = Callable[[Emit], Coroutine[Any, Any, None]]
"""Emits an answer's events; a whole reply is one."""

_running: set["asyncio.Task[None]"] = set()
"""Keeps tasks without connections alive: they still have generations to cancel."""


@dataclass(eq=False)
class SharedRequest:
    """Runs ``produce`` once, from the first connection on, and passes its outcome to every connection."""

    produce: Produce
    _: KW_ONLY
    on_delivered: Callable[["SharedRequest"], None] = lambda _: None
    """Called once, when a client has everything."""
    on_abandoned: Callable[["SharedRequest"], None] = lambda _: None
    """Called when the last connection closes before a client has everything; the work is cancelled then."""
    _events: list[Event] = field(default_factory=list, init=False)
    _changes: Changes = field(default_factory=Changes, init=False)
    _task: "asyncio.Task[None] | None" = field(default=None, init=False)
    _num_connections: int = field(default=0, init=False)
    _is_delivered: bool = field(default=False, init=False)
    _cancelled_for: Exception | None = field(default=None, init=False)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task is not None and self._task.done()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with a failure: ``ended`` raises."""
        task = self._task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Start the work, or keep it going, while the block runs."""
        task = self._task = self._task or self._start()
        self._num_connections += 1
        try:
            yield
        finally:
            self._num_connections -= 1
            if self._num_connections == 0 and not self._is_delivered:
                task.cancel()
                self.on_abandoned(self)

    async def ended(self) -> list[Event]:
        """All events, once the work has ended. Raises what ``produce`` raised, or the reason given to ``cancel``."""
        assert self._task is not None
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise self._cancelled_for or InferenceError("the work on this request was cancelled from inside") from None
        return self._events

    async def events(self, num_seen: int, timeout_s: float) -> list[Event]:
        """The events after the first ``num_seen``, as soon as there is one; none when the work has ended, or after ``timeout_s``."""
        if len(self._events) == num_seen and not self.is_done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changes.next()
        return self._events[num_seen:]

    def cancel(self, reason: Exception) -> None:
        """Cancel the work, unless it has ended: ``ended`` raises ``reason`` on every connection."""
        self._cancelled_for = reason
        if self._task is not None:
            self._task.cancel()

    def delivered(self) -> None:
        """Record that a client has the whole outcome; the work ended well."""
        if not self._is_delivered:
            self._is_delivered = True
            self.on_delivered(self)

    def replay(self) -> Produce:
        """Produces the recorded events again. Call it only if the work ended well."""
        events = tuple(self._events)

        async def replay(emit: Emit) -> None:
            for event in events:
                emit(event)

        return replay

    def _start(self) -> "asyncio.Task[None]":
        # Connections come and go in tasks of their own, none of which can own this one; the last to close cancels it.
        task = asyncio.create_task(self.produce(self._emit), name="endpoint-request")
        _running.add(task)
        task.add_done_callback(self._on_done)
        if self._cancelled_for is not None:
            task.cancel()
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        _running.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            traceback.clear_frames(failure.__traceback__)  # they hold the request, and the task holds them
        if failure is not None and not self._num_connections:
            logger.info("a request failed after its client had disconnected: %r", failure)
        self._changes.notify()

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._changes.notify()
