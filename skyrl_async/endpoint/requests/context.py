"""What the routes of one endpoint share, and how they answer.

Flows in: the parts of an endpoint. Flows out: one object that every surface is made with. Does not know wire formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.guard import principal_of
from skyrl_async.endpoint.requests.json_text import json_bytes_fairly
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, LongWork, text_length
from skyrl_async.endpoint.requests.request_handler import RequestHandler
from skyrl_async.endpoint.requests.validation import refused_values
from skyrl_async.endpoint.sessions.store import SessionStore
from skyrl_async.rollout.sampler import Sampler

_MAX_TOKENIZED = 2**22
"""Characters. The tokenizer takes a hundred bytes for each, at the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts of one endpoint."""

    sampler: Sampler
    renderer: ChatRenderer
    model_name: str
    sessions: SessionStore
    exchange: RequestHandler
    """Answers a request."""
    long_work: LongWork

    async def tokenize(self, request: Request, content: Any, answer: Callable[[], Mapping[str, Any]]) -> Response:
        """What ``answer`` makes of ``content``, for a request that samples nothing."""
        limit = max(_MAX_TOKENIZED, 16 * self.sampler.max_model_len)

        def answered() -> bytes:
            if text_length(content, enough=limit) > limit:
                raise ApiError(413, f"at most {limit} characters are tokenized at once, got more: send them in parts")
            return json_bytes_fairly(answer())

        session = principal_of(request.scope).session
        with refused_values("messages"):
            body = await self.long_work.tokenize(session, answered, is_long=text_length(content) > LONG_TEXT)
        return Response(body, media_type="application/json")

    def require_model(self, name: str | None) -> None:
        """Raise ``ApiError`` 404 for a model that is not served; none is asked for by None."""
        if name in (None, self.model_name):
            return
        raise ApiError(
            404,
            f"model {name!r} is not served here; the model is {self.model_name!r}",
            code="model_not_found",
            param="model",
        )
