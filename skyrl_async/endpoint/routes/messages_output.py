"""One message of Anthropic's API, written piece by piece.

Flows in: reasoning, text and tool calls, whole or in blocks. Flows out: Anthropic's streaming events in Anthropic's order,
and the message they add up to; a whole reply is written the same way with nobody listening. Does not know tokens.
"""

import json
from collections.abc import Iterable
from typing import Any

from skyrl_async.endpoint.parsing.answers import ToolCall
from skyrl_async.endpoint.requests.shared_request import Emit
from skyrl_async.endpoint.routes.messages_input import tool_input


class MessageWriter:
    """Writes one message.

    Args:
        name: 32 hex digits; makes the message's id and signs its thinking.
        model_name: of the policy.
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
        """Add what a block holds."""
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
        """End the message and return it. An answer without calls always has a block of text, if an empty one."""
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
                "input_tokens": self._num_prompt_tokens - num_cached_tokens,  # Anthropic's are beside the cached ones
                "output_tokens": num_sampled_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached_tokens,
            },
        }

    def _event(self, kind: str, **fields: Any) -> None:
        self._emit({"type": kind, **fields})
