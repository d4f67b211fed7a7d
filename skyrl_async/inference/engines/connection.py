"""Calls of an engine's process and what comes back, over one socket per caller: Ray's calls take many times the processors' time.

    EngineConnection (caller) ── number, request or call ──> EngineListener (the engine's process) ──> its generate, stream or method
                              <── number, tokens or answer ──

A message is its length in four bytes, and a pickle. A caller first sends the listener's key, before which nothing is unpickled. A lost
connection ends what both sides wait for, and requests; a method that was called runs to its end.
"""

import asyncio
import hmac
import itertools
import pickle
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from skyrl_async.errors import EngineDeadError, InferenceError, SkyRLAsyncError
from skyrl_async.types import EngineOutput, EngineRequest

_NUM_LENGTH_BYTES = 4
_LOST_S = 30
"""Silence of the other machine after which the connection counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Where an engine's process takes calls."""

    host: str
    port: int
    key: bytes = field(repr=False)


class Sampling(Protocol):
    """The part of ``InferenceEngine`` that is called here; its other methods are called by name."""

    async def generate(self, request: EngineRequest) -> EngineOutput: ...

    def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]: ...


class _Messages(asyncio.Protocol):
    """One side of a connection."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        begin, num_unread = 0, len(self._unread)
        while num_unread - begin >= _NUM_LENGTH_BYTES:
            body = begin + _NUM_LENGTH_BYTES
            end = body + int.from_bytes(self._unread[begin:body], "little")
            if end > num_unread:
                break
            self.received(*pickle.loads(self._unread[body:end]))
            begin = end
        del self._unread[:begin]

    def send(self, *message: Any) -> None:
        """Send a message, unless the connection is lost."""
        body = pickle.dumps(message, protocol=5)
        if not self.transport.is_closing():
            self.transport.write(len(body).to_bytes(_NUM_LENGTH_BYTES, "little") + body)

    def received(self, number: int, content: Any, streams: bool = False) -> None:
        raise NotImplementedError


class EngineConnection(_Messages):
    """The caller's side; made by ``connect``."""

    def __init__(self, name: str, key: bytes) -> None:
        super().__init__()
        self._name = name
        self._key = key
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[EngineOutput | Exception | None]] = {}
        """What has come for each open request and was not taken yet; None: the end."""
        self._asked: dict[int, asyncio.Future[Any]] = {}
        """Calls of methods that wait for their answer."""
        self._is_lost = False

    @classmethod
    async def connect(cls, name: str, address: EngineAddress, timeout_s: float) -> "EngineConnection":
        """Connect to the engine of this name. Raises ``EngineDeadError``."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(lambda: cls(name, address.key), address.host, address.port)
        except OSError as error:
            raise EngineDeadError(f"engine {name} is gone: it takes no connection: {error!r}") from error
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self._key)
        if sys.platform == "linux":
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_S // 2)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_S * 1000)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        for answers in self._answers.values():
            answers.put_nowait(self._death())
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self._death())

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"engine {self._name} is gone: its connection ended")

    def received(self, number: int, content: Any, streams: bool = False) -> None:
        if (answer := self._asked.get(number)) is not None and not answer.done():
            if isinstance(content, Exception):
                answer.set_exception(content)
            else:
                answer.set_result(content)
        elif number in self._answers:  # not if its caller has left
            self._answers[number].put_nowait(content)

    def ask(self, method: str, *args: Any) -> "asyncio.Future[Any]":
        """Call a method of the engine's process: sent at once, and begun there in the order of the calls. It goes on if the caller leaves.

        The answer raises what the method raises, and ``EngineDeadError``.
        """
        answer = asyncio.get_running_loop().create_future()
        if self._is_lost:
            answer.set_exception(self._death())
            return answer
        number = next(self._numbers)
        self._asked[number] = answer
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        self.send(number, (method, args))
        return answer

    async def call(self, request: EngineRequest, *, streams: bool) -> AsyncGenerator[EngineOutput, None]:
        """Yield the blocks of the engine's ``stream``, or the one output of its ``generate``.

        The engine ends the request if the caller leaves before. Raises the engine's errors, and ``EngineDeadError``.
        """
        if self._is_lost:
            raise self._death()
        number, is_open = next(self._numbers), True
        answers = self._answers[number] = asyncio.Queue()
        self.send(number, request, streams)
        try:
            while (answer := await answers.get()) is not None:
                is_open = isinstance(answer, EngineOutput) and answer.finish_reason is None
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                if not is_open:
                    return
            is_open = False
        finally:
            del self._answers[number]
            if is_open:
                self.send(number, None)


class EngineListener(_Messages):
    """The engine's side of one connection; ``listen`` makes one for each."""

    def __init__(self, engine: Sampling, key: bytes) -> None:
        super().__init__()
        self._engine = engine
        self._key = key
        self._is_known = False
        self._calls: dict[int, asyncio.Task[None]] = {}
        """Requests."""
        self._methods: set[asyncio.Task[None]] = set()

    def connection_lost(self, error: Exception | None) -> None:
        for call in self._calls.values():
            call.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._is_known:
            self._unread += data
            if len(self._unread) < len(self._key):
                return
            data = bytes(self._unread[len(self._key) :])
            self._is_known = hmac.compare_digest(self._unread[: len(self._key)], self._key)
            self._unread.clear()
        if self._is_known:
            super().data_received(data)
        else:
            self.transport.abort()

    def received(self, number: int, content: Any, streams: bool = False) -> None:
        # Callers come and go: no task group could own their calls. Their connection cancels requests.
        if isinstance(content, tuple):
            call = asyncio.create_task(self._call(number, *content), name=f"engine-{content[0]}")
            self._methods.add(call)
            call.add_done_callback(self._methods.discard)
        elif content is not None:
            call = asyncio.create_task(self._answer(number, content, streams), name=f"engine-call-{number}")
            self._calls[number] = call
            call.add_done_callback(lambda _: self._calls.pop(number))
        elif number in self._calls:
            self._calls[number].cancel()

    async def _call(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        with self._sending_errors(number):
            self.send(number, await getattr(self._engine, method)(*args))

    async def _answer(self, number: int, request: EngineRequest, streams: bool) -> None:
        with self._sending_errors(number):
            if streams:
                async for block in self._engine.stream(request):
                    self.send(number, block)
            else:
                self.send(number, await self._engine.generate(request))
            self.send(number, None)

    @contextmanager
    def _sending_errors(self, number: int) -> Iterator[None]:
        try:
            yield
        except SkyRLAsyncError as error:
            self.send(number, error)
        except Exception as error:  # of other packages: the caller may lack the class, or be unable to make it again
            self.send(number, InferenceError(f"{type(error).__name__}: {error}"))


async def listen(host: str, engine: Sampling) -> tuple[asyncio.Server, EngineAddress]:
    """Take calls of callers that know the address, until the server is closed."""
    key = secrets.token_bytes(32)
    server = await asyncio.get_running_loop().create_server(lambda: EngineListener(engine, key), host, 0)
    return server, EngineAddress(host=host, port=server.sockets[0].getsockname()[1], key=key)
