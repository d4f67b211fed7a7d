"""One turn of the policy: how it is asked for, and what comes of it.

Flows in: a conversation and exact ids. Flows out: sampled tokens with their text. Does not know environments.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

from skyrl_async.errors import GenerationError
from skyrl_async.rollout.sample_state import fields_of
from skyrl_async.rollout.sampler import OpenGeneration
from skyrl_async.types import ENVIRONMENT_VERSION, Completion, Message, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn of the policy, asked of a turn_sampler."""

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


class TurnSampler(Protocol):
    """Samples the policy's next turn."""

    async def sample_turn(self, request: TurnRequest) -> Turn:
        """The turn's prompt begins with ``request.context_token_ids``. Raises ``PromptTooLongError`` without room."""
        ...


@dataclass(slots=True)
class TrajectoryBuilder:
    """The tokens of an episode so far. No I/O; ``GenerationError`` when a turn does not continue the one before it."""

    prompt_token_ids: tuple[int, ...] = ()
    response_token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_turns: int = 0
    num_aborts: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response: what the next turn's prompt must begin with."""
        return (*self.prompt_token_ids, *self.response_token_ids)

    def add_turn(self, completion: Completion, num_kept: int | None = None) -> None:
        """Append a turn: what its prompt adds as the environment's tokens, then its own (the first ``num_kept``)."""
        _check_lengths(completion)
        if self.num_turns == 0:
            self.prompt_token_ids = completion.prompt_token_ids
        context = self.token_ids
        if completion.prompt_token_ids[: len(context)] != context:
            raise GenerationError(
                f"the prompt of turn {self.num_turns + 1} must begin with the {len(context)} tokens before it, "
                "but does not"
            )
        between = completion.prompt_token_ids[len(context) :]
        self._extend(between, 0, (0.0,) * len(between), (ENVIRONMENT_VERSION,) * len(between))
        kept = slice(0, num_kept)
        self._extend(completion.token_ids[kept], 1, completion.logprobs[kept], completion.versions[kept])
        self.num_turns += 1
        self.num_aborts += completion.num_aborts

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled so far."""
        return sum(self.loss_mask)

    def to_json(self) -> dict[str, Any]:
        """A copy of all fields."""
        return {name: list(v) if isinstance(v, list | tuple) else v for name, v in fields_of(self).items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        values = {one.name: saved[one.name] for one in fields(cls)}
        copied = {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**copied | {"prompt_token_ids": tuple(saved["prompt_token_ids"])})

    def _extend(self, ids: Sequence[int], mask: int, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.response_token_ids.extend(ids)
        self.loss_mask.extend([mask] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def build(self, *, reward: float, is_truncated: bool, metrics: dict[str, float]) -> Trajectory:
        return Trajectory(
            prompt_token_ids=self.prompt_token_ids,
            response_token_ids=tuple(self.response_token_ids),
            loss_mask=tuple(self.loss_mask),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            reward=reward,
            num_turns=self.num_turns,
            is_truncated=is_truncated,
            num_aborts=self.num_aborts,
            metrics=metrics,
        )


def _check_lengths(completion: Completion) -> None:
    num_tokens = len(completion.token_ids)
    if not num_tokens:
        raise GenerationError("a completion must hold at least one token, got none")
    for name in ("logprobs", "versions"):
        found = len(getattr(completion, name))
        if found != num_tokens:
            raise GenerationError(f"a completion of {num_tokens} tokens must have as many {name}, got {found}")
