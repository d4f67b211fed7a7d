"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API with text and tools.

Messages become the ones that a chat client would have sent, so that a session finds its turns. Unknown fields and server tools are ignored.
A tool that is to be loaded later (``defer_loading``) stands in the prompt where a tool result refers to it, and nowhere else.
Does not know how prompts are made or tokens sampled.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skyrl_async.chat import Tool
from skyrl_async.endpoint.requests.fields import (
    chat_content,
    chat_tool,
    name_at,
    object_at,
    refused,
    string_at,
    texts_at,
    unsupported,
)
from skyrl_async.endpoint.requests.generation import Answer, GenerationRequest, Planned
from skyrl_async.endpoint.requests.guard import checked_body
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.routes.schema import (
    Checked,
    SamplingFields,
    StopString,
    ToolFields,
    assistant_message,
    format_of,
)
from skyrl_async.endpoint.routes.surface import ItemsCall, extra_fields, provenance
from skyrl_async.types import Message, ToolCall

_RAW_ARGUMENTS = "__raw_arguments__"
"""The key under which a ``tool_use`` input holds arguments that are no JSON object: Anthropic's input must be one."""
_TEXT = {"text": "text"}
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
"""A line that Claude Code puts before its instructions, in some versions with another hash in each request."""


def chat_messages(
    messages: Sequence[Mapping[str, Any]], system: Any, deferred: Mapping[str, Tool] | None = None
) -> tuple[Message, ...]:
    """The conversation in chat form; ``ApiError`` names a block that cannot be used. ``deferred``: tools that results may refer to."""
    chat: list[Message] = []
    given = texts_at({"system": system}, "system", "", _TEXT)
    instructions = [_ATTRIBUTION.sub("", text) for text in given if not _ATTRIBUTION.fullmatch(text)]
    if any(instructions):
        chat.append({"role": "system", "content": chat_content(instructions)})
    for index, message in enumerate(messages):
        chat += _chat_messages(message, f"messages.{index}", deferred or {})
    if chat[-1]["role"] == "assistant":
        raise refused("messages", "must end with a user message: an answer that is begun (a prefill) is not continued")
    return tuple(chat)


