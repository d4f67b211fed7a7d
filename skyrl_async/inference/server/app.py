"""The endpoint's application: one router module per surface, behind the key and the body limit.

Flows in: a sampler, a renderer and settings. Flows out: a FastAPI application for any ASGI server. A further surface
(completions, responses, messages, sessions) is a module with ``make_router`` and one line in ``create_app``.
"""

import time
from collections.abc import Sequence

from fastapi import FastAPI

from skyrl_async.chat import ChatRenderer
from skyrl_async.inference.server import chat_completions, operations
from skyrl_async.inference.server.errors import install_error_handlers
from skyrl_async.inference.server.guard import BodyLimit, KeyGuard
from skyrl_async.inference.server.operations import Statistics
from skyrl_async.inference.server.schema import Serving
from skyrl_async.rollout.sampler import Sampler


def create_app(
    sampler: Sampler,
    renderer: ChatRenderer,
    *,
    api_keys: Sequence[str],
    model_name: str = "policy",
    max_body_bytes: int = 16 * 2**20,
    statistics: Statistics = dict,
    keepalive_interval_s: float = 4.0,
) -> FastAPI:
    """Make the application.

    Args:
        api_keys: Bearer keys that open everything but ``/health``, which is open; none opens everything to everybody.
        model_name: Name of the policy in ``/v1/models`` and in replies.
        max_body_bytes: Larger requests get 413.
        statistics: Figures for ``/metrics``.
        keepalive_interval_s: Silence after which a stream sends a comment, > 0.
    """
    serving = Serving(
        sampler=sampler, renderer=renderer, model_name=model_name, keepalive_interval_s=keepalive_interval_s
    )
    app = FastAPI(title="skyrl_async", docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.include_router(chat_completions.make_router(serving))
    app.include_router(operations.make_router(serving, statistics, created=int(time.time())))
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    app.add_middleware(KeyGuard, api_keys=tuple(api_keys))
    return app
