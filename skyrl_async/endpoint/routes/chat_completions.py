"""``POST /v1/chat/completions``.

Replies carry exact ids, log-probs and policy versions on request. The sampler holds a request that is open while weights change, and
finishes it: ``finish_reason`` is never ``abort``. Does not know engines or sessions.
"""

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, field_validator, model_validator
from starlette.responses import Response

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.requests.fields import ignored_note, tool_name
from skyrl_async.endpoint.requests.generation import (
    Answer,
    AnswerBlock,
    GenerationRequest,
    Planned,
    chat_tool_call,
)
from skyrl_async.endpoint.requests.guard import ParsedRoute
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, in_thread_if
from skyrl_async.endpoint.requests.planner import Planner
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.requests.response_parts import chat_logprobs, extra_fields, provenance, usage
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.routes.schema import (
    Checked,
    ResponseFormat,
    SamplingFields,
    ToolDefinition,
    functions_of,
)
from skyrl_async.runtime.tasks import run_together
from skyrl_async.types import Completion, CompletionDelta


class NamedFunction(BaseModel):
    name: str


class NamedToolChoice(BaseModel):
    """OpenAI's ``tool_choice`` that names a function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatCompletionRequest(SamplingFields):
    """A body of ``POST /v1/chat/completions``: OpenAI's fields, vLLM's additions, and this package's."""

    messages: Checked[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=0, ge=0, le=20)
    tools: Checked[ToolDefinition] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    response_format: ResponseFormat | None = None
    prefix_token_ids: Checked[int] | None = Field(default=None, min_length=1)
    """Exact ids (prompt and completion) of the conversation up to and including the last assistant message: only what
    follows is rendered, and nothing sampled is tokenized again."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and completion together."""

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _chooses_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "function") != "function":
            raise ValueError(f"{value['type']!r} is not supported; choose auto, none, required or a function")
        return value

    @model_validator(mode="after")
    def _tool_choice_has_tools(self) -> "ChatCompletionRequest":
        names = [tool["function"]["name"] for tool in functions_of(self.tools)]
        ignored = ignored_note(self.ignored_tools)
        if self.chosen_tool not in ("auto", "none", "required", *names):
            raise ValueError(f"tool_choice must name one of tools {names}, got {self.chosen_tool!r}{ignored}")
        if self.chosen_tool == "required" and not names:
            raise ValueError(f"tools must hold at least one function when tool_choice is required, got none{ignored}")
        return self

    @property
    def ignored_tools(self) -> tuple[str, ...]:
        """The tools that are no functions, by type and name."""
        return tuple(tool_name(tool.model_dump()) for tool in self.tools or () if tool.function is None)

    @property
    def chosen_tool(self) -> str:
        """``auto``, ``none``, ``required`` or a function's name."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return self.tool_choice.function.name
        return self.tool_choice or "auto"

    def to_generation(self, session_label: str | None) -> GenerationRequest:
        """The request without its wire format."""
        return GenerationRequest(
            messages=tuple(self.messages),
            prompt_token_ids=None if self.prefix_token_ids is None else tuple(self.prefix_token_ids),
            tools=functions_of(self.tools) or None,
            tool_choice=self.chosen_tool,
            sampling=self.sampling(
                self.max_completion_tokens or self.max_tokens,
                self.response_format.structured if self.response_format else None,
                (self.top_logprobs or 0) if self.logprobs else 0,
                shows_logprobs=bool(self.logprobs),
            ),
            max_total_tokens=self.max_total_tokens,
            bad_words=tuple(self.bad_words or ()),
            session_label=self.label(session_label),
            priority=self.priority or 0,
        )


def make_router(serving: Serving) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        serving.require_model(body.model)
        asked = body.to_generation(request.headers.get("x-session-id"))

        async def call(planner: Planner) -> ChatCall:
            return ChatCall(await planner.plan(asked), body, serving.renderer, serving.model_name)

        return await serving.handle(request, call, is_stream=bool(body.stream))

    return router


class ChatCall:
    """One request in OpenAI's chat format."""

    def __init__(self, planned: Planned, body: ChatCompletionRequest, renderer: ChatRenderer, model_name: str) -> None:
        self._planned = planned
        self._body = body
        self._renderer = renderer
        self._common = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model_name}

    async def reply(self) -> dict[str, Any]:
        """The whole answer: ``n`` independent generations."""
        answers = await run_together(
            {f"{self._common['id']}-{i}": self._planned.answer(i) for i in range(self._body.num_choices)}
        )
        num_tokens = sum(len(answer.completion.token_ids) for answer in answers)
        choices = await in_thread_if(
            lambda: [self._choice(i, answer) for i, answer in enumerate(answers)],
            is_long=num_tokens * (1 + (self._body.top_logprobs or 0)) > LONG_TEXT,
        )
        reply = self._common | {
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage([answer.completion for answer in answers]),
        }
        return reply | self._extras()

    async def stream(self, emit: Emit) -> None:
        """The answer in chunks; those of ``n`` choices are interleaved."""
        completions = await run_together(
            {f"{self._common['id']}-{i}": self._stream_choice(i, emit) for i in range(self._body.num_choices)}
        )
        if self._body.includes_usage:
            emit(self._chunk([]) | {"usage": self._usage(completions)})

    def _usage(self, choices: Sequence[Completion]) -> dict[str, Any]:
        """Reports the prompt tokens that were cached for the first choice."""
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        return usage(len(self._planned.prompt_token_ids), num_tokens, choices[0].num_cached_tokens)

    async def _stream_choice(self, index: int, emit: Emit) -> Completion:
        """Emit one choice's chunks, and return its completion."""
        num_calls = 0
        is_begun = False
        async with aclosing(self._planned.stream(index)) as blocks:
            async for block in blocks:
                if not is_begun:  # not earlier: until the first event a failure has a status of its own
                    emit(self._chunk([_role_choice(index)]) | self._extras())
                    is_begun = True
                emit(self._chunk([self._chunk_choice(index, block, num_calls)]))
                num_calls += len(block.tool_calls)
        assert block.answer is not None, "a stream ends with its answer"
        return block.answer.completion

    def _chunk_choice(self, index: int, block: AnswerBlock, num_calls_before: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": _delta(block, num_calls_before),
            "logprobs": self._logprobs(block.delta),
            "finish_reason": block.finish_reason,
        }
        return choice | self._provenance(block.delta)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": _message(answer),
            "logprobs": self._logprobs(answer.completion),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._body.return_token_ids:
            choice["text_ends"] = self._renderer.text_ends(answer.completion.token_ids)
            choice["num_aborts"] = answer.completion.num_aborts
        return choice | self._provenance(answer.completion)

    def _provenance(self, block: Completion | CompletionDelta) -> dict[str, Any]:
        return provenance(block) if self._body.return_token_ids else {}

    def _extras(self) -> dict[str, Any]:
        has_ids = bool(self._body.return_token_ids)
        return extra_fields(self._planned.prompt_token_ids, self._body.ignored_tools, has_ids=has_ids)

    def _logprobs(self, block: Completion | CompletionDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(block, self._renderer, as_ids=bool(self._body.return_tokens_as_token_ids))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._common | {"object": "chat.completion.chunk", "choices": choices}
        return chunk | {"usage": None} if self._body.includes_usage else chunk


def _role_choice(index: int) -> dict[str, Any]:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.tool_calls:
        message["tool_calls"] = [chat_tool_call(call) for call in answer.tool_calls]
    return message


def _delta(block: AnswerBlock, num_calls_before: int) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": block.content} if block.content else {}
    if block.reasoning:
        delta |= {"reasoning_content": block.reasoning, "reasoning": block.reasoning}
    if block.tool_calls:
        delta["tool_calls"] = [
            {"index": num_calls_before + i, **chat_tool_call(call)} for i, call in enumerate(block.tool_calls)
        ]
    return delta
