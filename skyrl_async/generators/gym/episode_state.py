"""One episode: its turns, its training row so far, and its state, with which another process can play it to its end.

Flows in: turns and the environment's answers. Flows out: the training row, and the state as JSON with numpy columns as values. Does not
know how turns are sampled, nor environments: it holds the snapshot of one that can be restored.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from skyrl_async.columns import (
    NO_LOGPROBS,
    NO_TOKENS,
    Logprobs,
    Mask,
    Rewards,
    TokenIds,
    VersionSpans,
    at_last,
    begins_with,
    fields_of,
    token_ids,
)
from skyrl_async.errors import GenerationError
from skyrl_async.generators.gym.environment import StepOutcome
from skyrl_async.rollout.group_state import SampleState, from_json
from skyrl_async.rollout.sampler import NOTHING_SAMPLED, OpenGeneration
from skyrl_async.types import (
    ENVIRONMENT_VERSION,
    Completion,
    EngineOutput,
    Message,
    RowMessage,
    SamplingParams,
    ToolCall,
    Trajectory,
    TurnSpan,
)

_KIND = "episode"
"""Marks this module's states among those of other generators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for one turn of the policy."""

    messages: tuple[Message, ...]
    """The conversation so far."""
    context_token_ids: TokenIds
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
    text_ends: TokenIds
    """(T,) int32: UTF-8 bytes of text up to and including each token."""

    @property
    def text(self) -> str:
        """The text of the policy, with its stop string."""
        return self.completion.text + self.stop_string

    def num_tokens_covering(self, text: str) -> int | None:
        """Fewest leading tokens that spell ``text``, or None when the turn does not begin with it."""
        if not text or not self.text.startswith(text):
            return None
        position = int(np.searchsorted(self.text_ends, len(text.encode())))
        return position + 1 if position < len(self.text_ends) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Addition:
    """What one turn adds to the response: the environment's tokens, then sampled ones."""

    num_before: int
    """Tokens of the environment."""
    logprobs: Logprobs
    """(T,) float32, of the sampled tokens."""
    versions: VersionSpans
    """(T,) of the sampled tokens."""
    reward: float
    """What the environment gave for it."""
    token_rewards: Rewards | None = None
    """(T,) float32: the same by sampled token; None: only the whole is known."""


