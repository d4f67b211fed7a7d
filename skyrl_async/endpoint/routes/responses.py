"""``POST /v1/responses``: OpenAI's Responses API without a store.

Flows in: input items. Flows out: responses, whole or as events. Every request brings its whole conversation; what needs
the server to remember is refused. Does not know how prompts are made or tokens sampled.
"""

import time
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.parsing.stream_joining import joined_completion
from skyrl_async.endpoint.requests.body_fields import ignored_metadata
from skyrl_async.endpoint.requests.context import Serving
from skyrl_async.endpoint.requests.generation import Planned, Planner
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, done_apart
from skyrl_async.endpoint.requests.response_parts import chat_logprobs, provenance
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes.responses_output import ResponseWriter
from skyrl_async.endpoint.routes.responses_schema import ResponsesRequest
from skyrl_async.types import Completion, CompletionDelta, FinishReason


def make_router(serving: Serving) -> APIRouter:
    """The Responses surface over ``serving``."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        serving.require_model(body.model)
        asked = body.to_generation(request.headers.get("x-session-id"))

        async def call(planner: Planner) -> ResponsesCall:
            return ResponsesCall(await planner.plan(asked), body, serving.renderer, serving.model_name)

        return await serving.exchange(request, call, is_stream=bool(body.stream), style=EventStyle.named)

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
        logprobs = await done_apart(lambda: self._logprobs(answer.completion), is_long=num_logprobs > LONG_TEXT)
        writer.write(reasoning=answer.reasoning, text=answer.content, tool_calls=answer.tool_calls, logprobs=logprobs)
        return self._finish(writer, answer.completion)

    async def stream(self, emit: Emit) -> None:
        """The response in events."""
        writer, deltas = self._writer(emit), []
        writer.begin()
        async with aclosing(self._planned.stream()) as blocks:
            async for block in blocks:
                deltas.append(block.delta)
                writer.write(
                    reasoning=block.reasoning,
                    text=block.content,
                    tool_calls=block.tool_calls,
                    logprobs=self._logprobs(block.delta),
                )
        self._finish(writer, joined_completion(self._planned.prompt_token_ids, deltas))

    def _finish(self, writer: ResponseWriter, completion: Completion) -> dict[str, Any]:
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

    def _writer(self, emit: Emit) -> ResponseWriter:
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
        """One entry per token, where asked for."""
        if not self._body.has_logprobs:
            return []
        as_ids = bool(self._body.return_tokens_as_token_ids)
        entries: list[dict[str, Any]] = chat_logprobs(block, self._renderer, as_ids=as_ids)["content"]
        return entries
