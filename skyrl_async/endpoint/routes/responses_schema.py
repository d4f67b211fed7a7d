"""Bodies of ``POST /v1/responses``, as generation requests: the stateless subset of OpenAI's Responses API.

The items of one assistant turn (reasoning, message, function calls) become one message, as a chat client would have sent it, so that a
session finds its turns. Fields that need a store are refused; unknown fields, and tools that are no functions, are ignored.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from skyrl_async.endpoint.requests.fields import (
    chat_content,
    chat_tool,
    checked_choice,
    ignored_note,
    name_at,
    object_at,
    refused,
    string_at,
    texts_at,
    tool_name,
    unsupported,
)
from skyrl_async.endpoint.requests.generation import GenerationRequest
from skyrl_async.endpoint.routes.schema import Checked, SamplingFields
from skyrl_async.types import Message, StructuredOutput

_INPUT_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}
_OUTPUT_PARTS = _INPUT_PARTS | {"refusal": "refusal"}
_REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text"}
_SERVED_ITEMS = "items may be messages, function_call, function_call_output and reasoning"
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})_\d+")


def item_id(kind: str, turn: str, index: int) -> str:
    """The id of an output item: its kind, its turn (32 hex digits), and its place in the turn."""
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
    """From the ids of its items; None if the client dropped them."""
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
    """The messages so far, and the assistant turn that the next item may belong to."""

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
        """The turn of an assistant's item: the open one, or a new one."""
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


_LOGPROBS = "message.output_text.logprobs"
_STATEFUL = {
    "previous_response_id": "nothing is stored here: send the earlier items in input",
    "conversation": "nothing is stored here: send the earlier items in input",
    "background": "a response is not kept for later: leave it out",
    "prompt": "there are no prompt templates here: send the text in input",
}


class TextConfig(BaseModel):
    """OpenAI's ``text``."""

    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingFields):
    """A body of ``POST /v1/responses``: OpenAI's fields and those of ``SamplingFields``. Null means the default everywhere.

    ``return_token_ids`` answers with ``prompt_token_ids``, ``token_ids``, ``token_logprobs`` and ``policy_versions`` in the
    response.
    """

    input: Any
    """A string, or items."""
    instructions: str | None = None
    tools: Checked[dict[str, Any]] = Field(default=[])
    tool_choice: Any = "auto"
    text: TextConfig = TextConfig()
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int = Field(default=0, ge=0, le=20)
    include: Checked[str] = Field(default=[])
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] = Field(default={})
    metadata: dict[str, str] = Field(default={})
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None

    @property
    def text_format(self) -> dict[str, Any]:
        return self.text.format or {"type": "text"}

    @property
    def has_logprobs(self) -> bool:
        """Whether text comes with the log-probs of the answer's tokens."""
        return _LOGPROBS in self.include or self.top_logprobs > 0

    @property
    def ignored_tools(self) -> tuple[str, ...]:
        """The tools that are no functions, by type and name: nothing else is run here, and clients send some by default."""
        return tuple(tool_name(tool) for tool in self.tools if tool["type"] != "function")

    def to_generation(self, session_header: str | None) -> tuple[GenerationRequest, ...]:
        for name, advice in _STATEFUL.items():
            if getattr(self, name):
                raise refused(name, f"is not supported; {advice}", code="unsupported_parameter")
        tools = tuple(
            chat_tool(tool, f"tools.{i}", parameters="parameters")
            for i, tool in enumerate(self.tools)
            if string_at(tool, "type", f"tools.{i}") == "function"
        )
        structured, has_logprobs = self._format(), self.has_logprobs
        request = self.generation(
            session_header,
            messages=chat_messages(self.input, self.instructions),
            tools=tools or None,
            tool_choice=checked_choice(self._choice(), tools, self.ignored_tools),
            sampling=self.sampling(self.max_output_tokens, structured, self.top_logprobs, shows_logprobs=has_logprobs),
        )
        return (request,)

    def _choice(self) -> str:
        match self.tool_choice:
            case "auto" | "none" | "required":
                return str(self.tool_choice)
            case {"type": "function"}:
                return name_at(self.tool_choice, "name", "tool_choice")
            case {"type": kind}:
                ignored = ignored_note(self.ignored_tools)
                raise unsupported("tool_choice", kind, f"choose auto, none, required or a function{ignored}")
        raise refused("tool_choice", f"must be auto, none, required or a function, got {self.tool_choice!r}")

    def _format(self) -> StructuredOutput | None:
        form = self.text_format
        match form.get("type"):
            case "text":
                return None
            case "json_object":
                return StructuredOutput(json_object=True)
            case "json_schema":
                schema = object_at(form.get("schema"), "text.format.schema")
                return StructuredOutput(json_schema=json.dumps(schema))
        raise unsupported("text.format", form.get("type"), "choose text, json_object or json_schema")
