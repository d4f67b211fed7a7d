"""One HTTP request of a surface, from its body to its delivery: who asks, whether it is a resend, and what it becomes.

    body ──> session open? ──> resend of the last one: replay · equal to one in flight: join it · else: plan and sample
                                              └──> Delivery ──the client has it──> the sampled turns are committed

Flows in: a request and what makes a surface's call of it. Flows out: the response. Turns are committed exactly once, and only
if a client has got them. Does not know wire formats, nor how prompts are made.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fastapi import Request
from starlette.responses import Response

from skyrl_async.endpoint.requests.generation import Planner
from skyrl_async.endpoint.requests.guard import principal_of
from skyrl_async.endpoint.requests.shared_request import Emit, Event, Produce, SharedRequest
from skyrl_async.endpoint.requests.streaming import Delivery, EventStyle
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.errors import SessionClosedError

_RETRY_HEADER = "x-stainless-retry-count"
"""How the SDKs of OpenAI and Anthropic mark a resend."""


class Call(Protocol):
    """What a surface makes of a body: its wire format, whole or in events."""

    async def reply(self) -> dict[str, Any]:
        """The whole answer."""
        ...

    async def stream(self, emit: Emit) -> None:
        """The answer in events."""
        ...


MakePlanner = Callable[[Session | None, "Slots"], Planner]


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


class _SessionRequests:
    """What one session has in flight, and what it was sent last."""

    def __init__(self, max_concurrent_requests: int) -> None:
        self.limit = asyncio.Semaphore(max_concurrent_requests)
        self.in_flight: dict[bytes, SharedRequest] = {}
        """By the request's digest."""
        self.last: tuple[bytes, Produce] | None = None
        """The digest of the request delivered last, and what answers it again."""

    def replay(self, digest: bytes) -> Produce | None:
        """The reply sent last, if it was to this request and no equal one is in flight."""
        is_last = self.last is not None and self.last[0] == digest and digest not in self.in_flight
        return self.last[1] if self.last is not None and is_last else None


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
        make_call: Callable[[Planner], Call],
        *,
        is_stream: bool,
        style: EventStyle = EventStyle.openai,
    ) -> Response:
        """Answer ``request``.

        Raises what ``make_call`` raises, and ``SessionClosedError``, before anything is sampled or sent.
        """
        session = principal_of(request.scope).session
        shown = style if is_stream else None
        if session is None:
            planner = self._make_planner(None, Slots(self._limit))
            return self._deliver(SharedRequest(_produce(make_call(planner), is_stream)), shown)
        digest = await _digest(request)
        desk = self._desks.get(session)
        replay = desk.replay(digest) if desk is not None and _is_resend(request) else None
        if replay is not None:  # before caps are looked at: nothing is sampled
            self._counts["replays"] += 1
            return self._deliver(SharedRequest(replay), shown)
        session.begin_request(self._clock())
        try:
            work = self._session_work(session, digest, make_call, is_stream)
        except BaseException:
            session.end_request(self._clock())
            raise
        return self._deliver(work, shown, lambda: session.end_request(self._clock()))

    def end_session(self, session: Session) -> None:
        """Cut off what a session has in flight; its clients are told that it is closed."""
        desk = self._desks.pop(session, None)
        reason = SessionClosedError(f"session {session.id} was closed while this request was open; begin a new session")
        for work in list(desk.in_flight.values()) if desk else ():
            work.end(reason)
        self._on_session_end(session.id)

    def statistics(self) -> dict[str, float]:
        """Resends answered with the reply before, and requests that joined an equal one in flight."""
        return {f"{name}_total": float(count) for name, count in self._counts.items()}

    def _deliver(
        self, work: SharedRequest, style: EventStyle | None, on_closed: Callable[[], None] = lambda: None
    ) -> Response:
        return Delivery(work, style=style, keepalive_interval_s=self._keepalive_interval_s, on_closed=on_closed)

    def _session_work(
        self, session: Session, digest: bytes, make_call: Callable[[Planner], Call], is_stream: bool
    ) -> SharedRequest:
        desk = self._desk_of(session)
        joined = desk.in_flight.get(digest)
        if joined is not None and not joined.has_failed:
            self._counts["joined_requests"] += 1
            return joined
        planner = self._make_planner(session, Slots(desk.limit, self._limit))

        def left(work: SharedRequest) -> None:
            if desk.in_flight.get(digest) is work:
                del desk.in_flight[digest]

        def delivered(work: SharedRequest) -> None:
            planner.turns.commit()
            left(work)
            desk.last = digest, work.recorded()

        work = SharedRequest(_produce(make_call(planner), is_stream), on_delivered=delivered, on_left=left)
        desk.in_flight[digest] = work
        return work

    def _desk_of(self, session: Session) -> _SessionRequests:
        desk = self._desks.get(session)
        if desk is None:
            desk = self._desks[session] = _SessionRequests(session.limits.max_concurrent_requests)
        return desk


def _produce(call: Call, is_stream: bool) -> Produce:
    async def produce(emit: Emit) -> Event | None:
        if not is_stream:
            return await call.reply()
        await call.stream(emit)
        return None

    return produce


async def _digest(request: Request) -> bytes:
    return hashlib.sha256(request.url.path.encode() + b"\0" + await request.body()).digest()


def _is_resend(request: Request) -> bool:
    count = request.headers.get(_RETRY_HEADER, "")
    return count.isdecimal() and bool(count.strip("0"))
