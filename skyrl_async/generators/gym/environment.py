"""Environments of the skyrl_gym protocol, called without holding up the event loop.

Flows in: an environment and its inputs. Flows out: its answers, checked. Does not know tokens or sampling.
"""

import asyncio
import inspect
import json
import logging
import math
import reprlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from skyrl_async.chat.messages import arguments_text
from skyrl_async.columns import TokenIds
from skyrl_async.errors import ConfigError, GenerationError
from skyrl_async.runtime.daemon_threads import DaemonThreads
from skyrl_async.runtime.progress import report
from skyrl_async.types import Message, ToolCall

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Environment(Protocol):
    """The calls of a generator on an environment: skyrl_gym's ``BaseTextEnv``.

    Calls are made one at a time, in threads, because an environment may run tools. One that never blocks says so with
    an attribute ``is_fast = True`` and is called on the event loop. Constructors always are: slow set-up belongs in
    ``init``.
    """

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """The first messages for the policy, and anything else."""

    def step(self, action: str) -> Mapping[str, Any]:
        """``observations`` (messages), ``reward``, ``done``, and maybe ``postprocessed_action`` and ``metadata``.

        A reward is a number, or a list with one for each sampled token of the action (as it is kept, if it is postprocessed). A ``step``
        with a parameter ``token_ids`` is passed these tokens, (T,) int32; None where they are unknown, as with agents.

        Metadata with ``tool_name`` and ``tool_input`` say which tool the action called; the record of samples has it.
        """

    def get_metrics(self) -> dict[str, Any]:
        """Figures of this episode."""

    def close(self) -> None:
        """Release what the episode holds."""


def max_turns_of(extras: Mapping[str, Any], default: int) -> int:
    """The turns that a row's column ``max_turns`` allows; null is the default. Raises ``ConfigError`` for what is no whole number >= 1."""
    found = default if extras.get("max_turns") is None else extras["max_turns"]
    if isinstance(found, bool) or not isinstance(found, Real) or found < 1 or not float(found).is_integer():
        raise ConfigError(f"max_turns must be a whole number >= 1, got {found!r}")
    return int(float(found))


@runtime_checkable
class RestorableEnvironment(Protocol):
    """An environment whose episode can go on in a resumed run after it has taken steps."""

    def snapshot(self) -> Any:
        """The state for ``restore``, as JSON. Called after ``init`` and after every step but the last, so it should be quick."""

    def restore(self, state: Any) -> None:
        """Return to the state of a snapshot; called on a fresh environment instead of ``init``."""


def finite_reward(found: Any, source: str) -> float:
    """``found`` as a number; ``GenerationError`` names its source if it is none, or not finite."""
    try:
        reward = float(found)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise GenerationError(f"{source} must return a finite number as reward, got {found!r}")
    return reward


def turn_reward(found: Any, source: str) -> tuple[float, NDArray[np.float64] | None]:
    """What a turn earned, with what each of its tokens did if ``found`` is a list or array. ``GenerationError`` as ``finite_reward``."""
    if not isinstance(found, list | tuple) and getattr(found, "ndim", 0) == 0:
        return finite_reward(found, source), None
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, of a tensor with a gradient
        values = np.empty(())
    expected = f"{source} must return finite numbers (float32) as rewards of tokens, got"
    if values.ndim != 1:
        raise GenerationError(f"{expected} {reprlib.repr(found)}")
    for token in np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max)):
        raise GenerationError(f"{expected} {values[token]} for token {token}")
    return math.fsum(values), values


EnvironmentFactory = Callable[[str, dict[str, Any]], Environment]
"""Makes a fresh environment of a name and of a prompt's extras."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """An environment's answer to one action."""

    observations: list[Message]
    reward: float
    token_rewards: NDArray[np.float64] | None = None
    """(T,) what each kept token of the action earned; None: only the whole is known."""
    is_done: bool
    postprocessed_action: str | None
    """The action as the conversation should keep it, if the environment changes it."""
    tool_call: ToolCall | None = None
    """The call that the environment found in the action, and answers with its observations."""
    snapshot: str | None = None
    """The environment's state after the action, as JSON text; None if it takes no snapshots or the episode is over."""


def _tool_call(metadata: Any) -> ToolCall | None:
    """The call that a step's metadata name; SkyRL's environments name a tool without an input where they found no call."""
    if not isinstance(metadata, Mapping) or not metadata.get("tool_name"):
        return None
    given = metadata.get("tool_input")
    if given is None or (isinstance(given, list) and all(one is None for one in given)):
        return None
    return ToolCall(name=str(metadata["tool_name"]), arguments=arguments_text(given))


