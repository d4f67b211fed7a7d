"""The endpoint's application: one route per surface, behind the checks of keys and bodies.

    KeyGuard ──> BodyLimit ──> chat · completions · responses · messages ──> Serving ──> Planner ──> sampler
                          └──> sessions (controller only) · models · tokenize · health · metrics

A further surface is a module with a body and a call, and one line in ``create_app``.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from skyrl_async.chat import ChatRenderer
from skyrl_async.config.schema.server import ServerConfig
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.requests.errors import ERROR_HANDLERS
from skyrl_async.endpoint.requests.guard import BodyLimit, KeyGuard
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes import operations, responses, sessions
from skyrl_async.endpoint.routes.chat_completions import ChatCall, ChatCompletionRequest
from skyrl_async.endpoint.routes.completions import CompletionCall, CompletionRequest
from skyrl_async.endpoint.routes.messages import MessagesCall, MessagesRequest, count_tokens_route
from skyrl_async.endpoint.routes.operations import Statistics
from skyrl_async.endpoint.routes.responses import ResponsesCall, ResponsesRequest
from skyrl_async.endpoint.routes.surface import sampling_route
from skyrl_async.endpoint.sessions.settings import SessionSettings
from skyrl_async.endpoint.sessions.store import SessionStore
from skyrl_async.rollout.sampler import Sampler


def create_app(
    sampler: Sampler,
    renderer: ChatRenderer,
    *,
    server: ServerConfig | None = None,
    api_keys: Sequence[str],
    controller_keys: Sequence[str] = (),
    parser: AnswerParser | None = None,
    session_settings: SessionSettings | None = None,
    statistics: Statistics = dict,
    clock: Callable[[], float] = time.monotonic,
) -> Starlette:
    """Make the application; its ``state.serving`` holds the sessions.

    Args:
        server: Limits of requests, and the policy's name in replies; None takes the defaults.
        api_keys: Bearer keys that sample outside of sessions. ``/health`` needs none, and nothing does without keys of both kinds.
        controller_keys: Bearer keys that also make, reward and export sessions.
        parser: Finds reasoning and tool calls; None chooses it by the chat template.
        statistics: Figures for ``/metrics``.
        clock: Seconds, for the lifetimes of sessions.
    """
    server = server or ServerConfig()
    store = SessionStore(session_settings or SessionSettings(), clock=clock)
    parser = parser or AnswerParser.of(renderer.tokenizer)
    serving = Serving(sampler, renderer, parser, store, server)

    def figures() -> Mapping[str, float]:
        return {**statistics(), **store.statistics(), **serving.statistics()}

    routes = [
        sampling_route(serving, "/v1/chat/completions", ChatCompletionRequest, ChatCall),
        sampling_route(serving, "/v1/completions", CompletionRequest, CompletionCall),
        sampling_route(serving, responses.PATH, ResponsesRequest, ResponsesCall, style=EventStyle.named),
        responses.no_websocket_route(),
        sampling_route(serving, "/v1/messages", MessagesRequest, MessagesCall, style=EventStyle.named),
        count_tokens_route(serving),
        *sessions.routes(serving),
        *operations.routes(serving, figures, created=int(time.time())),
    ]
    guards = [
        Middleware(KeyGuard, api_keys=tuple(api_keys), controller_keys=tuple(controller_keys), sessions=store),
        Middleware(
            BodyLimit,
            server=server,
            max_model_len=sampler.max_model_len,
            long_work=serving.long_work,
            clock=clock,
        ),
    ]
    # Around the routes, so that the handlers of errors answer what the guards raise.
    app = Starlette(routes=[Mount("", routes=routes, middleware=guards)], exception_handlers=ERROR_HANDLERS)
    app.state.serving = serving
    return app
