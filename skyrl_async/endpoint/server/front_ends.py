"""The front ends of the endpoint: one process each, replaced on the same port when it dies or does not answer.

    start ──> serves ──death, silence──> killed ──> another one on the same port, with the same keys and today's engines
      └────────────────────death───────────┘  └──restarts used up──> failed

Addresses stay. A session lives in its front end's process and is lost with it: its rollout gets 404 and runs the sample again. Does not
know what is served.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_async.endpoint.server.process import EndpointServer, EndpointSettings
from skyrl_async.errors import ConfigError, DeadlineError, InferenceError, SkyRLAsyncError
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.runtime.heartbeat import Heartbeat, listening
from skyrl_async.runtime.outages import Outages
from skyrl_async.runtime.tasks import run_together, task_group

logger = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 5.0
_PORT_TIMEOUT_S = 60.0
"""A killed process frees its port at once, a frozen one when Ray's node kills it, some five seconds later."""
_PORT_RETRY_S = 0.5
_START_TIMEOUT_S = 180.0
_MAX_CONCURRENCY = 1000
"""Calls that run at once in a front end's actor."""

OnFailure = Callable[[SkyRLAsyncError], None]
"""Called with the reason why a front end is not replaced."""


@dataclass(eq=False)
class FrontEnd:
    """One address, and the process that serves there now."""

    settings: EndpointSettings
    """Shared by all front ends."""
    index: int
    engines: Sequence[InferenceEngine]
    """The engines of the next process; ``follow`` replaces them."""
    _: KW_ONLY
    outages: Outages
    """Record the time between a process's end and its successor."""
    on_failure: OnFailure | None = None
    """Called once the process cannot be replaced; None raises the reason."""
    actor: Any = field(default=None, init=False)
    _num_restarts: int = field(default=0, init=False)
    _peers: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        server = self.settings.server
        self.host = server.host
        self.port = server.port + self.index if server.port else 0

    @property
    def url(self) -> str:
        """The address, without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def _name(self) -> str:
        return f"front end {self.index} of the endpoint"

    async def start_in_time(self) -> None:
        """Call ``start`` for the first time, and again if the process dies. Also raises ``DeadlineError`` and ``InferenceError``."""
        async with self._start_deadline("start"):
            while True:
                try:
                    return await self.start()
                except RayActorError as error:
                    if error.actor_init_failed:
                        raise
                    self._count_restart(f"did not come up ({_first_line(error)})")
                    self.kill()

    async def connect(self, peers: tuple[str, ...]) -> None:
        """Pass the addresses of all front ends to the process; ``supervise`` replaces a dead one. Raises ``DeadlineError``."""
        self._peers = peers
        async with self._start_deadline("answer"):
            with suppress(RayActorError):
                await _as_own_errors(self.actor.connect.remote(peers))

    @asynccontextmanager
    async def _start_deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_START_TIMEOUT_S) as deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineError(f"{self._name} did not {what} within {_START_TIMEOUT_S:g} s") from error

    async def start(self) -> None:
        """Start a process that serves, on this machine. Errors raised in it keep their class."""
        # Ray puts an actor that asks for no resources anywhere, unless it must be on a node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        server = ray.remote(EndpointServer).options(
            num_cpus=0, max_concurrency=_MAX_CONCURRENCY, max_restarts=0, scheduling_strategy=here
        )
        self.actor = server.remote(self.settings, self.engines, self.index, self._peers)
        self.host, self.port = await _as_own_errors(self.actor.start.remote(self.host, self.port))

    async def follow(self, engines: Sequence[InferenceEngine]) -> None:
        """Send requests to ``engines`` from now on. Raises ``InferenceError`` if the process is gone."""
        self.engines = tuple(engines)
        try:
            await _as_own_errors(self.actor.follow.remote(self.engines))
        except RayError as error:
            raise InferenceError(f"the front end on port {self.port} is gone: {error}") from error

    async def stop(self) -> None:
        """Stop the process after its open requests."""
        await _as_own_errors(self.actor.stop.remote())

    def kill(self) -> None:
        """Kill the process, if there is one."""
        if self.actor is not None:
            ray.kill(self.actor)

    async def supervise(self) -> None:
        """Replace the process whenever it dies or falls silent; returns when the server was stopped, or has failed.

        Raises ``InferenceError`` when ``max_restarts`` are used up and there is no ``on_failure``.
        """
        try:
            while reason := await self._death():
                while reason is not None:
                    self._count_restart(reason)
                    self.outages.begin(self._name)
                    self.kill()
                    reason = await self._replace()
                self.outages.end(self._name)
        except SkyRLAsyncError as error:
            if self.on_failure is None:
                raise
            self.kill()
            self.outages.begin(self._name)
            self.on_failure(error)

    def _count_restart(self, reason: str) -> None:
        """Count and log a restart. Raises ``InferenceError`` if none is left."""
        name = f"the front end on port {self.port}" if self.port else self._name
        if self._num_restarts == self.settings.server.max_restarts:
            raise InferenceError(
                f"{name} {reason}, and server.max_restarts={self._num_restarts} are used up. Mend what "
                "ends it, or raise server.max_restarts, and continue with trainer.resume_mode=latest"
            )
        self._num_restarts += 1
        logger.warning("%s %s: another takes its place", name, reason)

    async def _replace(self) -> str | None:
        """Start another process; returns why it does not serve, or None if it does."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._start_again()
        except SkyRLAsyncError:
            raise
        except Exception as error:  # its death, its silence or any other failure
            return f"did not come up ({_first_line(error)})"
        logger.info("a front end serves on port %d again", self.port)
        return None

    async def _death(self) -> str | None:
        """Wait until the process serves no more; returns why, or None if it was told to stop."""
        server = self.settings.server
        heartbeat = Heartbeat(interval_s=server.heartbeat_interval_s, timeout_s=server.heartbeat_timeout_s)
        silence = DeadlineError(f"does not answer within {heartbeat.timeout_s:g} s")
        try:
            async with listening({self._name: lambda: self.actor.ping.remote()}, heartbeat, lambda _: silence):
                await _as_own_errors(self.actor.wait.remote())
        except Exception as error:  # for any reason: another one is started
            return str(error) if error is silence else f"has ended ({_first_line(error)})"
        return None

    async def _start_again(self) -> None:
        """Call ``start`` on the same port once it is free."""
        deadline = asyncio.get_running_loop().time() + _PORT_TIMEOUT_S
        while True:
            try:
                return await self.start()
            except ConfigError:
                self.kill()
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_PORT_RETRY_S)


