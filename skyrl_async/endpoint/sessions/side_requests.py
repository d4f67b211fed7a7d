"""Finds the requests of a session that are no part of its task: a title, a topic, a commit message.

    system A, tools ══ turn 0 ── tool ══ turn 1 ── tool ══ turn 3       the agent
    system B ══ turn 2                                                  a side request: nothing else uses it

A side request has one turn, no tools, and another system prompt than the session's agents. No sampled text passes between it and the rest:
it quotes no reply, and no other request quotes its reply. So it cannot have changed the reward, unless a program acted on it, and training
on it would only add noise.
Everything else is part of the task: a rewritten history, one handed to another agent, a summary that the next request begins with, a
subagent that works with tools or whose answer is quoted.

Agents are the conversations with several turns or with tools. In a session without agents, the longest answer is the task's, and answers
with at most a quarter of its tokens are side requests. A session with raw prompts has none: their quotes are not seen.

Does not know tokens, rows or rewards.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.endpoint.sessions.message_key import RAW_PROMPT_ROLE, MessageKey, text_of
from skyrl_async.types import Message

SystemKey = tuple[MessageKey, ...]
"""Keys of the system messages that a conversation begins with."""

_LENGTH_RATIO = 4
"""An answer has at least this many times the tokens of a title for it."""
_MIN_QUOTE_CHARS = 8
"""Shorter lines occur in any text."""
_MAX_QUOTE_LINES = 8
_MAX_REPLIES = 100
_MAX_TEXT_CHARS = 200_000
"""The end of a request that is searched for the longest lines of the newest replies: about 0.1 s at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """One reply, which later requests may quote."""

    index: int
    system: SystemKey
    keys: frozenset[MessageKey]
    lines: tuple[str, ...]
    """Its longest lines, without those in its own prompt."""

    def is_quoted_in(self, keys: frozenset[MessageKey], text: str) -> bool:
        return not self.keys.isdisjoint(keys) or any(line in text for line in self.lines)


def system_key(messages: Sequence[Message], keys: Sequence[MessageKey]) -> SystemKey:
    """The system messages' keys, from a request's messages and their keys."""
    roles = [message.get("role") in ("system", "developer") for message in messages]
    return tuple(keys[: [*roles, False].index(False)])


class SideRequests:
    """Follows the turns of one session."""

    def __init__(self) -> None:
        self._num_tokens: list[tuple[int, SystemKey]] = []
        """Sampled tokens of each turn, and its system prompt."""
        self._agents: set[SystemKey] = set()
        self._possible: dict[int, _Reply] = {}
        """Turns that are side requests, unless their system prompt is an agent's."""
        self._newest: deque[_Reply] = deque(maxlen=_MAX_REPLIES)
        self._has_raw_prompts = False

    def add(
        self,
        parent: int | None,
        messages: Sequence[Message],
        keys: Sequence[MessageKey],
        num_known: int,
        reply: Message,
        reply_keys: frozenset[MessageKey],
        *,
        has_tools: bool,
        num_tokens: int,
    ) -> None:
        """Record the next turn.

        Args:
            parent: index of the turn that it continues.
            messages, keys: the request's.
            num_known: leading messages that are the parent's.
            reply, reply_keys: the sampled message, and the keys under which clients send it back.
            has_tools: whether tools were offered.
            num_tokens: sampled tokens.
        """
        index, system = len(self._num_tokens), system_key(messages, keys)
        new_keys = frozenset(keys[num_known:])
        text = "\n".join(text_of(message.get("content")) for message in messages[num_known:])[-_MAX_TEXT_CHARS:]
        self._num_tokens.append((num_tokens, system))
        for one in [one for one in self._possible.values() if one.system != system]:
            if one.is_quoted_in(new_keys, text):
                del self._possible[one.index]
        added = _Reply(index=index, system=system, keys=reply_keys, lines=_own_lines(reply, text))
        self._has_raw_prompts |= any(message.get("role") == RAW_PROMPT_ROLE for message in messages)
        if parent is not None:
            self._possible.pop(parent, None)
        if parent is not None or has_tools:
            self._agents.add(system)
        elif not any(one.is_quoted_in(new_keys, text) for one in self._newest if one.system != system):
            self._possible[index] = added
        self._newest.append(added)

    def found(self) -> frozenset[int]:
        """Indices of the side requests among the turns so far."""
        if self._has_raw_prompts or not self._num_tokens:
            return frozenset()
        longest, its_system = max(self._num_tokens, key=lambda turn: turn[0])
        agents = self._agents or {its_system}
        found = [one.index for one in self._possible.values() if one.system not in agents]
        if not self._agents:
            found = [index for index in found if _LENGTH_RATIO * self._num_tokens[index][0] <= longest]
        return frozenset(found)


def _own_lines(reply: Message, prompt: str) -> tuple[str, ...]:
    lines = {line.strip() for line in text_of(reply.get("content")).splitlines()}
    longest = sorted((line for line in lines if len(line) >= _MIN_QUOTE_CHARS), key=len, reverse=True)
    return tuple(line for line in longest[:_MAX_QUOTE_LINES] if line not in prompt)
