"""Every failure as an OpenAI error body: ``{"error": {"message", "type", "param", "code"}}``.

The client learns only the class of an unexpected exception; the log has its traceback.
"""

import logging
import re
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from skyrl_async.endpoint.requests.json_text import StrictJSONResponse
from skyrl_async.errors import (
    NoEngineError,
    PromptTooLongError,
    RequestRefusedError,
    SessionClosedError,
    SessionNotFoundError,
)

logger = logging.getLogger(__name__)


_FINAL = {"x-should-retry": "false"}
"""Read by the SDKs of OpenAI and Anthropic. Without it Claude Code sends a request again for minutes, lest its key was renewed."""
_NO_ENGINE_RETRY_S = 10
"""Engines boot in tens of seconds."""


@dataclass(eq=False)
class ApiError(Exception):
    """A failure with its HTTP status and OpenAI error body."""

    status: int
    message: str
    code: str | None = field(default=None, kw_only=True)
    param: str | None = field(default=None, kw_only=True)
    headers: Mapping[str, str] | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 401:  # litellm retries one of the type invalid_request_error
            kind = "authentication_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response_for(self, path: str) -> JSONResponse:
        """The response in the format of the surface at ``path``: Anthropic's SDK looks for a type beside the error."""
        outer = {"type": "error"} if "/v1/messages" in path else {}
        headers = dict(self.headers or {}) | (_FINAL if self.status == 401 else {})
        return StrictJSONResponse(outer | self.body, self.status, headers=headers)


_API_ERRORS: Mapping[type[Exception], tuple[int, str]] = {
    PromptTooLongError: (400, "context_length_exceeded"),
    NoEngineError: (503, "no_engine"),
    RequestRefusedError: (400, "invalid_value"),
    SessionClosedError: (401, "session_closed"),  # the one status at which every harness gives up at once
    SessionNotFoundError: (404, "session_not_found"),
}
"""This package's failures -> status and code."""


def as_api_error(error: Exception) -> ApiError:
    """The answer to a failure; an unexpected one is logged. Clears the failure's tracebacks, whose frames hold the request."""
    answer = _api_error(error)
    failure: BaseException | None = error
    while failure is not None:
        failure.__traceback__ = None
        failure = failure.__cause__ or failure.__context__
    return answer


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    for kind, (status, code) in _API_ERRORS.items():
        if isinstance(error, kind):
            param = "messages" if kind is PromptTooLongError else None
            headers = {"Retry-After": str(_NO_ENGINE_RETRY_S)} if kind is NoEngineError else None
            return ApiError(status, str(error), code=code, param=param, headers=headers)
    logger.error("a request failed unexpectedly", exc_info=error)
    return _unexpected(error)


def _unexpected(error: Exception) -> ApiError:
    return ApiError(500, f"the server failed unexpectedly ({type(error).__name__}); its log has the traceback")


_KIND_OF_VALUE = re.compile(r"str|int|bool|float|none|(list|dict|constrained|function|nullable)[-\[].*")
"""A part of the field's path that pydantic adds for a union."""


def invalid_body(error: ValidationError) -> ApiError:
    """The refusal of a body, naming the first wrong field and its value.

    Of a field that may be one of several kinds, the kind counts of which the most was right.
    """
    found = error.errors(include_url=False, include_context=False)
    found = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]

    def depth(one: ErrorDetails) -> tuple[int, int]:
        places = _places(one)
        return len(places), max((place for place in places if isinstance(place, int)), default=-1)

    deepest = max(found, key=depth)
    equals = [one for one in found if _places(one) == _places(deepest)]
    param = ".".join(map(str, _places(deepest))) or None
    message = ", or ".join(dict.fromkeys(one["msg"] for one in equals))
    value = "" if deepest["type"] == "missing" else f", got {reprlib.repr(deepest['input'])}"
    return ApiError(400, f"{param or 'the body'}: {message}{value}", code="invalid_value", param=param)


def _places(found: ErrorDetails) -> list[int | str]:
    return [place for place in found["loc"] if not _KIND_OF_VALUE.fullmatch(str(place))]


_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, code=_CODES.get(error.status_code), headers=error.headers)
    return as_api_error(error).response_for(request.url.path)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    """Answer; the exception then goes on to the ASGI server, which logs it."""
    return _unexpected(error).response_for(request.url.path)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


ERROR_HANDLERS: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = {
    **dict.fromkeys((HTTPException, ApiError, *_API_ERRORS), _answer),
    Exception: _answer_unexpected,
    ClientDisconnect: _answer_nobody,
}
"""An application's, so that every failure is answered with an OpenAI error body."""
