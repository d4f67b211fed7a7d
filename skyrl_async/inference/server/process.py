"""The endpoint in a process of its own: a Ray actor that serves the application over its own client of the engines.

Flows in: picklable engine adapters, a policy directory, settings. Flows out: an address. The driver's event loop never
waits for a request, and a request never waits for the driver.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayTaskError

from skyrl_async.inference.protocol import InferenceEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """What an endpoint serves and where; see ``ServerConfig``."""

    policy_path: str
    """Directory of the tokenizer."""
    trust_remote_code: bool
    max_model_len: int
    host: str
    port: int
    api_keys: tuple[str, ...] = field(repr=False)
    model_name: str
    max_body_bytes: int
    keep_alive_timeout_s: int


class EndpointServer:
    """The actor. ``start`` once, then ``wait`` or ``stop``."""

    def __init__(self, settings: EndpointSettings, engines: Sequence[InferenceEngine]) -> None:
        self._settings = settings
        self._engines = engines
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

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

    async def wait(self) -> None:
        """Return when the server has stopped; raise what it failed of."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self) -> None:
        """End open requests and stop. Idempotent."""
        self._stopping.set()
        await self.wait()

    async def _serve(self, address: "asyncio.Future[tuple[str, int]]") -> None:
        from skyrl_async.inference.server.serve import start_server

        settings = self._settings
        serving = start_server(
            self._application(), settings.host, settings.port, keep_alive_timeout_s=settings.keep_alive_timeout_s
        )
        async with serving as bound:
            logger.info("endpoint on http://%s:%d/v1", *bound)
            address.set_result(bound)
            await self._stopping.wait()

    def _application(self) -> Any:
        from transformers import AutoTokenizer

        from skyrl_async.chat import ChatRenderer
        from skyrl_async.inference.client import InferenceEngineClient
        from skyrl_async.inference.server.app import create_app

        settings = self._settings
        tokenizer = AutoTokenizer.from_pretrained(
            settings.policy_path, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
        renderer = ChatRenderer(tokenizer)
        client = InferenceEngineClient(
            self._engines,
            tokenizer=tokenizer,
            max_model_len=settings.max_model_len,
            renderer=renderer,
            name="endpoint",
        )
        return create_app(
            client,
            renderer,
            api_keys=settings.api_keys,
            model_name=settings.model_name,
            max_body_bytes=settings.max_body_bytes,
            statistics=client.statistics,
        )


@asynccontextmanager
async def endpoint_process(
    settings: EndpointSettings, engines: Sequence[InferenceEngine], *, max_concurrency: int = 1000
) -> AsyncIterator[tuple[str, int, Any]]:
    """An ``EndpointServer`` actor while the block runs; yields (host, port, actor). Its process is killed afterwards.

    Errors raised inside the actor arrive as themselves. Whoever supervises the run awaits ``actor.wait.remote()``.
    """
    actor = (
        ray.remote(EndpointServer)
        .options(num_cpus=0, max_concurrency=max_concurrency, max_restarts=0)
        .remote(settings, engines)
    )
    try:
        try:
            host, port = await actor.start.remote()
        except RayTaskError as error:
            raise error.cause from error
        yield host, port, actor
    finally:
        ray.kill(actor)
