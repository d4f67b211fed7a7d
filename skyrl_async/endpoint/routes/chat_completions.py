"""``POST /v1/chat/completions``.

Replies carry exact ids, log-probs and policy versions on request. The sampler holds a request that is open while weights change, and
finishes it: ``finish_reason`` is never ``abort``. Does not know engines or sessions.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from skyrl_async.endpoint.parsing.answers import AnswerParts
from skyrl_async.endpoint.requests.generation import Answer, AnswerBlock, GenerationRequest, Planned, chat_tool_call
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.routes.schema import ChatToolFields, Checked, SamplingFields, format_of
from skyrl_async.endpoint.routes.surface import ChoicesCall, Written, chat_logprobs, extra_fields
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
        request = self.generation(
            session_header,
            self.max_completion_tokens or self.max_tokens,
            format_of(self.response_format, "response_format", schema_in="json_schema"),
            num_top_logprobs=self.top_logprobs if self.logprobs else 0,
            shows_logprobs=self.logprobs,
            messages=tuple(self.messages),
            prefix_token_ids=self.prefix_token_ids,
            **self.tool_fields(),
            max_total_tokens=self.max_total_tokens,
        )
        return (request,)


class ChatCall(ChoicesCall[ChatCompletionRequest]):
    """One request in OpenAI's chat format."""

    id_prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, planned: Sequence[Planned], body: ChatCompletionRequest, serving: Serving) -> None:
        super().__init__(planned, body, serving)
        self.extra = extra_fields(planned[0].prompt_token_ids, body.ignored_tools, has_ids=body.return_token_ids)

    def whole(self, plan: Planned, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.parts.content, "refusal": None} | _delta(answer.parts)
        if answer.parts.tool_calls and not answer.parts.content:
            message["content"] = None
        if not self._body.return_token_ids:
            return {"message": message}
        completion = answer.completion
        text_ends = self._renderer.text_ends(completion.token_ids, skip_special_tokens=answer.skips_special_tokens)
        origin = {name: getattr(completion, name) for name in ("num_aborts", "engines", "engine_seconds", "asked_at")}
        return {"message": message, "text": completion.text, "text_ends": text_ends} | origin

    def piece(self, plan: Planned, block: AnswerBlock, written: Written) -> dict[str, Any]:
        delta = _delta(block.parts)
        for index, call in enumerate(delta.get("tool_calls", ()), start=written.num_calls):
            call["index"] = index
        return {"delta": delta}

    def chunks(self, index: int, plan: Planned, block: AnswerBlock, written: Written) -> list[dict[str, Any]]:
        chunks = super().chunks(index, plan, block, written)
        if written.num_blocks:
            return chunks
        begun = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        # Not before there is a block: until the first event a failure has a status of its own.
        return [self.chunk(begun) | self.extra, *chunks]

    def logprobs(self, tokens: Completion | CompletionDelta, written: Written) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(tokens, self._renderer, as_ids=self._body.return_tokens_as_token_ids)


def _delta(parts: AnswerParts) -> dict[str, Any]:
    """What a message says, without what it lacks."""
    delta: dict[str, Any] = {"content": parts.content} if parts.content else {}
    if parts.reasoning:
        delta |= {"reasoning_content": parts.reasoning, "reasoning": parts.reasoning}
    if parts.tool_calls:
        delta["tool_calls"] = [chat_tool_call(call) for call in parts.tool_calls]
    return delta
