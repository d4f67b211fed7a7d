"""The endpoint in a process of its own: a Ray actor that serves the application over its own client of the engines.

Flows in: picklable engine adapters, a policy directory, settings. Flows out: an address. The driver's event loop never
waits for a request, and a request never waits for the driver.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_async.concurrency import run_together
from skyrl_async.errors import InferenceError
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.server.forwarding import Forwarding
from skyrl_async.inference.server.sweeping import sweep_sessions
from skyrl_async.inference.sessions.settings import SessionSettings

if TYPE_CHECKING:
    from skyrl_async.inference.client import InferenceEngineClient

logger = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """What an endpoint serves and where; see ``ServerConfig``."""

    policy_path: str
    """Directory of the tokenizer."""
    trust_remote_code: bool
    max_model_len: int
    host: str
    port: int
    """Of the first front end; the next ones take the ports after it. 0 takes free ones."""
    api_keys: tuple[str, ...] = field(repr=False)
    controller_keys: tuple[str, ...] = field(default=(), repr=False)
    model_name: str
    max_body_bytes: int
    keep_alive_timeout_s: int
    shutdown_timeout_s: int = 1
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_concurrent_requests: int = 4096
    engine_wait_s: float = 0.0
    sessions: SessionSettings = field(default_factory=SessionSettings)


class EndpointServer:
    """The actor. ``start`` once, then ``connect``, and ``wait`` or ``stop``."""

    def __init__(self, settings: EndpointSettings, engines: Sequence[InferenceEngine], front_end: int = 0) -> None:
        self._settings = settings
        self._engines = engines
        self._front_end = front_end
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._forwarding: Forwarding
        self._client: InferenceEngineClient

    async def start(self) -> tuple[str, int]:
        """Serve, and return (host, port). ``ConfigError`` for a port in use or a tokenizer without a template."""
        address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        # Ray runs each call as a task of its own, so no call can hold the group in which the server would live.
        self._serving = asyncio.create_task(self._serve(address), name="endpoint-server")
        watched: set[asyncio.Future[Any]] = {self._serving, address}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()
        return await address

    async def connect(self, peers: tuple[str, ...]) -> None:
        """Learn where the other front ends are; see ``Forwarding.connect``."""
        self._forwarding.connect(peers)

    async def follow(self, engines: Sequence[InferenceEngine]) -> None:
        """Send requests to these engines from now on; see ``EnginePool.follow``."""
        self._client.pool.follow(engines)

    async def wait(self) -> None:
        """Return when the server has stopped; raise what it failed of."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """Accept nothing more, give open requests ``shutdown_timeout_s`` to finish, and stop. Idempotent."""
        self._stopping.set()
        await self.wait()

    async def _serve(self, address: "asyncio.Future[tuple[str, int]]") -> None:
        from skyrl_async.inference.server.serve import start_server

        settings = self._settings
        app = self._application()
        self._forwarding = Forwarding(app, self._front_end)
        server = start_server(
            self._forwarding,
            settings.host,
            settings.port + self._front_end if settings.port else 0,
            keep_alive_timeout_s=settings.keep_alive_timeout_s,
            shutdown_timeout_s=settings.shutdown_timeout_s,
        )
        async with server as bound, asyncio.TaskGroup() as group:
            logger.info("endpoint on http://%s:%d/v1", *bound)
            address.set_result(bound)
            sweeping = group.create_task(sweep_sessions(app.state.serving), name="endpoint-sweeper")
            await self._stopping.wait()
            sweeping.cancel()
        await self._forwarding.close()

    def _application(self) -> Any:
        from transformers import AutoTokenizer

        from skyrl_async.chat import ChatRenderer
        from skyrl_async.inference.client import InferenceEngineClient
        from skyrl_async.inference.server.app import create_app
        from skyrl_async.inference.server.parsing import AnswerParser

        settings = self._settings
        tokenizer = AutoTokenizer.from_pretrained(
            settings.policy_path, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
        renderer = ChatRenderer(tokenizer)
        client = self._client = InferenceEngineClient(
            self._engines,
            tokenizer=tokenizer,
            max_model_len=settings.max_model_len,
            renderer=renderer,
            name=f"endpoint-{self._front_end}",
            carries_tokens=True,
            engine_wait_s=settings.engine_wait_s,
        )
        parser = AnswerParser.of(
            tokenizer, tool_call_parser=settings.tool_call_parser, reasoning_parser=settings.reasoning_parser
        )
        return create_app(
            client,
            renderer,
            api_keys=settings.api_keys,
            controller_keys=settings.controller_keys,
            parser=parser,
            session_settings=replace(settings.sessions, front_end=self._front_end),
            max_concurrent_requests=settings.max_concurrent_requests,
            model_name=settings.model_name,
            max_body_bytes=settings.max_body_bytes,
            statistics=client.statistics,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """One running server."""

    host: str
    port: int
    actor: Any

    @property
    def url(self) -> str:
        """Its root, without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def follow(self, engines: Sequence[InferenceEngine]) -> None:
        """See ``FrontEndPool.follow``."""
        try:
            await _own_errors(self.actor.follow.remote(tuple(engines)))
        except RayError as error:
            raise InferenceError(f"the front end on port {self.port} is gone: {error}") from error


@asynccontextmanager
async def endpoint_processes(
    settings: EndpointSettings,
    engines: Sequence[InferenceEngine],
    *,
    num_front_ends: int = 1,
    max_concurrency: int = 1000,
) -> AsyncIterator[tuple[FrontEnd, ...]]:
    """``EndpointServer`` actors while the block runs, each with its own process, client of the engines and sessions.

    Errors raised inside an actor arrive as themselves. Whoever supervises the run awaits their ``wait``. When the block ends well
    open requests are finished first.
    """
    server = ray.remote(EndpointServer).options(num_cpus=0, max_concurrency=max_concurrency, max_restarts=0)
    actors = [server.remote(settings, engines, index) for index in range(num_front_ends)]
    try:
        addresses = await run_together(
            {f"start-front-end-{i}": _own_errors(actor.start.remote()) for i, actor in enumerate(actors)}
        )
        front_ends = tuple(
            FrontEnd(host=host, port=port, actor=actor) for (host, port), actor in zip(addresses, actors, strict=True)
        )
        peers = tuple(front_end.url for front_end in front_ends)
        await run_together(
            {f"connect-front-end-{i}": _own_errors(actor.connect.remote(peers)) for i, actor in enumerate(actors)}
        )
        yield front_ends
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(settings.shutdown_timeout_s + _SHUTDOWN_GRACE_S):
                await run_together(
                    {f"stop-front-end-{i}": _own_errors(actor.stop.remote()) for i, actor in enumerate(actors)}
                )
    finally:
        for actor in actors:
            ray.kill(actor)


async def _own_errors(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except RayTaskError as error:
        raise error.cause from error