@asynccontextmanager
async def endpoint_processes(
    settings: EndpointSettings,
    engines: Sequence[InferenceEngine],
    *,
    outages: Outages | None = None,
    on_failure: OnFailure | None = None,
) -> AsyncIterator[tuple[FrontEnd, ...]]:
    """Front ends while the block runs, each with its own process, client of the engines and sessions.

    A process that dies or hangs is replaced, and ``outages`` records the time. If it cannot be replaced, ``on_failure`` is called once per
    front end and the outage stays open; without ``on_failure``, the block is cancelled and the reason raised. A process that hangs before
    it serves for the first time raises ``DeadlineError``. Open requests are finished first if the block ends without an error.
    """
    outages = outages or Outages()
    front_ends = tuple(
        FrontEnd(settings, index, tuple(engines), outages=outages, on_failure=on_failure)
        for index in range(settings.server.num_front_ends)
    )
    try:
        await run_together({f"start-front-end-{i}": one.start_in_time() for i, one in enumerate(front_ends)})
        peers = tuple(one.url for one in front_ends)
        await run_together({f"connect-front-end-{i}": one.connect(peers) for i, one in enumerate(front_ends)})
        async with task_group() as tasks:
            supervising = [tasks.create_task(one.supervise(), name=f"front-end-{one.port}") for one in front_ends]
            try:
                yield front_ends
            finally:
                for task in supervising:
                    task.cancel()
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(settings.server.shutdown_timeout_s + _SHUTDOWN_GRACE_S):
                await run_together({f"stop-front-end-{i}": one.stop() for i, one in enumerate(front_ends)})
    finally:
        for one in front_ends:
            one.kill()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


async def _as_own_errors(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except RayTaskError as error:
        raise error.cause from error
