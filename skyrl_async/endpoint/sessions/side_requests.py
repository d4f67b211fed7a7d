"""Which requests of a session were asked beside its task: a title, a topic, the message of a commit.

    system A, tools ══ turn 0 ── tool ══ turn 1 ── tool ══ turn 3       the agent
    system B ══ turn 2                                                  a side request: nothing comes of it here

A side request is answered once, was offered no tools, and has another system prompt than the session's agents; and nothing that was
sampled passes between it and the rest: it quotes no reply, and no other request quotes its own. So it cannot have changed what was
rewarded, and training on it would add noise alone. All else is part of the task: a history that was rewritten or handed to another
agent, a summary that the next request begins with, a subagent that works with tools or whose answer is read.

Agents are the conversations that went on or were offered tools. A session without any has one that may be meant by its length alone:
there, an answer is beside the longest one if that has four times its tokens. A session with raw prompts has no side requests: what these
quote is not seen.

Flows in: turns as they are committed. Flows out: those that are side requests. Does not know tokens, rows or rewards.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.endpoint.sessions.message_key import MessageKey, text_of
from skyrl_async.types import Message

SystemKey = tuple[MessageKey, ...]
"""Of the system messages that a conversation begins with."""

_LENGTH_RATIO = 4
"""How much longer the answer to a question is than a title for it, at the least."""
_MIN_QUOTE_CHARS = 8
"""Shorter lines are found in any text."""
_MAX_QUOTE_LINES = 8
_MAX_REPLIES = 100
_MAX_TEXT_CHARS = 200_000
"""A request's last characters, in which the longest lines of the newest replies are looked for: about 0.1 s at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What later requests may quote."""

    index: int
    system: SystemKey
    keys: frozenset[MessageKey]
    lines: tuple[str, ...]
    """Its longest, without those that its own prompt had."""

    def is_quoted_in(self, keys: frozenset[MessageKey], text: str) -> bool:
        return not self.keys.isdisjoint(keys) or any(line in text for line in self.lines)


def system_key(messages: Sequence[Message], keys: Sequence[MessageKey]) -> SystemKey:
    """Of a request's messages and their keys."""
    roles = [message.get("role") in ("system", "developer") for message in messages]
    return tuple(keys[: [*roles, False].index(False)])


class SideRequests:
    """Follows the turns of one session."""

    def __init__(self) -> None:
        self._num_tokens: list[tuple[int, SystemKey]] = []
        """Of each turn, with its system."""
        self._agents: set[SystemKey] = set()
        self._possible: dict[int, _Reply] = {}
        """Turns that are side requests, unless their system is the agents'."""
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
        """The next turn.

        Args:
            parent: index of the turn that it continues.
            messages, keys: its request's.
            num_known: messages that are its parent's.
            reply, reply_keys: what was sampled, and how that may come back.
            has_tools: whether tools were offered.
            num_tokens: sampled.
        """
        index, system = len(self._num_tokens), system_key(messages, keys)
        new_keys = frozenset(keys[num_known:])
        text = "\n".join(text_of(message.get("content")) for message in messages[num_known:])[-_MAX_TEXT_CHARS:]
        self._num_tokens.append((num_tokens, system))
        for one in [one for one in self._possible.values() if one.system != system]:
            if one.is_quoted_in(new_keys, text):
                del self._possible[one.index]
        added = _Reply(index=index, system=system, keys=reply_keys, lines=_own_lines(reply, text))
        self._has_raw_prompts |= not messages
        if parent is not None:
            self._possible.pop(parent, None)
        if parent is not None or has_tools:
            self._agents.add(system)
        elif not any(one.is_quoted_in(new_keys, text) for one in self._newest if one.system != system):
            self._possible[index] = added
        self._newest.append(added)

    def found(self) -> frozenset[int]:
        """The side requests among the turns so far."""
        if self._has_raw_prompts or not self._num_tokens:
            return frozenset()
        longest, its_system = max(self._num_tokens, key=lambda turn: turn[0])
        agents = self._agents or {its_system}
        beside = [one.index for one in self._possible.values() if one.system not in agents]
        if not self._agents:
            beside = [index for index in beside if _LENGTH_RATIO * self._num_tokens[index][0] <= longest]
        return frozenset(beside)


def _own_lines(reply: Message, prompt: str) -> tuple[str, ...]:
    lines = {line.strip() for line in text_of(reply.get("content")).splitlines()}
    longest = sorted((line for line in lines if len(line) >= _MIN_QUOTE_CHARS), key=len, reverse=True)
    return tuple(line for line in longest[:_MAX_QUOTE_LINES] if line not in prompt)
