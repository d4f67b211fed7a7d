"""Who is told about a run's engines: front ends learn which there are, people when there is none.

A front end sends requests to the same engines as the run. People read one line when the last engine is gone and one when the next serves.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from skyrl_async.errors import InferenceError
from skyrl_async.inference.pool import EnginePool
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.logs import SHOWN

logger = logging.getLogger(__name__)

_NOTIFY_TIMEOUT_S = 10.0


class FrontEndPool(Protocol):
    """A client of the same engines in another process."""

    async def follow(self, engines: Sequence[InferenceEngine]) -> None:
        """Send requests to exactly these engines. Raises ``InferenceError`` if the front end is gone."""
        ...


class FrontEndNotifier:
    """Keeps a front end's engines those of a pool, also after a lost message."""

    def __init__(self, front_end: FrontEndPool) -> None:
        self._front_end = front_end
        self._lock = asyncio.Lock()
        self._is_reachable = True
        self.changed = asyncio.Event()

    async def run(self, pool: EnginePool, interval_s: float) -> None:
        """Consumes changes, produces messages; waits for ``changed``, at most ``interval_s``. Runs until cancelled."""
        while True:
            self.changed.clear()
            await self.notify(pool)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self.changed.wait()

    async def notify(self, pool: EnginePool) -> None:
        """Send the list of engines. A front end that does not answer is logged once."""
        async with self._lock:
            try:
                async with asyncio.timeout(_NOTIFY_TIMEOUT_S):
                    await self._front_end.follow(pool.engines)
            except (InferenceError, TimeoutError) as error:
                if self._is_reachable:
                    logger.warning("a front end of the endpoint does not learn which engines there are: %r", error)
                self._is_reachable = False
            else:
                self._is_reachable = True


class Outage:
    """Announces when no engine serves and when one does again; after a timeout nobody waits any more.

    Args:
        pool: its waiting requests fail after the timeout.
        timeout_s: longest time without an engine.
        say: takes a line for the people who watch.
    """

    def __init__(self, pool: EnginePool, timeout_s: float, say: Callable[[str], None]) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._say = say
        self._began: float | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def update(self) -> None:
        """Compare with the pool's engines, which have changed."""
        loop = asyncio.get_running_loop()
        if not self._pool.engines and self._began is None:
            self._began = loop.time()
            self._deadline = loop.call_later(self._timeout_s, self._expire)
            self._announce(
                f"no inference engine is left: generation and weight updates wait for one, {self._timeout_s:g} s at most"
            )
        elif self._pool.engines and self._began is not None:
            name, seconds = self._pool.engines[0].name, loop.time() - self._began
            self._announce(f"{name} serves: generation goes on, after {seconds:.0f} s without any engine")
            self.end()

    def end(self) -> None:
        """Stop counting. Idempotent."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._began = self._deadline = None

    def _expire(self) -> None:
        self._pool.give_up(f"no inference engine came back within engine.no_engine_timeout_s={self._timeout_s:g}")

    def _announce(self, line: str) -> None:
        logger.warning(line, extra=SHOWN)
        self._say(line)
