"""Episodes: a policy and an environment taking turns, assembled into training rows.

Flows in: group requests, a ``Speaker`` that samples the policy's turns, environments. Flows out: trajectories whose
ids, log-probs and versions are exactly those sampled, with the environment's tokens masked. Does not know how a turn
is sampled (in process or over HTTP), nor tokenizers.
"""

import asyncio
import hashlib
import logging
from bisect import bisect_left
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from skyrl_async.errors import GenerationError, PromptTooLongError
from skyrl_async.progress import report
from skyrl_async.rollout.daemon_threads import DaemonThreads
from skyrl_async.rollout.environment import EnvironmentCalls, EnvironmentFactory
from skyrl_async.rollout.members import play_members
from skyrl_async.types import (
    ENVIRONMENT_VERSION,
    Completion,
    FinishReason,
    GroupRequest,
    Message,
    SamplingParams,
    Trajectory,
)

logger = logging.getLogger(__name__)


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


class TrajectoryBuilder:
    """The tokens of an episode so far. No I/O; ``GenerationError`` when a turn does not continue the one before it."""

    def __init__(self) -> None:
        self.prompt_token_ids: tuple[int, ...] = ()
        self.response_token_ids: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._num_turns = 0
        self._num_aborts = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response: what the next turn's prompt must begin with."""
        return (*self.prompt_token_ids, *self.response_token_ids)

    def add_turn(self, completion: Completion, num_kept: int | None = None) -> None:
        """Append a turn: what its prompt adds as the environment's tokens, then its own (the first ``num_kept``)."""
        _check_lengths(completion)
        if self._num_turns == 0:
            self.prompt_token_ids = completion.prompt_token_ids
        context = self.token_ids
        if completion.prompt_token_ids[: len(context)] != context:
            raise GenerationError(
                f"the prompt of turn {self._num_turns + 1} must begin with the {len(context)} tokens before it, "
                "but does not"
            )
        between = completion.prompt_token_ids[len(context) :]
        self._extend(between, 0, (0.0,) * len(between), (ENVIRONMENT_VERSION,) * len(between))
        kept = slice(0, num_kept)
        self._extend(completion.token_ids[kept], 1, completion.logprobs[kept], completion.versions[kept])
        self._num_turns += 1
        self._num_aborts += completion.num_aborts

    def _extend(self, ids: Sequence[int], mask: int, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.response_token_ids.extend(ids)
        self._loss_mask.extend([mask] * len(ids))
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)

    def build(self, *, reward: float, is_truncated: bool, metrics: dict[str, float]) -> Trajectory:
        return Trajectory(
            prompt_token_ids=self.prompt_token_ids,
            response_token_ids=tuple(self.response_token_ids),
            loss_mask=tuple(self._loss_mask),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            reward=reward,
            num_turns=self._num_turns,
            is_truncated=is_truncated,
            num_aborts=self._num_aborts,
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


class EpisodePlayer:
    """Plays all samples of a prompt at once, each in an environment of its own."""

    def __init__(
        self,
        speaker: Speaker,
        make_environment: EnvironmentFactory,
        *,
        max_turns: int,
        max_trajectory_tokens: int | None,
        max_environment_threads: int,
    ) -> None:
        self._speaker = speaker
        self._make_environment = make_environment
        self._max_turns = max_turns
        self._max_trajectory_tokens = max_trajectory_tokens
        self._executor = DaemonThreads("environment")
        self._places = asyncio.Semaphore(max_environment_threads)
        self._has_warned = False

    async def play_group(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return one trajectory per sample asked for; the first failure is raised as it is, once the others are finished."""
        return await play_members(
            request, "episode", lambda i: self._play(request, i), lambda trajectory: (trajectory,)
        )

    async def _play(self, request: GroupRequest, sample_index: int) -> Trajectory:
        prompt = request.prompt
        environment = self._make_environment(prompt.env_class, self._extras(prompt.extras))
        calls = EnvironmentCalls(environment, self._executor, self._places)
        try:
            return await self._take_turns(request, sample_index, calls)
        except Exception as error:
            error.add_note(f"in environment {prompt.env_class!r}, prompt {prompt.uid!r}, sample {sample_index}")
            raise
        finally:
            calls.close()

    def _extras(self, extras: dict[str, Any]) -> dict[str, Any]:
        """A copy for one environment, which also learns the most turns it will get."""
        max_turns = extras.get("max_turns")
        limit = self._max_turns if max_turns is None else min(int(max_turns), self._max_turns)
        return {**deepcopy(extras), "max_turns": limit}

    async def _take_turns(self, request: GroupRequest, sample_index: int, calls: EnvironmentCalls) -> Trajectory:
        messages = await calls.init(deepcopy(list(request.prompt.messages)))
        builder = TrajectoryBuilder()
        reward = 0.0
        is_truncated = False
        for turn_index in range(self._max_turns):
            turn = await self._speak(request, sample_index, turn_index, messages, builder)
            if turn is None:
                is_truncated = True
                break
            outcome = await calls.step(turn.text)
            action, num_kept = self._remembered(turn, outcome.postprocessed_action)
            builder.add_turn(turn.completion, num_kept)
            reward += outcome.reward
            is_truncated = num_kept is None and turn.completion.finish_reason is FinishReason.LENGTH
            if outcome.is_done:
                break
            messages = [*messages, {"role": "assistant", "content": action}, *outcome.observations]
        return builder.build(reward=reward, is_truncated=is_truncated, metrics=await calls.metrics())

    async def _speak(
        self,
        request: GroupRequest,
        sample_index: int,
        turn_index: int,
        messages: list[Message],
        builder: TrajectoryBuilder,
    ) -> Turn | None:
        """Sample a turn; None when a later turn finds no room."""
        max_tokens, budget = request.sampling.max_tokens, self._max_trajectory_tokens
        if budget is not None:
            max_tokens = min(max_tokens, budget - len(builder.response_token_ids))
        if max_tokens < 1:
            return None
        report("generating", turn=turn_index + 1)
        is_first = turn_index == 0
        turn_request = TurnRequest(
            messages=tuple(messages),
            context_token_ids=builder.token_ids,
            sampling=replace(
                request.sampling,
                max_tokens=max_tokens,
                seed=derive_seed(request.seed, sample_index, turn_index),
            ),
            max_total_tokens=None if is_first or budget is None else len(builder.prompt_token_ids) + budget,
            session_id=f"{request.prompt.uid}/{request.seed}/{sample_index}",
            priority=request.priority,
        )
        try:
            return await self._speaker.speak(turn_request)
        except PromptTooLongError:
            if is_first:
                raise
            return None

    def _remembered(self, turn: Turn, postprocessed: str | None) -> tuple[str, int | None]:
        """The action as the conversation keeps it, and how many of its tokens.

        SkyRL tokenizes a postprocessed action anew and trains on tokens nobody sampled. Here an action shortened at its
        end keeps the fewest sampled tokens that spell it; one rewritten otherwise stays as it was sampled.
        """
        if postprocessed is None or postprocessed == turn.text:
            return turn.text, None
        num_kept = turn.num_tokens_covering(postprocessed)
        if num_kept is not None:
            return postprocessed, num_kept
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an environment rewrote an action (postprocessed_action) other than by shortening it; "
                "the sampled text is kept"
            )
        return turn.text, None


def derive_seed(seed: int, sample_index: int, turn_index: int) -> int:
    """A sampling seed in [0, 2**31) for one turn, distinct for all practical purposes and the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{sample_index}/{turn_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
