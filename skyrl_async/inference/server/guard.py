"""What a request passes before any route: the bearer key and the limit on its body.

Flows in: ASGI messages. Flows out: the same, or a refusal. Plain ASGI, so that routes keep their view of disconnects.
Keys are compared in constant time and never logged.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_async.inference.server.errors import ApiError

_OPEN_PATHS = ("/health",)


class KeyGuard:
    """Lets requests with one of the keys through, and everything to ``/health``. Without any key, everything."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(_digest(key) for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "a valid key is needed: send it as Authorization: Bearer <key>",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        if not self._digests:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        presented = _digest(key.strip())
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class BodyLimit:
    """Refuses bodies above ``max_body_bytes`` with 413, before or while they are read."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            await ApiError(413, self._refusal, code="request_too_large").response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._refusal)
            return message

        await self._app(scope, counted, send)

    @property
    def _refusal(self) -> str:
        return f"the body may have {self._max_body_bytes} bytes (server.max_body_bytes), got more"
