"""``POST /v1/responses``: OpenAI's Responses API without a store.

Every request brings its whole conversation; fields that need a store are refused. A response is written piece by piece, with the same
code whole and streamed. Does not know how prompts are made or tokens sampled.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.parsing.answers import ToolCall
from skyrl_async.endpoint.requests.fields import ignored_metadata
from skyrl_async.endpoint.requests.generation import Planned
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, in_thread_if
from skyrl_async.endpoint.requests.planner import Planner
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.requests.response_parts import chat_logprobs, provenance
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes.responses_schema import ResponsesRequest, item_id
from skyrl_async.types import Completion, CompletionDelta, FinishReason


def make_router(serving: Serving) -> APIRouter:
    """The route of OpenAI's Responses API."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        serving.require_model(body.model)
        asked = body.to_generation(request.headers.get("x-session-id"))

        async def call(planner: Planner) -> ResponsesCall:
            return ResponsesCall(await planner.plan(asked), body, serving.renderer, serving.model_name)

        return await serving.handle(request, call, is_stream=bool(body.stream), style=EventStyle.named)

    return router


class ResponsesCall:
    """One request in the format of the Responses API."""

    def __init__(self, planned: Planned, body: ResponsesRequest, renderer: ChatRenderer, model_name: str) -> None:
        self._planned = planned
        self._body = body
        self._renderer = renderer
        self._model_name = model_name

    async def reply(self) -> dict[str, Any]:
        """The whole response."""
        answer = await self._planned.answer()
        writer = self._writer(lambda _: None)
        num_logprobs = len(answer.completion.token_ids) * (1 + (self._body.top_logprobs or 0))
        logprobs = await in_thread_if(lambda: self._logprobs(answer.completion), is_long=num_logprobs > LONG_TEXT)
        writer.write(reasoning=answer.reasoning, text=answer.content, tool_calls=answer.tool_calls, logprobs=logprobs)
        return self._finish(writer, answer.completion)

    async def stream(self, emit: Emit) -> None:
        """The response in events."""
        writer = self._writer(emit)
        writer.begin()
        async with aclosing(self._planned.stream()) as blocks:
            async for block in blocks:
                writer.write(
                    reasoning=block.reasoning,
                    text=block.content,
                    tool_calls=block.tool_calls,
                    logprobs=self._logprobs(block.delta),
                )
        assert block.answer is not None, "a stream ends with its answer"
        self._finish(writer, block.answer.completion)

    def _finish(self, writer: "ResponseWriter", completion: Completion) -> dict[str, Any]:
        num_prompt, num_sampled = len(completion.prompt_token_ids), len(completion.token_ids)
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": completion.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        }
        origin = {"prompt_token_ids": completion.prompt_token_ids, **provenance(completion)}
        return writer.finish(
            is_cut=completion.finish_reason is FinishReason.LENGTH,
            usage=usage,
            provenance=origin if self._body.return_token_ids else {},
        )

    def _writer(self, emit: Emit) -> "ResponseWriter":
        body = self._body
        fields = {
            "created_at": int(time.time()),
            "completed_at": None,
            "model": self._model_name,
            "instructions": body.instructions,
            "metadata": (body.metadata or {}) | ignored_metadata(body.ignored_tools),
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": body.top_p or 1.0,
            "top_logprobs": body.top_logprobs or 0,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }
        return ResponseWriter(uuid4().hex, fields, emit)

    def _logprobs(self, block: Completion | CompletionDelta) -> list[dict[str, Any]]:
        """One entry per token, if asked for."""
        if not self._body.has_logprobs:
            return []
        as_ids = bool(self._body.return_tokens_as_token_ids)
        entries: list[dict[str, Any]] = chat_logprobs(block, self._renderer, as_ids=as_ids)["content"]
        return entries


Logprobs = Sequence[Mapping[str, Any]]
"""One entry per token, in OpenAI's form."""


