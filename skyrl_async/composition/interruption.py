"""What Ctrl-C and SIGTERM do to a run.

    once, while it trains     the stop request: the step is finished or left, a checkpoint written
    once, at another time     what boots is cancelled; what finishes has the time that is left
    twice, or out of time     cancelled at once
    while it is cleaned up    nothing more: cleaning up has deadlines of its own

Flows in: signals. Flows out: a stop request, a cancellation, an exit code. Knows phases of a run, and nothing of what they do.
"""

import asyncio
import logging
import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Self

from skyrl_async.runtime.shutdown import ShutdownRequest

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_SHARE = 0.5
_SAVED_SHARE = 0.75
"""Of the shutdown timeout: until the step is left, and until nothing is waited for any more. The rest is for cleaning up."""


class Phase(Enum):
    """What a run is doing, as far as a signal is concerned."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHING = "finishing"
    ENDING = "ending"


class Interruption:
    """The handler of both signals while inside; ``attach`` tells it what it interrupts.

    Args:
        timeout_s: from the first signal until nothing is waited for, cleaning up included.
    """

    def __init__(self, timeout_s: float) -> None:
        self.shutdown = ShutdownRequest()
        self.signal: signal.Signals | None = None
        """The first one that came."""
        self._timeout_s = timeout_s
        self._phase = Phase.STARTING
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_on_its_way = False
        self._has_asked = False
        self._previous: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """As shells say it: 130 for SIGINT, 143 for SIGTERM."""
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
        """Interrupt the current task while inside."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            yield
        finally:
            self._loop = None

    @contextmanager
    def ending_afterwards(self) -> Iterator[None]:
        """What comes after what is inside, however that ends, is the run's end."""
        try:
            yield
        finally:
            self._phase = Phase.ENDING

    def enter(self, phase: Phase) -> None:
        """Say what the run does from now on."""
        self._phase = phase

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Between any two instructions of the main thread: hand it to the loop, unless that is stuck or not there."""
        if self.signal is None:
            self.signal = signal.Signals(number)
        if self._loop is None or self._is_on_its_way:
            raise KeyboardInterrupt
        self._is_on_its_way = True
        self._loop.call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        self._is_on_its_way = False
        if self._loop is None or self.signal is None:
            return
        name = self.signal.name
        if self._phase is Phase.ENDING:
            logger.warning("%s: the run is being ended; it takes some seconds", name)
        elif self._phase is Phase.STARTING or self._has_asked:
            self._end(f"{name}: the run ends at once")
        else:
            self._has_asked = True
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
