"""Deadlines that stand still while there is nothing to sample from.

Flows in: when that begins and ends. Flows out: timeouts that count the rest of the time. Does not know engines.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl_async.runtime.outages import Outages


class Deadlines:
    """Of everything that waits for the same engines."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, float] = {}
        """Deadline -> seconds that it had left when they stood still last."""
        self._reasons: set[str] = set()
        """Why they stand still; none: time passes."""
        self.outages = Outages(on_begun=self.stand_still, on_over=self.go_on)
        """They stand still in these."""

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Like ``asyncio.timeout``, of the time in which the deadlines do not stand still. Raises ``TimeoutError``."""
        async with asyncio.timeout(None if self._reasons else timeout_s) as deadline:
            self._open[deadline] = timeout_s
            try:
                yield deadline
            finally:
                del self._open[deadline]

    def stand_still(self, why: str = "no engine") -> None:
        """No time passes from now on, until ``go_on`` was called for every reason. Idempotent."""
        was_still, self._reasons = bool(self._reasons), self._reasons | {why}
        if was_still:
            return
        for deadline in self._running():
            when = deadline.when()
            assert when is not None
            self._open[deadline] = when - asyncio.get_running_loop().time()
            deadline.reschedule(None)

    def go_on(self, why: str = "no engine") -> None:
        """Time passes again, unless another reason is left. Idempotent."""
        was_still, self._reasons = bool(self._reasons), self._reasons - {why}
        if self._reasons or not was_still:
            return
        for deadline in self._running():
            deadline.reschedule(asyncio.get_running_loop().time() + self._open[deadline])

    def _running(self) -> list[asyncio.Timeout]:
        """Those that have not passed."""
        return [deadline for deadline in self._open if not deadline.expired()]
