"""What a request passes before any route: its key, which says who asks, and the checks of its body.

Flows in: ASGI messages. Flows out: the same with a ``Principal`` in their scope and the body in one piece, or a refusal. Plain ASGI,
so that routes keep their view of disconnects. Keys are compared in constant time and never logged.

Three kinds of keys: the run's samples, uncaptured; the controller's does that too, and makes, rewards and exports sessions; a
session's samples in that session and does nothing else, because what runs inside a sandbox must not reward itself.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.json_text import refusal_of
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.endpoint.sessions.store import SessionStore, front_end_of

_OPEN_PATHS = ("/health",)
_SESSION_PATH = re.compile(r"/sessions/([^/]+)(/v1/.*)")
_PRINCIPAL = "skyrl_async.principal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks."""

    session: Session | None = None
    """The session whose key was sent."""
    is_controller: bool = False
    """May make, reward and export sessions."""


def principal_of(scope: Scope) -> Principal:
    """Who sent the request; the guard has let it through."""
    principal: Principal = scope[_PRINCIPAL]
    return principal


class KeyGuard:
    """Finds out who asks, and refuses whom it does not know.

    Args:
        api_keys: of the run.
        controller_keys: of those who run sessions.
        sessions: know their own keys.

    Without any run's or controller's key everybody is a controller, but for those who send a session's key. ``/health`` is open.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], controller_keys: Sequence[str], sessions: SessionStore
    ) -> None:
        self._app = app
        self._run_digests = tuple(_digest(key) for key in api_keys)
        self._controller_digests = tuple(_digest(key) for key in controller_keys)
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        principal = self._principal(presented_key(Headers(scope=scope)))
        refusal = _UNKNOWN_KEY if principal is None else _trespass(principal, scope)
        if refusal is not None:
            await refusal.response_for(scope["path"])(scope, receive, send)
            return
        if inner := _SESSION_PATH.fullmatch(scope["path"]):
            scope = scope | {"path": inner[2], "raw_path": inner[2].encode()}
        await self._app(scope | {_PRINCIPAL: principal}, receive, send)

    def _principal(self, key: str | None) -> Principal | None:
        if key is not None and (session := self._sessions.authenticate(key)) is not None:
            return Principal(session=session)
        if not self._run_digests and not self._controller_digests:
            # The key of a session that is gone makes nobody a controller.
            return Principal(is_controller=True) if key is None or front_end_of(key) is None else None
        presented = _digest(key or "")
        is_controller = [hmac.compare_digest(presented, digest) for digest in self._controller_digests]
        is_run = [hmac.compare_digest(presented, digest) for digest in self._run_digests]
        if key is None or not any(is_controller + is_run):
            return None
        return Principal(is_controller=any(is_controller))


_UNKNOWN_KEY = ApiError(
    401,
    "a valid key is needed: send it as Authorization: Bearer <key>",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def _trespass(principal: Principal, scope: Scope) -> ApiError | None:
    """Why this request is none of ``principal``'s business, or None."""
    path = scope["path"]
    inner = _SESSION_PATH.fullmatch(path)
    if inner is not None:
        own = principal.session is not None and principal.session.id == inner[1]
        return None if own else ApiError(401, f"{path} needs the key of that session", code="invalid_api_key")
    if principal.session is not None and not path.startswith("/v1/"):
        return ApiError(403, f"a session's key opens /v1/ only, not {path}", code="forbidden")
    if path.startswith("/sessions") and not principal.is_controller:
        return ApiError(403, f"{path} needs the controller's key", code="forbidden")
    return None


def presented_key(headers: Headers) -> str | None:
    """A bearer key, or Anthropic's header."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class BodyLimit:
    """Reads bodies whole, and refuses those above ``max_body_bytes`` (413) and those that are text but not JSON (400)."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as refusal:
            await refusal.response_for(scope["path"])(scope, receive, send)
            return
        except ClientDisconnect:
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replayed, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > self._max_body_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        num_bytes, is_whole = 0, False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(message.get("body", b""))
            num_bytes += len(chunks[-1])
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            is_whole = not message.get("more_body", False)
        body = b"".join(chunks)
        if reason := refusal_of(body):
            raise ApiError(400, reason, code="invalid_value")
        return body

    def _too_large(self) -> ApiError:
        limit = self._max_body_bytes
        return ApiError(
            413, f"the body may have {limit} bytes (server.max_body_bytes), got more", code="request_too_large"
        )
