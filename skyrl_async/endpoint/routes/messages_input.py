"""Messages of Anthropic's API as chat messages.

Flows in: ``system`` and ``messages`` with their content blocks. Flows out: the messages that a chat client would have
sent, so that a session finds its turns. Does not know what is sampled.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_async.endpoint.requests.body_fields import (
    chat_content,
    name_at,
    object_at,
    refused,
    string_at,
    texts_at,
    unsupported,
)
from skyrl_async.types import Message

_RAW_ARGUMENTS = "__raw_arguments__"
"""The one key of a ``tool_use`` input whose call had arguments that are no JSON object: Anthropic's input must be one."""
_TEXT = {"text": "text"}


def chat_messages(messages: Sequence[Mapping[str, Any]], system: Any) -> tuple[Message, ...]:
    """The conversation in chat form; ``ApiError`` names a block that cannot be used."""
    chat: list[Message] = []
    instructions = texts_at({"system": system}, "system", "", _TEXT)
    if any(instructions):
        chat.append({"role": "system", "content": chat_content(instructions)})
    for index, message in enumerate(messages):
        chat += _chat_messages(message, f"messages.{index}")
    if chat[-1]["role"] == "assistant":
        raise refused("messages", "must end with a user message: an answer that is begun (a prefill) is not continued")
    return tuple(chat)


def tool_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the ``input`` of a ``tool_use`` block; ``chat_messages`` makes equal arguments of it."""
    if arguments.strip() in ("", "null"):
        return {}
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {_RAW_ARGUMENTS: arguments}


def _chat_messages(message: Mapping[str, Any], where: str) -> list[Message]:
    role = message.get("role")
    match role:
        case "user":
            return _user_messages(message, where)
        case "assistant":
            return [_assistant_message(message, where)]
        case "system":
            return [{"role": role, "content": chat_content(texts_at(message, "content", where, _TEXT))}]
    raise refused(f"{where}.role", f"must be user, assistant or system, got {role!r}")


def _blocks(message: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The content as blocks: a string is one of text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise refused(f"{where}.content", f"must be a string or a list of blocks, got {type(content).__name__}")
    return [object_at(block, f"{where}.content.{i}") for i, block in enumerate(content)]


def _user_messages(message: Mapping[str, Any], where: str) -> list[Message]:
    """Tool results are messages of their own in chat; text around them becomes user messages, in the same order."""
    chat: list[Message] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            chat.append({"role": "user", "content": chat_content(texts)})
            texts.clear()

    for index, block in enumerate(_blocks(message, where)):
        at = f"{where}.content.{index}"
        match block.get("type"):
            case "text":
                texts.append(string_at(block, "text", at))
            case "tool_result":
                end_text()
                content = chat_content(texts_at(block, "content", at, _TEXT))
                call_id = name_at(block, "tool_use_id", at)
                chat.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind:
                raise unsupported(at, kind, "a user's content may be text and tool_result")
    end_text()
    return chat or [{"role": "user", "content": ""}]


def _assistant_message(message: Mapping[str, Any], where: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(message, where)):
        at = f"{where}.content.{index}"
        match block.get("type"):
            case "text":
                texts.append(string_at(block, "text", at))
            case "thinking":
                reasoning.append(string_at(block, "thinking", at))
            case "redacted_thinking":
                pass  # another server's, and unreadable
            case "tool_use":
                calls.append(_chat_call(block, at))
            case kind:
                raise unsupported(at, kind, "an assistant's content may be text, thinking and tool_use")
    chat: Message = {"role": "assistant", "content": chat_content(texts)}
    if reasoning:
        chat["reasoning_content"] = "\n".join(reasoning)
    if calls:
        chat["tool_calls"] = calls
    return chat


def _chat_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = object_at(block.get("input"), f"{where}.input")
    raw = given.get(_RAW_ARGUMENTS) if len(given) == 1 else None
    arguments = raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": name_at(block, "name", where), "arguments": arguments}
    return {"id": name_at(block, "id", where), "type": "function", "function": function}
