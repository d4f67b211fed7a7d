"""Ends the parts of a run, each within a deadline: what hangs or fails is named and keeps nothing else from being ended.

Flows in: what ends a part. Flows out: the names of those that did not end. Does not know what the parts are.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Any

import psutil

from skyrl_async.runtime.tasks import first_failure

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0


class ClosingStack(contextlib.AsyncExitStack):
    """An exit stack that cannot hide what ended the run: errors and hangs of its callbacks are collected, not raised, and so are errors of
    its contexts where the run has failed before.

    Args:
        timeout_s: for each asynchronous callback.
    """

    def __init__(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self.failures: list[str] = []
        self._threads: list[threading.Thread] = []

    @property
    def has_unfinished_thread(self) -> bool:
        """Whether a call has not come back from a thread."""
        return any(thread.is_alive() for thread in self._threads)

    def push_async_callback(  # type: ignore[override]
        self, callback: Callable[..., Awaitable[Any]], /, *arguments: Any, **named: Any
    ) -> None:
        """Await ``callback`` at the end, within the deadline."""
        self._push(callback.__qualname__, lambda: callback(*arguments, **named))

    def callback_in_thread(self, name: str, callback: Callable[[], None]) -> None:
        """The same for a call that blocks; one that hangs stays behind in a thread that ends with the process."""
        self._push(name, lambda: self._in_daemon_thread(name, callback))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """What ended the block is raised, unless it is the cancellation by which a context's failure ended it."""
        try:
            return await super().__aexit__(kind, error, trace)
        except Exception as later:
            if error is None or first_failure(BaseExceptionGroup("", [error, later])) is later:
                raise
            if later is not error:
                self._fail(f"{type(later).__name__}: {later}")
            raise error from error.__cause__

    def _push(self, name: str, end: Callable[[], Awaitable[Any]]) -> None:
        async def end_in_time() -> None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await end()
            except TimeoutError:
                self._fail(f"{name} did not end within {self._timeout_s:g} s")
            except Exception as error:
                self._fail(f"{name} failed: {type(error).__name__}: {error}")

        super().push_async_callback(end_in_time)

    def _fail(self, failure: str) -> None:
        logger.error("while the run was ended: %s", failure)
        self.failures.append(failure)

    async def _in_daemon_thread(self, name: str, function: Callable[[], None]) -> None:
        """Wait for a call in a thread for which nobody waits when the process exits, unlike asyncio's own."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(error: Exception | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        def run() -> None:
            error: Exception | None = None
            try:
                function()
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # nobody waits any more, and the loop is closed
                loop.call_soon_threadsafe(tell, error)

        thread = threading.Thread(target=run, name=f"end-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        await ended


def leave_process(code: int) -> None:
    """The last resort, for a process with a thread that is stuck in foreign code: it ends, and what descends from it before.

    An interpreter that ends under such a thread crashes (Ray's, waiting for a frozen process: exit code 139 instead of the run's), and
    agents of a Ray that was left to itself outlive it by minutes.
    """
    kill_descendants()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def descendants() -> frozenset[psutil.Process]:
    """Every process that this one started, and what these started."""
    return frozenset(psutil.Process().children(recursive=True))


def kill_descendants(but: Collection[psutil.Process] = ()) -> None:
    """Kill them all, ``but`` for these; one that is gone already is no error."""
    for process in descendants().difference(but):
        with contextlib.suppress(psutil.Error):
            process.kill()
