"""What tests of sessions share: completions without an engine, and a harness that sends messages back as real ones do."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from skyrl_async.endpoint.sessions.tree import Match, Turn, TurnTree
from skyrl_async.types import Completion, FinishReason, Message

FIRST_SAMPLED_ID = 1000
"""Ids below are of messages that nobody sampled."""


def completion(
    prompt: Sequence[int],
    token_ids: Sequence[int],
    *,
    text: str = "",
    version: int = 0,
    logprobs: Sequence[float] | None = None,
    finish_reason: FinishReason = FinishReason.STOP,
    num_aborts: int = 0,
) -> Completion:
    return Completion(
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) if logprobs is not None else (-0.5,) * len(token_ids),
        versions=(version,) * len(token_ids),
        text=text,
        finish_reason=finish_reason,
        num_aborts=num_aborts,
        top_logprobs=((),) * len(token_ids),
    )


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def assistant(content: Any, **rest: Any) -> Message:
    return {"role": "assistant", "content": content, **rest}


def tool(content: str, call_id: str = "call_0") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def call(name: str, arguments: Any, call_id: str = "call_0") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


class Policy:
    """Serves requests on a turn tree as the endpoint does; each sampled id is used once in its life."""

    def __init__(self, tree: TurnTree) -> None:
        self.tree = tree
        self._ids = count(FIRST_SAMPLED_ID)

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(num_tokens))

    def plan(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> tuple[Match, tuple[int, ...]]:
        """The match, and the prompt: known ids, then one per message that follows."""
        match = self.tree.match(messages, tools=tools)
        known = match.turn.token_ids if match.turn is not None else ()
        return match, (*known, *(1 + len(str(m.get("content"))) for m in messages[match.num_messages :]))

    def answer(
        self,
        messages: Sequence[Message],
        reply: Message,
        *,
        tools: list[dict[str, Any]] | None = None,
        num_tokens: int = 2,
        other_forms: Sequence[Message] = (),
        **rest: Any,
    ) -> Turn:
        match, prompt = self.plan(messages, tools)
        is_constrained = rest.pop("is_constrained", False)
        done = completion(prompt, self.ids(num_tokens), text=str(reply.get("content") or ""), **rest)
        return self.tree.commit(
            match, messages, reply, done, tools=tools, is_constrained=is_constrained, other_forms=other_forms
        )
