"""Asks processes for signs of life, and knows when silence means death.

    ask ──answer──> ask again after an interval
     └──silence for longer than the timeout──> dead: killed, wedged or stopped (SIGSTOP) makes no difference

Flows in: a way to ping, a clock. Flows out: whether there was an answer. Does not know who is asked, nor what follows. A ping must be
answered beside whatever the process works on: it says that the process runs, not that it gets on.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_async.runtime.tasks import task_group

Ping = Callable[[], Awaitable[None]]
"""Returns when who is asked has answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """How often to ask, and how long to wait for an answer."""

    interval_s: float
    """Between an answer and the next ping; > 0."""
    timeout_s: float
    """Silence that means death; > 0. It is noticed at the end of an interval."""


DEFAULT = Heartbeat(interval_s=5.0, timeout_s=60.0)


class Silence:
    """How long one ping has been unanswered: a state machine without I/O and without a clock.

    Args:
        heartbeat: when it is too long.
        now: when the ping was sent, in seconds of any clock.
    """

    def __init__(self, heartbeat: Heartbeat, now: float) -> None:
        self._heartbeat = heartbeat
        self._seconds = 0.0
        self._last_tick = now

    def tick(self, now: float) -> bool:
        """There is still no answer; True when that means death.

        However late the call comes, it counts for one interval at most: what stopped may have been this process.
        """
        self._seconds += min(now - self._last_tick, self._heartbeat.interval_s)
        self._last_tick = now
        return self._seconds >= self._heartbeat.timeout_s


async def is_answered(ping: Ping, interval_s: float, tick: Callable[[float], bool]) -> bool:
    """Ping once and wait for the answer; False when ``tick``, called with the time after each interval of silence, says that it is
    too late. Raises what ``ping`` raises.
    """
    clock = asyncio.get_running_loop().time

    async def ask() -> None:
        await ping()

    async with task_group() as tasks:
        asking = tasks.create_task(ask(), name="ping")
        while not (await asyncio.wait({asking}, timeout=interval_s))[0]:
            if tick(clock()):
                asking.cancel()
                return False
    return True


async def until_silent(ping: Ping, heartbeat: Heartbeat) -> None:
    """Ping again and again; returns when there was no answer in time. Raises what ``ping`` raises."""
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(heartbeat.interval_s)
        if not await is_answered(ping, heartbeat.interval_s, Silence(heartbeat, clock()).tick):
            return


@asynccontextmanager
async def listening(
    pings: Mapping[str, Ping], heartbeat: Heartbeat, death_of: Callable[[str], Exception]
) -> AsyncIterator[None]:
    """Ping everybody while the block runs.

    One who does not answer in time ends the block: ``death_of`` its name is raised then, and so is what a ping raises.
    """

    async def listen(name: str, ping: Ping) -> None:
        await until_silent(ping, heartbeat)
        raise death_of(name)

    async with task_group() as tasks:
        heard = [tasks.create_task(listen(name, ping), name=f"heartbeat-{name}") for name, ping in pings.items()]
        try:
            yield
        finally:
            for task in heard:
                task.cancel()
