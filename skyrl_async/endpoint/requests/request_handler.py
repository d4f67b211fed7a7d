"""Takes a request of any surface from its body to its delivery, and holds what the surfaces of one endpoint share.

    body ──> session open? ──> resend of one in flight: join it · of one answered: replay · else: plan and sample
                                              └──> Delivery ──the client has it──> the sampled turns are committed

Turns are committed exactly once, and only when a client has got them. Does not know wire formats, nor how prompts are made.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fastapi import Request
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.fields import refused_values
from skyrl_async.endpoint.requests.guard import principal_of, release_body
from skyrl_async.endpoint.requests.json_text import json_bytes_stepwise
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, LongWork, text_length
from skyrl_async.endpoint.requests.planner import Planner
from skyrl_async.endpoint.requests.resends import RequestIdentity, SessionRequests, identity_of
from skyrl_async.endpoint.requests.shared_request import Emit, Event, Produce, SharedRequest
from skyrl_async.endpoint.requests.streaming import Delivery, EventStyle
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.endpoint.sessions.store import SessionStore
from skyrl_async.errors import SessionClosedError
from skyrl_async.rollout.sampler import Sampler

logger = logging.getLogger(__name__)

_MAX_TOKENIZED_CHARS = 2**22
"""The tokenizer takes a hundred bytes for each, at the worst."""


class Call(Protocol):
    """One request in a surface's wire format."""

    async def reply(self) -> dict[str, Any]:
        """Return the whole answer."""
        ...

    async def stream(self, emit: Emit) -> None:
        """Emit the answer in events."""
        ...


MakePlanner = Callable[[Session | None, "Slots"], Planner]
MakeCall = Callable[[Planner], Awaitable[Call]]


class Slots:
    """Limits how many generations run at once, overall and in one session; more wait in line."""

    def __init__(self, *limits: asyncio.Semaphore) -> None:
        self._limits = limits

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for limit in self._limits:
                await stack.enter_async_context(limit)
            yield


class RequestHandler:
    """Answers requests that sample.

    Args:
        make_planner: makes the planner of one request.
        clock: seconds, the session store's.
        max_concurrent_requests: generations at once, >= 1.
        keepalive_interval_s: silence after which a stream sends a comment, > 0.
        on_session_end: called with the id of a session that is closed, once or more often.
    """

    def __init__(
        self,
        make_planner: MakePlanner,
        *,
        clock: Callable[[], float],
        max_concurrent_requests: int,
        keepalive_interval_s: float,
        on_session_end: Callable[[str], None],
    ) -> None:
        self._make_planner = make_planner
        self._clock = clock
        self._limit = asyncio.Semaphore(max_concurrent_requests)
        self._keepalive_interval_s = keepalive_interval_s
        self._on_session_end = on_session_end
        self._by_session: WeakKeyDictionary[Session, SessionRequests] = WeakKeyDictionary()
        self._counts = {"replays": 0, "joined_requests": 0}

    async def __call__(
        self,
        request: Request,
        make_call: MakeCall,
        *,
        is_stream: bool,
        style: EventStyle = EventStyle.openai,
    ) -> Response:
        """Answer ``request``, in ``style`` if it ``is_stream``.

        Raises ``SessionClosedError`` before anything is sampled or sent. What ``make_call`` raises becomes the answer.
        """
        session = principal_of(request.scope).session
        shown = style if is_stream else None
        if session is None:
            planner = self._make_planner(None, Slots(self._limit))
            return self._deliver(SharedRequest(_produce(request, planner, make_call, is_stream)), shown)
        identity = identity_of(request)
        requests = self._requests_of(session)
        requests.require_same_body(identity)
        replay = requests.replay(identity)
        if replay is not None:  # before caps are looked at: nothing is sampled
            self._counts["replays"] += 1
            return self._deliver(SharedRequest(replay), shown)
        session.begin_request(self._clock())
        try:
            shared = self._join_or_begin(session, identity, request, make_call, is_stream)
        except BaseException:
            session.end_request(self._clock())
            raise
        return self._deliver(shared, shown, lambda: session.end_request(self._clock()))

    def end_session(self, session: Session) -> None:
        """Cancel the session's requests in flight; their clients are told that it is closed."""
        requests = self._by_session.pop(session, None)
        reason = SessionClosedError(f"session {session.id} was closed while this request was open; begin a new session")
        for equal in list(requests.in_flight.values()) if requests else ():
            for shared in equal:
                shared.cancel(reason)
        self._on_session_end(session.id)

    def statistics(self) -> dict[str, float]:
        """Resends answered by a replay, and resends that joined a request in flight."""
        return {f"{name}_total": float(count) for name, count in self._counts.items()}

    def _deliver(
        self, shared: SharedRequest, style: EventStyle | None, on_closed: Callable[[], None] = lambda: None
    ) -> Response:
        return Delivery(shared, style=style, keepalive_interval_s=self._keepalive_interval_s, on_closed=on_closed)

    def _join_or_begin(
        self, session: Session, identity: RequestIdentity, request: Request, make_call: MakeCall, is_stream: bool
    ) -> SharedRequest:
        requests = self._requests_of(session)
        joined = requests.join(identity)
        if joined is not None:
            self._counts["joined_requests"] += 1
            release_body(request.scope)
            return joined
        planner = self._make_planner(session, Slots(requests.limit, self._limit))

        def abandoned(shared: SharedRequest) -> None:
            requests.abandoned(identity, shared)

        def delivered(shared: SharedRequest) -> None:
            planner.turns.commit()
            requests.delivered(identity, shared)

        produce = _produce(request, planner, make_call, is_stream)
        shared = SharedRequest(produce, on_delivered=delivered, on_abandoned=abandoned)
        requests.add(identity, shared)
        return shared

    def _requests_of(self, session: Session) -> SessionRequests:
        requests = self._by_session.get(session)
        if requests is None:
            requests = self._by_session[session] = SessionRequests(session.limits.max_concurrent_requests)
        return requests


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts of one endpoint, which every surface is made with."""

    sampler: Sampler
    renderer: ChatRenderer
    model_name: str
    sessions: SessionStore
    handle: RequestHandler
    """Answers a request that samples."""
    long_work: LongWork

    async def tokenize(self, request: Request, content: Any, answer: Callable[[], Mapping[str, Any]]) -> Response:
        """Answer a request that only tokenizes ``content``, with the JSON object that ``answer`` returns."""
        limit = max(_MAX_TOKENIZED_CHARS, 16 * self.sampler.max_model_len)

        def answered() -> bytes:
            if text_length(content, enough=limit) > limit:
                raise ApiError(413, f"at most {limit} characters are tokenized at once, got more: send them in parts")
            return json_bytes_stepwise(answer())

        session = principal_of(request.scope).session
        with refused_values("messages"):
            body = await self.long_work.tokenize(session, answered, is_long=text_length(content) > LONG_TEXT)
        return Response(body, media_type="application/json")

    def require_model(self, name: str | None) -> None:
        """Raise ``ApiError`` 404 for a model that is not served; None asks for none."""
        if name in (None, self.model_name):
            return
        message = f"model {name!r} is not served here; the model is {self.model_name!r}"
        raise ApiError(404, message, code="model_not_found", param="model")

    async def sweep_sessions(self, interval_s: float = 5.0) -> None:
        """Close sessions that are past a deadline, every ``interval_s``. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            for session in self.sessions.sweep():
                logger.info("%r has expired", session)
                self.handle.end_session(session)
