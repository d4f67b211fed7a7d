"""Keeps the engines of a run alive: detects dead and wedged ones, and starts others in their place.

    heartbeat ──silence──> dead: dropped, killed ──backoff──> started anew ──client.add_engine (load, verify)──> serves

Front ends, which send requests to the same engines, learn which there are. People read one line when the last engine is gone and one when
the next serves.

Weights are unknown here: the publisher's ``admission`` in the client's pool updates an engine that joins.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.errors import EngineDeadError, InferenceError, PublishError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engine_life import EngineLife, EngineState
from skyrl_async.inference.pool import EnginePool
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.logs import SHOWN
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.heartbeat import Heartbeat, until_silent
from skyrl_async.runtime.tasks import run_together, task_group

logger = logging.getLogger(__name__)

_NOTIFY_TIMEOUT_S = 10.0


class FrontEndPool(Protocol):
    """A client of the same engines in another process."""

    async def follow(self, engines: Sequence[InferenceEngine]) -> None:
        """Send requests to exactly these engines. Raises ``InferenceError`` if the front end is gone."""


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
            with suppress(TimeoutError):
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


class _Member:
    """One place in the fleet, and the engine now in it."""

    def __init__(self, place: str, engine: InferenceEngine, life: EngineLife) -> None:
        self.place = place
        self.life = life
        self.death: asyncio.Future[str | None]
        """Why the engine serves no more; None: it was removed."""
        self.task: asyncio.Task[None]
        """Supervises the place."""
        self.replace_engine(engine)

    def report_death(self, reason: str | None) -> None:
        """Set why the engine serves no more. Later calls change nothing."""
        if not self.death.done():
            self.death.set_result(reason)

    def replace_engine(self, engine: InferenceEngine) -> None:
        """Put another engine in the place."""
        self.engine = engine
        self.death = asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Fleet:
    """Listens to a client's pool, and supervises its engines while ``supervising`` lasts."""

    client: InferenceEngineClient
    """Has the engines. For a run to outlive its last engine it must wait for one (``engine_wait_s=None``)."""
    start: Callable[[str], Awaitable[InferenceEngine]] = field(kw_only=True)
    """Boots an engine with the name given. Raises ``EngineStartError``."""
    config: EngineConfig = field(kw_only=True)
    """Heartbeats, restarts, and how long to wait without any engine."""
    say: Callable[[str], None] = field(kw_only=True)
    """Takes a line for the people who watch."""
    front_ends: Sequence[FrontEndPool] = field(default=(), kw_only=True)
    """Learn which engines there are, at every change and every heartbeat interval."""
    trace: Trace = field(default_factory=lambda: Trace(None, time.monotonic), kw_only=True)
    """Gets the moment of each engine's death, and a span per restart, from then until another serves in its place."""
    lives: dict[str, EngineLife] = field(default_factory=dict, kw_only=True)
    """By place, which has the name of its first engine. Given for engines that were restarted before they served."""
    _members: list[_Member] = field(default_factory=list, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _num_restarts: int = field(default=0, init=False)
    _num_missed: int = field(default=0, init=False)
    """Heartbeats missed in places that are no more."""

    def __post_init__(self) -> None:
        self._outage = Outage(self.client.pool, self.config.no_engine_timeout_s, self.say)
        self._notifiers = [FrontEndNotifier(front_end) for front_end in self.front_ends]
        self._group: asyncio.TaskGroup

    @asynccontextmanager
    async def supervising(self) -> AsyncIterator[None]:
        """Supervise while the block runs; then close every engine, also those that joined later."""
        try:
            async with task_group() as self._group:
                self.client.pool.listener = self
                for engine in self.client.engines:
                    self.engine_joined(engine)
                for i, front_end in enumerate(self._notifiers):
                    interval_s = self.config.heartbeat_interval_s
                    self._spawn(f"front-end-{i}-notifier", front_end.run(self.client.pool, interval_s))
                try:
                    yield
                finally:
                    self.client.pool.listener = None
                    self._outage.end()
                    for task in self._tasks:
                        task.cancel()
        finally:
            for member in self._members:
                await member.engine.close()

    async def add_engine(self) -> str:
        """Start one more engine and let it serve, in the first place that is free or was given up. Returns its name.

        Raises ``EngineStartError``, ``PublishError`` and ``EngineDeadError``; the place is free then.
        """
        place = next(name for i in itertools.count() if self._is_free(name := f"engine-{i}"))
        for member in [member for member in self._members if member.place == place]:
            self._forget(member)
        self.lives[place] = EngineLife(self.config)
        try:
            await self._admit(await self.start(place))
        except BaseException as error:
            del self.lives[place]
            self._end_wait_if_none_may_serve(f"the one that was added does not serve: {error}")
            raise
        return place

    async def remove_engine(self, name: str) -> None:
        """Continue an engine's requests elsewhere, close it and free its place, also where this is cancelled.

        Args:
            name: the engine's, or its place's, also if that was given up or its next engine is starting.

        Raises ``InferenceError`` for an unknown name, one that is being added or removed, and the only engine that serves or may serve.
        """
        member = next((member for member in self._members if name in (member.place, member.engine.name)), None)
        if member is None and name in self.lives:
            raise InferenceError(f"{name} is starting; remove it once it serves")
        if member is None:
            raise InferenceError(f"there is no engine {name!r} to remove; there are {', '.join(self.lives) or 'none'}")
        if member.life.state is EngineState.leaving:
            raise InferenceError(f"{name} is being removed already")
        others_may_serve = any(self._may_serve(place) for place in self.lives if place != member.place)
        if self._may_serve(member.place) and not others_may_serve:
            raise InferenceError(f"{name} is the only engine; add another one before it is removed")
        is_serving = member.engine in self.client.engines
        member.life.leave()
        try:
            if is_serving:
                await self.client.remove_engine(member.engine.name)
                self.trace.moment("removal", f"engines/{member.engine.name}")
            else:
                member.task.cancel()
                await asyncio.wait([member.task])
        finally:
            await member.engine.close()
            self._forget(member)

    def states(self) -> dict[str, EngineState]:
        """The state of every place."""
        return {place: life.state for place, life in self.lives.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Every place with its state, the engine that serves in it (None: none does), and its restarts, for people."""
        serving = {member.place: member.engine.name for member in self._members if member.engine in self.client.engines}
        return [
            {
                "name": place,
                "state": life.state.value,
                "serving": serving.get(place),
                "restarts": life.num_restarts,
            }
            for place, life in self.lives.items()
        ]

    def statistics(self) -> dict[str, float]:
        """Values by metric name."""
        return {
            "engines/serving": float(len(self.client.engines)),
            "engines/restarts": float(self._num_restarts + sum(life.num_restarts for life in self.lives.values())),
            "engines/heartbeats_missed": float(self._num_missed + sum(life.num_missed for life in self.lives.values())),
            **self.client.pool.load_statistics(),
        }

    def engine_joined(self, engine: InferenceEngine) -> None:
        """Supervise an engine that has joined. A restarted one has its place already."""
        member = next((member for member in self._members if member.engine is engine), None)
        if member is None:
            member = _Member(engine.name, engine, self.lives.setdefault(engine.name, EngineLife(self.config)))
            self._members.append(member)
            member.task = self._spawn(f"supervise-{engine.name}", self._supervise(member))
        member.life.serve()
        self._notify()

    async def engine_leaving(self, name: str) -> None:
        """End an engine's supervision, and tell front ends before its requests are evicted."""
        self._member_of(name).report_death(None)
        self._outage.update()
        notices = {f"front-end-{i}-notice": it.notify(self.client.pool) for i, it in enumerate(self._notifiers)}
        await run_together(notices)

    def engine_died(self, name: str, reason: str) -> None:
        """Replace an engine that the pool has dropped."""
        self._member_of(name).report_death(reason)
        self._notify()

    def _member_of(self, name: str) -> _Member:
        return next(member for member in self._members if member.engine.name == name)

    def _notify(self) -> None:
        self._outage.update()
        for front_end in self._notifiers:
            front_end.changed.set()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _supervise(self, member: _Member) -> None:
        """Consumes heartbeats, produces engines in the place of dead ones; ends when the engine is removed or its place given up."""
        while (reason := await self._death_of(member)) is not None:
            if member.life.state is EngineState.leaving:  # it was removed in the moment in which it was found dead
                return
            member.life.die()
            self.client.drop_engine(member.engine, EngineDeadError(reason))
            self.trace.moment("death", f"engines/{member.engine.name}", reason=reason)
            with self.trace.span("restart", track=f"engines/{member.engine.name}", reason=reason):
                await member.engine.close()
                is_back = await self._restart(member, reason)
            if not is_back:
                return
        if member.life.state is not EngineState.leaving:  # else ``remove_engine`` does, once the engine is empty
            self._forget(member)

    async def _death_of(self, member: _Member) -> str | None:
        """Wait until the engine serves no more, and return why; None: it was removed."""
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._check_heartbeats(member), name=f"heartbeat-{member.engine.name}")
            death = await member.death
            beating.cancel()
        return death

    async def _check_heartbeats(self, member: _Member) -> None:
        """Ask for heartbeats until one is not answered, which means the engine's death."""
        life, timeout_s = member.life, self.config.heartbeat_timeout_s

        async def ping() -> None:
            self.client.pool.report_load(member.engine.name, await member.engine.ping())

        heartbeat = Heartbeat(interval_s=self.config.heartbeat_interval_s, timeout_s=timeout_s)
        try:
            await until_silent(ping, heartbeat, on_answer=life.answer, on_missed=life.miss)
        except EngineDeadError as error:
            member.report_death(str(error))
        else:
            member.report_death(f"no heartbeat within {timeout_s:g} s")

    async def _restart(self, member: _Member, reason: str) -> bool:
        """Start engines in the place of a dead one until one serves; False if no restart is left."""
        while (wait_s := member.life.restart()) is not None:
            await asyncio.sleep(wait_s)
            name = f"{member.place}.{member.life.num_restarts}"
            logger.info("starting %s in the place of %s", name, member.engine.name)
            try:
                member.replace_engine(await self.start(name))
                await self._admit(member.engine)
            except Exception as error:  # a full disk, say, or Ray's: others may serve, and the run goes on with them
                is_known = isinstance(error, InferenceError | PublishError)
                reason = str(error) if is_known else repr(error)
                logger.error("%s does not serve: %s", name, reason, exc_info=not is_known)
            else:
                return True
        max_restarts = self.config.max_restarts
        logger.error("%s stays dead: engine.max_restarts=%d are used up (%s)", member.place, max_restarts, reason)
        self._end_wait_if_none_may_serve(f"engine.max_restarts={max_restarts} are used up; the last failure: {reason}")
        return False

    def _end_wait_if_none_may_serve(self, why: str) -> None:
        if not any(self._may_serve(place) for place in self.lives):
            self.client.pool.give_up(f"no inference engine is left, and {why}")

    def _may_serve(self, place: str) -> bool:
        """Whether an engine serves in the place or is starting there."""
        return self.lives[place].state not in (EngineState.given_up, EngineState.leaving)

    def _is_free(self, place: str) -> bool:
        """Whether another engine may have the place."""
        return place not in self.lives or self.lives[place].state is EngineState.given_up

    def _forget(self, member: _Member) -> None:
        """Free the member's place. Idempotent."""
        if member in self._members:
            self._members.remove(member)
            life = self.lives.pop(member.place)
            self._num_restarts += life.num_restarts
            self._num_missed += life.num_missed

    async def _admit(self, engine: InferenceEngine) -> None:
        try:
            await self.client.add_engine(engine)
        except BaseException:
            await engine.close()
            raise
