"""A message that comes back changed only in form is the same message; one changed in substance is another."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.endpoint.sessions.message_key import call_ids, message_key, reasoning_of, tools_key
from tests.cpu.session_trees import assistant, call, tool, user

TEXT = st.text('aé1 "\\\u2028', max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)

SAME = {
    "null is empty": (assistant(None), assistant("")),
    "null is absent": (assistant(None), {"role": "assistant"}),
    "null is a line break": (assistant(None), assistant("\n")),
    "white space around content is dropped": (assistant("a b"), assistant(" a b\n")),
    "a text part is its text": (user("a"), user([{"type": "text", "text": "a"}])),
    "input_text and output_text are text": (
        user([{"type": "input_text", "text": "a"}]),
        user([{"type": "output_text", "text": "a"}]),
    ),
    "parts are joined by line breaks": (
        user("a\nb"),
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]),
    ),
    "developer is system": ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
    "unknown fields are ignored": (assistant("a"), assistant("a", refusal=None, annotations=[], audio=None)),
    "an assistant's name is the harness's addition": (assistant("a"), assistant("a", name="worker")),
    "reasoning is compared apart": (assistant("a"), assistant("a", reasoning_content="because")),
    "ids are compared apart": (
        assistant(None, tool_calls=[call("f", {}, "call_1")]),
        assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
    ),
    "arguments are JSON": (
        assistant(None, tool_calls=[call("f", '{"b":1,"a":[1,{"é":2}]}')]),
        assistant(None, tool_calls=[call("f", '{ "a": [1, {"\\u00e9": 2}], "b": 1 }\n')]),
    ),
    "arguments may be an object": (
        assistant(None, tool_calls=[call("f", '{"a":1}')]),
        assistant(None, tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}]),
    ),
    "JavaScript writes 1.0 as 1": (
        assistant(None, tool_calls=[call("f", '{"a":1.0}')]),
        assistant(None, tool_calls=[call("f", '{"a":1}')]),
    ),
    "no arguments may be written as nothing": (
        assistant(None, tool_calls=[call("f", "")]),
        assistant(None, tool_calls=[call("f", "{}")]),
    ),
    "no tool calls may be an empty list": (assistant("a"), assistant("a", tool_calls=[])),
    "the id of a tool result is not counted": (tool("a", "call_1"), tool("a", "call_2")),
}

OTHER = {
    "content": (user("a"), user("b")),
    "white space within": (user("a b"), user("a  b")),
    "role": (user("a"), assistant("a")),
    "a tool call": (assistant("a"), assistant("a", tool_calls=[call("f", {})])),
    "a tool's name": (assistant(None, tool_calls=[call("f", {})]), assistant(None, tool_calls=[call("g", {})])),
    "an argument": (
        assistant(None, tool_calls=[call("f", {"a": 1})]),
        assistant(None, tool_calls=[call("f", {"a": "1"})]),
    ),
    "arguments that are no JSON": (
        assistant(None, tool_calls=[call("f", '{"a": 1')]),
        assistant(None, tool_calls=[call("f", '{"a": 2')]),
    ),
    "the order of tool calls": (
        assistant(None, tool_calls=[call("f", {}), call("g", {})]),
        assistant(None, tool_calls=[call("g", {}), call("f", {})]),
    ),
    "where a field ends": (
        assistant(None, tool_calls=[call("f", {}), call("g", {})]),
        assistant(None, tool_calls=[call("f", "{}g{}")]),
    ),
    "a user's name": (user("a") | {"name": "x"}, user("a") | {"name": "y"}),
    "a tool's name in its result": (tool("a") | {"name": "f"}, tool("a") | {"name": "g"}),
    "a part that is no text": (
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        user([{"type": "image_url", "image_url": {"url": "y"}}]),
    ),
}


@pytest.mark.parametrize(("sent", "returned"), SAME.values(), ids=SAME)
def test_the_same_message_in_another_form_has_the_same_key(sent: dict, returned: dict) -> None:
    assert message_key(sent) == message_key(returned)


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_other_messages_have_other_keys(one: dict, other: dict) -> None:
    assert message_key(one) != message_key(other)


@given(arguments=st.dictionaries(TEXT, JSON, max_size=3))
def test_arguments_keep_their_key_through_any_serialiser(arguments: dict[str, Any]) -> None:
    sent = assistant(None, tool_calls=[call("f", json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))])
    returned = assistant("", tool_calls=[call("f", json.dumps(arguments, indent=2, sort_keys=True))])
    assert message_key(sent) == message_key(returned)


@given(
    message=st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name", "reasoning", "x"]), JSON),
    role=st.sampled_from(["assistant", "user", "tool", "developer"]),
)
def test_any_message_has_a_key(message: dict[str, Any], role: str) -> None:
    for each in (message, message | {"role": role}):
        assert message_key(each) == message_key(json.loads(json.dumps(each)))
        call_ids(each), reasoning_of(each)


def test_arguments_too_deep_to_parse_are_compared_as_text() -> None:
    deep, deeper = ("[" * n + "]" * n for n in (100_000, 100_001))
    one, same, other = (assistant(None, tool_calls=[call("f", text)]) for text in (deep, deep + "\n", deeper))
    assert message_key(one) == message_key(same) != message_key(other)


def test_lone_surrogates_have_keys_of_their_own() -> None:
    assert len({message_key(user(text)) for text in ("\ud800", "\ud801", "?")}) == 3


def test_tools_have_one_key_however_they_are_serialised() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    again = [{"function": {"parameters": {"properties": {}, "type": "object"}, "name": "f"}, "type": "function"}]
    assert tools_key(tools) == tools_key(again) != tools_key(None) == tools_key([])


def test_ids_and_reasoning_of_a_returned_message_are_found_in_every_field_that_harnesses_use() -> None:
    message = assistant("a", reasoning=" because\n", tool_calls=[call("f", {}, "call_7"), {"function": {"name": "g"}}])
    assert call_ids(message) == ("call_7", "")
    assert reasoning_of(message) == "because" == reasoning_of(assistant("a", reasoning_content="because"))
    assert reasoning_of(assistant("a", reasoning_content=None, reasoning="")) == ""
