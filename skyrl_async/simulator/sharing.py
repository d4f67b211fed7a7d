"""Jobs that share a machine, each at ``speed / (1 + n / k)`` while n run: exact, with one timer for all of them.

Flows in: jobs that come and go. Flows out: how many tokens each has got, and when it has got what it waits for. All running jobs
get on equally fast, so the tokens of a job that would have run from the start (``progress``) tell where every job stands.
"""

import asyncio
import heapq
import itertools
import math

_ROUNDING = 1e-6
"""Tokens by which sums of floats may be off."""


class Job:
    """One request in the machine.

    Args:
        priority: smaller is let in first.
    """

    __slots__ = ("num_wanted", "priority", "started", "woken")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.started: float | None = None
        """Progress of the machine when the job was let in; None while it waits outside."""
        self.num_wanted = 0
        self.woken: asyncio.Future[None] | None = None
        """Pending while the job waits for ``num_wanted`` tokens."""


class SharedSpeed:
    """The machine.

    Args:
        tokens_per_second: of a job alone in it.
        half_speed_jobs: jobs at which each runs at half of that.
        max_running: jobs running at once; the others wait outside, by priority. None: no limit.
    """

    def __init__(self, tokens_per_second: float, half_speed_jobs: float, max_running: int | None) -> None:
        self._tokens_per_second = tokens_per_second
        self._half_speed_jobs = half_speed_jobs
        self._max_running = max_running
        self._running: dict[Job, None] = {}
        self._outside: list[tuple[int, int, Job]] = []
        self._goals: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._progress = 0.0
        self._moved_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_stopped = False

    @property
    def num_jobs(self) -> int:
        """Running and outside."""
        return len(self._running) + len(self._outside)

    @property
    def progress(self) -> float:
        """Tokens that a job running from the start would have."""
        self._advance()
        return self._progress

    def tokens_of(self, job: Job) -> int:
        """Whole tokens that the job has got so far."""
        return 0 if job.started is None else math.floor(self.progress - job.started + _ROUNDING)

    def enter(self, job: Job) -> None:
        """Run the job, or let it wait outside."""
        heapq.heappush(self._outside, (job.priority, next(self._numbers), job))
        self._let_in()

    def leave(self, job: Job) -> None:
        """The job is over. Idempotent."""
        self._advance()
        if job in self._running:
            del self._running[job]
        else:
            self._outside = [entry for entry in self._outside if entry[2] is not job]
            heapq.heapify(self._outside)
        self._let_in()

    def stop(self) -> None:
        """Nobody gets on."""
        self._advance()
        self.is_stopped = True
        self._set_timer()

    def go_on(self) -> None:
        """Everybody gets on again."""
        self._advance()
        self.is_stopped = False
        self._set_timer()

    async def wait_for(self, job: Job, num_tokens: int) -> None:
        """Return when the job has got ``num_tokens`` in all, or when ``wake_all`` says so."""
        job.num_wanted, job.woken = num_tokens, asyncio.get_running_loop().create_future()
        self._aim(job)
        self._set_timer()
        await job.woken

    def wake_all(self) -> None:
        """End every wait."""
        for job in (*self._running, *(entry[2] for entry in self._outside)):
            self.wake(job)

    def wake(self, job: Job) -> None:
        """End a job's wait."""
        if job.woken is not None and not job.woken.done():
            job.woken.set_result(None)

    def _let_in(self) -> None:
        self._advance()
        while self._outside and (self._max_running is None or len(self._running) < self._max_running):
            job = heapq.heappop(self._outside)[2]
            job.started = self._progress
            self._running[job] = None
            self._aim(job)
        self._set_timer()

    def _aim(self, job: Job) -> None:
        if job.started is not None and job.woken is not None:
            heapq.heappush(self._goals, (job.started + job.num_wanted, next(self._numbers), job.woken))

    def _rate(self) -> float:
        """Tokens per second of each running job."""
        return 0.0 if self.is_stopped else self._tokens_per_second / (1 + len(self._running) / self._half_speed_jobs)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        self._progress += (now - self._moved_at) * self._rate()
        self._moved_at = now

    def _set_timer(self) -> None:
        """For the next job that has got what it waits for."""
        while self._goals and self._goals[0][2].done():
            heapq.heappop(self._goals)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._goals and (rate := self._rate()):
            at = self._moved_at + max(0.0, self._goals[0][0] - self._progress) / rate
            self._timer = asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        while self._goals and self._goals[0][0] <= self._progress + _ROUNDING:
            woken = heapq.heappop(self._goals)[2]
            if not woken.done():
                woken.set_result(None)
        self._set_timer()
