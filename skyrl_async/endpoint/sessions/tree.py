"""The turns of one session as a tree, found again by what a harness sends back.

    tools ── system ── user ══ turn 0 ── tool ══ turn 1        ── a message that was not sampled
                        │         └───── tool ══ turn 2        ══ a sampled turn: exact ids, log-probs, versions
                        └══ turn 3 (the same request again)

Each conversation is a path of message keys from its tools, so a request is matched in one walk. Turns keep exactly the tokens they were
sampled as. Does not know templates, parsers, HTTP, rewards or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_async.chat.messages import row_messages
from skyrl_async.columns import TokenIds, begins_with, token_ids
from skyrl_async.endpoint.sessions.message_key import MessageKey, call_ids, message_key, reasoning_of, tools_key
from skyrl_async.endpoint.sessions.side_requests import SideRequests, SystemKey, system_key
from skyrl_async.errors import StateError
from skyrl_async.types import Completion, Message, RowMessage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One sampled reply. It holds what it adds to its parent, so that a long conversation is stored once."""

    index: int
    """Position in the order of commits."""
    parent: "Turn | None" = field(repr=False)
    """The sampled turn whose ids begin the prompt; None for the first of a conversation."""
    addition: Completion = field(repr=False)
    """The completion with its prompt cut to what follows the parent's ids, and without ``top_logprobs``."""
    message: Message = field(repr=False)
    """The reply as it went out."""
    before: tuple[RowMessage, ...] = field(repr=False)
    """The messages between the parent's reply and this one."""
    num_messages: int
    """Messages of the conversation through this reply."""
    is_constrained: bool
    """It was sampled under a grammar."""

    @property
    def token_ids(self) -> TokenIds:
        """(T,) int32: prompt and completion, which begin the prompt of every turn that continues this one."""
        added = [turn.addition for turn in self.path()]
        return token_ids(np.concatenate([ids for one in added for ids in (one.prompt_token_ids, one.token_ids)]))

    def path(self) -> "list[Turn]":
        """The turns from the conversation's first to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How far a request's messages are known in exact ids."""

    turn: Turn | None
    num_messages: int
    """``messages[:num_messages]`` are covered by ``turn.token_ids``; 0 without a turn."""
    keys: tuple[MessageKey, ...] = field(default=(), repr=False)
    """Keys of the matched messages; ``commit`` makes them if empty."""


@dataclass(slots=True)
class _Node:
    """A conversation: the messages on the path to this node."""

    children: "dict[MessageKey, _Node]" = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    """The turns that end this conversation; several if equal replies were sampled for equal requests."""

    def child(self, key: MessageKey) -> "_Node":
        return self.children.setdefault(key, _Node())


