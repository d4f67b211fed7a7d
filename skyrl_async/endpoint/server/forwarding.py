"""Forwards a session's requests to the front end that holds the session, so that any front end's address serves all sessions."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing

import httpx
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.guard import body_chunks, presented_key
from skyrl_async.endpoint.requests.streaming import until_disconnect
from skyrl_async.endpoint.sessions.store import front_end_of

_OWN_HEADERS = ("connection", "host", "keep-alive", "transfer-encoding")
"""Headers that belong to one connection and are not forwarded."""


class Forwarding:
    """An ASGI application in front of another one.

    Args:
        app: this front end's application.
        front_end: this front end's index.
        server: limits of a request's body.
    """

    def __init__(self, app: ASGIApp, front_end: int, server: ServerConfig) -> None:
        self._app = app
        self._front_end = front_end
        self._server = server
        self._peers: tuple[str, ...] = ()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy of the environment does not reach the front ends, and would see their keys
        )

    def connect(self, peers: tuple[str, ...]) -> None:
        """Set the addresses of all front ends: ``peers[i]`` is front end ``i``'s, without ``/v1``."""
        self._peers = peers

    async def close(self) -> None:
        """Close the connections to other front ends."""
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._other_owner(scope)
        if owner is None:
            await self._app(scope, receive, send)
            return
        is_whole = asyncio.Event()

        async def body() -> AsyncGenerator[bytes, None]:
            limit, timeout_s = self._server.max_body_bytes, self._server.request_timeout_s
            async with aclosing(body_chunks(scope, receive, limit, timeout_s)) as chunks:
                async for chunk in chunks:
                    yield chunk
            is_whole.set()

        async def receive_more() -> Message:
            await is_whole.wait()
            return await receive()

        try:
            await until_disconnect(receive_more, self._forward(owner, scope, receive, send, body()))
        except ClientDisconnect:
            return

    def _other_owner(self, scope: Scope) -> str | None:
        """The address of the front end that holds the request's session, unless it is this one or there is none."""
        key = presented_key(Headers(scope=scope))
        index = front_end_of(key) if key is not None else None
        if index is None or index == self._front_end or index >= len(self._peers):
            return None
        return self._peers[index]

    async def _forward(self, root: str, scope: Scope, receive: Receive, send: Send, body: AsyncIterable[bytes]) -> None:
        query = scope["query_string"].decode()
        url = f"{root}{scope['path']}{'?' if query else ''}{query}"
        headers = [(k, v) for k, v in scope["headers"] if k.decode("latin-1") not in _OWN_HEADERS]
        request = self._client.build_request(scope["method"], url, headers=headers, content=body)
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.TransportError, ApiError) as error:
            down = ApiError(503, f"the front end of this session does not answer: {error}", code="front_end_down")
            refusal = error if isinstance(error, ApiError) else down
            await refusal.response_for(scope["path"])(scope, receive, send)
            return
        try:
            own = (*_OWN_HEADERS, "content-length")
            raw = [(k.lower(), v) for k, v in answer.headers.raw if k.decode("latin-1").lower() not in own]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": raw})
            async for block in answer.aiter_raw():
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()
