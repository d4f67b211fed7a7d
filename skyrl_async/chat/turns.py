"""Splits the tokens of a training row into turns with roles and texts as the policy saw them: template, tool calls, observations.

A turn begins where sampled and other tokens meet, and at each special token that names a role, as ``<|im_start|>user`` or ``<|user|>`` do.
What a template puts in front of a sampled answer belongs to the answer's turn. With a template that names no roles the roles are
``prompt``, ``assistant`` and ``environment``.

The row's messages say which calls a turn makes, and which it answers. Between two answers, turns and messages are paired in order by their
roles. Where a template gathers the observations of several calls in one turn, that turn is split; rendering two shows whether it does.
"""

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, takewhile

import numpy as np

from skyrl_async.chat.renderer import ChatRenderer
from skyrl_async.columns import TokenIds, VersionSpans
from skyrl_async.types import ENVIRONMENT_VERSION, Message, RowMessage, ToolCall, Trajectory

_ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "model": "assistant", "observation": "tool", "ipython": "tool"},
}
_NAME = f"({'|'.join(_ROLES)})"
_INSIDE = re.compile(rf"[<|\uFF5C]+(?:im_)?{_NAME}[|\uFF5C>]+", re.IGNORECASE)
_BEHIND = re.compile(rf"{_NAME}\b", re.IGNORECASE)
_NAMELESS = ("prompt", "environment")
_NUM_BEHIND = 12
"""A role's name behind a special token has at most so many tokens."""


@dataclass(frozen=True, slots=True)
class RowTurn:
    """Consecutive tokens of one role."""

    role: str
    text: str
    """With special tokens, and U+FFFD for bytes that are no characters."""
    start: int
    """First token, counted from the beginning of the prompt."""
    end: int
    """After the last token."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of tools that the turn makes."""
    tool_call_id: str | None = None
    """The call that an observation answers, where it is known."""
    name: str | None = None
    """The tool whose observation it is."""
    engines: tuple[str, ...] = ()
    """Engines that sampled it, in order of their first call."""
    engine_seconds: float | None = None
    """Seconds of its engine calls."""
    asked_at: float | None = None
    """When it was asked for, Unix time."""