class TurnTree:
    """All turns of a session. Not thread-safe."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._turns: list[Turn] = []
        self.num_turn_tokens: list[int] = []
        """Sampled tokens of each turn, also after ``close``."""
        self.num_sampled_tokens = 0
        """Over all turns, also after ``close``."""
        self.is_closed = False
        self._side_requests = SideRequests()
        self._replies: dict[MessageKey, list[int]] = {}
        """Key of a reply -> turns that sampled it, in order."""
        self._newest: dict[SystemKey, tuple[Turn, tuple[Message, ...]]] = {}
        """The newest turn under each system prompt with its conversation, the newest last."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """In the order of commits; parents come before their children."""
        return tuple(self._turns)

    @property
    def side_requests(self) -> tuple[Turn, ...]:
        """The turns that are no part of the session's task; ``side_requests`` defines them."""
        found = self._side_requests.found()
        return tuple(turn for turn in self._turns if turn.index in found)

    @property
    def newest(self) -> tuple[Turn | None, tuple[Message, ...]]:
        """The newest turn that is no side request, and its conversation: its request's messages and its reply. (None, ()) without one."""
        side_requests = self._side_requests.found()
        newest_first = list(self._newest.values())[::-1]
        return next((one for one in newest_first if one[0].index not in side_requests), (None, ()))

    @property
    def newest_turns(self) -> list[int | None]:
        """For each message of the newest turn's conversation, the index of the turn that sampled it; None for one of the harness's.

        A history that the harness has rewritten holds replies that are on no path to the newest turn: they are known by their content.
        """
        newest, messages = self.newest
        if newest is None:
            return []
        on_path = {turn.num_messages - 1: turn.index for turn in newest.path()}
        known, sampled = set(on_path.values()), list[int | None]()
        after = newest.index + 1
        for place, message in reversed([*enumerate(messages)]):
            index = on_path.get(place)
            if index is None and message.get("role") == "assistant":
                possible = self._replies.get(message_key(message), ())
                index = max((one for one in possible if one < after and one not in known), default=None)
            sampled.append(index)
            after = after if index is None else index
        return sampled[::-1]

    def match(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None = None) -> Match:
        """The deepest sampled turn whose whole conversation equals a prefix of ``messages``, asked with the same ``tools``.

        Reasoning that a client sends back must be the sampled one. Of turns with equal replies to equal requests, tool-call ids decide,
        else the newest turn is taken.
        """
        keys = tuple(message_key(message) for message in messages)
        node = self._roots.get(tools_key(tools))
        mismatches: dict[Turn, int] = {}
        """Possible turn -> number of tool-call ids that differ on its path."""
        found: Turn | None = None
        for key, message in zip(keys, messages, strict=True):
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            possible = _possible(node.turns, message, mismatches)
            mismatches |= possible
            if possible:
                found = min(possible, key=lambda turn: (possible[turn], -turn.index))
        return Match(turn=found, num_messages=0 if found is None else found.num_messages, keys=keys)

    def commit(
        self,
        match: Match,
        messages: Sequence[Message],
        reply: Message,
        completion: Completion,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        is_constrained: bool = False,
        other_forms: Sequence[Message] = (),
    ) -> Turn:
        """Add a turn.

        Args:
            match: the result of ``match`` for ``messages``; one without a turn if the prompt does not begin with its ids.
            messages: the request's.
            reply: as it went out.
            completion: with its whole prompt.
            tools: the request's.
            is_constrained: whether it was sampled under a grammar.
            other_forms: further forms in which clients send the reply back, such as with its stop string.

        Raises ``StateError`` when the prompt does not begin with the matched turn's ids, when the completion has not one log-prob and
        version per token, or when the tree is closed. The tree is then as it was.
        """
        if self.is_closed:
            raise StateError("a closed turn tree accepts no turn; its session is finished or deleted")
        num_known = self._check_extends(match.turn, completion)
        keys = match.keys if len(match.keys) == len(messages) else tuple(message_key(m) for m in messages)
        turn = Turn(
            index=len(self._turns),
            parent=match.turn,
            addition=replace(
                completion, prompt_token_ids=completion.prompt_token_ids[num_known:].copy(), top_logprobs=()
            ),
            message=reply,
            before=tuple(_added_messages(messages, match.num_messages)),
            num_messages=len(messages) + 1,
            is_constrained=is_constrained,
        )
        reply_keys = frozenset(message_key(form) for form in (reply, *other_forms))
        node = self._roots.setdefault(tools_key(tools), _Node())
        for key in keys:
            node = node.child(key)
        for key in reply_keys:
            node.child(key).turns.append(turn)
            self._replies.setdefault(key, []).append(turn.index)
        self._turns.append(turn)
        self.num_turn_tokens.append(len(completion.token_ids))
        self.num_sampled_tokens += len(completion.token_ids)
        self._side_requests.add(
            None if turn.parent is None else turn.parent.index,
            messages,
            keys,
            match.num_messages,
            reply,
            reply_keys,
            has_tools=bool(tools),
            num_tokens=len(completion.token_ids),
        )
        system = system_key(messages, keys)
        self._newest.pop(system, None)
        self._newest[system] = (turn, (*messages, reply))
        return turn

    def close(self) -> None:
        """Drop all turns and accept no more; the counts remain."""
        self.is_closed = True
        self._roots, self._turns, self._replies, self._newest, self._side_requests = {}, [], {}, {}, SideRequests()

    @property
    def num_turns(self) -> int:
        return len(self.num_turn_tokens)

    def _check_extends(self, parent: Turn | None, completion: Completion) -> int:
        """The number of the prompt's ids that are the parent's."""
        _check_lengths(completion)
        if parent is None:
            return 0
        known = parent.token_ids
        if not begins_with(completion.prompt_token_ids, known):
            raise StateError(
                f"the prompt of a turn after turn {parent.index} must begin with its {len(known)} ids, but does not; commit it "
                "without a parent when it was rendered anew"
            )
        return len(known)


def _added_messages(messages: Sequence[Message], num_known: int) -> list[RowMessage]:
    """What follows the known messages, the last of which may have made calls that are answered here."""
    num_before = min(num_known, 1)
    return row_messages(messages[num_known - num_before :])[num_before:]


def _possible(turns: Sequence[Turn], message: Message, mismatches: dict[Turn, int]) -> dict[Turn, int]:
    """The turns among ``turns``, whose reply is ``message``, that it may repeat -> tool-call ids that differ on their paths."""
    if not turns:
        return {}
    reasoning, ids = reasoning_of(message), call_ids(message)
    possible = {}
    for turn in turns:
        is_possible = turn.parent is None or turn.parent in mismatches
        if is_possible and (not reasoning or reasoning == reasoning_of(turn.message)):
            pairs = zip(ids, call_ids(turn.message), strict=False)
            differ = sum(bool(received and sent and received != sent) for received, sent in pairs)
            possible[turn] = differ + (mismatches[turn.parent] if turn.parent is not None else 0)
    return possible


def _check_lengths(completion: Completion) -> None:
    num_tokens = len(completion.token_ids)
    for name in ("logprobs", "versions"):
        found = len(getattr(completion, name))
        if found != num_tokens:
            raise StateError(f"a completion of {num_tokens} tokens must have as many {name}, got {found}")
