"""``POST /v1/responses``: OpenAI's Responses API without a store.

Every request brings its whole conversation; fields that need a store are refused. The items of one assistant turn (reasoning, message,
function calls) become one message, as a chat client would have sent it, so that a session finds its turns. A function in a namespace is
called ``namespace.name``. Unknown fields, and tools that are no functions, are ignored. Does not know how prompts are made or tokens
sampled.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.fields import (
    chat_content,
    ignored_metadata,
    name_at,
    object_at,
    refused,
    string_at,
    texts_at,
    unsupported,
)
from skyrl_async.endpoint.requests.generation import Answer, GenerationRequest, Planned
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.routes.schema import Checked, SamplingFields, ToolFields, assistant_message, format_of
from skyrl_async.endpoint.routes.surface import ItemsCall, chat_logprobs, provenance
from skyrl_async.types import Completion, CompletionDelta, Message, ToolCall

PATH = "/v1/responses"

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
    conversation: list[Message | _Turn] = []
    if instructions:
        conversation.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        conversation.append({"role": "user", "content": items})
    elif isinstance(items, list):
        for index, item in enumerate(items):
            _add_item(conversation, object_at(item, f"input.{index}"), f"input.{index}")
    else:
        raise refused("input", f"must be a string or a list of items, got {type(items).__name__}")
    if not conversation:
        raise refused("input", "must hold at least one item, got none")
    return tuple(part.message() if isinstance(part, _Turn) else part for part in conversation)


@dataclass(slots=True)
class _Turn:
    """The items of one assistant turn so far."""

    name: str | None
    """From the ids of its items; None if the client dropped them."""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, kind: str, name: str | None) -> bool:
        """Whether an item may stand after those so far: reasoning, then one message, then calls, of one response."""
        if self.name is not None and name is not None and self.name != name:
            return False
        return kind == "function_call" or (self.content is None and not self.tool_calls)

    def message(self) -> Message:
        return assistant_message(self.content or [], self.reasoning, self.tool_calls)


def _add_item(conversation: list[Message | _Turn], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            _add_message(conversation, item, where)
        case "reasoning":
            shown = texts_at(item, "content", where, _REASONING_PARTS)
            shown = shown or texts_at(item, "summary", where, _REASONING_PARTS)
            _turn_of(conversation, kind, item).reasoning += shown
        case "function_call":
            call = _chat_call(item, where)
            _turn_of(conversation, kind, item).tool_calls.append(call)
        case "function_call_output":
            content = chat_content(texts_at(item, "output", where, _INPUT_PARTS))
            call_id = name_at(item, "call_id", where)
            conversation.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "item_reference":
            raise unsupported(where, kind, "nothing is stored here, send the item itself")
        case _:
            raise unsupported(where, kind, _SERVED_ITEMS)


def _add_message(conversation: list[Message | _Turn], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role == "assistant":
        texts = texts_at(item, "content", where, _OUTPUT_PARTS)
        _turn_of(conversation, "message", item).content = texts
    elif role in ("user", "system", "developer"):
        content = chat_content(texts_at(item, "content", where, _INPUT_PARTS))
        conversation.append({"role": role, "content": content})
    else:
        raise refused(f"{where}.role", f"must be user, assistant, system or developer, got {role!r}")


def _turn_of(conversation: list[Message | _Turn], kind: str, item: Mapping[str, Any]) -> _Turn:
    """The turn of an assistant's item: the last one, or a new one."""
    known = _ITEM_ID.fullmatch(str(item.get("id")))
    name = known[1] if known else None
    last = conversation[-1] if conversation else None
    if isinstance(last, _Turn) and last.takes(kind, name):
        return last
    conversation.append(turn := _Turn(name))
    return turn


def _chat_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = name_at(item, "name", where)
    if item.get("namespace"):
        name = _qualified(name_at(item, "namespace", where), name)
    function = {"name": name, "arguments": string_at(item, "arguments", where)}
    return {"id": name_at(item, "call_id", where), "type": "function", "function": function}


def _qualified(namespace: str, name: str) -> str:
    """The name by which the policy calls a function of a namespace."""
    return f"{namespace}.{name}"