class TurnSplitter:
    """Splits rows whose tokens ``renderer`` has rendered."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._special = np.array(sorted(renderer.special_ids), np.int32)

    def turns(self, row: Trajectory) -> list[RowTurn]:
        """The turns of a row; together they tile its tokens. A thread may call this."""
        token_ids = np.concatenate([row.prompt_token_ids, row.response_token_ids])
        turns = self._turns(token_ids, row)
        return self._with_messages(turns, row.messages, token_ids) if row.messages else turns

    def _turns(self, token_ids: TokenIds, row: Trajectory) -> list[RowTurn]:
        places = [*self._begins(token_ids, row), (len(token_ids), "")]
        return [
            RowTurn(role, self._renderer.decode(token_ids[start:end]), start, end)
            for (start, role), (end, _) in pairwise(places)
            if start < end
        ]

    def _with_messages(self, turns: Sequence[RowTurn], messages: Sequence[RowMessage], ids: TokenIds) -> list[RowTurn]:
        """The turns with what the messages say of them."""
        replies = deque(message for message in messages if message.is_reply)
        others = deque(message for message in messages if not message.is_reply)
        found: list[RowTurn] = []
        for turn in turns:
            reply = None
            while replies and replies[0].start < turn.end:
                reply = replies.popleft()
            if reply is None:
                found += self._paired(turn, others, ids)
                continue
            found.append(_with_message(turn, reply) if turn.role == "assistant" else turn)
            while others and others[0].start < reply.start:  # they were rendered otherwise than as turns of their own
                others.popleft()
        return found

    def _paired(self, turn: RowTurn, others: "deque[RowMessage]", ids: TokenIds) -> list[RowTurn]:
        """The turn, split where it has several observations, with the messages that it holds, which are taken from ``others``."""
        waiting = list(takewhile(lambda message: message.start <= turn.start, others))
        has_observations = any(message.role == "tool" for message in waiting)
        role, opening = self._observation_form if has_observations else ("tool", "")
        if turn.role in _NAMELESS:  # all of them are in it
            first, held = 0, waiting if all(map(_is_observation, waiting)) else []
        else:
            roles = [role if message.role == "tool" else message.role for message in waiting]
            first = roles.index(turn.role) if turn.role in roles else len(waiting)
            held = waiting[first : first + 1]
            if opening and held and held[0].role == "tool":
                held = list(takewhile(lambda message: message.role == "tool", waiting[first:]))
        if not held:
            return [turn]
        for _ in range(first + len(held)):
            others.popleft()
        pieces = self._split(turn, len(held), ids)
        if len(pieces) < len(held):
            return [replace(turn, role="tool")]
        return [_with_message(piece, message) for piece, message in zip(pieces, held, strict=True)]

    def _split(self, turn: RowTurn, num: int, token_ids: TokenIds) -> list[RowTurn]:
        """A turn of ``num`` observations as one turn each; the turn itself where its text does not say where they begin."""
        _, opening = self._observation_form
        texts = turn.text.split(opening) if num > 1 and opening else []
        if len(texts) != num + 1:
            return [turn]
        own = token_ids[turn.start : turn.end]
        ends = accumulate((len(text) + len(opening) for text in texts[1:-1]), initial=len(texts[0]))
        num_before = [
            bisect_left(range(len(own)), end, key=lambda num: len(self._renderer.decode(own[:num])))
            for end in list(ends)[1:]
        ]
        places = [turn.start, *(turn.start + num for num in num_before), turn.end]
        return [RowTurn(turn.role, self._renderer.decode(token_ids[a:b]), a, b) for a, b in pairwise(places)]

    @cached_property
    def _observation_form(self) -> tuple[str, str]:
        """(role under which the template writes an observation, text that opens each of several in one turn).

        The text is empty for a template that writes each observation as a turn of its own.
        """
        token_ids = self._rendered_observations(2)
        if token_ids is None:  # some templates refuse two calls at a time
            token_ids = self._rendered_observations(1)
        if token_ids is None:
            return "tool", ""
        nothing = Trajectory(
            prompt_token_ids=token_ids,
            response_token_ids=(),
            loss_mask=(),
            logprobs=(),
            versions=VersionSpans(),
            reward=0.0,
        )
        turn = next((turn for turn in self._turns(token_ids, nothing) if "see 11" in turn.text), None)
        if turn is None:
            return "tool", ""
        before, _, rest = turn.text.partition("see 11")
        between, second, _ = rest.partition("see 22")
        return turn.role, _common_end(before, between) if second else ""

    def _rendered_observations(self, num: int) -> TokenIds | None:
        """A conversation with ``num`` calls and their observations; None if the template refuses it."""
        names = [{"id": f"call_{i}", "name": "f", "content": f"see {i}{i}"} for i in range(1, num + 1)]
        function = {"name": "f", "arguments": "{}"}
        calls = [{"id": one["id"], "type": "function", "function": function} for one in names]
        said: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        said += [{"role": "tool", "tool_call_id": one.pop("id"), **one} for one in names]
        try:
            return self._renderer.render(said, add_generation_prompt=False)
        except Exception:  # a template is somebody else's program
            return None

    def _begins(self, token_ids: TokenIds, row: Trajectory) -> list[tuple[int, str]]:
        """(first token, role) of each turn."""
        begins: list[tuple[int, str]] = []
        answered = 0
        for is_sampled, start, end in _segments(row):
            if is_sampled:
                if not begins or begins[-1][1] != "assistant" or begins[-1][0] < answered:
                    begins.append((start, "assistant"))
                answered = end
                continue
            named = self._named_roles(token_ids, start, end)
            if not named:
                begins.append((start, _NAMELESS[1] if begins else _NAMELESS[0]))
            elif not begins:
                named[0] = (start, named[0][1])
            begins += named
        return begins

    def _named_roles(self, token_ids: TokenIds, start: int, end: int) -> list[tuple[int, str]]:
        """(place, role) of each special token that names a role."""
        places = start + np.flatnonzero(np.isin(token_ids[start:end], self._special))
        found = ((place, self._role_at(token_ids[place : place + 1 + _NUM_BEHIND])) for place in places.tolist())
        return [(place, role) for place, role in found if role is not None]

    def _role_at(self, token_ids: TokenIds) -> str | None:
        """The role that a special token names, with the tokens behind it."""
        special, behind = self._renderer.decode(token_ids[:1]), self._renderer.decode(token_ids[1:])
        named = _INSIDE.fullmatch(special) or _BEHIND.match(behind)
        return _ROLES[named.group(1).lower()] if named else None


def _with_message(turn: RowTurn, message: RowMessage) -> RowTurn:
    return replace(
        turn,
        role="tool" if _is_observation(message) else turn.role,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        engines=message.engines,
        engine_seconds=message.engine_seconds,
        asked_at=message.asked_at,
    )


def _is_observation(message: RowMessage) -> bool:
    return message.role == "tool" or message.name is not None


def _common_end(one: str, other: str) -> str:
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
    return "".join(char for char, _ in shared)[::-1]


def _segments(row: Trajectory) -> list[tuple[bool, int, int]]:
    """(whether the policy sampled them, first, after the last) of the consecutive tokens of one origin, prompt first."""
    num_prompt = len(row.prompt_token_ids)
    spans = [(ENVIRONMENT_VERSION, num_prompt), *((version, num_prompt + end) for version, end in row.versions.spans)]
    segments: list[tuple[bool, int, int]] = []
    for version, end in spans:
        is_sampled, start = version != ENVIRONMENT_VERSION, segments[-1][2] if segments else 0
        if segments and segments[-1][0] == is_sampled:
            start = segments.pop()[1]
        segments.append((is_sampled, start, end))
    return segments
