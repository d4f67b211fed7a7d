"""Rewards of agents' episodes: from a function of the user's, or from the prompt's environment.

Flows in: prompts and what agents did. Flows out: rewards with figures. Does not know harnesses, sessions or tokens.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from skyrl_async.errors import GenerationError
from skyrl_async.generators.gym.environment import Environment, EnvironmentCalls, EnvironmentFactory
from skyrl_async.types import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode:
    """What an agent did with a prompt, as far as the endpoint and the working directory show it."""

    messages: tuple[Message, ...]
    """The conversation of the newest turn, its reply included; empty when nothing was sampled."""
    last_text: str | None
    """What the policy wrote in the newest turn, as it was sampled (reasoning and tool calls included); None without turns."""
    output: str | None
    """What the harness gave as its answer, if it gave one."""
    working_dir: Path
    """Where it ran; deleted after the reward is known, unless ``generator.working_dir`` keeps it."""
    num_turns: int
    """Sampled in all branches."""
    is_truncated: bool
    """A cap of the session, the model's context, or a cut answer that its harness could do nothing with ended it."""
    failure: str | None = None
    """Why the harness failed, where a truncation made it fail: it is rewarded for what it did until then."""

    @property
    def answer(self) -> str:
        """What a judge of one answer reads: the harness's output, else the last text, else nothing."""
        return self.last_text or "" if self.output is None else self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReward:
    """What an episode earned."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


class RewardSource(Protocol):
    """Rewards episodes; any exception fails the whole group, because it is no fault of the agent's."""

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Called before the session is finished."""
        ...


RewardFunction = Callable[[Prompt, AgentEpisode], float | Awaitable[float]]
"""A user's reward: async, or a plain function, which is called in a thread and may block."""


class FunctionReward:
    """Asks a function; ``slots`` bounds the plain functions that run at once in ``executor``."""

    def __init__(
        self, function: RewardFunction, executor: Executor, slots: AbstractAsyncContextManager[Any] | None = None
    ) -> None:
        self._function = function
        self._executor = executor
        self._slots = slots or nullcontext()
        self._is_async = inspect.iscoroutinefunction(function)

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Raises what the function raises, and ``GenerationError`` when it returns no finite number."""
        if self._is_async:
            found: Any = self._function(prompt, episode)
        else:
            async with self._slots:
                found = await asyncio.wrap_future(self._executor.submit(self._function, prompt, episode))
        if inspect.isawaitable(found):
            found = await found
        try:
            reward = float(found)
        except (TypeError, ValueError) as error:
            raise GenerationError(f"generator.reward must return a number, got {found!r}") from error
        if not math.isfinite(reward):
            raise GenerationError(f"generator.reward must return a finite number, got {reward}")
        return EpisodeReward(reward=reward)


class EnvironmentReward:
    """Tells the prompt's environment, of the skyrl_gym protocol, what the agent said.

    An environment of one turn (its ``max_turns`` is 1, or it has none) is told the answer. One of several is told each text of
    the conversation in turn, until it is done: those that the prompt does not hold already, and that call no tool. Its
    observations are not used: what the agent was answered, its harness has decided.
    """

    def __init__(
        self,
        make_environment: EnvironmentFactory,
        executor: Executor,
        slots: AbstractAsyncContextManager[Any] | None = None,
        *,
        max_turns: int,
    ) -> None:
        """
        Args:
            make_environment: of a prompt's ``env_class`` and ``extras``.
            executor: of environments that block.
            slots: bound their calls that run at once; None sets no limit but the executor's.
            max_turns: most texts told, >= 1, whatever the environment says.
        """
        self._slots = slots
        self._make_environment = make_environment
        self._executor = executor
        self._max_turns = max_turns

    async def reward_of(self, prompt: Prompt, episode: AgentEpisode) -> EpisodeReward:
        """Raises what the environment raises, ``GenerationError`` where it breaks the protocol."""
        limit = min(int(prompt.extras.get("max_turns") or self._max_turns), self._max_turns)
        environment = self._make_environment(prompt.env_class, {**deepcopy(prompt.extras), "max_turns": limit})
        calls = EnvironmentCalls(environment, self._executor, self._slots)
        try:
            await calls.init(deepcopy(list(prompt.messages)))
            reward = 0.0
            for text in _texts_for(environment, prompt, episode)[:limit]:
                outcome = await calls.step(text)
                reward += outcome.reward
                if outcome.is_done:
                    break
            return EpisodeReward(reward=reward, metrics=await calls.metrics())
        except Exception as error:
            error.add_note(f"in environment {prompt.env_class!r}, which rewards prompt {prompt.uid!r}")
            raise
        finally:
            calls.close()


def _texts_for(environment: Environment, prompt: Prompt, episode: AgentEpisode) -> list[str]:
    """The texts that an environment is to judge."""
    if int(getattr(environment, "max_turns", 1)) <= 1:
        return [episode.answer]
    given = [_text(message) for message in prompt.messages if message["role"] == "assistant"]
    said = [_text(m) for m in episode.messages if m["role"] == "assistant" and not m.get("tool_calls")]
    return said[len(given) :] if said[: len(given)] == given else said


def _text(message: Message) -> str:
    """A message's content, its text parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content or "")
