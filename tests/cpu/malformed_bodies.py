"""Bodies that are nearly right: made from the schemas of an application's routes, then changed in a few places."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from skyrl_async.endpoint.routes.chat_completions import ChatCompletionRequest
from skyrl_async.endpoint.routes.completions import CompletionRequest
from skyrl_async.endpoint.routes.messages import Conversation, MessagesRequest
from skyrl_async.endpoint.routes.operations import DetokenizeRequest, TokenizeRequest
from skyrl_async.endpoint.routes.responses import ResponsesRequest
from skyrl_async.endpoint.routes.sessions import CreateSession
from skyrl_async.endpoint.sessions.settings import SessionOutcome

Schema = Mapping[str, Any]
Strategy = st.SearchStrategy[Any]
Place = tuple[Any, Any]
"""A list or an object, and where in it."""

_WORDS = [
    "assistant",
    "auto",
    "any",
    "call_1",
    "computer",
    "custom",
    "developer",
    "f",
    "function",
    "function_call",
    "function_call_output",
    "high",
    "image",
    "input_text",
    "item_reference",
    "json_object",
    "json_schema",
    "message",
    "none",
    "null",
    "output_text",
    "policy",
    "reasoning",
    "reasoning_text",
    "required",
    "system",
    "text",
    "thinking",
    "tool",
    "tool_result",
    "tool_use",
    "user",
]
_KEYS = [
    "$defs",
    "$ref",
    "additionalProperties",
    "arguments",
    "call_id",
    "content",
    "encrypted_content",
    "format",
    "function",
    "id",
    "input",
    "input_schema",
    "is_error",
    "json_schema",
    "name",
    "output",
    "parameters",
    "properties",
    "reasoning",
    "reasoning_content",
    "required",
    "role",
    "schema",
    "signature",
    "strict",
    "summary",
    "text",
    "thinking",
    "tool_call_id",
    "tool_calls",
    "tool_use_id",
    "type",
]
_STRANGE = ("", " ", "\0", "\ud800", "\udfff\ud83d", "{", "{}", '{"a": [1]}', "[1]", "NaN", "<tool_call>", "é" * 40)

_texts = st.one_of(st.sampled_from(_STRANGE), st.sampled_from(_WORDS), st.text(max_size=8))
_numbers = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31, -(2**31) - 1, 2**63, -(2**64), 10**400, 1e308, -1e-320, 0.5]),
    st.floats(),
)
_scalars = st.one_of(st.none(), st.booleans(), _numbers, _texts)
_names = st.one_of(st.sampled_from(_KEYS), st.sampled_from(_KEYS), _texts)


def _containers(inner: Strategy) -> Strategy:
    return st.one_of(st.lists(inner, max_size=3), st.dictionaries(_names, inner, max_size=4))


_junk = st.recursive(_scalars, _containers, max_leaves=8)


@st.composite
def _deep(draw: st.DrawFn) -> Any:
    value: Any = draw(_scalars)
    key = draw(st.sampled_from(["properties", "content", "$defs", None]))
    for _ in range(draw(st.sampled_from([90, 300, 700, 950]))):
        value = [value] if key is None else {key: value}
    return value


_wild = st.one_of(_junk, _junk, _junk, _junk, _deep())


def _some(**fields: Strategy) -> Strategy:
    """An object that may lack any of its fields."""
    return st.fixed_dictionaries({}, optional=fields)


def _all(**fields: Strategy) -> Strategy:
    return st.fixed_dictionaries(fields)


_said = st.sampled_from(["hello", "", "é\n"])
_schema = st.sampled_from([{"type": "object", "properties": {}}, {"type": "object", "$defs": {"a": {}}}, {}])
_call = _all(
    id=st.just("call_1"), type=st.just("function"), function=_all(name=st.just("f"), arguments=st.just('{"a": 1}'))
)
_text_part = _all(type=st.sampled_from(["text", "input_text", "output_text"]), text=_said)
_chat_message = st.one_of(
    _all(
        role=st.sampled_from(["user", "assistant", "system"]),
        content=st.one_of(_said, st.lists(_text_part, max_size=2)),
    ),
    _all(role=st.just("assistant"), content=st.none(), tool_calls=st.lists(_call, max_size=2), reasoning_content=_said),
    _all(role=st.just("tool"), tool_call_id=st.just("call_1"), content=_said),
)
_block = st.one_of(
    _all(type=st.just("text"), text=_said),
    _all(type=st.just("tool_use"), id=st.just("call_1"), name=st.just("f"), input=st.just({"a": 1})),
    _all(type=st.just("tool_result"), tool_use_id=st.just("call_1"), content=_said),
    _all(type=st.just("thinking"), thinking=_said, signature=st.just("")),
)
_block_message = _all(role=st.sampled_from(["user", "assistant"]), content=st.lists(_block, min_size=1, max_size=2))
_item = st.one_of(
    _all(type=st.just("message"), role=st.sampled_from(["user", "assistant", "developer"]), content=_said),
    _all(type=st.just("function_call"), call_id=st.just("call_1"), name=st.just("f"), arguments=st.just('{"a": 1}')),
    _all(type=st.just("function_call_output"), call_id=st.just("call_1"), output=_said),
    _all(type=st.just("reasoning"), id=st.just("rs_1"), summary=st.just([])),
)
_chat_tool = _all(type=st.just("function"), function=_all(name=st.just("f"), description=_said, parameters=_schema))
_response_tool = _all(type=st.just("function"), name=st.just("f"), parameters=_schema)
_message_tool = _all(name=st.just("f"), input_schema=_schema)
_choices = {
    "chat": st.one_of(
        st.sampled_from(["auto", "none", "required"]), st.just({"type": "function", "function": {"name": "f"}})
    ),
    "responses": st.one_of(st.sampled_from(["auto", "none", "required"]), st.just({"type": "function", "name": "f"})),
    "messages": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}]),
}
_BY_NAME: dict[str, dict[str, Strategy]] = {
    "chat": {
        "messages": st.lists(_chat_message, min_size=1, max_size=4),
        "tools": st.lists(_chat_tool, min_size=1, max_size=2),
    },
    "messages": {
        "messages": st.lists(_block_message, min_size=1, max_size=3).map(
            lambda m: [*m, {"role": "user", "content": "x"}]
        ),
        "tools": st.lists(_message_tool, min_size=1, max_size=2),
        "system": _said,
    },
    "responses": {
        "input": st.one_of(_said, st.lists(_item, max_size=4)),
        "tools": st.lists(_response_tool, min_size=1, max_size=2),
    },
}
"""Of what the schemas say little about, for the surface in a route's path; ``chat`` for all others."""
_COMMON: dict[str, Strategy] = {
    "model": st.just("policy"),
    "n": st.integers(1, 3),
    "prompt": st.one_of(
        st.just("a"), st.lists(st.just("a"), min_size=1, max_size=3), st.lists(st.integers(3, 200), min_size=1)
    ),
    "schema": _schema,
    "tokens": st.lists(st.integers(0, 250), max_size=5),
    **dict.fromkeys(("previous_response_id", "conversation", "background"), st.none()),
}


BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": Conversation,
    "/sessions": CreateSession,
    "/sessions/{id}/finish": SessionOutcome,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
}
"""Path of every route that takes a body -> its fields."""


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A body of ``POST path``: right, or wrong in up to three places, or no JSON at all."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(
            st.one_of(st.binary(max_size=30), st.just(b"[" * 100_000), _wild.map(lambda v: json.dumps(v).encode()))
        )
    body = draw(_right(path))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        _change(draw, body)
    written = json.dumps(body, ensure_ascii=kind != 1)
    encoded = written.encode("utf-16" if kind == 2 else "utf-8", "surrogatepass")
    return encoded[: draw(st.integers(0, 200))] if kind == 3 else encoded


def _change(draw: st.DrawFn, body: Any) -> None:
    """Replace, remove or add something somewhere."""
    places = list(_places(body))
    if not places:
        return
    inside, where = draw(st.sampled_from(places))
    match draw(st.integers(0, 5)):
        case 0:
            del inside[where]
        case 1 if isinstance(inside, dict):
            inside[draw(_names)] = draw(_wild)
        case 2 if isinstance(inside, list):
            inside.append(inside[where])
        case _:
            inside[where] = draw(_wild)


def _places(value: Any) -> Iterator[Place]:
    if isinstance(value, dict | list):
        for where in value if isinstance(value, dict) else range(len(value)):
            yield value, where
            if len(json.dumps(value[where])) < 10_000:
                yield from _places(value[where])


def _right(path: str) -> Strategy:
    schema = BODIES[path].model_json_schema()
    surface = next((name for name in ("responses", "messages") if name in path), "chat")
    by_name = _COMMON | _BY_NAME[surface] | {"tool_choice": _choices[surface]}
    # Written and read again, so that no two places hold the same object.
    return _values(schema, schema.get("$defs", {}), by_name).map(lambda body: json.loads(json.dumps(body)))


def _values(schema: Schema, definitions: Mapping[str, Schema], by_name: Mapping[str, Strategy]) -> Strategy:
    if "$ref" in schema:
        return _values(definitions[schema["$ref"].rpartition("/")[2]], definitions, by_name)
    if "anyOf" in schema:
        return st.one_of([_values(option, definitions, by_name) for option in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema.get("const")])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return _objects(schema, definitions, by_name)
        case "array":
            return st.lists(_values(schema.get("items", {}), definitions, by_name), min_size=1, max_size=3)
        case "string":
            return st.sampled_from(["a", "text"])
        case "integer":
            return st.integers(*_bounds(schema))
        case "number":
            return st.floats(*_bounds(schema), exclude_min="exclusiveMinimum" in schema)
        case "boolean":
            return st.booleans()
        case "object":
            return st.dictionaries(st.sampled_from(["a", "type"]), st.just(1), max_size=2)
        case "null":
            return st.none()
    return _junk


def _bounds(schema: Schema) -> tuple[Any, Any]:
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    most = schema.get("maximum", schema.get("exclusiveMaximum", least + 101) - 1)
    return least, max(least, most)


def _objects(schema: Schema, definitions: Mapping[str, Schema], by_name: Mapping[str, Strategy]) -> Strategy:
    fields = {
        name: by_name[name] if name in by_name else _values(field, definitions, by_name)
        for name, field in schema["properties"].items()
    }
    required = {name: fields.pop(name) for name in (*schema.get("required", ()), "tools") if name in fields}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True) if fields else st.just([])
    return chosen.flatmap(lambda names: st.fixed_dictionaries(required | {name: fields[name] for name in names}))
