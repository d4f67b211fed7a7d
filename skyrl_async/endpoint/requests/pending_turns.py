"""Finished choices of one request, from their last token until a client has them: only then are they turns of its session.

Flows in: replies with the completions they were read from. Flows out: turns of a session's tree. Does not know HTTP, sampling or
parsing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_async.chat import Tool
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.endpoint.sessions.tree import Match
from skyrl_async.types import Completion, Message

_PROMPT_ROLE = "prompt"
"""Stands for a raw prompt in a session's tree, where no chat message can equal it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A finished choice."""

    match: Match
    """What the request's messages continue."""
    messages: tuple[Message, ...]
    """The request's; none for a raw prompt."""
    tools: tuple[Tool, ...] | None
    reply: Message
    """As a client sends it back."""
    stop_string: str | None
    """What ended it and is missing in the reply's text; some clients put it back."""
    completion: Completion
    is_constrained: bool
    """It was sampled under a grammar."""


class PendingTurns:
    """Keeps choices of a request in ``session``; without one, nothing."""

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._sampled: list[SampledTurn] = []

    def add(self, turn: SampledTurn) -> None:
        """Keep a choice until its delivery is known."""
        if self._session is not None:
            self._sampled.append(turn)

    def commit(self) -> None:
        """The client has them: they become part of the session, unless it has ended. Once; later calls do nothing."""
        sampled, self._sampled = self._sampled, []
        if self._session is None or not self._session.is_open:
            return
        for turn in sampled:
            self._session.tree.commit(
                turn.match,
                turn.messages or (_raw_prompt(turn.completion.prompt_token_ids),),
                turn.reply,
                turn.completion,
                tools=turn.tools,
                is_constrained=turn.is_constrained,
                echoes=_echoes(turn),
            )


def _echoes(turn: SampledTurn) -> tuple[Message, ...]:
    if turn.stop_string is None:
        return ()
    return (turn.reply | {"content": turn.reply["content"] + turn.stop_string},)


def _raw_prompt(token_ids: Sequence[int]) -> Message:
    return {"role": _PROMPT_ROLE, "content": " ".join(map(str, token_ids))}
