"""Where one episode stands: all that has to be kept of it for another process to play it to its end.

Flows in: what happened in the episode. Flows out: the training row so far, and everything as JSON. Does not know how turns are
sampled, nor environments: of one that can be restored it holds a snapshot.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Self

from skyrl_async.errors import GenerationError
from skyrl_async.generators.gym.environment import StepOutcome
from skyrl_async.generators.gym.turn import TrajectoryBuilder, Turn
from skyrl_async.rollout.sample_state import SampleState, fields_of
from skyrl_async.rollout.sampler import OpenGeneration
from skyrl_async.types import Completion, EngineOutput, FinishReason, Message

_KIND = "episode"
"""Marks the states that are of this module, among those of other generators."""


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
    """Its snapshot after those turns, as JSON text; None where it takes none."""
    generation: OpenGeneration = field(default_factory=OpenGeneration)
    """Of the turn being sampled."""
    turn: Turn | None = None
    """Sampled, and not answered yet."""

    def open(self, messages: list[Message], snapshot: str | None) -> None:
        """The environment has said what the policy hears first."""
        self.messages, self.environment = messages, snapshot

    def check_opening(self, messages: list[Message]) -> None:
        """Raise ``GenerationError`` where the environment opens the conversation otherwise than it was opened."""
        if messages != self.messages:
            raise GenerationError(
                "the environment opens the conversation otherwise than in the checkpoint, and has no restore()"
            )

    def add_turn(self, turn: Turn, num_kept: int | None, action: str, outcome: StepOutcome) -> None:
        """The environment has answered a turn, remembered as ``action``, of which so many tokens are kept (None: all)."""
        self.builder.add_turn(turn.completion, num_kept)
        said = {"role": "assistant", "content": action}
        self.messages = [*(self.messages or ()), said, *outcome.observations]
        self.reward += outcome.reward
        self.num_steps += 1
        self.environment = outcome.snapshot
        self.turn, self.generation = None, OpenGeneration()

    def num_tokens_lost(self, completion: Completion) -> int:
        """How many tokens the turn was to begin with and does not, because who sampled it could not continue it."""
        begin = self.generation.begin.token_ids
        has_begun = completion.token_ids[: len(begin)] == begin[: len(completion.token_ids)]
        return 0 if has_begun else len(begin)

    @property
    def num_delivered_tokens(self) -> int:
        """Sampled in turns that have ended."""
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
        open_turn = saved["generation"]
        return cls(
            messages=saved["messages"],
            num_steps=saved["num_steps"],
            reward=saved["reward"],
            builder=TrajectoryBuilder.from_json(saved["tokens"]),
            environment=saved["environment"],
            generation=OpenGeneration(EngineOutput(**_columns(open_turn))) if open_turn else OpenGeneration(),
            turn=_turn(saved["turn"]),
        )


def _turn(saved: dict[str, Any] | None) -> Turn | None:
    if saved is None:
        return None
    columns = _columns(saved["completion"])
    completion = Completion(**columns)
    return Turn(completion=completion, stop_string=saved["stop_string"], text_ends=tuple(saved["text_ends"]))


def _columns(saved: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples and no enums."""
    columns = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    top = tuple(tuple((token, logprob) for token, logprob in position) for position in saved["top_logprobs"])
    reason = None if saved["finish_reason"] is None else FinishReason(saved["finish_reason"])
    return {**columns, "top_logprobs": top, "finish_reason": reason}
