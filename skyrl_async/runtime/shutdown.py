"""Ending a run early and well: what signals do, the request that follows, and the waits that it cuts short.

    signal ──once, while it trains──> request ──at once──> evaluations end
                                       ├──after a grace──> engines that have not answered are no longer waited for
                                       └──after the patience──> waits for groups end: a step that lacks them is left
    once, at another time     what boots is cancelled; what finishes has the time that is left
    twice, or out of time     cancelled at once
    while it is cleaned up    nothing more: cleaning up has deadlines of its own

Knows the phases of a run, not what they do, nor what is waited for.
"""

import asyncio
import logging
import signal
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import Self

from skyrl_async.errors import SkyRLAsyncError
from skyrl_async.runtime.tasks import is_being_cancelled

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""Seconds that an engine has to answer a call at the end of a run."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_SHARE = 0.5
"""Part of the shutdown timeout after which the step is left."""
_SAVED_SHARE = 0.75
"""Part of the shutdown timeout after which the run is cancelled; the rest is for cleaning up."""


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
        if self.failure is None and not self.is_requested and not is_being_cancelled():
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


class Phase(Enum):
    """What a run is doing, as far as a signal is concerned."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHING = "finishing"
    ENDING = "ending"


class Interruption:
    """Handles both signals in its block; ``attached`` sets the task to interrupt.

    Args:
        timeout_s: seconds from the first signal to the end of the run, cleaning up included.
    """

    def __init__(self, timeout_s: float) -> None:
        self.shutdown = ShutdownRequest()
        self.signal: signal.Signals | None = None
        """The first signal; None before."""
        self._timeout_s = timeout_s
        self._phase = Phase.STARTING
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self._has_requested = False
        self._previous: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """Exit code as shells define it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Interrupt the current task while the block runs."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            yield
        finally:
            self._loop = None

    @contextmanager
    def ending_afterwards(self) -> Iterator[None]:
        """Enter the phase ``ENDING`` after the block, however it ends."""
        try:
            yield
        finally:
            self._phase = Phase.ENDING

    def enter(self, phase: Phase) -> None:
        """Note the phase that the run begins."""
        self._phase = phase

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Runs between any two instructions of the main thread: hand the signal to the loop, unless the loop hangs or is not running."""
        if self.signal is None:
            self.signal = signal.Signals(number)
        if self._loop is None or self._is_scheduled:
            raise KeyboardInterrupt
        self._is_scheduled = True
        self._loop.call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        self._is_scheduled = False
        if self._loop is None or self.signal is None:
            return
        name = self.signal.name
        if self._phase is Phase.ENDING:
            logger.warning("%s: the run is being ended; it takes some seconds", name)
        elif self._phase is Phase.STARTING or self._has_requested:
            self._end(f"{name}: the run ends at once")
        else:
            self._has_requested = True
            self._loop.call_later(self._timeout_s * _SAVED_SHARE, self._end, f"{name}: time is up")
            patience_s = self._timeout_s * _PATIENCE_SHARE
            self.shutdown.request(patience_s)
            if self._phase is Phase.TRAINING:
                said = f"{name}: finishing the step (for at most {patience_s:g} s), then saving"
            else:
                said = f"{name}: training is over, only the run's files are finished"
            logger.warning("%s; once more ends the run at once", said)

    def _end(self, why: str) -> None:
        if self._phase is not Phase.ENDING and self._task is not None:
            self._phase = Phase.ENDING
            logger.warning("%s", why)
            self._task.cancel()