_LOGPROBS = "message.output_text.logprobs"
_STATEFUL = {
    "previous_response_id": "nothing is stored here: send the earlier items in input",
    "conversation": "nothing is stored here: send the earlier items in input",
    "background": "a response is not kept for later: leave it out",
    "prompt": "there are no prompt templates here: send the text in input",
}


_ECHOED = (
    *("instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens"),
    *("temperature", "top_p", "top_logprobs"),
)
"""Fields of a request that its response repeats."""
_TEXT_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}
"""Kind of an item -> the name of its text in event types and content parts."""
_ID_PREFIXES = {"message": "msg", "reasoning": "rs"}


class ResponsesRequest(ToolFields, SamplingFields):
    """A body of ``POST /v1/responses``: OpenAI's fields and those of ``SamplingFields``. Null means the default everywhere.

    ``return_token_ids`` answers with ``prompt_token_ids``, ``token_ids``, ``token_logprobs`` and ``policy_versions`` in the
    response.
    """

    input: Any
    """A string, or items."""
    instructions: str | None = None
    text: dict[str, Any] = Field(default={})
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
        return self.text.get("format") or {"type": "text"}

    @property
    def has_logprobs(self) -> bool:
        """Whether text comes with the log-probs of the answer's tokens."""
        return _LOGPROBS in self.include or self.top_logprobs > 0

    def listed_tools(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The tools, those in a namespace one by one under their qualified names."""
        for where, tool in super().listed_tools():
            if tool.get("type") != "namespace":
                yield where, tool
                continue
            namespace = name_at(tool, "name", where)
            functions = tool.get("tools") or []
            if not isinstance(functions, list):
                raise refused(f"{where}.tools", f"must be a list, got {type(functions).__name__}")
            for i, inner in enumerate(functions):
                at = f"{where}.tools.{i}"
                yield at, {**object_at(inner, at), "name": _qualified(namespace, name_at(inner, "name", at))}

    def names(self) -> dict[str, dict[str, str]]:
        """Qualified name -> name and namespace, of the functions in namespaces."""
        spaces = [tool for tool in self.tools if tool.get("type") == "namespace"]
        return {
            _qualified(space["name"], tool["name"]): {"name": tool["name"], "namespace": space["name"]}
            for space in spaces
            for tool in space.get("tools") or ()
        }

    def to_generation(self, session_header: str | None) -> tuple[GenerationRequest, ...]:
        for name, advice in _STATEFUL.items():
            if getattr(self, name):
                raise refused(name, f"is not supported; {advice}", code="unsupported_parameter")
        request = self.generation(
            session_header,
            self.max_output_tokens or self.max_tokens,
            format_of(self.text_format, "text.format"),
            num_top_logprobs=self.top_logprobs,
            shows_logprobs=self.has_logprobs,
            messages=chat_messages(self.input, self.instructions),
            **self.tool_fields(),
        )
        return (request,)


class ResponsesCall(ItemsCall[ResponsesRequest]):
    """One request in the format of the Responses API."""

    kinds = ("reasoning", "message")

    def __init__(self, planned: Sequence[Planned], body: ResponsesRequest, serving: Serving) -> None:
        super().__init__(planned, body, serving)
        self._num_events = 0
        self._names = body.names()
        self._new_logprobs: list[Mapping[str, Any]] = []
        """Those of tokens since the last piece of a message: reasoning's wait for the message."""
        self._message_logprobs: list[Mapping[str, Any]] = []
        self._fields = {
            "created_at": int(time.time()),
            "completed_at": None,
            "model": serving.model_name,
            **{name: getattr(body, name) for name in _ECHOED},
            "metadata": body.metadata | ignored_metadata(body.ignored_tools),
            "text": {"format": body.text_format},
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }

    def add_tokens(self, tokens: Completion | CompletionDelta) -> None:
        if self._body.has_logprobs:
            as_ids = self._body.return_tokens_as_token_ids
            self._new_logprobs += chat_logprobs(tokens, self._renderer, as_ids=as_ids)["content"]

    def begin(self) -> None:
        for kind in ("created", "in_progress"):
            self._event(kind, response=self._response("in_progress"))

    def begin_text(self, kind: str) -> None:
        self._message_logprobs = []
        self._begin_item(self._text_item(kind, "in_progress", []))
        self._event("content_part.added", **self._place(kind), part=self._part(kind, ""))

    def add_text(self, kind: str, text: str) -> None:
        self._event(f"{_TEXT_NAMES[kind]}.delta", **self._place(kind), delta=text, **self._taken_logprobs(kind))

    def end_text(self, kind: str, text: str) -> None:
        self._taken_logprobs(kind)
        logprobs = {"logprobs": self._message_logprobs} if kind == "message" else {}
        part = self._part(kind, text)
        self._event(f"{_TEXT_NAMES[kind]}.done", **self._place(kind), text=text, **logprobs)
        self._event("content_part.done", **self._place(kind), part=part)
        self._end_item(self._text_item(kind, "incomplete" if self._is_cut else "completed", [part]))

    def add_call(self, call: ToolCall) -> None:
        place = {"item_id": item_id("fc", self._name, len(self._items)), "output_index": len(self._items)}
        item = {"id": place["item_id"], "type": "function_call", "call_id": call.id, **self._called(call.name)}
        self._begin_item(item | {"arguments": "", "status": "in_progress"})
        self._event("function_call_arguments.delta", **place, delta=call.arguments)
        self._event("function_call_arguments.done", **place, **self._called(call.name), arguments=call.arguments)
        self._end_item(item | {"arguments": call.arguments, "status": "completed"})

    def _called(self, name: str) -> dict[str, str]:
        return self._names.get(name) or {"name": name}

    def finish(self, answer: Answer) -> dict[str, Any]:
        completion, status = answer.completion, "incomplete" if self._is_cut else "completed"
        num_prompt, num_sampled = len(completion.prompt_token_ids), len(completion.token_ids)
        response = self._response(status) | {
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": completion.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_sampled,
            },
        }
        if self._body.return_token_ids:
            response |= {"prompt_token_ids": completion.prompt_token_ids, **provenance(completion)}
        self._event(status, response=response)
        return response

    def _text_item(self, kind: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self._place(kind)["item_id"], "type": kind}
        fields = {"role": "assistant", "status": status} if kind == "message" else {"status": status, "summary": []}
        return item | fields | {"content": content}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        part = {"type": _TEXT_NAMES[kind], "text": text}
        return part | ({"annotations": [], "logprobs": list(self._message_logprobs)} if kind == "message" else {})

    def _place(self, kind: str) -> dict[str, Any]:
        index = len(self._items)
        identity = item_id(_ID_PREFIXES[kind], self._name, index)
        return {"item_id": identity, "output_index": index, "content_index": 0}

    def _taken_logprobs(self, kind: str) -> dict[str, Any]:
        """The log-probs that go with a piece of a message."""
        if kind != "message":
            return {}
        new, self._new_logprobs = self._new_logprobs, []
        self._message_logprobs += new
        return {"logprobs": new}

    def _begin_item(self, item: dict[str, Any]) -> None:
        self._event("output_item.added", output_index=len(self._items), item=item)

    def _end_item(self, item: dict[str, Any]) -> None:
        self._event("output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def _response(self, status: str) -> dict[str, Any]:
        response: dict[str, Any] = {"id": f"resp_{self._name}", "object": "response", "status": status}
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return response | nothing | self._fields | {"output": list(self._items)}

    def _event(self, kind: str, **fields: Any) -> None:
        self._emit({"type": f"response.{kind}", "sequence_number": self._num_events, **fields})
        self._num_events += 1


def no_websocket_route() -> Route:
    """The route that refuses the WebSocket by which Codex first tries to send requests; 426 makes it POST them at once."""

    async def refuse(request: Request) -> Response:
        if request.headers.get("upgrade", "").lower() != "websocket":
            raise HTTPException(405, "POST a request", headers={"Allow": "POST"})
        raise ApiError(426, f"{PATH} takes no WebSocket: POST the request", code="websocket_not_served")

    return Route(PATH, refuse, methods=["GET"])
