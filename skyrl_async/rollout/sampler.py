"""The part of inference that generators and the endpoint use: completions by token ids, exact across weight updates.

Token usage is recorded across tasks: a group's tokens are known when the group is dropped.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from skyrl_async.columns import TokenIds
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.types import Completion, CompletionDelta, EngineOutput, SamplingParams

NOTHING_SAMPLED = EngineOutput(finish_reason=None)


class OpenGeneration:
    """One generation in flight, readable by a checkpoint.

    Args:
        begin: tokens sampled before the run was resumed.
    """

    def __init__(self, begin: EngineOutput = NOTHING_SAMPLED) -> None:
        self.begin = begin
        self.partial_output: Callable[[], EngineOutput] = lambda: begin
        """Returns the tokens known to be sampled; a sampler sets it. A finish reason means that the engine has ended the generation and its
        sampler is about to return."""


class Sampler(Protocol):
    """The part of ``InferenceEngineClient`` that samples."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
        generation: OpenGeneration | None = None,
    ) -> Completion:
        """Sample one completion; ``max_tokens`` is cut to what the context has left.

        ``generation`` lets a checkpoint read the tokens sampled so far. It may hold earlier tokens of the same generation: they begin
        the completion and count against ``max_tokens``; with a finish reason they are the whole completion. Sampling that is not
        ``is_resumable`` ignores them.

        ``session_id`` names the conversation, for samplers that route by it. Raises ``PromptTooLongError`` if no room is left
        for one token, ``NoEngineError`` if no engine is left, ``RequestRefusedError`` if engines cannot do it.

        Sampling that is not ``is_resumable`` is never split: it stays in its engine while the weights change. If the engine dies,
        the generation restarts in another one.
        """

    def stream_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Like ``generate_tokens``, in blocks as they are sampled.

        Sampling that is not ``is_resumable`` gives a single block at the end, because a restart could not take blocks back.
        """


class GenerationClient(Protocol):
    """The part of ``InferenceEngineClient`` that the generation workers use."""

    @property
    def num_abandoned_tokens(self) -> int:
        """Tokens of generations that were cancelled, so far."""

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of rollouts, which stand still in outages."""

    async def collect_open_tokens(self) -> None:
        """Update open generations with all of their tokens."""


@dataclass(slots=True)
class TokenUsage:
    """Tokens sampled for one purpose, such as a group."""

    num_tokens: int = 0
    """Tokens of completed generations."""
    num_cut_off_tokens: int = 0
    """Tokens of cancelled generations that may still be continued."""


_usage: ContextVar[TokenUsage] = ContextVar("token_usage", default=TokenUsage())  # noqa: B039 - nobody reads the default


@contextmanager
def recording_tokens_to(usage: TokenUsage) -> Iterator[None]:
    """Record tokens sampled inside, and in tasks started inside, in ``usage``."""
    token = _usage.set(usage)
    try:
        yield
    finally:
        _usage.reset(token)


def record_tokens(num_tokens: int) -> None:
    """Record a completed generation."""
    _usage.get().num_tokens += num_tokens


def record_cut_off(num_tokens: int) -> None:
    """Record a cancelled generation."""
    _usage.get().num_cut_off_tokens += num_tokens


def record_wasted() -> None:
    """Record that no cancelled generation will be continued."""
    _usage.get().num_cut_off_tokens = 0