@dataclass(slots=True)
class TrajectoryBuilder:
    """The tokens of an episode so far. No I/O; ``GenerationError`` when a turn does not continue the one before it."""

    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    """Prompt and response: the next turn's prompt must begin with them."""
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    """Tokens that the policy sampled so far."""
    num_aborts: int = 0
    turns: list[_Addition] = field(default_factory=list)
    messages: list[RowMessage] = field(default_factory=list)
    """Replies and what answered them."""

    @property
    def num_response_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def add_turn(
        self,
        completion: Completion,
        num_kept: int | None = None,
        call: ToolCall | None = None,
        observations: Sequence[Message] = (),
        reward: float = 0.0,
        token_rewards: NDArray[np.float64] | None = None,
    ) -> None:
        """Append a turn: the prompt's new tokens as the environment's, then its own (the first ``num_kept``).

        ``call`` is the one that the environment found in it, and answered with ``observations``, which the next turn's prompt holds, and
        with ``reward``, of each kept token with ``token_rewards`` if it says so.
        """
        prompt, sampled = completion.prompt_token_ids, completion.token_ids[:num_kept]
        if not len(completion.token_ids):
            raise GenerationError("a completion must hold at least one token, got none")
        if not self.turns:
            self.token_ids, self.num_prompt_tokens = prompt, len(prompt)
        if not begins_with(prompt, self.token_ids):
            raise GenerationError(
                f"the prompt of turn {len(self.turns)} must begin with the {len(self.token_ids)} tokens before it, but does not"
            )
        if token_rewards is not None and len(token_rewards) != len(sampled):
            raise GenerationError(
                f"the environment's rewards of turn {len(self.turns)} must be one per sampled token that is kept ({len(sampled)}), "
                f"got {len(token_rewards)}"
            )
        added = _Addition(
            num_before=len(prompt) - len(self.token_ids),
            logprobs=completion.logprobs[:num_kept],
            versions=completion.versions[:num_kept],
            reward=reward,
            token_rewards=None if token_rewards is None else token_rewards.astype(np.float32),
        )
        self.turns.append(added)
        self.token_ids = token_ids(np.concatenate([prompt, sampled]))
        self.num_sampled_tokens += len(sampled)
        self.num_aborts += completion.num_aborts
        reply = RowMessage(
            role="assistant",
            start=len(prompt),
            is_reply=True,
            tool_calls=() if call is None else (call,),
            engines=completion.engines,
            engine_seconds=completion.engine_seconds,
            asked_at=completion.asked_at,
        )
        tool = None if call is None else call.name
        roles = [str(message.get("role")) for message in observations]
        self.messages += [reply, *(RowMessage(role=role, start=len(self.token_ids), name=tool) for role in roles)]

    def to_json(self) -> dict[str, Any]:
        """All fields; columns stay columns."""
        turns, messages = [_with_spans(turn) for turn in self.turns], list(map(asdict, self.messages))
        return {**fields_of(self), "turns": turns, "messages": messages}

    def build(self, *, is_truncated: bool, metrics: dict[str, float]) -> Trajectory:
        """The training row."""
        spans: list[TurnSpan] = []
        masks: list[Mask] = [np.zeros(0, np.bool_)]
        logprobs: list[Logprobs] = [NO_LOGPROBS]
        versions: list[VersionSpans] = []
        rewards: list[Rewards] = []
        is_by_token = any(turn.token_rewards is not None for turn in self.turns)
        for turn in self.turns:
            masks += np.zeros(turn.num_before, np.bool_), np.ones(len(turn.versions), np.bool_)
            logprobs += np.zeros(turn.num_before, np.float32), turn.logprobs
            versions += VersionSpans.constant(ENVIRONMENT_VERSION, turn.num_before), turn.versions
            if is_by_token:
                of_turn = at_last(turn.reward, len(turn.versions)) if turn.token_rewards is None else turn.token_rewards
                rewards += np.zeros(turn.num_before, np.float32), of_turn
            # What is before the first turn is the prompt.
            start = spans[-1].end + turn.num_before if spans else 0
            spans.append(TurnSpan(index=len(spans), start=start, end=start + len(turn.versions)))
        return Trajectory(
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            response_token_ids=self.token_ids[self.num_prompt_tokens :],
            loss_mask=np.concatenate(masks),
            logprobs=np.concatenate(logprobs),
            versions=VersionSpans.joined(versions),
            num_turns=len(self.turns),
            num_aborts=self.num_aborts,
            reward=sum((turn.reward for turn in self.turns), 0.0),
            turn_rewards=tuple(turn.reward for turn in self.turns),
            token_rewards=np.concatenate(rewards) if is_by_token else None,
            turn_spans=tuple(spans),
            is_truncated=is_truncated,
            metrics=metrics,
            messages=tuple(self.messages),
        )


