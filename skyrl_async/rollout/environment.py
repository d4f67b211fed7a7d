"""Environments of the skyrl_gym protocol, called without holding up the event loop.

Flows in: an environment and what is said to it. Flows out: its answers, checked. Does not know tokens or sampling.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from skyrl_async.errors import GenerationError
from skyrl_async.progress import report
from skyrl_async.types import Message

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Environment(Protocol):
    """What a generator calls on an environment: skyrl_gym's ``BaseTextEnv``.

    Calls are made one at a time, in threads, because an environment may run tools. One that never blocks says so with
    an attribute ``is_fast = True`` and is called on the event loop. Constructors always are: slow set-up belongs in
    ``init``.
    """

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """The first messages for the policy, and anything else."""
        ...

    def step(self, action: str) -> Mapping[str, Any]:
        """``observations`` (messages), ``reward``, ``done``, and maybe ``postprocessed_action``."""
        ...

    def get_metrics(self) -> dict[str, Any]:
        """Figures of this episode."""
        ...

    def close(self) -> None:
        """Release what the episode holds."""
        ...


EnvironmentFactory = Callable[[str, dict[str, Any]], Environment]
"""Makes a fresh environment of a name and of a prompt's extras."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What an environment said to one action."""

    observations: list[Message]
    reward: float
    is_done: bool
    postprocessed_action: str | None
    """The action as the environment wants it remembered, where it says so."""


class EnvironmentCalls:
    """One environment's calls, kept off the event loop unless it is fast, and closed exactly once."""

    def __init__(
        self,
        environment: Environment,
        executor: concurrent.futures.Executor,
        places: contextlib.AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        """``places`` bounds the calls that run at once; one that nobody waits for any more needs none."""
        self._environment = environment
        self._executor = executor
        self._places = places or contextlib.nullcontext()
        self._is_fast = bool(getattr(environment, "is_fast", False))
        self._in_flight: concurrent.futures.Future[Any] | None = None

    async def init(self, messages: list[Message]) -> list[Message]:
        """The first messages for the policy."""
        report("in environment init")
        opening, _ = await self._call(self._environment.init, messages)
        return list(opening)

    async def step(self, action: str) -> StepOutcome:
        """Hand over an action; ``GenerationError`` when the answer lacks what the protocol asks."""
        report("in environment step")
        output = await self._call(self._environment.step, action)
        try:
            reward = float(output["reward"])
            outcome = StepOutcome(
                observations=list(output["observations"]),
                reward=reward,
                is_done=bool(output["done"]),
                postprocessed_action=output.get("postprocessed_action"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GenerationError(
                f"{type(self._environment).__name__}.step must return observations, reward and done, got {output!r}"
            ) from error
        if not math.isfinite(reward):
            raise GenerationError(f"{type(self._environment).__name__}.step must return a finite reward, got {reward}")
        return outcome

    async def metrics(self) -> dict[str, float]:
        """The episode's figures that are numbers."""
        report("in environment get_metrics")
        get_metrics = getattr(self._environment, "get_metrics", None)
        found = await self._call(get_metrics) if get_metrics else {}
        return {name: float(value) for name, value in (found or {}).items() if isinstance(value, (int, float))}

    def close(self) -> None:
        """Close the environment without waiting: after the call in flight, which cancellation cannot stop."""
        if self._is_fast:
            self._close()
        elif self._in_flight is not None and not self._in_flight.done():
            self._in_flight.add_done_callback(lambda _: self._close())
        else:
            self._executor.submit(self._close)

    def _close(self) -> None:
        try:
            self._environment.close()
        except Exception:  # the episode is over: its result must not be lost to a failing clean-up
            logger.exception("closing %s failed", type(self._environment).__name__)

    async def _call(self, method: Callable[..., T], *args: Any) -> T:
        if self._is_fast:
            return method(*args)
        async with self._places:
            self._in_flight = self._executor.submit(method, *args)
            return await asyncio.wrap_future(self._in_flight)
