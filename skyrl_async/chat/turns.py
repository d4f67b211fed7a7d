"""Splits the tokens of a training row into turns with roles and texts as the policy saw them: template, tool calls, observations.

A turn begins where sampled and other tokens meet, and at each special token that names a role, as ``<|im_start|>user`` or ``<|user|>`` do.
What a template puts in front of a sampled answer belongs to the answer's turn. With a template that names no roles the roles are
``prompt``, ``assistant`` and ``environment``.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skyrl_async.chat.renderer import ChatRenderer
from skyrl_async.columns import TokenIds
from skyrl_async.types import ENVIRONMENT_VERSION, Trajectory

_ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "model": "assistant", "observation": "tool", "ipython": "tool"},
}
_NAME = f"({'|'.join(_ROLES)})"
_INSIDE = re.compile(rf"[<|\uFF5C]+(?:im_)?{_NAME}[|\uFF5C>]+", re.IGNORECASE)
_BEHIND = re.compile(rf"{_NAME}\b", re.IGNORECASE)
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


class TurnSplitter:
    """Splits rows whose tokens ``renderer`` has rendered."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._special = np.array(sorted(renderer.special_ids), np.int32)

    def turns(self, row: Trajectory) -> list[RowTurn]:
        """The turns of a row; together they tile its tokens. A thread may call this."""
        token_ids = np.concatenate([row.prompt_token_ids, row.response_token_ids])
        begins = self._begins(token_ids, row)
        places = [*begins, (len(token_ids), "")]
        return [
            RowTurn(role, self._renderer.decode(token_ids[start:end]), start, end)
            for (start, role), (end, _) in pairwise(places)
            if start < end
        ]

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
                begins.append((start, "environment" if begins else "prompt"))
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
