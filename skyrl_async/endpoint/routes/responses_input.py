"""Items of the Responses API as chat messages.

Flows in: ``input`` and ``instructions``. Flows out: the messages that a chat client would have sent, so that a session
finds its turns: the items of one assistant turn (reasoning, message, function calls) become one message again. Does not
know what is sampled.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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

_INPUT_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}
_OUTPUT_PARTS = _INPUT_PARTS | {"refusal": "refusal"}
_REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text"}
_SERVED_ITEMS = "items may be messages, function_call, function_call_output and reasoning"
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})_\d+")


def item_id(kind: str, turn: str, index: int) -> str:
    """The id of an output item: what it is, the turn (32 hex digits) that it is part of, and its place in it."""
    return f"{kind}_{turn}_{index}"


def chat_messages(items: Any, instructions: str | None) -> tuple[Message, ...]:
    """The conversation in chat form; ``ApiError`` names an item that cannot be used."""
    conversation = _Conversation()
    if instructions:
        conversation.add({"role": "system", "content": instructions})
    if isinstance(items, str):
        conversation.add({"role": "user", "content": items})
    elif isinstance(items, list):
        for index, item in enumerate(items):
            conversation.take(object_at(item, f"input.{index}"), f"input.{index}")
    else:
        raise refused("input", f"must be a string or a list of items, got {type(items).__name__}")
    messages = conversation.messages()
    if not messages:
        raise refused("input", "must hold at least one item, got none")
    return messages


@dataclass(slots=True)
class _Turn:
    """The items of one assistant turn so far."""

    name: str | None
    """From the ids of its items, where the client has kept them."""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> Message:
        """The turn as the chat surface would have sent it."""
        message: Message = {"role": "assistant", "content": chat_content(self.content or [])}
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class _Conversation:
    """Messages so far, and the assistant turn that the next item may belong to."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    def messages(self) -> tuple[Message, ...]:
        self._end_turn()
        return tuple(self._messages)

    def add(self, message: Message) -> None:
        self._end_turn()
        self._messages.append(message)

    def take(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._take_message(item, where)
            case "reasoning":
                shown = texts_at(item, "content", where, _REASONING_PARTS)
                self._turn_of(kind, item).reasoning += shown or texts_at(item, "summary", where, _REASONING_PARTS)
            case "function_call":
                call = _chat_call(item, where)
                self._turn_of(kind, item).tool_calls.append(call)
            case "function_call_output":
                content = chat_content(texts_at(item, "output", where, _INPUT_PARTS))
                call_id = name_at(item, "call_id", where)
                self.add({"role": "tool", "tool_call_id": call_id, "content": content})
            case "item_reference":
                raise unsupported(where, kind, "nothing is stored here, send the item itself")
            case _:
                raise unsupported(where, kind, _SERVED_ITEMS)

    def _take_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role == "assistant":
            texts = texts_at(item, "content", where, _OUTPUT_PARTS)
            self._turn_of("message", item).content = texts
        elif role in ("user", "system", "developer"):
            self.add({"role": role, "content": chat_content(texts_at(item, "content", where, _INPUT_PARTS))})
        else:
            raise refused(f"{where}.role", f"must be user, assistant, system or developer, got {role!r}")

    def _turn_of(self, kind: str, item: Mapping[str, Any]) -> _Turn:
        """The turn that an assistant's item belongs to: the open one, or a new one."""
        known = _ITEM_ID.fullmatch(str(item.get("id")))
        name = known[1] if known else None
        if self._turn is None or not _continues(self._turn, kind, name):
            self._end_turn()
            self._turn = _Turn(name)
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
        self._turn = None


def _continues(turn: _Turn, kind: str, name: str | None) -> bool:
    """Whether an item may stand after those of ``turn``: reasoning, then one message, then calls, of one response."""
    if turn.name is not None and name is not None and turn.name != name:
        return False
    if kind == "function_call":
        return True
    return turn.content is None and not turn.tool_calls


def _chat_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {"name": name_at(item, "name", where), "arguments": string_at(item, "arguments", where)}
    return {"id": name_at(item, "call_id", where), "type": "function", "function": function}
