"""Rewards of agents' episodes: from the user's function, or from the prompt's environment.

Does not know harnesses, sessions or tokens.
"""

import asyncio
import inspect
import math
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl_async.errors import GenerationError
from skyrl_async.generators.gym.environment import (
    CallThreads,
    Environment,
    EnvironmentCalls,
    EnvironmentFactory,
    finite_reward,
    max_turns_of,
    turn_reward,
)
from skyrl_async.runtime.tasks import is_being_cancelled
from skyrl_async.types import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode:
    """An agent's work on a prompt, as seen by the endpoint and the working directory."""

    messages: tuple[Message, ...]
    """The conversation of the newest turn with its reply; empty if nothing was sampled."""
    message_turns: tuple[int | None, ...] = ()
    """For each of ``messages``, the turn that sampled it, counted from 0 over the session; None for one of the harness's."""
    last_text: str | None
    """The sampled text of the newest turn (with reasoning and tool calls); None without turns."""
    output: str | None
    """The harness's answer, if it gave one."""
    working_dir: Path
    """The agent's directory; deleted after the reward is known, unless ``generator.working_dir`` keeps it."""
    num_turns: int
    """Turns sampled in all branches."""
    num_turn_tokens: tuple[int, ...] = ()
    """Sampled tokens of each turn, in the order of replies."""
    is_truncated: bool
    """Ended by a cap of the session, the model's context, or a cut answer that the harness could not use."""
    failure: str | None = None
    """The harness's failure, if a truncation caused it: the agent is rewarded for its work until then."""

    @property
    def answer(self) -> str:
        """The harness's output, else the last text, else an empty string."""
        return self.last_text or "" if self.output is None else self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReward:
    """The reward of an episode, with figures."""

    reward: float
    turn_rewards: tuple[float | NDArray[np.float64], ...] = ()
    """What the first turns of the session earned, in the order of its replies, or (T,) each sampled token of a turn; empty if only the
    whole reward is known."""
    metrics: dict[str, float] = field(default_factory=dict)


class RewardSource(Protocol):
    """Rewards episodes. An exception fails the whole group, because it is not the agent's fault."""

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Called before the session is finished."""


Reward = float | Sequence[float | Sequence[float]]
"""One for an episode, or one for each of its first turns, in the order of replies; later turns earn nothing. A turn's may be a list, with a
number per sampled token."""
RewardFunction = Callable[[Prompt, AgentEpisode], Reward | Awaitable[Reward]]
"""A user's reward: async, or a plain function that is called in a thread and may block."""


def earned(found: Any, source: str, episode: AgentEpisode) -> EpisodeReward:
    """A reward, or a list or array of rewards of turns and tokens, as given.

    Raises ``GenerationError`` with its source for what is not finite, for more rewards than the episode has turns, none for its turns, or
    other than one per token of a turn.
    """
    if not isinstance(found, list | tuple) and getattr(found, "ndim", 0) == 0:
        return EpisodeReward(reward=finite_reward(found, source))
    if not len(found) and episode.num_turns:
        raise GenerationError(
            f"{source} must return a number, or a reward for at least one of its turns ({episode.num_turns}), got {found!r}; return 0 for "
            "none"
        )
    if len(found) > episode.num_turns:
        raise GenerationError(
            f"{source} must return at most one reward per turn ({episode.num_turns}), got {len(found)}: {reprlib.repr(found)}"
        )
    values = [turn_reward(value, f"{source}[{turn}]") for turn, value in enumerate(found)]
    for turn, (_, by_token) in enumerate(values):
        _require_one_per_token(by_token, f"{source}[{turn}]", episode, turn)
    return EpisodeReward(
        reward=math.fsum(reward for reward, _ in values),
        turn_rewards=tuple(reward if by_token is None else by_token for reward, by_token in values),
    )


