"""JSON as it goes over the wire: strictly JSON, strictly UTF-8, whatever the values hold.

Flows in: bodies, and values to send. Flows out: why a body is refused, and bytes. Does not know what they mean.
"""

import json
import math
from typing import Any

from starlette.responses import JSONResponse

_SUSPICIOUS = ("NaN", "Infinity", "\\ud", "\\uD")
"""A body without any of these is JSON whenever Python's parser takes it."""


class StrictJSONResponse(JSONResponse):
    """A JSON body, of values that a client may have brought."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """``content`` as JSON: numbers that JSON lacks become null, halves of surrogate pairs stay escaped."""
    try:
        text = _dump(content)
    except ValueError:
        text = _dump(_finite(content))
    # A lone surrogate is the one thing that UTF-8 lacks, and its escape in Python is its escape in JSON.
    return text.encode(errors="backslashreplace")


def refusal_of(body: bytes) -> str | None:
    """Why a request's body is no JSON though Python's parser might take it, in words; None for one to parse."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return f"the body must be JSON in UTF-8, got byte {body[error.start]:#04x} at {error.start}"
    if not any(mark in text for mark in _SUSPICIOUS):
        return None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except _ConstantError as error:
        return f"the body must be JSON, which has no {error}"
    except UnicodeEncodeError:
        return "the body must be JSON of Unicode text, got half of a surrogate pair"
    except (ValueError, RecursionError):
        return None  # the parser of the route says it better
    return None


class _ConstantError(Exception):
    """A number that JSON lacks."""


def _refuse_constant(name: str) -> None:
    raise _ConstantError(name)


def _dump(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value
