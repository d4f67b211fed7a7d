"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API with text and tools.

A message is written piece by piece, with the same code whole and streamed. Does not know how prompts are made or tokens sampled.
"""

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from skyrl_async.endpoint.parsing.answers import ToolCall
from skyrl_async.endpoint.requests.generation import Answer, Planned
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes.messages_schema import Conversation, MessagesRequest, tool_input
from skyrl_async.endpoint.routes.surface import ItemsCall, extra_fields, provenance, sampling_router


def make_router(serving: Serving) -> APIRouter:
    """The routes of Anthropic's Messages API."""
    router = sampling_router(serving, "/v1/messages", MessagesRequest, MessagesCall, style=EventStyle.named)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: Conversation, request: Request) -> Response:
        serving.require_model(body.model)
        messages, tools = body.chat_messages(), body.chat_tools() or None

        def count() -> dict[str, int]:
            return {"input_tokens": len(serving.renderer.render(messages, tools=tools))}

        return await serving.tokenize(request, (messages, tools), count)

    return router


class MessagesCall(ItemsCall[MessagesRequest]):
    """One request in Anthropic's format."""

    kinds = ("thinking", "text")

    def __init__(self, planned: Sequence[Planned], body: MessagesRequest, serving: Serving) -> None:
        super().__init__(planned, body, serving)
        self.shows_reasoning = body.shows_thinking
        prompt = self._planned.prompt_token_ids
        self._num_prompt_tokens = len(prompt)
        self._extra = extra_fields(prompt, body.ignored_tools, has_ids=body.return_token_ids)

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
                "input_tokens": self._num_prompt_tokens - num_cached_tokens,
                "output_tokens": num_sampled_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached_tokens,
            },
        }

    def _event(self, kind: str, **fields: Any) -> None:
        self._emit({"type": kind, **fields})


def _text_block(kind: str, text: str, signature: str = "") -> dict[str, Any]:
    return {"type": kind, kind: text} | ({"signature": signature} if kind == "thinking" else {})
