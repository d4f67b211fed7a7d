"""Serves an ASGI application on a socket while a block runs."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.json_text import json_bytes
from skyrl_async.errors import ConfigError
from skyrl_async.runtime.tasks import task_group


@contextlib.asynccontextmanager
async def start_server(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, server: ServerConfig | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Serve ``app`` while the block runs, and yield (host, port).

    Args:
        host, port: the address; 0 takes a free port. ``ConfigError`` when it is in use.
        server: timeouts; None takes the defaults, and gives open requests a second at the end.

    A server that fails cancels the block and raises its failure.
    """
    limits = server or ServerConfig(shutdown_timeout_s=1)
    bound = _bind(host, port)
    running = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=limits.keep_alive_timeout_s,
            http=_connection(limits.request_timeout_s),
            timeout_graceful_shutdown=limits.shutdown_timeout_s,
        )
    )
    try:
        async with task_group() as group:
            serving = group.create_task(running.serve(sockets=[bound]), name="endpoint")
            await running.ready.wait()
            try:
                yield bound.getsockname()[0], bound.getsockname()[1]
            finally:
                # A group cancels its tasks when the block fails; a cancelled server leaves its connections open.
                running.stop()
                await asyncio.wait({serving}, timeout=limits.shutdown_timeout_s + 1)
    finally:
        bound.close()


_CANCELLED_TIMEOUT_S = 1.0


def _connection(timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's connection with a deadline for a request's header."""

    class Connection(AutoHTTPProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _has_begun = False
        """Whether a part of a header has arrived."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._deadline = self.loop.call_later(timeout_s, self._time_out)

        def connection_lost(self, error: Exception | None) -> None:
            self._end_deadline()
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            request = self.cycle
            self._has_begun = True
            super().data_received(data)
            if self.cycle is not request:
                self._end_deadline()
            elif self._deadline is None and (request is None or request.response_complete):
                self._deadline = self.loop.call_later(timeout_s, self._time_out)

        def _end_deadline(self) -> None:
            self._has_begun = False
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None

        def _time_out(self) -> None:
            if self._has_begun and not self.transport.is_closing():
                self.transport.write(_late_answer(timeout_s))
            self.transport.close()

    return Connection


def _late_answer(timeout_s: float) -> bytes:
    """The answer to a header that was never completed."""
    reason = f"the header of a request did not arrive within {timeout_s:g} s (server.request_timeout_s)"
    body = json_bytes(ApiError(408, reason, code="request_timeout").body)
    lines = (
        "HTTP/1.1 408 Request Timeout",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


class _Server(uvicorn.Server):
    """uvicorn's server, with an event for its start. Leaves signals to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Accept nothing more, and end."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """uvicorn's loop, woken by ``stop`` instead of polling ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's shutdown without its pauses: open requests get their time, are then cancelled, and release their resources."""
        for server in self.servers:
            server.close()
        for bound in sockets or ():
            bound.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # at once where it is idle, else after its response
        for timeout_s in (self.config.timeout_graceful_shutdown, _CANCELLED_TIMEOUT_S):
            if tasks := set(self.server_state.tasks):
                _, open_tasks = await asyncio.wait(tasks, timeout=timeout_s)
                for task in open_tasks:
                    task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCELLED_TIMEOUT_S):
                while self.server_state.connections:  # noqa: ASYNC110 - nothing tells when the last byte is sent
                    await asyncio.sleep(0.01)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"server.host must be an address of this machine, got {host!r}: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"server.port {port} is in use on {host}; choose another, or 0 for a free one") from error
        raise ConfigError(f"server.host={host} server.port={port} cannot be bound: {error.strerror}") from error
    return bound
