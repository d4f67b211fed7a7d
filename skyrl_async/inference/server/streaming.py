"""Work on behalf of a client that may leave, and server-sent events with comments in silences.

Flows in: coroutines and events. Flows out: ASGI messages. A client that disconnects cancels the work done for it. Does
not know what is generated.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl_async.concurrency import first_failure
from skyrl_async.inference.server.errors import as_api_error

T = TypeVar("T")

_KEEPALIVE = b": keepalive\n\n"
_DONE = b"data: [DONE]\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; cancel it and raise ``ClientDisconnect`` when the client leaves. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    try:
        async with asyncio.TaskGroup() as group:
            worker = group.create_task(work, name="request")
            watcher = group.create_task(watch(), name="request-watch")
            worker.add_done_callback(lambda _: watcher.cancel())
            watcher.add_done_callback(lambda _: worker.cancel())
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    if worker.cancelled():
        raise ClientDisconnect
    return worker.result()


Emit = Callable[[Mapping[str, Any]], None]
"""Sends one event on its way."""


class EventStream(Response):
    """Sends what ``produce`` emits as JSON events, ``[DONE]`` at the end, and a comment after each silent interval.

    A failure in mid-stream is sent as an error event, after which the stream ends without ``[DONE]``.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Emit], Awaitable[None]], keepalive_interval_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._produce = produce
        self._keepalive_interval_s = keepalive_interval_s
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await until_disconnect(receive, self._write(send))
        except ClientDisconnect:
            return

    async def _write(self, send: Send) -> None:
        outbox = _Outbox()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fill(outbox), name="event-source")
            while not outbox.is_finished:
                block = await outbox.take(self._keepalive_interval_s)
                await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fill(self, outbox: "_Outbox") -> None:
        try:
            await self._produce(lambda event: outbox.put(_event(event)))
            outbox.put(_DONE)
        except Exception as error:  # headers are out: the failure becomes an event
            outbox.put(_event(as_api_error(error).body))
        finally:
            outbox.close()


class _Outbox:
    """Bytes on their way to a client. ``put`` never waits: a generation's length bounds it."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        return self._is_closed and not self._blocks

    def put(self, block: bytes) -> None:
        self._blocks.append(block)
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def take(self, timeout_s: float) -> bytes:
        """All that is there, as soon as anything is; a keep-alive comment after ``timeout_s`` of nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return _KEEPALIVE
        self._changed.clear()
        blocks, self._blocks = self._blocks, []
        return b"".join(blocks)


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
