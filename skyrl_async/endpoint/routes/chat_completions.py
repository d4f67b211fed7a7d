"""``POST /v1/chat/completions``.

Replies carry exact ids, log-probs and policy versions on request. The sampler holds a request that is open while weights change, and
finishes it: ``finish_reason`` is never ``abort``. Does not know engines or sessions.
"""

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from pydantic import Field
from starlette.routing import Route

from skyrl_async.endpoint.requests.generation import (
    Answer,
    AnswerBlock,
    GenerationRequest,
    Planned,
    chat_tool_call,
)
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.routes.schema import ChatToolFields, Checked, SamplingFields, format_of
from skyrl_async.endpoint.routes.surface import (
    ChoicesCall,
    Written,
    chat_logprobs,
    extra_fields,
    provenance,
    sampling_route,
)
from skyrl_async.types import Completion, CompletionDelta


class ChatCompletionRequest(ChatToolFields, SamplingFields):
    """A body of ``POST /v1/chat/completions``: OpenAI's fields, vLLM's additions, and this package's."""

    messages: Checked[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    prefix_token_ids: Checked[int] | None = Field(default=None, min_length=1)
    """Exact ids (prompt and completion) of the conversation up to and including the last assistant message: only what
    follows is rendered, and nothing sampled is tokenized again."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and completion together."""

    def to_generation(self, session_header: str | None) -> tuple[GenerationRequest, ...]:
        num_top_logprobs = self.top_logprobs if self.logprobs else 0
        structured = format_of(self.response_format, "response_format", schema_in="json_schema")
        max_tokens = self.max_completion_tokens or self.max_tokens
        request = self.generation(
            session_header,
            self.sampling(max_tokens, structured, num_top_logprobs, shows_logprobs=self.logprobs),
            messages=tuple(self.messages),
            prefix_token_ids=None if self.prefix_token_ids is None else tuple(self.prefix_token_ids),
            **self.tool_fields(),
            max_total_tokens=self.max_total_tokens,
        )
        return (request,)


class ChatCall(ChoicesCall[ChatCompletionRequest]):
    """One request in OpenAI's chat format."""

    def __init__(self, planned: Sequence[Planned], body: ChatCompletionRequest, serving: Serving) -> None:
        common = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": serving.model_name}
        super().__init__(
            planned,
            body,
            serving,
            head=common | {"object": "chat.completion"},
            chunk_head=common | {"object": "chat.completion.chunk"},
            num_top_logprobs=body.top_logprobs,
        )
        self.extra = extra_fields(planned[0].prompt_token_ids, body.ignored_tools, has_ids=body.return_token_ids)

    def choice(self, index: int, plan: Planned, answer: Answer) -> dict[str, Any]:
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

    def chunks(self, index: int, plan: Planned, block: AnswerBlock, written: Written) -> list[dict[str, Any]]:
        choice = {
            "index": index,
            "delta": _delta(block, written.num_calls),
            "logprobs": self._logprobs(block.delta),
            "finish_reason": block.finish_reason,
        }
        chunk = self.chunk(choice | self._provenance(block.delta))
        if written.num_blocks:
            return [chunk]
        begun = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        # Not before there is a block: until the first event a failure has a status of its own.
        return [self.chunk(begun) | self.extra, chunk]

    def _provenance(self, block: Completion | CompletionDelta) -> dict[str, Any]:
        return provenance(block) if self._body.return_token_ids else {}

    def _logprobs(self, block: Completion | CompletionDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(block, self._renderer, as_ids=self._body.return_tokens_as_token_ids)


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


def routes(serving: Serving) -> list[Route]:
    """The route of chat completions."""
    return [sampling_route(serving, "/v1/chat/completions", ChatCompletionRequest, ChatCall)]
