"""The speed that the calls of a modelled engine share.

Each call runs at ``speed / (1 + n / k)`` while n run, with one timer for all of them. All running calls progress equally fast, so one
number, the tokens of a call running from the start (``progress``), tells where each of them stands. The prefill of a call holds up all of
them, but for a token per chunk of it, as in an engine whose scheduler puts chunks of prompts beside the tokens of running requests.
"""

import asyncio
import heapq
import itertools
import math
from dataclasses import dataclass, field

from skyrl_async.columns import VersionSpans
from skyrl_async.simulator.shared_machine import SharedMachine
from skyrl_async.types import EngineRequest, FinishReason

ROUNDING = 1e-6
"""Tokens by which sums of floats may be off."""


@dataclass(slots=True, eq=False)
class Call:
    """One engine call."""

    request: EngineRequest
    num_tokens: int
    """To be sampled in this call, unless it is aborted."""
    end: FinishReason
    """Why it ends, unless it is aborted."""
    started: float = math.inf
    """Progress of the engine when the call began to run, had it run until now without an abort; infinite while it waits."""
    awaited: int = 0
    """Tokens of the call at which ``woken`` is due."""
    num_taken: int = 0
    """Handed out."""
    is_aborted: bool = False
    num_held: int = 0
    """Tokens of the prompt, for which the engine must have room."""
    kept: VersionSpans = field(default_factory=VersionSpans)
    """Versions of the tokens before the last abort after which the engine continues by itself."""
    num_aborts: int = 0
    """How many such aborts there were."""
    woken: asyncio.Future[None] | None = None
    """Pending while the call waits for tokens."""

    def wake(self) -> None:
        """End its wait."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


class SharedSpeed:
    """What the calls of an engine run on.

    Args:
        name: of the engine.
        tokens_per_second: of a call alone in it.
        half_speed_calls: calls at which each runs at half of that.
        prefilling_tokens_per_second: of a call during prefills.
        machine: where others compute too.
        cores: of the machine, that the engine takes.
    """

    def __init__(
        self,
        name: str,
        tokens_per_second: float,
        half_speed_calls: float,
        prefilling_tokens_per_second: float,
        machine: SharedMachine | None,
        cores: float,
    ) -> None:
        self._name = name
        self._tokens_per_second = tokens_per_second
        self._half_speed_calls = half_speed_calls
        self._prefilling_tokens_per_second = prefilling_tokens_per_second
        self._machine = machine
        self._cores = cores
        if machine is not None:
            machine.listen(self._machine_changes)
        self.num_running = 0
        self.request_seconds = self.idle_seconds = 0.0
        self._prefill_left = 0.0
        """Seconds of prefill that are due before a call progresses, on a machine with nothing else to do."""
        self._goals: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._progress = 0.0
        self._moved_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timed = (0.0, 0.0, 0.0)
        """(goal, rate, end of the prefill) for which the timer is set; a rate of 0 needs none."""
        self.is_paused = False

    @property
    def progress(self) -> float:
        """Tokens that a call running from the start would have."""
        self._advance()
        return self._progress

    def tokens_of(self, call: Call) -> int:
        """Whole tokens that the call has got so far."""
        if call.started == math.inf:
            return len(call.kept)
        return max(len(call.kept), math.floor(self.progress - call.started + ROUNDING))

    def begin(self, call: Call, prefill_seconds: float) -> None:
        """The call runs from now on, after its prefill."""
        self._advance()
        self.num_running += 1
        self._prefill_left += prefill_seconds
        # Where the engine is when the call's prompt is computed, less what the call had before.
        call.started = self._progress + self._prefill_left * self._prefilling_tokens_per_second - len(call.kept)
        self._note_computing()
        if call.woken is not None:  # else it is about to wait, or to end, which sets the timer
            heapq.heappush(self._goals, (call.started + call.awaited, next(self._numbers), call.woken))
            self.set_timer()

    def restart_prefill(self, seconds: float) -> None:
        """No call progresses for so long; what was left of earlier prefills is void."""
        self._advance()
        self._prefill_left = seconds
        self.set_timer()

    def stop_all(self) -> None:
        """No call runs any more, though some still wait for tokens."""
        self._advance()
        self.num_running, self._prefill_left = 0, 0.0
        self._goals.clear()
        self._note_computing()
        self.set_timer()

    def end(self) -> None:
        """A call that ran has ended."""
        self._advance()
        self.num_running -= 1
        self._note_computing()
        self.set_timer()

    def set_paused(self, is_paused: bool) -> None:
        """No call progresses while paused."""
        self._advance()
        self.is_paused = is_paused
        self._note_computing()
        self.set_timer()

    async def wait_for(self, call: Call, num_tokens: int) -> None:
        """Return when the call has got ``num_tokens`` in all, or is woken."""
        call.woken, call.awaited = asyncio.get_running_loop().create_future(), num_tokens
        if call.started < math.inf:
            heapq.heappush(self._goals, (call.started + num_tokens, next(self._numbers), call.woken))
            self.set_timer()
        await call.woken

    def _rate(self) -> float:
        """Tokens per second of each running call, outside prefills."""
        if self.is_paused:
            return 0.0
        return self._tokens_per_second / (1 + self.num_running / self._half_speed_calls) / self._slowdown

    @property
    def _prefilling_rate(self) -> float:
        return self._prefilling_tokens_per_second / self._slowdown

    @property
    def _slowdown(self) -> float:
        """Seconds of a computation over its seconds alone, see ``SharedMachine``; 1 on a machine of its own."""
        return 1.0 if self._machine is None else self._machine.slowdown

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        self.request_seconds += (now - self._moved_at) * self.num_running
        if not self.num_running:
            self.idle_seconds += now - self._moved_at
        if not self.is_paused:
            prefilling = min(now - self._moved_at, self._prefill_left * self._slowdown)
            self._prefill_left = max(0.0, self._prefill_left - prefilling / self._slowdown)
            self._progress += prefilling * self._prefilling_rate
            self._progress += (now - self._moved_at - prefilling) * self._rate()
        self._moved_at = now

    def _note_computing(self) -> None:
        """The engine may have begun or ended to compute."""
        if self._machine is not None:
            is_computing = self.num_running > 0 and not self.is_paused
            self._machine.set_computing(self._name, is_computing, self._cores)

    def _machine_changes(self) -> None:
        self._advance()
        self.set_timer()

    def set_timer(self) -> None:
        """For the next call that has got what it waits for."""
        while self._goals and self._goals[0][2].done():
            heapq.heappop(self._goals)
        prefilling = self._prefill_left * self._slowdown
        begin = self._moved_at + prefilling if prefilling else 0.0
        timed = (self._goals[0][0], self._rate(), begin) if self._goals else (0.0, 0.0, 0.0)
        if timed == self._timed:
            return
        goal, rate, _ = self._timed = timed
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if rate:
            left, while_prefilling = max(0.0, goal - self._progress), prefilling * self._prefilling_rate
            is_soon = left < while_prefilling
            seconds = left / self._prefilling_rate if is_soon else prefilling + (left - while_prefilling) / rate
            self._timer = asyncio.get_running_loop().call_at(self._moved_at + seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timed = (0.0, 0.0, 0.0)
        self._timer = None
        self._advance()
        has_woken = False
        while self._goals and self._goals[0][0] <= self._progress + ROUNDING:
            woken = heapq.heappop(self._goals)[2]
            if not woken.done():
                woken.set_result(None)
                has_woken = True
        if not has_woken:  # else what was woken sets it, at once
            self.set_timer()
