"""Ending a run early and well: the wish to stop, and the waits that it cuts short.

    ask ──at once──> evaluations end
     ├──after a grace──> engines that have not answered are no longer waited for
     └──after the patience──> waits for groups end: the step that lacks them is left

Flows in: the request, or an error after which the run cannot go on. Flows out: ``ShutdownRequested`` in whoever waits. Knows neither
signals nor what is waited for.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from skyrl_async.errors import SkyRLAsyncError

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""What an engine has to answer what is asked of it at the end of a run."""


class ShutdownRequested(Exception):
    """What was inside ``ShutdownRequest.interruptible`` was cut short: the run is to end."""


class ShutdownRequest:
    """Asked for once, from the loop that the run is in."""

    def __init__(self) -> None:
        self._requested_at: float | None = None
        self._patience_s = 0.0
        self._waits: dict[asyncio.Timeout, Callable[[], float | None]] = {}
        """When each ends, in seconds on the loop's clock; None: not before a stop is asked for."""
        self.failure: Exception | None = None
        """What the run failed of first; whatever fails later does not replace it."""

    @property
    def is_requested(self) -> bool:
        """Whether nothing new should begin."""
        return self._requested_at is not None

    def request(self, patience_s: float) -> None:
        """End what is cut short now, and what is patient in so many seconds. The first call counts."""
        if self.is_requested:
            return
        self._requested_at, self._patience_s = asyncio.get_running_loop().time(), patience_s
        for wait, end in self._waits.items():
            wait.reschedule(end())

    def remember(self, error: Exception) -> None:
        """The run fails of ``error``. Ignored where it has failed before, or where that comes of a stop or of a cancellation."""
        task = asyncio.current_task()
        is_cancelled = task is not None and task.cancelling() > 0
        if self.failure is None and not self.is_requested and not is_cancelled:
            self.failure = error

    def fail(self, error: SkyRLAsyncError) -> None:
        """The run cannot go on, and nothing that it waits for is to be waited for; what there is can be saved.

        Ignored once a stop was asked for.
        """
        if self.is_requested:
            logger.warning("while the run was being stopped: %s", error)
            return
        logger.error("the run is to be saved and to end: %s", error)
        self.remember(error)
        self.request(0.0)

    @asynccontextmanager
    async def interruptible(self, *, wait_for_step: bool = False, grace_s: float = 0.0) -> AsyncIterator[None]:
        """End what is inside with ``ShutdownRequested`` once a stop was asked for; with ``wait_for_step``, once its patience is over.

        What is inside then has ``grace_s`` more, also where it begins after that.
        """
        begun = asyncio.get_running_loop().time()

        def end() -> float | None:
            if self._requested_at is None:
                return None
            return max(begun, self._requested_at + (self._patience_s if wait_for_step else 0.0)) + grace_s

        if (at := end()) is not None and at <= begun:
            raise ShutdownRequested
        try:
            async with asyncio.timeout_at(at) as wait:
                self._waits[wait] = end
                try:
                    yield
                finally:
                    del self._waits[wait]
        except TimeoutError:
            if not wait.expired():
                raise
            raise ShutdownRequested from None
