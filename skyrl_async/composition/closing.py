"""Ends the parts of a run, each within a deadline: a part that hangs or fails is reported and does not keep others from ending."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Any

import psutil

from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.runtime.tasks import first_failure

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0


class ClosingStack(contextlib.AsyncExitStack):
    """An exit stack that cannot hide what ended the run: errors and hangs of its callbacks are collected instead of raised, and so are
    errors of its contexts after a failure of the run.

    Args:
        timeout_s: deadline of each asynchronous callback.
    """

    def __init__(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self.failures: list[str] = []
        self.threads = DaemonThreads("end")
        """Run blocking callbacks; busy after the end where one hangs."""

    def push_async_callback(  # type: ignore[override]
        self, callback: Callable[..., Awaitable[Any]], /, *arguments: Any, **named: Any
    ) -> None:
        """Await ``callback`` at the end, within the deadline."""
        self._push(callback.__qualname__, lambda: callback(*arguments, **named))

    def callback_in_thread(self, name: str, callback: Callable[[], None]) -> None:
        """Run a blocking callback in a thread at the end, within the deadline; a call that hangs ends with the process."""
        self._push(name, lambda: asyncio.wrap_future(self.threads.submit(callback)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Raise what ended the block, unless a failing context ended it by cancellation: then raise that failure."""
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


def leave_process(code: int) -> None:
    """Kill all descendants and end this process at once: the last resort while a thread hangs in foreign code.

    An interpreter that ends normally under such a thread crashes (Ray's, waiting for a frozen process: exit code 139 instead of the
    run's), and processes of an abandoned Ray outlive it by minutes.
    """
    kill_descendants()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def descendants() -> frozenset[psutil.Process]:
    """Return the processes that this process started, directly or indirectly."""
    return frozenset(psutil.Process().children(recursive=True))


def kill_descendants(but: Collection[psutil.Process] = ()) -> None:
    """Kill all descendants, except ``but``; ignores those that have ended."""
    for process in descendants().difference(but):
        with contextlib.suppress(psutil.Error):
            process.kill()
