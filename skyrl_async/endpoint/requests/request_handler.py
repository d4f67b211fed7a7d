"""Takes a request of any surface from its body to its delivery, and holds what the surfaces of one endpoint share.

    body ──> session open? ──> resend of one in flight: join it · of one answered: replay · else: plan and sample
                                              └──> Delivery ──the client has it──> the sampled turns are committed

Turns are committed exactly once, and only when a client has got them. Does not know wire formats, nor how prompts are made.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.fields import refused_values
from skyrl_async.endpoint.requests.generation import GenerationContext
from skyrl_async.endpoint.requests.guard import body_of, session_of
from skyrl_async.endpoint.requests.json_text import json_bytes_stepwise
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, LongWork, text_length
from skyrl_async.endpoint.requests.planner import Planner
from skyrl_async.endpoint.requests.resends import SessionRequests, identity_of
from skyrl_async.endpoint.requests.shared_request import Emit, Produce, SharedRequest
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

    async def stream(self, emit: Emit) -> None:
        """Emit the answer in events."""


MakeCall = Callable[[Planner], Awaitable[Call]]


@dataclass(eq=False)
class Serving:
    """One endpoint: answers requests that sample, and holds what every surface is made with."""

    sampler: Sampler
    renderer: ChatRenderer
    parser: AnswerParser
    sessions: SessionStore
    """The endpoint's sessions, and how they are treated."""
    server: ServerConfig
    """The policy's name in replies, and how many generations run at once."""

    def __post_init__(self) -> None:
        self.model_name = self.server.model_name
        self.long_work = LongWork()
        self._limit = asyncio.Semaphore(self.server.max_concurrent_requests)
        self._by_session: WeakKeyDictionary[Session, SessionRequests] = WeakKeyDictionary()
        self._counts = {"replays": 0, "joined_requests": 0}

    async def handle(self, request: Request, make_call: MakeCall, *, style: EventStyle | None) -> Response:
        """Answer ``request``: as a stream in ``style``, or whole.

        Raises ``SessionClosedError`` before anything is sampled or sent. What ``make_call`` raises becomes the answer.
        """
        session = session_of(request.scope)
        if session is None:
            produce = self._produce(request, self._context(None, self._limit), make_call, style)
            return Delivery(SharedRequest(produce), style)
        identity = identity_of(request)
        requests = self._by_session.setdefault(session, SessionRequests(session.limits.max_concurrent_requests))
        requests.require_same_body(identity)
        replay = requests.replay(identity)
        if replay is not None:  # before caps are looked at: nothing is sampled
            self._counts["replays"] += 1
            return Delivery(SharedRequest(replay), style)
        session.begin_request(self.sessions.clock())
        shared = requests.join(identity)
        if shared is not None:
            self._counts["joined_requests"] += 1
            body_of(request.scope).release()
        else:
            context = self._context(session, requests.limit, self._limit)
            produce = self._produce(request, context, make_call, style)
            shared = requests.begin(identity, produce, context.commit_turns)
        return Delivery(shared, style, lambda: session.end_request(self.sessions.clock()))

    def end_session(self, session: Session) -> None:
        """Cancel the session's requests in flight; their clients are told that it is closed."""
        requests = self._by_session.pop(session, None)
        reason = SessionClosedError(f"session {session.id} was closed while this request was open; begin a new session")
        if requests is not None:
            requests.cancel(reason)

    def statistics(self) -> dict[str, float]:
        """Resends answered by a replay, and resends that joined a request in flight."""
        return {f"{name}_total": float(count) for name, count in self._counts.items()}

    def _context(self, session: Session | None, *limits: asyncio.Semaphore) -> GenerationContext:
        return GenerationContext(
            sampler=self.sampler, renderer=self.renderer, parser=self.parser, session=session, limits=limits
        )

    def _produce(
        self, request: Request, context: GenerationContext, make_call: MakeCall, style: EventStyle | None
    ) -> Produce:
        body = body_of(request.scope)
        planner = Planner(context, self.sessions.settings.reasoning_policy, self.long_work)

        async def produce(emit: Emit) -> None:
            call = await make_call(planner)
            body.release()
            if style is None:
                emit(await call.reply())
            else:
                await call.stream(emit)

        return produce

    async def tokenize(self, request: Request, content: Any, answer: Callable[[], Mapping[str, Any]]) -> Response:
        """Answer a request that only tokenizes ``content``, with the JSON object that ``answer`` returns."""
        limit = max(_MAX_TOKENIZED_CHARS, 16 * self.sampler.max_model_len)

        def answered() -> bytes:
            if text_length(content, enough=limit) > limit:
                raise ApiError(413, f"at most {limit} characters are tokenized at once, got more: send them in parts")
            return json_bytes_stepwise(answer())

        session = session_of(request.scope)
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
                self.end_session(session)
