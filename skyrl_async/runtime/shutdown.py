"""Ending a run early and well: the request, and the waits that it cuts short.

    request ──at once──> evaluations end
     ├──after a grace──> engines that have not answered are no longer waited for
     └──after the patience──> waits for groups end: a step that lacks them is left

Knows neither signals nor what is waited for.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from skyrl_async.errors import SkyRLAsyncError

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""Seconds that an engine has to answer a call at the end of a run."""


class ShutdownRequested(Exception):
    """The block of ``ShutdownRequest.interruptible`` was cut short, because the run is to end."""


class ShutdownRequest:
    """Requests a shutdown, once, from the run's event loop."""

    def __init__(self) -> None:
        self._requested_at: float | None = None
        self._patience_s = 0.0
        self._waits: dict[asyncio.Timeout, Callable[[], float | None]] = {}
        """Wait -> when it ends, in seconds on the loop's clock; None before a shutdown is requested."""
        self.failure: Exception | None = None
        """The first failure of the run; later ones do not replace it."""

    @property
    def is_requested(self) -> bool:
        """Whether nothing new should begin."""
        return self._requested_at is not None

    def request(self, patience_s: float) -> None:
        """Interrupt waits now, and waits for the step after ``patience_s`` seconds. The first call counts."""
        if self.is_requested:
            return
        self._requested_at, self._patience_s = asyncio.get_running_loop().time(), patience_s
        for wait, end in self._waits.items():
            wait.reschedule(end())

    def remember(self, error: Exception) -> None:
        """Note a failure of the run. Ignored after another failure, in a shutdown, and in a cancelled task."""
        task = asyncio.current_task()
        is_cancelled = task is not None and task.cancelling() > 0
        if self.failure is None and not self.is_requested and not is_cancelled:
            self.failure = error

    def fail(self, error: SkyRLAsyncError) -> None:
        """End a run that cannot continue: interrupt every wait at once, and let the trainer save.

        Ignored once a shutdown is requested.
        """
        if self.is_requested:
            logger.warning("during the shutdown: %s", error)
            return
        logger.error("the run will be saved and end: %s", error)
        self.remember(error)
        self.request(0.0)

    @asynccontextmanager
    async def interruptible(self, *, wait_for_step: bool = False, grace_s: float = 0.0) -> AsyncIterator[None]:
        """End the block with ``ShutdownRequested`` once a shutdown is requested; with ``wait_for_step``, once its patience is over.

        The block has ``grace_s`` more seconds then, also where it begins later.
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
