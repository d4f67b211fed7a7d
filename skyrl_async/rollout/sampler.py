"""What a generator or the endpoint needs of inference: completions by token ids, exact across weight updates."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from skyrl_async.runtime.outages import Deadlines
from skyrl_async.types import Completion, CompletionDelta, EngineOutput, SamplingParams

NOTHING_SAMPLED = EngineOutput(token_ids=(), logprobs=(), versions=(), finish_reason=None)


class OpenGeneration:
    """One generation in flight, as a checkpoint sees it.

    Args:
        begin: what was sampled of it in the run that is resumed.
    """

    def __init__(self, begin: EngineOutput = NOTHING_SAMPLED) -> None:
        self.begin = begin
        self._read: Callable[[], EngineOutput] = lambda: begin

    def follow(self, read: Callable[[], EngineOutput]) -> None:
        """From now on ``read`` returns what is sampled so far."""
        self._read = read

    def partial_output(self) -> EngineOutput:
        """What is known to be sampled; with a finish reason where an engine has ended it, and its sampler is about to return."""
        return self._read()


class Sampler(Protocol):
    """The part of ``InferenceEngineClient`` that samples."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        ...

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
        generation: OpenGeneration | None = None,
    ) -> Completion:
        """Sample one completion; ``max_tokens`` is cut to what the context has left.

        ``generation`` lets a checkpoint read what is sampled so far. It may hold tokens of the same generation that were sampled
        before: they are the first of the completion and of ``max_tokens``, or all of it where they have a finish reason, unless
        ``sampling`` is not ``is_resumable``.

        Requests with the same ``session_id`` go to the same engine while it lives. Raises ``PromptTooLongError`` when no
        room is left for one token, ``NoEngineError`` when no engine is left, ``RequestRefusedError`` when engines cannot do it.

        Sampling that is not ``is_resumable`` is never split: the weights change under it, but it stays in its engine; when
        that dies it begins anew in another, and what was sampled is thrown away.
        """
        ...

    def stream_tokens(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[CompletionDelta]:
        """Like ``generate_tokens``, in blocks as they are sampled; as a single one at the end where ``sampling`` is not
        ``is_resumable``, because what has been passed on could not be taken back.
        """
        ...


class GenerationClient(Protocol):
    """What generation workers ask of the client that generators sample through."""

    @property
    def num_abandoned_tokens(self) -> int:
        """Tokens sampled so far for generations that were cut off."""
        ...

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of rollouts, which stand still while there is nothing to sample from."""
        ...

    async def collect_open_tokens(self) -> None:
        """Have open generations know all of their tokens."""
        ...


_open: ContextVar["TokenUsage | None"] = ContextVar("token_account", default=None)


@dataclass(slots=True)
class TokenUsage:
    """What was sampled for one purpose."""

    num_tokens: int = 0
    """Of completed generations."""
    num_cut_off_tokens: int = 0
    """Of generations that were cut off, and that may still be gone on with."""


@contextmanager
def recording_tokens_to(account: TokenUsage) -> Iterator[None]:
    """Charge what is delivered inside, and in tasks begun inside, to ``account``."""
    token = _open.set(account)
    try:
        yield
    finally:
        _open.reset(token)


def record_tokens(num_tokens: int) -> None:
    """A generation of ``num_tokens`` was delivered to whoever runs now."""
    if account := _open.get():
        account.num_tokens += num_tokens


def record_cut_off(num_tokens: int) -> None:
    """A generation was cut off after ``num_tokens``."""
    if account := _open.get():
        account.num_cut_off_tokens += num_tokens


def record_wasted() -> None:
    """Nobody goes on with what was cut off so far."""
    if account := _open.get():
        account.num_cut_off_tokens = 0
