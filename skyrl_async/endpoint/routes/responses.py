"""``POST /v1/responses``: OpenAI's Responses API without a store.

Every request brings its whole conversation; fields that need a store are refused. A response is written piece by piece, with the same
code whole and streamed. Does not know how prompts are made or tokens sampled.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter

from skyrl_async.endpoint.parsing.answers import ToolCall
from skyrl_async.endpoint.requests.fields import ignored_metadata
from skyrl_async.endpoint.requests.generation import Answer, Planned
from skyrl_async.endpoint.requests.request_handler import Serving
from skyrl_async.endpoint.requests.streaming import EventStyle
from skyrl_async.endpoint.routes.responses_schema import ResponsesRequest, item_id
from skyrl_async.endpoint.routes.surface import ItemsCall, chat_logprobs, provenance, sampling_router
from skyrl_async.types import Completion, CompletionDelta


def make_router(serving: Serving) -> APIRouter:
    """The route of OpenAI's Responses API."""
    return sampling_router(serving, "/v1/responses", ResponsesRequest, ResponsesCall, style=EventStyle.named)


class ResponsesCall(ItemsCall[ResponsesRequest]):
    """One request in the format of the Responses API."""

    kinds = ("reasoning", "message")

    def __init__(self, planned: Sequence[Planned], body: ResponsesRequest, serving: Serving) -> None:
        super().__init__(planned, body, serving)
        self._num_events = 0
        self._new_logprobs: list[Mapping[str, Any]] = []
        """Those of tokens since the last piece of a message: reasoning's wait for the message."""
        self._message_logprobs: list[Mapping[str, Any]] = []
        self._fields = {
            "created_at": int(time.time()),
            "completed_at": None,
            "model": serving.model_name,
            "instructions": body.instructions,
            "metadata": body.metadata | ignored_metadata(body.ignored_tools),
            "tools": body.tools,
            "tool_choice": body.tool_choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "text": {"format": body.text_format},
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }

    @property
    def num_top_logprobs(self) -> int:
        return self._body.top_logprobs

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
        self._event(f"{_event_of(kind)}.delta", **self._place(kind), delta=text, **self._taken_logprobs(kind))

    def end_text(self, kind: str, text: str) -> None:
        self._taken_logprobs(kind)
        logprobs = {"logprobs": self._message_logprobs} if kind == "message" else {}
        part = self._part(kind, text)
        self._event(f"{_event_of(kind)}.done", **self._place(kind), text=text, **logprobs)
        self._event("content_part.done", **self._place(kind), part=part)
        self._end_item(self._text_item(kind, "incomplete" if self._is_cut else "completed", [part]))

    def add_call(self, call: ToolCall) -> None:
        place = {"item_id": item_id("fc", self._name, len(self._items)), "output_index": len(self._items)}
        item = {"id": place["item_id"], "type": "function_call", "call_id": call.id, "name": call.name}
        self._begin_item(item | {"arguments": "", "status": "in_progress"})
        self._event("function_call_arguments.delta", **place, delta=call.arguments)
        self._event("function_call_arguments.done", **place, name=call.name, arguments=call.arguments)
        self._end_item(item | {"arguments": call.arguments, "status": "completed"})

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
        part = {"type": _event_of(kind), "text": text}
        return part | ({"annotations": [], "logprobs": list(self._message_logprobs)} if kind == "message" else {})

    def _place(self, kind: str) -> dict[str, Any]:
        index = len(self._items)
        identity = item_id("msg" if kind == "message" else "rs", self._name, index)
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


def _event_of(kind: str) -> str:
    """The name of a text in event types and content parts."""
    return "output_text" if kind == "message" else "reasoning_text"
