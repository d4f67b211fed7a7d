"""A front end's process: a Ray actor that serves the application over its own client of the engines.

The driver's event loop never waits for a request, and a request never waits for the driver.
"""

import asyncio
import ctypes
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.server.forwarding import Forwarding
from skyrl_async.endpoint.sessions.settings import SessionSettings
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.runtime.garbage import collect_rarely

if TYPE_CHECKING:
    from skyrl_async.inference.client import InferenceEngineClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """What the front ends of an endpoint serve."""

    server: ServerConfig = field(repr=False)
    """The run's section ``server``; its addresses are those of the first start."""
    policy_path: str
    """Directory of the tokenizer."""
    trust_remote_code: bool
    max_model_len: int
    api_keys: tuple[str, ...] = field(repr=False)
    controller_keys: tuple[str, ...] = field(default=(), repr=False)
    engine_wait_s: float = 0.0
    """``server.engine_wait_s`` where engines are replaced; 0 where nothing is worth waiting for."""
    sessions: SessionSettings = field(default_factory=SessionSettings)


def _prepare_memory() -> None:
    """Collect garbage rarely, and return freed large blocks to the system. Call it before serving."""
    collect_rarely()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**20)  # fixed: glibc raises it to the size of the largest block it has seen


_SWITCH_INTERVAL_S = 0.001
"""Time after which a thread with a long request yields to the event loop; Python's default is five times that."""
_M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""


class EndpointServer:
    """The actor. ``start`` once, then ``connect`` if the peers were not known, and ``wait`` or ``stop``."""

    def __init__(
        self,
        settings: EndpointSettings,
        engines: Sequence[InferenceEngine],
        front_end: int = 0,
        peers: tuple[str, ...] = (),
    ) -> None:
        """``peers``: the addresses of all front ends, as for ``connect``, where they are known."""
        self._settings = settings
        self._engines = engines
        self._front_end = front_end
        self._peers = peers
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._forwarding: Forwarding
        self._client: InferenceEngineClient | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Serve, and return (host, port). ``ConfigError`` for a port in use or a tokenizer without a template."""
        address: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        # Ray runs each call as a task of its own, so no call can hold the group in which the server would live.
        self._serving = asyncio.create_task(self._serve(host, port, address), name="endpoint-server")
        watched: set[asyncio.Future[Any]] = {self._serving, address}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()
        return await address

    async def connect(self, peers: tuple[str, ...]) -> None:
        """Learn the addresses of all front ends."""
        self._forwarding.connect(peers)

    async def follow(self, engines: Sequence[InferenceEngine]) -> None:
        """Send requests to ``engines`` from now on, or once the server serves."""
        self._engines = engines
        if self._client is not None:
            self._client.pool.follow(engines)

    async def ping(self) -> None:
        """Show that the event loop runs."""

    async def wait(self) -> None:
        """Return when the server has stopped; raise its failure."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """Accept nothing more, give open requests ``shutdown_timeout_s`` to finish, and stop. Idempotent."""
        self._stopping.set()
        await self.wait()

    async def _serve(self, host: str, port: int, address: "asyncio.Future[tuple[str, int]]") -> None:
        from skyrl_async.endpoint.server.serve import start_server

        server = self._settings.server
        app = self._application()
        self._forwarding = Forwarding(app, self._front_end, server)
        self._forwarding.connect(self._peers)
        async with start_server(self._forwarding, host, port, server) as bound, asyncio.TaskGroup() as group:
            logger.info("endpoint on http://%s:%d/v1", *bound)
            _prepare_memory()
            address.set_result(bound)
            sweeping = group.create_task(app.state.serving.sweep_sessions(), name="endpoint-sweeper")
            await self._stopping.wait()
            sweeping.cancel()
        await self._forwarding.close()

    def _application(self) -> Any:
        from transformers import AutoTokenizer

        from skyrl_async.chat import ChatRenderer
        from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
        from skyrl_async.endpoint.server.app import create_app
        from skyrl_async.inference.client import InferenceEngineClient

        settings, server = self._settings, self._settings.server
        tokenizer = AutoTokenizer.from_pretrained(
            settings.policy_path, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
        renderer = ChatRenderer(tokenizer)
        # Front ends do not know of each other's requests: each prefers another engine where all are idle.
        first = self._front_end % max(1, len(self._engines))
        client = self._client = InferenceEngineClient(
            (*self._engines[first:], *self._engines[:first]),
            tokenizer=tokenizer,
            max_model_len=settings.max_model_len,
            renderer=renderer,
            name=f"endpoint-{self._front_end}",
            carries_tokens=True,
            engine_wait_s=settings.engine_wait_s,
        )
        parser = AnswerParser.of(
            tokenizer, tool_call_parser=server.tool_call_parser, reasoning_parser=server.reasoning_parser
        )
        return create_app(
            client,
            renderer,
            server=server,
            api_keys=settings.api_keys,
            controller_keys=settings.controller_keys,
            parser=parser,
            session_settings=replace(settings.sessions, front_end=self._front_end),
            statistics=client.statistics,
        )
