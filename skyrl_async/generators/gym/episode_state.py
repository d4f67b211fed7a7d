"""One episode: its turns, its training row so far, and its state, with which another process can play it to its end.

Flows in: turns and the environment's answers. Flows out: the training row, and the state as JSON. Does not know how turns are sampled,
nor environments: it holds the snapshot of one that can be restored.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter

from skyrl_async.errors import GenerationError
from skyrl_async.generators.gym.environment import StepOutcome
from skyrl_async.rollout.group_state import SampleState, fields_of
from skyrl_async.rollout.sampler import NOTHING_SAMPLED, OpenGeneration
from skyrl_async.types import ENVIRONMENT_VERSION, Completion, EngineOutput, Message, SamplingParams, Trajectory

_KIND = "episode"
"""Marks this module's states among those of other generators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for one turn of the policy."""

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
        """The text of the policy, with its stop string."""
        return self.completion.text + self.stop_string

    def num_tokens_covering(self, text: str) -> int | None:
        """Fewest leading tokens that spell ``text``, or None when the turn does not begin with it."""
        if not text or not self.text.startswith(text):
            return None
        position = bisect_left(self.text_ends, len(text.encode()))
        return position + 1 if position < len(self.text_ends) else None


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
        """Prompt and response: the next turn's prompt must begin with them."""
        return (*self.prompt_token_ids, *self.response_token_ids)

    def add_turn(self, completion: Completion, num_kept: int | None = None) -> None:
        """Append a turn: the prompt's new tokens as the environment's, then its own (the first ``num_kept``)."""
        if not completion.token_ids:
            raise GenerationError("a completion must hold at least one token, got none")
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

    def _extend(self, ids: Sequence[int], mask: int, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.response_token_ids.extend(ids)
        self.loss_mask.extend([mask] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def build(self, *, reward: float, is_truncated: bool, metrics: dict[str, float]) -> Trajectory:
        """The training row; the fields here are fields of it."""
        columns: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields_of(self).items()}
        return Trajectory(**columns, reward=reward, is_truncated=is_truncated, metrics=metrics)


@dataclass(slots=True)
class EpisodeState:
    """One episode between two events; it changes in one step."""

    messages: list[Message] | None = None
    """The conversation; None before the environment has opened it."""
    num_steps: int = 0
    """Turns that the environment has answered."""
    reward: float = 0.0
    builder: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    environment: str | None = None
    """The environment's snapshot after those turns, as JSON text; None if it takes none."""
    generation: OpenGeneration = field(default_factory=OpenGeneration)
    """The turn being sampled, with its tokens so far."""
    turn: Turn | None = None
    """A turn that is sampled, and that the environment has not answered."""

    def add_turn(self, turn: Turn, num_kept: int | None, action: str, outcome: StepOutcome) -> None:
        """Add a turn that the environment has answered; ``action`` is its text as kept, ``num_kept`` its tokens (None: all)."""
        self.builder.add_turn(turn.completion, num_kept)
        said = {"role": "assistant", "content": action}
        self.messages = [*(self.messages or ()), said, *outcome.observations]
        self.reward += outcome.reward
        self.num_steps += 1
        self.environment = outcome.snapshot
        self.turn, self.generation = None, OpenGeneration()

    def num_tokens_lost(self, completion: Completion) -> int:
        """Number of tokens that the turn should begin with and does not, because its sampler could not continue them."""
        begin = self.generation.begin.token_ids
        has_begun = completion.token_ids[: len(begin)] == begin[: len(completion.token_ids)]
        return 0 if has_begun else len(begin)

    @property
    def num_delivered_tokens(self) -> int:
        """Tokens sampled in turns that have ended."""
        return self.builder.num_sampled_tokens + (0 if self.turn is None else len(self.turn.completion.token_ids))

    def sample_state(self) -> SampleState | None:
        """For a checkpoint; None before anything has happened.

        Without a snapshot of the environment, an episode that it has answered has to begin anew.
        """
        if self.messages is None:
            return None
        num_open_tokens = 0 if self.turn is not None else len(self.generation.partial_output().token_ids)
        can_be_restored = self.num_steps == 0 or self.environment is not None
        state = self._to_json() if can_be_restored else None
        return SampleState(state=state, num_tokens=self.num_delivered_tokens + num_open_tokens)

    def _to_json(self) -> dict[str, Any] | None:
        """None where the environment's messages are no JSON."""
        try:
            messages = json.loads(json.dumps(self.messages))
        except (TypeError, ValueError):
            return None
        turn, partial_output = self.turn, self.generation.partial_output()
        return {
            "kind": _KIND,
            "messages": messages,
            "num_steps": self.num_steps,
            "reward": self.reward,
            "tokens": self.builder.to_json(),
            "environment": self.environment,
            "turn": None if turn is None else {**fields_of(turn), "completion": fields_of(turn.completion)},
            "generation": fields_of(partial_output) if turn is None and partial_output.token_ids else None,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """The state of which ``sample_state`` was taken. Raises ``ValueError`` for another generator's."""
        if saved.get("kind") != _KIND:
            raise ValueError(f"expected the state of an episode, got {sorted(saved)}")
        return cls(
            messages=saved["messages"],
            num_steps=saved["num_steps"],
            reward=saved["reward"],
            builder=_loaded(TrajectoryBuilder, saved["tokens"]),
            environment=saved["environment"],
            generation=OpenGeneration(_loaded(EngineOutput, saved["generation"]) or NOTHING_SAMPLED),
            turn=_loaded(Turn, saved["turn"]),
        )


def _loaded(kind: type[Any], fields: dict[str, Any] | None) -> Any:
    """A dataclass from its fields as JSON, which has no tuples and no enums; None for None. Raises ``ValueError``."""
    return None if fields is None else _ADAPTERS[kind].validate_python(fields)


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (EngineOutput, TrajectoryBuilder, Turn)}
