"""Chat messages in the form that most chat templates expect, in the forms that some templates require, and as a row's record keeps them."""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from skyrl_async.types import Message, RowMessage, ToolCall

Tool = dict[str, Any]
"""A function tool in OpenAI's chat form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

_TEXT_PARTS = ("text", "input_text", "output_text")


def normalise_messages(messages: Sequence[Message]) -> list[Message]:
    """Return copies of messages, as clients send them, in the form that templates expect.

    ``content`` is a string (null and absent are empty, text parts are joined by line breaks), ``developer`` is ``system``,
    ``reasoning`` is ``reasoning_content``, arguments of tool calls are objects where their text spells one, and other nulls
    and empty lists of tool calls are left out. Raises ``ValueError`` with the field that cannot be used.
    """
    return [_normalise_message(i, message) for i, message in enumerate(messages)]


def _normalise_message(index: int, message: Message) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{index}].role must be a non-empty string, got {role!r}")
    content = _content_text(index, message.get("content"))
    normalised = {key: value for key, value in message.items() if value is not None}
    normalised |= {"role": "system" if role == "developer" else role, "content": content}
    if isinstance(message.get("reasoning"), str):
        normalised.setdefault("reasoning_content", message["reasoning"])
    calls = normalised.pop("tool_calls", None)
    if calls:
        normalised["tool_calls"] = _normalise_tool_calls(index, calls)
    return normalised


def _normalise_tool_calls(index: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"messages[{index}].tool_calls must be a list, got {type(calls).__name__}")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"messages[{index}].tool_calls[{i}].function.name must be a string, got {call!r}")
    return [_with_arguments(call, _arguments_object(call["function"].get("arguments"))) for call in calls]


def _arguments_object(arguments: Any) -> Any:
    """Return the object that the text of arguments is the JSON of, else the arguments as they are."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        spelled = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return spelled if isinstance(spelled, dict) else arguments


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _content_text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"messages[{index}].content must be a string, a list of parts or null, got {type(content).__name__}"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{index}].content may only hold text parts, got one of type {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Return messages for templates that join arguments to other text themselves."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        return _with_arguments(call, arguments_text(call["function"]["arguments"]))

    return [_with_calls(message, as_text) for message in messages]


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Return messages for templates that only accept ids of nine letters and digits."""

    def short(name: Any) -> str:
        text = str(name)
        return text if len(text) == 9 and text.isalnum() else sha256(text.encode()).hexdigest()[:9]

    answered = [
        {**message, "tool_call_id": short(message["tool_call_id"])} if "tool_call_id" in message else message
        for message in messages
    ]
    return [_with_calls(message, lambda call: {**call, "id": short(call.get("id"))}) for message in answered]


def _with_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def row_messages(messages: Sequence[Message], start: int = 0, **others: Any) -> list[RowMessage]:
    """The roles, tool calls and observations of messages in OpenAI's chat form, as any client may send them. Raises nothing.

    ``start`` and ``others`` are fields of each ``RowMessage`` that messages do not tell.
    """
    found: list[RowMessage] = []
    names: dict[str, str] = {}
    for message in messages:
        role, calls, call_id = str(message.get("role")), _tool_calls(message), message.get("tool_call_id")
        names |= {call.id: call.name for call in calls}
        is_observation = role == "tool"
        name = (message.get("name") or names.get(str(call_id))) if is_observation else None
        found.append(
            RowMessage(
                role="system" if role == "developer" else role,
                start=start,
                tool_calls=calls,
                tool_call_id=str(call_id) if is_observation and call_id else None,
                name=str(name) if name else None,
                **others,
            )
        )
    return found


def _tool_calls(message: Message) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    return tuple(
        ToolCall(
            id=str(call.get("id") or ""),
            name=str(function.get("name")),
            arguments=arguments_text(function.get("arguments")),
        )
        for call in (calls if isinstance(calls, list | tuple) else ())
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict)
    )


def arguments_text(arguments: Any) -> str:
    """Arguments of a call as JSON text; text stays as it is, and what has no JSON is described. Raises nothing."""
    if isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return f"{type(arguments).__name__} that is no JSON"