@dataclass(slots=True)
class _TextItem:
    """A message or reasoning while it is written."""

    id: str
    is_message: bool
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def events(self) -> str:
        """The name of its text in event types."""
        return "output_text" if self.is_message else "reasoning_text"

    def part(self) -> dict[str, Any]:
        """Its one content part, with the text so far."""
        text = "".join(self.pieces)
        if not self.is_message:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str) -> dict[str, Any]:
        """The item as it stands."""
        content = [] if status == "in_progress" else [self.part()]
        if self.is_message:
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class ResponseWriter:
    """Writes one response.

    Args:
        turn: 32 hex digits, shared by the ids of the response and its items.
        fields: further fields of the response.
        emit: gets every event.
    """

    def __init__(self, turn: str, fields: dict[str, Any], emit: Emit) -> None:
        self._turn = turn
        self._fields = fields
        self._emit = emit
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._open: _TextItem | None = None
        self._logprobs: list[Mapping[str, Any]] = []

    def begin(self) -> None:
        """Announce the response."""
        for kind in ("created", "in_progress"):
            self._event(kind, response=self._response("in_progress"))

    def write(
        self, *, reasoning: str | None, text: str | None, tool_calls: Iterable[ToolCall], logprobs: Logprobs = ()
    ) -> None:
        """Add a block. ``logprobs`` are those of all its tokens; they go with the text, or wait for it."""
        self._logprobs.extend(logprobs)
        if reasoning:
            self._add_text(reasoning, is_message=False)
        if text:
            self._add_text(text, is_message=True)
        for call in tool_calls:
            self._add_call(call)

    def finish(self, *, is_cut: bool, usage: Mapping[str, Any], provenance: dict[str, Any]) -> dict[str, Any]:
        """End the response and return it. A response without calls always has a message, even an empty one."""
        if not any(item["type"] == "function_call" for item in self._output):
            self._open_text(is_message=True)
        self._close("incomplete" if is_cut else "completed")
        kind = "incomplete" if is_cut else "completed"
        response = self._response(kind) | {
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": usage,
            **provenance,
        }
        self._event(kind, response=response)
        return response

    def _add_text(self, text: str, *, is_message: bool) -> None:
        item = self._open_text(is_message=is_message)
        item.pieces.append(text)
        self._event(f"{item.events}.delta", **self._place(item), delta=text, **self._new_logprobs(item))

    def _open_text(self, *, is_message: bool) -> _TextItem:
        if self._open is not None and self._open.is_message == is_message:
            return self._open
        self._close()
        identity = item_id("msg" if is_message else "rs", self._turn, len(self._output))
        item = self._open = _TextItem(identity, is_message)
        self._event("output_item.added", output_index=len(self._output), item=item.item("in_progress"))
        self._event("content_part.added", **self._place(item), part=item.part())
        return item

    def _close(self, status: str = "completed") -> None:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        place = self._place(item)
        self._new_logprobs(item)
        logprobs = {"logprobs": list(item.logprobs)} if item.is_message else {}
        self._event(f"{item.events}.done", **place, text="".join(item.pieces), **logprobs)
        self._event("content_part.done", **place, part=item.part())
        self._end_item(item.item(status))

    def _add_call(self, call: ToolCall) -> None:
        self._close()
        place = {"item_id": item_id("fc", self._turn, len(self._output)), "output_index": len(self._output)}
        item = {"id": place["item_id"], "type": "function_call", "call_id": call.id, "name": call.name}
        begun = item | {"arguments": "", "status": "in_progress"}
        self._event("output_item.added", output_index=len(self._output), item=begun)
        self._event("function_call_arguments.delta", **place, delta=call.arguments)
        self._event("function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        self._end_item(item | {"arguments": call.arguments, "status": "completed"})

    def _end_item(self, item: dict[str, Any]) -> None:
        self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _place(self, item: _TextItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._output), "content_index": 0}

    def _new_logprobs(self, item: _TextItem) -> dict[str, Any]:
        """Log-probs that came since the last piece of text; reasoning's wait for the message."""
        if not item.is_message:
            return {}
        new, self._logprobs = self._logprobs, []
        item.logprobs.extend(new)
        return {"logprobs": new}

    def _response(self, status: str) -> dict[str, Any]:
        response: dict[str, Any] = {"id": f"resp_{self._turn}", "object": "response", "status": status}
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return response | nothing | self._fields | {"output": list(self._output)}

    def _event(self, kind: str, **fields: Any) -> None:
        self._emit({"type": f"response.{kind}", "sequence_number": self._num_events, **fields})
        self._num_events += 1