def _require_one_per_token(rewards: NDArray[np.float64] | None, source: str, episode: AgentEpisode, turn: int) -> None:
    """Raise ``GenerationError`` for rewards of tokens, if there are any, that are not as many as the turn's."""
    for num in episode.num_turn_tokens[turn : turn + 1]:
        if rewards is not None and len(rewards) != num:
            raise GenerationError(f"{source} must have one number per sampled token ({num}), got {len(rewards)}")


@dataclass(frozen=True, slots=True)
class FunctionReward:
    """Calls a function; plain functions run in ``threads``."""

    function: RewardFunction
    threads: CallThreads

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Raises ``GenerationError`` if the function raises or returns no finite number, nor one for each of the first turns."""
        try:
            found = await self._call(prompt, episode)
        except asyncio.CancelledError as error:  # of a task of its own, say
            if is_being_cancelled():
                raise
            raise GenerationError(
                f"generator.reward was cancelled from inside, not by the trainer, for prompt {prompt.uid!r}"
            ) from error
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise GenerationError(
                f"generator.reward raised {type(error).__name__}: {error} ({place.filename}:{place.lineno}) for prompt {prompt.uid!r}"
            ) from error
        return earned(found, "generator.reward", episode)

    async def _call(self, prompt: Prompt, episode: AgentEpisode) -> Any:
        if inspect.iscoroutinefunction(self.function):
            found: Any = self.function(prompt, episode)
        else:
            async with self.threads.slots:
                found = await asyncio.wrap_future(self.threads.executor.submit(self.function, prompt, episode))
        return await found if inspect.isawaitable(found) else found


@dataclass(frozen=True, slots=True)
class EnvironmentReward:
    """Passes the agent's texts to the prompt's skyrl_gym environment.

    An environment of one turn (``max_turns`` is 1 or missing) gets the answer. An environment of several gets one text after another
    until it is done: the texts of the conversation that were sampled and call no tool. Its observations are not used, since the
    harness has answered the agent. What it gives for a text is the reward of that turn.
    """

    make_environment: EnvironmentFactory
    threads: CallThreads
    """Run environments that block."""
    max_turns: int
    """Most texts passed, >= 1, whatever the environment's own limit."""

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Raises the environment's error, and ``GenerationError`` if it breaks the protocol."""
        limit = min(max_turns_of(prompt.extras, self.max_turns), self.max_turns)
        environment = self.make_environment(prompt.env_class, {**deepcopy(prompt.extras), "max_turns": limit})
        calls = EnvironmentCalls(environment, self.threads)
        try:
            await calls.init(deepcopy(list(prompt.messages)))
            turn_rewards: dict[int, float | NDArray[np.float64]] = {}
            reward = 0.0
            for turn, text in _texts_for(environment, episode)[:limit]:
                outcome = await calls.step(text, turn=turn or 0)
                reward += outcome.reward
                if turn is not None:
                    source = f"{type(environment).__name__}.step for turn {turn}"
                    _require_one_per_token(outcome.token_rewards, source, episode, turn)
                    turn_rewards[turn] = outcome.reward if outcome.token_rewards is None else outcome.token_rewards
                if outcome.is_done:
                    break
            return EpisodeReward(
                reward=reward,
                turn_rewards=tuple(turn_rewards.get(turn, 0.0) for turn in range(max(turn_rewards, default=-1) + 1)),
                metrics=await calls.metrics(),
            )
        except Exception as error:
            error.add_note(f"in environment {prompt.env_class!r}, which rewards prompt {prompt.uid!r}")
            raise
        finally:
            calls.close()


def _texts_for(environment: Environment, episode: AgentEpisode) -> list[tuple[int | None, str]]:
    """The texts to pass to an environment, each with its turn; None for the answer of several turns."""
    if int(getattr(environment, "max_turns", 1)) <= 1:
        return [(0 if episode.num_turns == 1 else None, episode.answer)]
    replies = zip(episode.message_turns, episode.messages, strict=True)
    return [(turn, _text(reply)) for turn, reply in replies if turn is not None and not reply.get("tool_calls")]


def _text(message: Message) -> str:
    """A message's content, its text parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")
