"""Checks a request's key and body before any route, as plain ASGI, so that routes still see disconnects.

    a key of the run          samples outside of sessions
    a key of the controller   does that too, and makes, rewards and exports sessions
    a session's key           samples in that session only: an agent in a sandbox must not reward itself

Keys are compared in constant time and never logged. A route finds the session and the parsed body in its scope.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.requests.errors import ApiError, invalid_body
from skyrl_async.endpoint.requests.json_text import TooManyValuesError, parse_stepwise
from skyrl_async.endpoint.requests.long_work import LARGE_BODY, LONG_BODY, LongWork
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.endpoint.sessions.store import SessionStore, front_end_of, key_digest

M = TypeVar("M", bound=BaseModel)

_SESSION_PATH = re.compile(r"/sessions/([^/]+)(/v1/.*)")
_SESSION = "skyrl_async.session"


def session_of(scope: Scope) -> Session | None:
    """The session whose key a request came with; None for any other key."""
    return scope.get(_SESSION)


class KeyGuard:
    """Finds the session of each request's key, and refuses unknown keys and forbidden paths.

    Args:
        api_keys: the run's.
        controller_keys: the controllers'.
        sessions: check the keys of sessions.

    Without keys of the run and of controllers, every request without a session's key is a controller's. ``/health`` is open.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], controller_keys: Sequence[str], sessions: SessionStore
    ) -> None:
        self._app = app
        self._run_digests = tuple(key_digest(key) for key in api_keys)
        self._controller_digests = tuple(key_digest(key) for key in controller_keys)
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/health":
            await self._app(scope, receive, send)
            return
        session, is_controller = self._sender(presented_key(Headers(scope=scope)))
        if session is not None:
            session.num_requests += 1
        if inner := _SESSION_PATH.fullmatch(path):
            if session is None or session.id != inner[1]:
                raise ApiError(401, f"{path} needs the key of that session", code="invalid_api_key")
            scope = scope | {"path": inner[2], "raw_path": inner[2].encode()}
        elif session is not None and not path.startswith("/v1/"):
            raise ApiError(403, f"a session's key opens /v1/ only, not {path}", code="forbidden")
        elif path.startswith("/sessions") and not is_controller:
            raise ApiError(403, f"{path} needs the controller's key", code="forbidden")
        await self._app(scope | {_SESSION: session}, receive, send)

    def _sender(self, key: str | None) -> tuple[Session | None, bool]:
        """The session of a key, and whether the key is a controller's."""
        session = None if key is None else self._sessions.authenticate(key)
        if session is not None:
            return session, False
        if self._run_digests or self._controller_digests:
            presented = key_digest(key or "")
            is_controller = [hmac.compare_digest(presented, digest) for digest in self._controller_digests]
            is_run = [hmac.compare_digest(presented, digest) for digest in self._run_digests]
            if key is not None and any(is_controller + is_run):
                return None, any(is_controller)
        elif key is None or front_end_of(key) is None:  # the key of a deleted session is no controller's
            return None, True
        raise ApiError(
            401,
            "a valid key is needed: send it as Authorization: Bearer <key>; an agent's is in OPENAI_API_KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def presented_key(headers: Headers) -> str | None:
    """The key in a bearer header or in Anthropic's; None without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


class BodyLimit:
    """Reads bodies whole. Refuses a body above ``max_body_bytes`` (413), and text that is not JSON (400).

    Args:
        max_model_len: tokens of the model's context. A body that no prompt of it needs gets the answer to a prompt that is too long,
            before it is read to its end: to parse, check and render what cannot fit would hold up others.
        long_work: limits large bodies and parses long ones.
        clock: seconds, as for the sessions.
    """

    def __init__(
        self, app: ASGIApp, server: ServerConfig, max_model_len: int, long_work: LongWork, clock: Callable[[], float]
    ) -> None:
        self._app = app
        self._server = server
        self._max_model_len = max_model_len
        self._long_work = long_work
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = session_of(scope)
        with ExitStack() as held:
            raw, digest = await self._read(scope, receive, session, held)
            parse = partial(_parsed, raw)
            value = await self._long_work.parse(session, parse, is_long=len(raw) > LONG_BODY)
            body = RequestBody(value, digest, held.close)
            del raw, parse, value
            await self._app(scope | {_BODY: body}, receive, send)

    async def _read(
        self, scope: Scope, receive: Receive, session: Session | None, held: ExitStack
    ) -> tuple[bytearray, bytes]:
        """The whole body, and a digest of it and its path.

        Acquires one of the session's large bodies as soon as the body is large; ``held`` releases it.
        """
        body = bytearray()
        digest = hashlib.sha256(scope["path"].encode() + b"\0")
        large_bodies, is_large = self._long_work.large_bodies(session), False
        limit = self._server.max_body_bytes
        if scope["path"] in _PROMPT_PATHS:
            limit = min(limit, _MIN_PROMPT_BYTES + _BYTES_PER_TOKEN * self._max_model_len)

        async def receive_chunk() -> Message:
            return await (self._long_work.in_turn(receive) if is_large else receive())

        try:
            async with aclosing(body_chunks(scope, receive_chunk, limit, self._server.request_timeout_s)) as chunks:
                async for chunk in chunks:
                    body += chunk
                    digest.update(chunk)
                    if len(body) > LARGE_BODY and not is_large:
                        is_large = await large_bodies.acquire()
                        held.callback(large_bodies.release)
        except ApiError as refusal:
            if refusal.status != 413 or limit == self._server.max_body_bytes:
                raise
            if session is not None:
                session.require_open(self._clock())
                session.count_overflow()
            raise ApiError(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens, but the body has more than {limit} bytes "
                "(context_length_exceeded); shorten the prompt or raise engine.max_model_len",
                code="context_length_exceeded",
                param="messages",
            ) from None
        return body, digest.digest()


_PROMPT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Paths whose bodies have one prompt, and nothing else that is long."""
_BYTES_PER_TOKEN, _MIN_PROMPT_BYTES = 64, 2**18
"""Bytes of JSON that any prompt may have: a token of text has some four, and history that the template leaves out has bytes too."""
_BODY = "skyrl_async.body"
_JSON_TYPE = re.compile(r"application/(\S+\+)?json\s*(;|$)", re.IGNORECASE)


@dataclass(slots=True)
class RequestBody:
    """A body that was read."""

    value: Any
    """The JSON value; None without a body, and once a route has taken it."""
    digest: bytes
    """SHA-256 of path and body."""
    release: Callable[[], None]
    """Admits the session's next large body: call it when this one has become a prompt. Idempotent."""


def body_of(scope: Scope) -> RequestBody:
    """The body of a request."""
    return scope[_BODY]


def checked_body(request: Request, kind: type[M]) -> M:
    """The request's body as a ``kind``; ``ApiError`` if it is none. Call it once: the JSON value is forgotten."""
    body = body_of(request.scope)
    value, body.value = body.value, None
    content_type = request.headers.get("content-type", "")
    if value is not None and not _JSON_TYPE.match(content_type):
        raise ApiError(400, f"the body must come as Content-Type: application/json, got {content_type!r}")
    try:
        return kind.model_validate({} if value is None else value, from_attributes=True)
    except ValidationError as error:
        raise invalid_body(error) from None


def _parsed(body: bytearray) -> Any:
    """The JSON value of a body; None for an empty one. Raises ``ApiError`` for one that is refused."""
    try:
        return parse_stepwise(body.decode()) if body else None
    except TooManyValuesError as error:
        raise ApiError(413, str(error), code="request_too_large") from None
    except UnicodeDecodeError as error:
        reason = f"the body must be JSON in UTF-8, got byte {body[error.start]:#04x} at {error.start}"
    except (ValueError, RecursionError) as error:
        reason = f"the body must be JSON: {error}"
    raise ApiError(400, reason, code="invalid_value")


async def body_chunks(
    scope: Scope, receive: Receive, max_body_bytes: int, timeout_s: float
) -> AsyncGenerator[bytes, None]:
    """A request's body in the chunks that arrive.

    Args:
        max_body_bytes: a larger body is refused.
        timeout_s: time for the client to send it; time in which no chunk is asked for does not count.

    Raises ``ApiError`` 413 or 408, and ``ClientDisconnect``.
    """
    announced = Headers(scope=scope).get("content-length", "")
    is_too_large = announced.isdecimal() and len(announced) < 20 and int(announced) > max_body_bytes
    num_bytes, is_whole, left_s = 0, False, timeout_s
    while not is_whole and not is_too_large:
        asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {timeout_s:g} s (server.request_timeout_s)",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        left_s -= asyncio.get_running_loop().time() - asked_at
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        is_whole, is_too_large = not message.get("more_body", False), num_bytes > max_body_bytes
        if not is_too_large:
            yield chunk
    if is_too_large:
        raise ApiError(
            413, f"the body may have {max_body_bytes} bytes (server.max_body_bytes), got more", code="request_too_large"
        )
