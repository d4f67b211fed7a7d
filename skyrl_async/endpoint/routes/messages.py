"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API with text and tools.

A message is written piece by piece, with the same code whole and streamed. Does not know how prompts are made or tokens sampled.
"""

import json
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.parsing.answers import ToolCall
from skyrl_async.endpoint.requests.generation import Answer, Planned
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.planner import Planner
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.requests.response_parts import extra_fields, provenance
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes.messages_schema import Conversation, MessagesRequest, tool_input
from skyrl_async.types import FinishReason


def make_router(serving: Serving) -> APIRouter:
    """The routes of Anthropic's Messages API."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/messages")
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        serving.require_model(body.model)
        asked = body.to_generation(request.headers.get("x-session-id"))

        async def call(planner: Planner) -> MessagesCall:
            return MessagesCall(await planner.plan(asked), body, serving.renderer, serving.model_name)

        return await serving.handle(request, call, is_stream=bool(body.stream), style=EventStyle.named)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: Conversation, request: Request) -> Response:
        serving.require_model(body.model)
        messages, tools = body.chat_messages(), body.chat_tools() or None

        def count() -> dict[str, int]:
            return {"input_tokens": len(serving.renderer.render(messages, tools=tools))}

        return await serving.tokenize(request, (messages, tools), count)

    return router


class MessagesCall:
    """One request in Anthropic's format."""

    def __init__(self, planned: Planned, body: MessagesRequest, renderer: ChatRenderer, model_name: str) -> None:
        self._planned = planned
        self._body = body
        self._renderer = renderer
        self._model_name = model_name

    async def reply(self) -> dict[str, Any]:
        """The whole message."""
        answer = await self._planned.answer()
        writer = self._writer(lambda _: None)
        writer.write(reasoning=self._shown(answer.reasoning), text=answer.content, tool_calls=answer.tool_calls)
        return self._finish(writer, answer) | self._extras()

    async def stream(self, emit: Emit) -> None:
        """The message in events."""
        writer = self._writer(emit)
        writer.begin(self._extras())
        async with aclosing(self._planned.stream()) as blocks:
            async for block in blocks:
                writer.write(reasoning=self._shown(block.reasoning), text=block.content, tool_calls=block.tool_calls)
        assert block.answer is not None, "a stream ends with its answer"
        self._finish(writer, block.answer)

    def _finish(self, writer: "MessageWriter", answer: Answer) -> dict[str, Any]:
        completion, stop_sequence = answer.completion, None
        if completion.finish_reason is FinishReason.LENGTH:
            stop_reason = "max_tokens"
        elif answer.finish_reason == "tool_calls":
            stop_reason = "tool_use"
        elif isinstance(answer.stop_reason, str):
            stop_reason, stop_sequence = "stop_sequence", answer.stop_reason
        else:
            stop_reason = "end_turn"
        return writer.finish(
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            num_sampled_tokens=len(completion.token_ids),
            num_cached_tokens=completion.num_cached_tokens,
            extra=provenance(completion) if self._body.return_token_ids else {},
        )

    def _writer(self, emit: Emit) -> "MessageWriter":
        return MessageWriter(uuid4().hex, self._model_name, len(self._planned.prompt_token_ids), emit)

    def _shown(self, reasoning: str | None) -> str | None:
        return reasoning if self._body.shows_thinking else None

    def _extras(self) -> dict[str, Any]:
        has_ids = bool(self._body.return_token_ids)
        return extra_fields(self._planned.prompt_token_ids, self._body.ignored_tools, has_ids=has_ids)


class MessageWriter:
    """Writes one message.

    Args:
        name: 32 hex digits, for the message's id and the signature of its thinking.
        num_prompt_tokens: for ``usage``.
        emit: gets every event.
    """

    def __init__(self, name: str, model_name: str, num_prompt_tokens: int, emit: Emit) -> None:
        self._name = name
        self._model_name = model_name
        self._num_prompt_tokens = num_prompt_tokens
        self._emit = emit
        self._content: list[dict[str, Any]] = []
        self._open: str | None = None
        """``text`` or ``thinking`` while such a block is being written."""
        self._pieces: list[str] = []

    def begin(self, extra: dict[str, Any]) -> None:
        """Announce the message; ``extra`` goes beside its fields."""
        self._event("message_start", message=self._message(None, None, 0) | extra)

    def write(self, *, reasoning: str | None, text: str | None, tool_calls: Iterable[ToolCall]) -> None:
        """Add a block's reasoning, text and calls."""
        if reasoning:
            self._add_text("thinking", reasoning)
        if text:
            self._add_text("text", text)
        for call in tool_calls:
            self._add_call(call)

    def finish(
        self,
        *,
        stop_reason: str,
        stop_sequence: str | None,
        num_sampled_tokens: int,
        num_cached_tokens: int = 0,
        extra: dict[str, Any],
    ) -> dict[str, Any]:
        """End the message and return it. A message without calls always has a block of text, even an empty one."""
        if not any(block["type"] == "tool_use" for block in self._content):
            self._open_block("text")
        self._close_block()
        message = self._message(stop_reason, stop_sequence, num_sampled_tokens, num_cached_tokens) | extra
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        self._event("message_delta", delta=delta, usage=message["usage"], **extra)
        self._event("message_stop")
        return message

    def _add_text(self, kind: str, text: str) -> None:
        self._open_block(kind)
        self._pieces.append(text)
        self._delta(f"{kind}_delta", **{kind: text})

    def _open_block(self, kind: str) -> None:
        if self._open == kind:
            return
        self._close_block()
        self._open = kind
        self._start(self._text_block(kind, ""))

    def _close_block(self) -> None:
        kind, self._open = self._open, None
        if kind is None:
            return
        if kind == "thinking":
            self._delta("signature_delta", signature=self._name)
        self._stop(self._text_block(kind, "".join(self._pieces), signature=self._name))
        self._pieces = []

    def _add_call(self, call: ToolCall) -> None:
        self._close_block()
        given = tool_input(call.arguments)
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        self._start(block | {"input": {}})
        self._delta("input_json_delta", partial_json=json.dumps(given, ensure_ascii=False))
        self._stop(block | {"input": given})

    def _text_block(self, kind: str, text: str, signature: str = "") -> dict[str, Any]:
        signed = {"signature": signature} if kind == "thinking" else {}
        return {"type": kind, kind: text} | signed

    def _start(self, block: dict[str, Any]) -> None:
        self._event("content_block_start", index=len(self._content), content_block=block)

    def _delta(self, kind: str, **fields: str) -> None:
        self._event("content_block_delta", index=len(self._content), delta={"type": kind, **fields})

    def _stop(self, block: dict[str, Any]) -> None:
        self._event("content_block_stop", index=len(self._content))
        self._content.append(block)

    def _message(
        self, stop_reason: str | None, stop_sequence: str | None, num_sampled_tokens: int, num_cached_tokens: int = 0
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": list(self._content),
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": self._num_prompt_tokens
                - num_cached_tokens,  # Anthropic counts cached tokens separately
                "output_tokens": num_sampled_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached_tokens,
            },
        }

    def _event(self, kind: str, **fields: Any) -> None:
        self._emit({"type": kind, **fields})