class CallThreads:
    """Threads for calls that may block. ``slots`` bounds the calls that run at once; one that nobody waits for any more needs none."""

    def __init__(self, name: str, max_calls: int = 32) -> None:
        self.executor = DaemonThreads(name)
        self.closing = DaemonThreads(f"close {name}")
        """Closes environments, each after its call in flight."""
        self.slots = asyncio.Semaphore(max_calls)


class EnvironmentCalls:
    """One environment's calls, kept off the event loop unless it is fast, and closed exactly once."""

    def __init__(self, environment: Environment, threads: CallThreads) -> None:
        self._environment = environment
        self._threads = threads
        self._takes_tokens = "token_ids" in inspect.signature(environment.step).parameters
        self._is_fast = bool(getattr(environment, "is_fast", False))
        self._in_flight: Future[Any] | None = None

    async def init(self, messages: list[Message]) -> tuple[list[Message], str | None]:
        """The first messages for the policy, and the environment's snapshot."""
        report("in environment init")
        (opening, _), snapshot = await self._call(self._with_snapshot, self._environment.init, messages)
        return list(opening), snapshot

    async def restore(self, snapshot: str) -> None:
        """Return to the state of a snapshot, instead of ``init``. ``GenerationError`` if the environment has no ``restore``."""
        report("in environment restore")
        if not isinstance(self._environment, RestorableEnvironment):
            raise GenerationError(f"{type(self._environment).__name__} has no restore any more")
        await self._call(self._environment.restore, json.loads(snapshot))

    async def step(self, action: str, token_ids: TokenIds | None = None, *, turn: int) -> StepOutcome:
        """Pass an action on, with its tokens, (T,), if known; ``GenerationError`` names the turn of an answer that breaks the protocol."""
        report("in environment step")
        step: Callable[..., Any] = self._environment.step
        if self._takes_tokens:
            step = partial(step, token_ids=token_ids)
        output, snapshot = await self._call(self._with_snapshot, step, action)
        source = f"{type(self._environment).__name__}.step for turn {turn}"
        try:
            reward, token_rewards = turn_reward(output["reward"], source)
            observations = list(output["observations"])
            if not output["done"] and any(one.get("role") == "assistant" for one in observations):
                raise GenerationError(
                    f"{source} must return observations of another role than assistant, which is the policy's alone (use user or tool), "
                    f"got {reprlib.repr(observations)}"
                )
            return StepOutcome(
                observations=observations,
                reward=reward,
                token_rewards=token_rewards,
                is_done=bool(output["done"]),
                postprocessed_action=output.get("postprocessed_action"),
                tool_call=_tool_call(output.get("metadata")),
                snapshot=snapshot,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GenerationError(f"{source} must return observations, reward and done, got {output!r}") from error

    def _with_snapshot(self, method: Callable[..., T], *args: Any) -> tuple[T, str | None]:
        """The result of ``method``, and the snapshot after it as text, so that nothing in it changes later."""
        output = method(*args)
        is_over = isinstance(output, Mapping) and output.get("done")
        if is_over or not isinstance(self._environment, RestorableEnvironment):
            return output, None
        state = self._environment.snapshot()
        try:
            return output, json.dumps(state)
        except (TypeError, ValueError) as error:
            raise GenerationError(f"{type(self._environment).__name__}.snapshot must return JSON: {error}") from error

    async def metrics(self) -> dict[str, float]:
        """The episode's figures that are numbers."""
        report("in environment get_metrics")
        get_metrics = getattr(self._environment, "get_metrics", None)
        found = await self._call(get_metrics) if get_metrics else {}
        return {name: float(value) for name, value in (found or {}).items() if isinstance(value, Real | np.bool_)}

    def close(self) -> None:
        """Close the environment without waiting: after the call in flight, which cancellation cannot stop."""
        if self._is_fast:
            self._close()
        else:
            self._threads.closing.submit(self._close)

    def _close(self) -> None:
        if self._in_flight is not None:
            wait([self._in_flight])
        try:
            self._environment.close()
        except Exception:  # the episode is over: its result must not be lost to a failing clean-up
            logger.exception("closing %s failed", type(self._environment).__name__)

    async def _call(self, method: Callable[..., T], *args: Any) -> T:
        if self._is_fast:
            return method(*args)
        async with self._threads.slots:
            self._in_flight = self._threads.executor.submit(method, *args)
            return await asyncio.wrap_future(self._in_flight)
