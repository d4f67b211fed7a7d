"""One HTTP request of a surface, from its body to its delivery: who asks, whether it is a resend, and what it becomes.

    body ──> session open? ──> resend of one in flight: join it · of one answered: replay · else: plan and sample
                                              └──> Delivery ──the client has it──> the sampled turns are committed

Flows in: a request and what makes a surface's call of it. Flows out: the response. Turns are committed exactly once, and only
if a client has got them. Equal requests that nothing marks as resends are samples beside each other. Does not know wire
formats, nor how prompts are made.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fastapi import Request
from starlette.responses import Response

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.generation import Planner
from skyrl_async.endpoint.requests.guard import principal_of, release_body
from skyrl_async.endpoint.requests.long_work import LARGE_BODY
from skyrl_async.endpoint.requests.shared_request import Emit, Event, Produce, SharedRequest
from skyrl_async.endpoint.requests.streaming import Delivery, EventStyle
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.errors import SessionClosedError

_RETRY_HEADER = "x-stainless-retry-count"
"""How the SDKs of OpenAI and Anthropic mark a resend."""
_KEY_HEADERS = ("idempotency-key", "x-idempotency-key")
"""How a client names a request, so that its resends can be told from equal requests."""


class Call(Protocol):
    """What a surface makes of a body: its wire format, whole or in events."""

    async def reply(self) -> dict[str, Any]:
        """The whole answer."""
        ...

    async def stream(self, emit: Emit) -> None:
        """The answer in events."""
        ...


MakePlanner = Callable[[Session | None, "Slots"], Planner]
MakeCall = Callable[[Planner], Awaitable[Call]]


class Slots:
    """How many generations run at once, overall and in one session; more wait in line."""

    def __init__(self, *limits: asyncio.Semaphore) -> None:
        self._limits = limits

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for limit in self._limits:
                await stack.enter_async_context(limit)
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """Which request one is."""

    body: bytes
    """Digest of path and body."""
    key: bytes | None
    """Digest of its idempotency key."""
    is_resend: bool
    """The client says that it has sent it before."""

    @property
    def name(self) -> bytes:
        """What a request and its resends share."""
        return self.body if self.key is None else self.key


class _SessionRequests:
    """What one session has in flight, and what it was sent last."""

    def __init__(self, max_concurrent_requests: int) -> None:
        self.limit = asyncio.Semaphore(max_concurrent_requests)
        self.in_flight: dict[bytes, list[SharedRequest]] = {}
        """By name; several under one name are samples beside each other."""
        self.last: tuple[bytes, Produce] | None = None
        """The name of the request delivered last, and what answers it again; of requests without a key."""
        self._max_keys = max_concurrent_requests
        """A client that resends has no more requests under way than these."""
        self._bodies: dict[bytes, bytes] = {}
        """Key -> body, of the newest keys."""
        self._replies: dict[bytes, Produce] = {}
        """Key -> what answers it again."""
        self._unread: tuple[bytes, SharedRequest] | None = None
        """The name of the request whose connection broke last when its answer was already sampled, and the answer."""
        self._cut_off: Counter[bytes] = Counter()
        """The name of the requests whose connections broke last and cancelled their sampling, less their resends."""

    def require_same_body(self, identity: _Identity) -> None:
        """Raise ``ApiError`` if the key came with another body."""
        if identity.key is not None and self._bodies.get(identity.key, identity.body) != identity.body:
            raise ApiError(
                400,
                "this idempotency key came with another body before; send each request under a key of its own",
                code="idempotency_error",
                param="Idempotency-Key",
            )

    def replay(self, identity: _Identity) -> Produce | None:
        """The reply to the request that this one resends, if a client was sent it and nothing equal is in flight."""
        name = identity.name
        if identity.key is not None:
            return self._replies.get(identity.key)
        if not identity.is_resend or self.last is None or self.last[0] != name:
            return None
        return None if name in self.in_flight or self._cut_off[name] else self.last[1]

    def join(self, identity: _Identity) -> SharedRequest | None:
        """The work that this request resends: one whose connection broke or, of a marked request, one in flight."""
        name = identity.name
        if self._unread is not None and self._unread[0] == name:
            work, self._unread = self._unread[1], None
            self.add(identity, work)
            return work
        if not identity.is_resend and identity.key is None:
            return None
        if self._cut_off[name]:  # it resends that one, and none that is in flight
            self._cut_off[name] -= 1
            return None
        alive = next((work for work in self.in_flight.get(name, ()) if not work.has_failed), None)
        if alive is not None:  # last in line from now on: several resends do not all join the same one
            self.in_flight[name].remove(alive)
            self.in_flight[name].append(alive)
        return alive

    def add(self, identity: _Identity, work: SharedRequest) -> None:
        """``work`` begins, or is resent."""
        self.in_flight.setdefault(identity.name, []).append(work)
        if identity.key is not None:
            self._bodies[identity.key] = identity.body
            while len(self._bodies) > self._max_keys:
                oldest = next(iter(self._bodies))
                del self._bodies[oldest]
                self._replies.pop(oldest, None)

    def left(self, name: bytes, work: SharedRequest) -> None:
        """The last client of ``work`` has left without its answer."""
        self._remove(name, work)
        if work.is_done and not work.has_failed:
            self._unread = name, work
        elif not work.has_failed:
            if name not in self._cut_off:
                self._cut_off.clear()
            self._cut_off[name] += 1

    def delivered(self, identity: _Identity, work: SharedRequest) -> None:
        """A client has the answer."""
        self._remove(identity.name, work)
        if identity.key is None:
            self.last = identity.name, work.recorded()
        elif identity.key in self._bodies:
            self._replies[identity.key] = work.recorded()

    def _remove(self, name: bytes, work: SharedRequest) -> None:
        works = self.in_flight.get(name, [])
        if work in works:
            works.remove(work)
        if not works:
            self.in_flight.pop(name, None)


class RequestHandler:
    """Carries requests through.

    Args:
        make_planner: makes the planner of one request.
        clock: seconds, the session store's.
        max_concurrent_requests: generations at once, >= 1.
        keepalive_interval_s: silence after which a stream sends a comment, > 0.
        on_session_end: told the id of a session that is closed; more than once, maybe.
    """

    def __init__(
        self,
        make_planner: MakePlanner,
        *,
        clock: Callable[[], float],
        max_concurrent_requests: int,
        keepalive_interval_s: float,
        on_session_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._make_planner = make_planner
        self._clock = clock
        self._limit = asyncio.Semaphore(max_concurrent_requests)
        self._keepalive_interval_s = keepalive_interval_s
        self._on_session_end = on_session_end
        self._desks: WeakKeyDictionary[Session, _SessionRequests] = WeakKeyDictionary()
        self._counts = {"replays": 0, "joined_requests": 0}

    async def __call__(
        self,
        request: Request,
        make_call: MakeCall,
        *,
        is_stream: bool,
        style: EventStyle = EventStyle.openai,
    ) -> Response:
        """Answer ``request``.

        Raises ``SessionClosedError`` before anything is sampled or sent. What ``make_call`` raises is answered likewise.
        """
        session = principal_of(request.scope).session
        shown = style if is_stream else None
        if session is None:
            planner = self._make_planner(None, Slots(self._limit))
            return self._deliver(SharedRequest(_produce(request, planner, make_call, is_stream)), shown)
        identity = await _identity(request)
        desk = self._desk_of(session)
        desk.require_same_body(identity)
        replay = desk.replay(identity)
        if replay is not None:  # before caps are looked at: nothing is sampled
            self._counts["replays"] += 1
            return self._deliver(SharedRequest(replay), shown)
        session.begin_request(self._clock())
        try:
            work = self._session_work(session, identity, request, make_call, is_stream)
        except BaseException:
            session.end_request(self._clock())
            raise
        return self._deliver(work, shown, lambda: session.end_request(self._clock()))

    def end_session(self, session: Session) -> None:
        """Cut off what a session has in flight; its clients are told that it is closed."""
        desk = self._desks.pop(session, None)
        reason = SessionClosedError(f"session {session.id} was closed while this request was open; begin a new session")
        for works in list(desk.in_flight.values()) if desk else ():
            for work in works:
                work.end(reason)
        self._on_session_end(session.id)

    def statistics(self) -> dict[str, float]:
        """Resends answered with the reply before, and resends that joined the request before."""
        return {f"{name}_total": float(count) for name, count in self._counts.items()}

    def _deliver(
        self, work: SharedRequest, style: EventStyle | None, on_closed: Callable[[], None] = lambda: None
    ) -> Response:
        return Delivery(work, style=style, keepalive_interval_s=self._keepalive_interval_s, on_closed=on_closed)

    def _session_work(
        self, session: Session, identity: _Identity, request: Request, make_call: MakeCall, is_stream: bool
    ) -> SharedRequest:
        desk = self._desk_of(session)
        joined = desk.join(identity)
        if joined is not None:
            self._counts["joined_requests"] += 1
            release_body(request.scope)
            return joined
        planner = self._make_planner(session, Slots(desk.limit, self._limit))

        def left(work: SharedRequest) -> None:
            desk.left(identity.name, work)

        def delivered(work: SharedRequest) -> None:
            planner.turns.commit()
            desk.delivered(identity, work)

        work = SharedRequest(_produce(request, planner, make_call, is_stream), on_delivered=delivered, on_left=left)
        desk.add(identity, work)
        return work

    def _desk_of(self, session: Session) -> _SessionRequests:
        desk = self._desks.get(session)
        if desk is None:
            desk = self._desks[session] = _SessionRequests(session.limits.max_concurrent_requests)
        return desk


def _produce(request: Request, planner: Planner, make_call: MakeCall, is_stream: bool) -> Produce:
    scope = request.scope

    async def produce(emit: Emit) -> Event | None:
        call = await make_call(planner)
        release_body(scope)
        if not is_stream:
            return await call.reply()
        await call.stream(emit)
        return None

    return produce


async def _digest(request: Request) -> bytes:
    digest = hashlib.sha256(request.url.path.encode() + b"\0")
    body = await request.body()
    if len(body) > LARGE_BODY:
        await asyncio.to_thread(digest.update, body)
    else:
        digest.update(body)
    return digest.digest()


async def _identity(request: Request) -> _Identity:
    count = request.headers.get(_RETRY_HEADER, "")
    key = next((request.headers[name] for name in _KEY_HEADERS if request.headers.get(name)), None)
    return _Identity(
        body=await _digest(request),
        key=None if key is None else hashlib.sha256(b"key\0" + key.encode()).digest(),
        is_resend=count.isdecimal() and bool(count.strip("0")),
    )