def tool_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the ``input`` of a ``tool_use`` block; ``chat_messages`` restores equal arguments from it."""
    if arguments.strip() in ("", "null"):
        return {}
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {_RAW_ARGUMENTS: arguments}


def _chat_messages(message: Mapping[str, Any], where: str, deferred: Mapping[str, Tool]) -> list[Message]:
    role = message.get("role")
    match role:
        case "user":
            return _user_messages(message, where, deferred)
        case "assistant":
            return [_assistant_message(message, where)]
        case "system":
            return [{"role": role, "content": chat_content(texts_at(message, "content", where, _TEXT))}]
    raise refused(f"{where}.role", f"must be user, assistant or system, got {role!r}")


def _blocks(message: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(place, block) of the content; a string is one block of text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise refused(f"{where}.content", f"must be a string or a list of blocks, got {type(content).__name__}")
    return [(at := f"{where}.content.{i}", object_at(block, at)) for i, block in enumerate(content)]


def _user_messages(message: Mapping[str, Any], where: str, deferred: Mapping[str, Tool]) -> list[Message]:
    """Tool results become messages of their own; text around them becomes user messages, in the same order."""
    chat: list[Message] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            chat.append({"role": "user", "content": chat_content(texts)})
            texts.clear()

    for at, block in _blocks(message, where):
        match block.get("type"):
            case "text":
                texts.append(string_at(block, "text", at))
            case "tool_result":
                end_text()
                content = chat_content(texts_at(_with_tools(block, deferred), "content", at, _TEXT))
                call_id = name_at(block, "tool_use_id", at)
                chat.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind:
                raise unsupported(at, kind, "a user's content may be text and tool_result")
    end_text()
    return chat or [{"role": "user", "content": ""}]


def _with_tools(block: Mapping[str, Any], deferred: Mapping[str, Tool]) -> Mapping[str, Any]:
    """A tool result in which each reference to a tool is the tool, as text."""

    def shown(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "tool_reference":
            return part
        name = str(part.get("tool_name"))
        tool = deferred.get(name, {"function": {"name": name}})
        return {"type": "text", "text": json.dumps(tool["function"], ensure_ascii=False)}

    content = block.get("content")
    return {**block, "content": [shown(part) for part in content]} if isinstance(content, list) else block


def _assistant_message(message: Mapping[str, Any], where: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in _blocks(message, where):
        match block.get("type"):
            case "text":
                texts.append(string_at(block, "text", at))
            case "thinking":
                reasoning.append(string_at(block, "thinking", at))
            case "redacted_thinking":
                pass  # another server wrote it, encrypted
            case "tool_use":
                calls.append(_chat_call(block, at))
            case kind:
                raise unsupported(at, kind, "an assistant's content may be text, thinking and tool_use")
    return assistant_message(texts, reasoning, calls)


def _chat_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = object_at(block.get("input"), f"{where}.input")
    raw = given.get(_RAW_ARGUMENTS) if len(given) == 1 else None
    arguments = raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": name_at(block, "name", where), "arguments": arguments}
    return {"id": name_at(block, "id", where), "type": "function", "function": function}


class Conversation(ToolFields):
    """The fields that make a prompt: a body of ``POST /v1/messages/count_tokens``."""

    served_tools: ClassVar[str] = "custom"

    messages: Checked[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    system: Any = None
    """A string, or text blocks."""

    def chat_tool(self, tool: Mapping[str, Any], where: str) -> Tool:
        return chat_tool(tool, where, parameters="input_schema")

    def listed_tools(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return ((where, tool) for where, tool in super().listed_tools() if not tool.get("defer_loading"))

    def conversation(self) -> tuple[Message, ...]:
        """The messages in chat form."""
        later = [(f"tools.{i}", tool) for i, tool in enumerate(self.tools) if tool.get("defer_loading")]
        deferred = {name_at(tool, "name", where): self.chat_tool(tool, where) for where, tool in later}
        return chat_messages(self.messages, self.system, deferred)


class MessagesRequest(Conversation, SamplingFields):
    """A body of ``POST /v1/messages``: Anthropic's fields and those of ``SamplingFields``. Null means the default everywhere.

    ``return_token_ids`` answers with ``prompt_token_ids``, ``token_ids``, ``token_logprobs`` and ``policy_versions`` beside
    the content; a stream has the first in ``message_start.message`` and the others in ``message_delta``.
    """

    stop: Checked[StopString] = Field(default=[], validation_alias="stop_sequences")
    tool_choice: dict[str, Any] = Field(default={"type": "auto"})
    thinking: dict[str, Any] = Field(default={})
    """The policy decides how long it reasons; ``disabled`` hides it."""
    output_config: dict[str, Any] = Field(default={})

    def to_generation(self, session_header: str | None) -> tuple[GenerationRequest, ...]:
        request = self.generation(
            session_header,
            self.max_tokens,
            format_of(self.output_config.get("format"), "output_config.format", served=("json_schema",)),
            messages=self.conversation(),
            **self.tool_fields(),
        )
        return (request,)

    def choice(self) -> str:
        match self.tool_choice:
            case {"type": "auto"}:
                return "auto"
            case {"type": "any"}:
                return "required"
            case {"type": "none"}:
                return "none"
            case {"type": "tool"}:
                return name_at(self.tool_choice, "name", "tool_choice")
        raise unsupported("tool_choice", self.tool_choice.get("type"), "choose auto, any, tool or none")


class MessagesCall(ItemsCall[MessagesRequest]):
    """One request in Anthropic's format."""

    kinds = ("thinking", "text")

    def __init__(self, planned: Sequence[Planned], body: MessagesRequest, serving: Serving) -> None:
        super().__init__(planned, body, serving)
        self.shows_reasoning = body.thinking.get("type") != "disabled"
        self._prompt = self._planned.prompt_token_ids
        self._extra = extra_fields(self._prompt, body.ignored_tools, has_ids=body.return_token_ids)

    def begin(self) -> None:
        self._event("message_start", message=self._message() | self._extra)

    def begin_text(self, kind: str) -> None:
        self._start(_text_block(kind, ""))

    def add_text(self, kind: str, text: str) -> None:
        self._delta(f"{kind}_delta", **{kind: text})

    def end_text(self, kind: str, text: str) -> None:
        if kind == "thinking":
            self._delta("signature_delta", signature=self._name)
        self._stop(_text_block(kind, text, signature=self._name))

    def add_call(self, call: ToolCall) -> None:
        given = tool_input(call.arguments)
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        self._start(block | {"input": {}})
        self._delta("input_json_delta", partial_json=json.dumps(given, ensure_ascii=False))
        self._stop(block | {"input": given})

    def finish(self, answer: Answer) -> dict[str, Any]:
        completion, stop_sequence = answer.completion, None
        if self._is_cut:
            stop_reason = "max_tokens"
        elif answer.finish_reason == "tool_calls":
            stop_reason = "tool_use"
        elif isinstance(answer.stop_reason, str):
            stop_reason, stop_sequence = "stop_sequence", answer.stop_reason
        else:
            stop_reason = "end_turn"
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        origin = provenance(completion) if self._body.return_token_ids else {}
        message = self._message(len(completion.token_ids), completion.num_cached_tokens) | delta | origin
        self._event("message_delta", delta=delta, usage=message["usage"], **origin)
        self._event("message_stop")
        return message | self._extra

    def _start(self, block: dict[str, Any]) -> None:
        self._event("content_block_start", index=len(self._items), content_block=block)

    def _delta(self, kind: str, **fields: str) -> None:
        self._event("content_block_delta", index=len(self._items), delta={"type": kind, **fields})

    def _stop(self, block: dict[str, Any]) -> None:
        self._event("content_block_stop", index=len(self._items))
        self._items.append(block)

    def _message(self, num_sampled_tokens: int = 0, num_cached_tokens: int = 0) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": list(self._items),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                # Anthropic counts cached tokens separately.
                "input_tokens": len(self._prompt) - num_cached_tokens,
                "output_tokens": num_sampled_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached_tokens,
            },
        }

    def _event(self, kind: str, **fields: Any) -> None:
        self._emit({"type": kind, **fields})


def _text_block(kind: str, text: str, signature: str = "") -> dict[str, Any]:
    return {"type": kind, kind: text} | ({"signature": signature} if kind == "thinking" else {})


def count_tokens_route(serving: Serving) -> Route:
    """The route that counts a prompt's tokens."""

    async def count_tokens(request: Request) -> Response:
        body = checked_body(request, Conversation)
        serving.require_model(body.model)
        messages, tools = body.conversation(), body.chat_tools() or None

        def count() -> dict[str, int]:
            return {"input_tokens": len(serving.renderer.render(messages, tools=tools))}

        return await serving.tokenize(request, (messages, tools), count)

    return Route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
