"""Sends a shared request's outcome to one client: a JSON body, or server-sent events with comments in silences.

Does not know what is generated.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skyrl_async.endpoint.requests.errors import as_api_error
from skyrl_async.endpoint.requests.json_text import encode_json
from skyrl_async.endpoint.requests.shared_request import Event, SharedRequest
from skyrl_async.runtime.tasks import task_group

T = TypeVar("T")

KEEPALIVE_INTERVAL_S = 4.0
"""Silence after which a stream sends a comment."""
_KEEPALIVE = b": keepalive\n\n"
_DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
"""Characters of JSON texts at which Python's ``splitlines``, and with it httpx, ends a line -> their escapes."""


class EventStyle(Enum):
    """How a surface writes its events."""

    openai = "openai"
    """``data: {...}``, and ``data: [DONE]`` at the end."""
    named = "named"
    """``event: <type>`` and ``data: {...}``; the type marks the last event."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; cancel it and raise ``ClientDisconnect`` when the client disconnects. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel()  # at once: a write that was held up must not go on as if it had been read

    async with task_group() as group:
        worker = group.create_task(work, name="request")
        watcher = group.create_task(watch(), name="request-watch")
        worker.add_done_callback(lambda _: watcher.cancel())
    if worker.cancelled():
        raise ClientDisconnect
    return worker.result()


class Delivery(Response):
    """Sends the outcome of ``shared`` to one client.

    Args:
        style: how events are written; None sends one JSON body.
        on_closed: called once, when the client has its answer or has disconnected.

    A failure before the first byte becomes an error body; in mid-stream it becomes an error event and ends the stream. The first byte of a
    stream waits for the first event or the first comment.
    """

    def __init__(
        self, shared: SharedRequest, style: EventStyle | None, on_closed: Callable[[], None] = lambda: None
    ) -> None:
        self.status_code = 200
        self.media_type = "application/json" if style is None else "text/event-stream"
        self._shared = shared
        self._style = style
        self._on_closed = on_closed
        self.init_headers({} if style is None else {"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._shared.connected():
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
            (reply,) = await self._shared.ended()
        except Exception as error:
            await as_api_error(error).response_for(scope["path"])(scope, receive, send)
            return
        body = await encode_json(reply)
        headers = [*self.raw_headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await self._delivered()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, scope: Scope, receive: Receive, send: Send, style: EventStyle) -> None:
        events = await self._shared.events(0, KEEPALIVE_INTERVAL_S)
        if not events and self._shared.has_failed:
            await self._send_body(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_sent = 0
        while events or not self._shared.is_done:
            num_sent += len(events)
            block = await _event_bytes(events, style) if events else _KEEPALIVE
            await send({"type": "http.response.body", "body": block, "more_body": True})
            events = await self._shared.events(num_sent, KEEPALIVE_INTERVAL_S)
        await self._send_end(send, style)

    async def _send_end(self, send: Send, style: EventStyle) -> None:
        """End a stream whose last event was sent."""
        try:
            await self._shared.ended()
        except Exception as error:  # headers are out: the failure becomes an event
            failure = as_api_error(error).body | ({"type": "error"} if style is EventStyle.named else {})
            await send({"type": "http.response.body", "body": await _event_bytes([failure], style), "more_body": True})
        else:
            if style is EventStyle.openai:
                await send({"type": "http.response.body", "body": _DONE, "more_body": True})
            await self._delivered()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _delivered(self) -> None:
        """Record that the client has every byte. Call it before the last message: the client may disconnect right after that one.

        A disconnect that came while the last bytes waited to be written drops these bytes, and is handled first.
        """
        await asyncio.sleep(0)
        self._shared.delivered()


async def _event_bytes(events: Iterable[Event], style: EventStyle) -> bytes:
    lines = []
    for event in events:
        if style is EventStyle.named:
            lines += [b"event: ", str(event["type"]).encode(), b"\n"]
        data = await encode_json(event)
        for end, escape in _LINE_ENDS.items():
            data = data.replace(end, escape)
        lines += [b"data: ", data, b"\n\n"]
    return b"".join(lines)