@dataclass(slots=True)
class EpisodeState:
    """One episode between two events; it changes in one step."""

    messages: list[Message] | None = None
    """The conversation; None before the environment has opened it. Never changed in place, since checkpoints hold it."""
    is_json: bool = True
    """Whether all messages are JSON."""
    num_steps: int = 0
    """Turns that the environment has answered."""
    builder: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    environment: str | None = None
    """The environment's snapshot after those turns, as JSON text; None if it takes none."""
    generation: OpenGeneration = field(default_factory=OpenGeneration)
    """The turn being sampled, with its tokens so far."""
    turn: Turn | None = None
    """A turn that is sampled, and that the environment has not answered."""

    def open(self, messages: Sequence[Message], snapshot: str | None) -> None:
        """The environment has opened the conversation."""
        self._add_messages(messages)
        self.environment = snapshot

    def add_turn(self, turn: Turn, num_kept: int | None, action: str, outcome: StepOutcome) -> None:
        """Add a turn that the environment has answered; ``action`` is its text as kept, ``num_kept`` its tokens (None: all)."""
        answer = outcome.tool_call, outcome.observations, outcome.reward, outcome.token_rewards
        self.builder.add_turn(turn.completion, num_kept, *answer)
        self._add_messages([{"role": "assistant", "content": action}, *outcome.observations])
        self.num_steps += 1
        self.environment = outcome.snapshot
        self.turn, self.generation = None, OpenGeneration()

    def _add_messages(self, messages: Sequence[Message]) -> None:
        """Add copies, because an environment may change its messages later."""
        try:
            copies = json.loads(json.dumps(messages))
        except (TypeError, ValueError):
            copies, self.is_json = messages, False
        self.messages = [*(self.messages or ()), *copies]

    def num_tokens_lost(self, completion: Completion) -> int:
        """Number of tokens that the turn should begin with and does not, because its sampler could not continue them."""
        begin = self.generation.begin.token_ids
        return 0 if begins_with(completion.token_ids, begin[: len(completion.token_ids)]) else len(begin)

    @property
    def num_delivered_tokens(self) -> int:
        """Tokens sampled in turns that have ended."""
        return self.builder.num_sampled_tokens + (0 if self.turn is None else len(self.turn.completion.token_ids))

    def lost_rows(self) -> tuple[Trajectory, ...]:
        """What was sampled of an episode that has failed, with a turn that the environment has not answered."""
        if self.turn is not None:
            with suppress(GenerationError):  # such as a prompt that does not continue the episode: why it failed
                self.builder.add_turn(self.turn.completion)
        return (self.builder.build(is_truncated=False, metrics={}),) if self.builder.turns else ()

    def sample_state(self) -> SampleState | None:
        """For a checkpoint, at a cost that grows with the turns only; None before anything has happened.

        Without a snapshot of the environment, an episode that it has answered has to begin anew, and so has one whose messages are no JSON.
        """
        if self.messages is None:
            return None
        sampled = NOTHING_SAMPLED if self.turn is not None else self.generation.partial_output()
        can_be_restored = self.is_json and (self.num_steps == 0 or self.environment is not None)
        state = self._to_json(sampled) if can_be_restored else None
        return SampleState(state=state, num_tokens=self.num_delivered_tokens + len(sampled.token_ids))

    def _to_json(self, sampled: EngineOutput) -> dict[str, Any]:
        """``sampled``: the tokens so far of the turn being sampled."""
        turn = self.turn
        return {
            "kind": _KIND,
            "messages": self.messages,
            "num_steps": self.num_steps,
            "tokens": self.builder.to_json(),
            "environment": self.environment,
            "turn": None if turn is None else {**fields_of(turn), "completion": _with_spans(turn.completion)},
            "generation": _with_spans(sampled) if len(sampled.token_ids) else None,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """The state of which ``sample_state`` was taken. Raises ``ValueError`` for another generator's."""
        if saved.get("kind") != _KIND:
            raise ValueError(f"expected the state of an episode, got {sorted(saved)}")
        return cls(
            messages=saved["messages"],
            num_steps=saved["num_steps"],
            builder=from_json(TrajectoryBuilder, saved["tokens"]),
            environment=saved["environment"],
            generation=OpenGeneration(from_json(EngineOutput | None, saved["generation"]) or NOTHING_SAMPLED),
            turn=from_json(Turn | None, saved["turn"]),
        )


def _with_spans(value: EngineOutput | _Addition) -> dict[str, Any]:
    """The fields, with the versions' runs as JSON; columns stay columns."""
    return {**fields_of(value), "versions": fields_of(value.versions)}
