"""Ending a run early and well: the wish to stop, and the waits that it cuts short.

    ask ──at once──> evaluations end
     └──after the patience──> waits for groups end: the step that lacks them is left

Flows in: the wish. Flows out: ``StopAsked`` in whoever waits. Knows neither signals nor what is waited for.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StopAsked(Exception):
    """What was inside ``StopRequest.cut_short`` was cut short: the run is to end."""


class StopRequest:
    """Asked for once, from the loop that the run is in."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._patience_s = 0.0
        self._waits: dict[asyncio.Timeout, bool] = {}

    @property
    def is_asked(self) -> bool:
        """Whether nothing new should begin."""
        return self._asked_at is not None

    def ask(self, patience_s: float) -> None:
        """End what is cut short now, and what is patient in so many seconds. The first call counts."""
        if self.is_asked:
            return
        self._asked_at, self._patience_s = asyncio.get_running_loop().time(), patience_s
        for wait, is_patient in self._waits.items():
            wait.reschedule(self._end(is_patient))

    @asynccontextmanager
    async def cut_short(self, *, is_patient: bool = False) -> AsyncIterator[None]:
        """End what is inside with ``StopAsked`` once a stop was asked for; with ``is_patient``, once its patience is over."""
        end = self._end(is_patient)
        if end is not None and end <= asyncio.get_running_loop().time():
            raise StopAsked
        try:
            async with asyncio.timeout_at(end) as wait:
                self._waits[wait] = is_patient
                try:
                    yield
                finally:
                    del self._waits[wait]
        except TimeoutError:
            if not wait.expired():
                raise
            raise StopAsked from None

    def _end(self, is_patient: bool) -> float | None:
        """Seconds on the loop's clock; None when no stop was asked for."""
        if self._asked_at is None:
            return None
        return self._asked_at + (self._patience_s if is_patient else 0.0)
