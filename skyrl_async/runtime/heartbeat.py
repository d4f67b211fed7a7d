"""Asks processes for signs of life, and knows when silence means death.

    ask ──answer──> ask again after an interval
     └──silence for longer than the timeout──> dead: killed, hung or stopped (SIGSTOP) makes no difference

A process must answer a ping beside its other work: the answer says that the process runs, not that its work progresses.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_async.runtime.tasks import task_group

Ping = Callable[[], Awaitable[None]]
"""Returns when the process has answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """How often to ask, and how long to wait for an answer."""

    interval_s: float
    """Seconds between an answer and the next ping; > 0."""
    timeout_s: float
    """Seconds of silence that mean death; > 0. Checked at the end of each interval."""


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
        """Note that there is still no answer; True when that means death.

        A call counts for one interval at most, however late it comes: this process may have been stopped instead.
        """
        self._seconds += min(now - self._last_tick, self._heartbeat.interval_s)
        self._last_tick = now
        return self._seconds >= self._heartbeat.timeout_s


async def until_silent(
    ping: Ping,
    heartbeat: Heartbeat,
    *,
    on_answer: Callable[[], None] = lambda: None,
    on_missed: Callable[[], None] = lambda: None,
) -> None:
    """Ping repeatedly; returns when there was no answer in time. Raises what ``ping`` raises.

    Args:
        ping: of the process.
        heartbeat: when to ask again, and when silence means death.
        on_answer: called after each answer.
        on_missed: called after each interval without one.
    """
    clock = asyncio.get_running_loop().time

    async def ask() -> None:
        await ping()

    while True:
        await asyncio.sleep(heartbeat.interval_s)
        silence = Silence(heartbeat, clock())
        async with task_group() as tasks:
            asking = tasks.create_task(ask(), name="ping")
            while not (await asyncio.wait({asking}, timeout=heartbeat.interval_s))[0]:
                on_missed()
                if silence.tick(clock()):
                    asking.cancel()
                    return
        on_answer()


@asynccontextmanager
async def listening(
    pings: Mapping[str, Ping], heartbeat: Heartbeat, death_of: Callable[[str], Exception]
) -> AsyncIterator[None]:
    """Ping every process while the block runs.

    A process that does not answer in time ends the block with ``death_of(name)``. Raises what a ping raises.
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
