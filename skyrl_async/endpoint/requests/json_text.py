"""Strict JSON in strict UTF-8, parsed and written without holding up the event loop. Numpy columns are written as lists."""

import asyncio
import itertools
import json
import json.scanner
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.responses import JSONResponse

T = TypeVar("T")

MAX_VALUES, MAX_CONTAINERS = 1_000_000, 20_000
"""Most numbers and strings, and most lists and objects, in a body. The ids of a context of a million tokens fit."""
MAX_DEPTH = 200
"""Most lists and objects within each other: templates and encoders call themselves for each."""
MANY_VALUES = 4096
"""Values that are written in some two milliseconds."""
LONG_LIST = 512
"""Values, each with some twenty others in it at most, that are written within ten milliseconds."""
_FEW_VALUES = 20_000
"""Python's parser in C makes them in some ten milliseconds."""
_SURROGATES = ("\\ud", "\\uD")
"""How the escapes of surrogates begin."""
_PIECE = 2**19
"""Characters that are searched in less than a millisecond, before another thread may run."""


class StrictJSONResponse(JSONResponse):
    """A JSON response that may hold a client's own values."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


_encode = partial(msgspec.json.encode, enc_hook=np.ndarray.tolist)


def json_bytes(content: Any) -> bytes:
    """``content`` as JSON: numbers that JSON lacks become null, halves of surrogate pairs are escaped."""
    try:
        return _encode(content)
    except UnicodeEncodeError:  # UTF-8 lacks such halves, but JSON in ASCII has them
        return json.dumps(_finite(content)).encode()


def json_bytes_stepwise(content: Any, encode: Callable[[Any], bytes] = json_bytes) -> bytes:
    """``json_bytes`` for a thread: writes long lists in pieces, so that other threads run meanwhile."""
    match content:
        case dict():
            items = (encode(key) + b":" + json_bytes_stepwise(value, encode) for key, value in content.items())
            return b"{" + b",".join(items) + b"}"
        case list() | tuple() | np.ndarray() if len(content) > LONG_LIST:
            pieces = (encode(content[i : i + LONG_LIST])[1:-1] for i in range(0, len(content), LONG_LIST))
            return b"[" + b",".join(pieces) + b"]"
        case list() | tuple():
            return b"[" + b",".join(json_bytes_stepwise(value, encode) for value in content) + b"]"
    return encode(content)


async def encode_json(content: Any) -> bytes:
    """``json_bytes``, in a thread if there are many values."""
    if _num_values(content) <= MANY_VALUES:
        return json_bytes(content)
    return await asyncio.to_thread(json_bytes_stepwise, content)


def _num_values(content: Any) -> int:
    """About how many values there are, taking those of a list to be alike: a stream's every event is counted, in a microsecond."""
    match content:
        case dict():
            return sum(map(_num_values, content.values()))
        case np.ndarray():
            return len(content)
        case [first, *_]:
            return len(content) * _num_values(first)
    return 1


def parse_stepwise(text: str) -> Any:
    """``json.loads`` of strict JSON, for a thread: makes many values step by step, so that other threads run meanwhile.

    Raises ``ValueError`` with the reason, ``RecursionError``, and ``TooManyValuesError``: to check, write and free so many would hold up
    the interpreter.
    """
    is_short = sum(piece.count(mark) for piece in _pieces(text) for mark in ",[{") <= _FEW_VALUES
    value = json.loads(text, parse_constant=_refuse_constant) if is_short else _StepwiseDecoder().decode(text)
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"lists and objects may be nested {MAX_DEPTH} deep, got more")
    if any(mark in piece for piece in _pieces(text) for mark in _SURROGATES):
        try:
            json_bytes_stepwise(value, _encode)
        except UnicodeEncodeError:
            raise ValueError("JSON of Unicode text has no half of a surrogate pair") from None
    return value


def _depth(value: Any) -> int:
    """How deep lists and objects are nested."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


class TooManyValuesError(ValueError):
    """A JSON text holds too many values."""


class _StepwiseDecoder(json.JSONDecoder):
    """Parses in Python, because the parser in C lets nothing else run; counts values."""

    def __init__(self) -> None:
        super().__init__(
            parse_int=_counted(int, MAX_VALUES),
            parse_float=_counted(float, MAX_VALUES),
            parse_constant=_refuse_constant,
        )
        self.parse_string = _counted(json.decoder.scanstring, MAX_VALUES)  # type: ignore[attr-defined]
        self.parse_array = _counted(json.decoder.JSONArray, MAX_CONTAINERS)  # type: ignore[attr-defined]
        self.parse_object = _counted(json.decoder.JSONObject, MAX_CONTAINERS)  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _counted(make: Callable[..., T], limit: int) -> Callable[..., T]:
    """``make``, which refuses to make more than ``limit``."""
    count = itertools.count(1)

    def counted(*arguments: Any) -> T:
        if next(count) > limit:
            raise TooManyValuesError(
                f"the body may hold {MAX_VALUES:,} numbers, as many strings, and {MAX_CONTAINERS:,} lists and as many objects; "
                "got more: send several requests"
            )
        return make(*arguments)

    return counted


def _pieces(text: str) -> Iterator[str]:
    """Pieces that overlap by as much as any of ``_SURROGATES`` is long."""
    return (text[i : i + _PIECE + 2] for i in range(0, len(text), _PIECE))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case np.ndarray():
            return _finite(value.tolist())
    return value
