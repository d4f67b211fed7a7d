"""One turn of the policy: how it is asked for, and what comes of it.

Flows in: a conversation and exact ids. Flows out: sampled tokens with their text. Does not know environments.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from skyrl_async.rollout.sampler import OpenGeneration
from skyrl_async.types import Completion, Message, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn of the policy, asked of a speaker."""

    messages: tuple[Message, ...]
    """The conversation so far."""
    context_token_ids: tuple[int, ...]
    """Exact ids up to and including the last assistant message; empty before the first turn."""
    sampling: SamplingParams
    max_total_tokens: int | None
    """Most tokens of prompt and completion together; None is bounded by the model's context only."""
    session_id: str
    priority: int
    generation: OpenGeneration | None = None
    """Where a checkpoint reads the turn's tokens so far, with those that it begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn."""

    completion: Completion
    stop_string: str
    """The stop string that ended it (environments look for it, the completion's text lacks it), or empty."""
    text_ends: tuple[int, ...]
    """(T,) UTF-8 bytes of text up to and including each token."""

    @property
    def text(self) -> str:
        """What the policy said, its stop string included."""
        return self.completion.text + self.stop_string

    def num_tokens_covering(self, text: str) -> int | None:
        """Fewest leading tokens that spell ``text``, or None when the turn does not begin with it."""
        if not text or not self.text.startswith(text):
            return None
        position = bisect_left(self.text_ends, len(text.encode()))
        return position + 1 if position < len(self.text_ends) else None


class Speaker(Protocol):
    """Samples the policy's next turn."""

    async def speak(self, request: TurnRequest) -> Turn:
        """The turn's prompt begins with ``request.context_token_ids``. Raises ``PromptTooLongError`` without room."""
        ...
