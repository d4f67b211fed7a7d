"""Outages: times in which nothing can be sampled, because no engine is left or the endpoint's process is gone.

    outage begins ──> deadlines are suspended ──> outage ends ──> deadlines resume, unanswered calls are sent again after a backoff

Knows neither engines nor endpoints.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from skyrl_async.errors import NoEngineError, OutageError
from skyrl_async.runtime.tasks import Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Wait before the next attempt: twice as long each time, jittered so that not all attempts come at once."""

    base_s: float
    """Seconds before the first retry; 0 never waits."""
    max_s: float
    """Longest wait, in seconds."""

    def seconds(self, num_retries: int, seed: int) -> float:
        """Return the wait before the retry after ``num_retries`` others: between half of the doubled wait and all of it, by the seed."""
        longest = min(self.max_s, self.base_s * 2.0 ** min(num_retries, 64))
        return longest * random.Random(f"{seed}-{num_retries}").uniform(0.5, 1.0)


logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSES = Backoff(base_s=0.5, max_s=5.0)
"""Wait before a request is sent again: an outage may be known only a moment after the request fails."""


class Outages:
    """The outages of one run.

    Args:
        on_begun: called with the name of each outage.
        on_over: called with its name when it is over or given up.
    """

    def __init__(
        self, on_begun: Callable[[str], None] = lambda what: None, on_over: Callable[[str], None] = lambda what: None
    ) -> None:
        self._on_begun = on_begun
        self._on_over = on_over
        self._on: set[str] = set()
        self._verdicts: dict[str, str] = {}
        self._changes = Changes()
        self._num_begun = 0
        self.num_over = 0

    def met_since(self, num_over: int) -> bool:
        """Whether there was an outage at any time since ``num_over`` had this value."""
        return self._num_begun > num_over

    def begin(self, what: str) -> None:
        """Note that ``what`` is gone, and will come back. Idempotent."""
        self._verdicts.pop(what, None)
        if what not in self._on:
            self._on.add(what)
            self._num_begun += 1
            self._on_begun(what)

    def end(self, what: str) -> None:
        """Note that ``what`` is back. Idempotent."""
        self._verdicts.pop(what, None)
        self._leave(what)

    def give_up(self, what: str, reason: str) -> None:
        """Note that ``what`` will not come back, because of ``reason``: everything that waits for it fails."""
        self._verdicts[what] = reason
        self._leave(what)

    async def wait_until_over(self) -> None:
        """Wait for the end of all outages. Raises ``NoEngineError`` when one was given up."""
        while True:
            for reason in self._verdicts.values():
                raise NoEngineError(reason)
            if not self._on:
                return
            await self._changes.next()

    def _leave(self, what: str) -> None:
        if what in self._on:
            self._on.remove(what)
            self.num_over += 1
            self._on_over(what)
        self._changes.notify()


class Resending:
    """Sends requests again that failed in an outage.

    Args:
        outages: their end is waited for before a request is sent again.
        timeout_s: seconds after the first failure in which a request is sent again; 0 never does.
    """

    def __init__(self, outages: Outages, timeout_s: float) -> None:
        self._outages = outages
        self._timeout_s = timeout_s
        self._seeds = itertools.count()

    async def until_answered(self, send: Callable[[], Awaitable[T]]) -> T:
        """Return what ``send`` returns. Raises what it raises (``OutageError`` only once the time is up), and ``NoEngineError``."""
        clock, seed = asyncio.get_running_loop().time, next(self._seeds)
        num_failures, deadline = 0, 0.0
        while True:
            try:
                return await send()
            except OutageError as error:
                if not num_failures:
                    deadline = clock() + self._timeout_s
                if clock() >= deadline:
                    raise
                logger.info("it will be sent again: %s", error)
            await asyncio.sleep(_PAUSES.seconds(num_failures, seed))
            await self._outages.wait_until_over()
            num_failures += 1


class Deadlines:
    """The deadlines of everything that waits for the same engines; they are suspended in outages."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, float] = {}
        """Deadline -> seconds left when it was suspended last."""
        self._reasons: set[str] = set()
        """Why deadlines are suspended; empty while time counts."""
        self.outages = Outages(on_begun=self.suspend, on_over=self.resume)
        """Outages that suspend the deadlines."""

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Like ``asyncio.timeout``, without the time in which deadlines are suspended. Raises ``TimeoutError``."""
        async with asyncio.timeout(None if self._reasons else timeout_s) as deadline:
            self._open[deadline] = timeout_s
            try:
                yield deadline
            finally:
                del self._open[deadline]

    def suspend(self, why: str = "no engine") -> None:
        """Stop counting time until ``resume`` was called for every reason. Idempotent."""
        was_suspended, self._reasons = bool(self._reasons), self._reasons | {why}
        if was_suspended:
            return
        for deadline in self._running():
            when = deadline.when()
            assert when is not None
            self._open[deadline] = when - asyncio.get_running_loop().time()
            deadline.reschedule(None)

    def resume(self, why: str = "no engine") -> None:
        """Count time again, unless another reason is left. Idempotent."""
        was_suspended, self._reasons = bool(self._reasons), self._reasons - {why}
        if self._reasons or not was_suspended:
            return
        for deadline in self._running():
            deadline.reschedule(asyncio.get_running_loop().time() + self._open[deadline])

    def _running(self) -> list[asyncio.Timeout]:
        """Deadlines that have not passed."""
        return [deadline for deadline in self._open if not deadline.expired()]
