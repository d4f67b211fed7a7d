"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API with text and tools.

Flows in: messages of content blocks. Flows out: messages, whole or as events, and counts. Does not know how prompts are
made or tokens sampled.
"""

from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.parsing.stream_joining import joined_completion
from skyrl_async.endpoint.requests.body_fields import ignored_metadata
from skyrl_async.endpoint.requests.context import Serving
from skyrl_async.endpoint.requests.generation import Planned, Planner, stop_string
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.response_parts import provenance
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes.messages_output import MessageWriter
from skyrl_async.endpoint.routes.messages_schema import Conversation, MessagesRequest
from skyrl_async.types import Completion, FinishReason


def make_router(serving: Serving) -> APIRouter:
    """The Messages surface over ``serving``."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/messages")
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        serving.require_model(body.model)
        asked = body.to_generation(request.headers.get("x-session-id"))

        async def call(planner: Planner) -> MessagesCall:
            return MessagesCall(await planner.plan(asked), body, serving.renderer, serving.model_name)

        return await serving.exchange(request, call, is_stream=bool(body.stream), style=EventStyle.named)

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
        return self._finish(writer, answer.completion, answer.finish_reason) | self._extras()

    async def stream(self, emit: Emit) -> None:
        """The message in events."""
        writer, deltas = self._writer(emit), []
        finish_reason: str | None = None
        writer.begin(self._extras())
        async with aclosing(self._planned.stream()) as blocks:
            async for block in blocks:
                deltas.append(block.delta)
                writer.write(reasoning=self._shown(block.reasoning), text=block.content, tool_calls=block.tool_calls)
                finish_reason = block.finish_reason
        self._finish(writer, joined_completion(self._planned.prompt_token_ids, deltas), finish_reason)

    def _finish(self, writer: MessageWriter, completion: Completion, finish_reason: str | None) -> dict[str, Any]:
        stop_sequence = stop_string(self._renderer, completion, self._planned.sampling)
        if completion.finish_reason is FinishReason.LENGTH:
            stop_reason, stop_sequence = "max_tokens", None
        elif finish_reason == "tool_calls":
            stop_reason, stop_sequence = "tool_use", None
        else:
            stop_reason = "end_turn" if stop_sequence is None else "stop_sequence"
        return writer.finish(
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            num_sampled_tokens=len(completion.token_ids),
            num_cached_tokens=completion.num_cached_tokens,
            extra=provenance(completion) if self._body.return_token_ids else {},
        )

    def _writer(self, emit: Emit) -> MessageWriter:
        return MessageWriter(uuid4().hex, self._model_name, len(self._planned.prompt_token_ids), emit)

    def _shown(self, reasoning: str | None) -> str | None:
        return reasoning if self._body.shows_thinking else None

    def _extras(self) -> dict[str, Any]:
        """What Anthropic's message does not have."""
        prompt_ids = {"prompt_token_ids": self._planned.prompt_token_ids} if self._body.return_token_ids else {}
        metadata = ignored_metadata(self._body.ignored_tools)
        return prompt_ids | ({"metadata": metadata} if metadata else {})
