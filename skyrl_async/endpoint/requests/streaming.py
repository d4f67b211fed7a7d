"""Answers on their way to one client: a JSON body, or server-sent events with comments in silences.

Flows in: work, whole or in events. Flows out: ASGI messages. A client that leaves no longer follows its work; one that has got
everything says so to the work. Does not know what is generated.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl_async.endpoint.requests.errors import as_api_error
from skyrl_async.endpoint.requests.json_text import written
from skyrl_async.endpoint.requests.shared_request import Event, SharedRequest
from skyrl_async.runtime.tasks import task_group

T = TypeVar("T")

_KEEPALIVE = b": keepalive\n\n"
_DONE = b"data: [DONE]\n\n"


class EventStyle(Enum):
    """How a surface writes its events."""

    openai = "openai"
    """``data: {...}``, and ``data: [DONE]`` at the end."""
    named = "named"
    """``event: <type>`` and ``data: {...}``; the last event says that it is the last."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; cancel it and raise ``ClientDisconnect`` when the client leaves. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel()  # here and now: a write that was held up must not go on as if it had been read

    async with task_group() as group:
        worker = group.create_task(work, name="request")
        watcher = group.create_task(watch(), name="request-watch")
        worker.add_done_callback(lambda _: watcher.cancel())
    if worker.cancelled():
        raise ClientDisconnect
    return worker.result()


class Delivery(Response):
    """Brings the outcome of ``work`` to one client.

    Args:
        work: shared with the resends of the same request.
        style: of events; None sends one JSON body.
        keepalive_interval_s: silence after which a stream sends a comment, > 0.
        on_closed: called once, when the client has its answer or has left.

    A failure before the first byte is an error body, in mid-stream an error event, after which the stream ends. A stream's first byte
    waits for the first event, but no longer than for a comment.
    """

    def __init__(
        self,
        work: SharedRequest,
        *,
        style: EventStyle | None,
        keepalive_interval_s: float,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "application/json" if style is None else "text/event-stream"
        self._work = work
        self._style = style
        self._keepalive_interval_s = keepalive_interval_s
        self._on_closed = on_closed
        self.init_headers({} if style is None else {"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._work.followed():
                if self._style is None:
                    await until_disconnect(receive, self._send_body(scope, receive, send))
                else:
                    await until_disconnect(receive, self._send_events(scope, receive, send, self._style))
        except ClientDisconnect:
            return
        finally:
            self._on_closed()

    async def _send_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._work.reply()
        except Exception as error:
            await as_api_error(error).response_for(scope["path"])(scope, receive, send)
            return
        body = await written(reply or {})
        headers = [*self.raw_headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await self._delivered()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, scope: Scope, receive: Receive, send: Send, style: EventStyle) -> None:
        events = await self._work.events(0, self._keepalive_interval_s)
        if not events and self._work.has_failed:
            await self._send_body(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_sent = 0
        while events or not self._work.is_done:
            num_sent += len(events)
            block = await _event_bytes(events, style) if events else _KEEPALIVE
            await send({"type": "http.response.body", "body": block, "more_body": True})
            events = await self._work.events(num_sent, self._keepalive_interval_s)
        await self._send_end(send, style)

    async def _send_end(self, send: Send, style: EventStyle) -> None:
        """What follows the last event, of work that has ended."""
        try:
            await self._work.reply()
        except Exception as error:  # headers are out: the failure becomes an event
            failure = as_api_error(error).body | ({"type": "error"} if style is EventStyle.named else {})
            await send({"type": "http.response.body", "body": await _event_bytes([failure], style), "more_body": True})
        else:
            if style is EventStyle.openai:
                await send({"type": "http.response.body", "body": _DONE, "more_body": True})
            await self._delivered()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _delivered(self) -> None:
        """The client has every byte. After the last message it may be seen to leave before this goes on, so it is said before.

        A client that was seen to leave while its last bytes waited to be written, which are dropped then, is dealt with first.
        """
        await asyncio.sleep(0)
        self._work.delivered()


async def _event_bytes(events: Iterable[Event], style: EventStyle) -> bytes:
    lines = []
    for event in events:
        if style is EventStyle.named:
            lines += [b"event: ", str(event["type"]).encode(), b"\n"]
        lines += [b"data: ", await written(event), b"\n\n"]
    return b"".join(lines)
