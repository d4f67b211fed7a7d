"""Harnesses: agents that generate one sample of a prompt by talking to an endpoint.

Flows in: a task with the address and the key of a session. Flows out: the harness's result. Does not know training rows, groups or
rewards. ``command.py`` runs harnesses that are programs.
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from skyrl_async.errors import GenerationError, InvalidResultError
from skyrl_async.runtime.tasks import is_being_cancelled
from skyrl_async.types import Message, SamplingParams

logger = logging.getLogger(__name__)

HIDDEN_COLUMNS = (
    *("answer", "answers", "extra_info", "ground_truth", "reward_model", "reward_spec"),
    *("solution", "solutions", "test_cases", "tests"),
)
"""Columns hidden from harnesses, at any depth of a row's extras, like every name that begins with an underscore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """The task of generating one sample of a prompt."""

    uid: str
    """Uid of the prompt."""
    messages: tuple[Message, ...]
    """The prompt, in OpenAI form."""
    extras: dict[str, Any]
    """The row's other columns, without ``HIDDEN_COLUMNS``."""
    base_url: str
    """Root of the endpoint, with ``/v1``."""
    api_key: str = field(repr=False)
    """Key of this sample's session, which records all requests made with it."""
    model: str
    max_model_len: int
    """Tokens of the policy's context, prompt and answer together."""
    working_dir: Path
    """Directory of this sample alone; empty at first."""
    sample_index: int
    """Index within the group."""
    is_evaluation: bool
    sampling: SamplingParams
    """Parameters that the endpoint samples with, whatever the harness requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """A harness's result."""

    output: str | None = None
    """The answer to be rewarded; None: the text of the last turn."""
    reward: float | Sequence[float] | None = None
    """Reward, or one for each of the first turns. Only from functions, which run in the trainer and are trusted; None: the reward source
    decides."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures of the episode."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """What the harness left to read: name -> text."""


class Harness(Protocol):
    """Runs a task; any exception is a failed sample, and ``EnvironmentFailedError`` one that is not the agent's fault."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Run ``task`` to its end. Cancellation must release everything at once."""

    async def close(self) -> None:
        """End what outlives single tasks."""


AgentFunction = Callable[[AgentTask], Awaitable[AgentResult | float | str | None]]
"""A harness as a function: returns its whole result, its reward, its answer, or None."""


class FunctionHarness:
    """An async function, called on an event loop of the agents in a thread of its own. It must not block."""

    def __init__(self, function: AgentFunction) -> None:
        self._function = function
        self._running: set[asyncio.Task[Any]] = set()
        """Calls that have not returned. Changed on the loop of the agents only."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Raises the function's error, and ``InvalidResultError`` if it returns another type."""
        # On another loop than the trainer's, which many agents would delay. A cancellation is passed on.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(task), _loop()))

    async def close(self, timeout_s: float = 10.0) -> None:
        """Wait until calls that were cancelled have released what they hold, at most so long: their thread ends with the process."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._all_returned(), _loop()))
        except TimeoutError:
            logger.warning(
                "some calls of %s have not returned in %g s: they may still hold something",
                _name(self._function),
                timeout_s,
            )

    async def _all_returned(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def _call(self, task: AgentTask) -> AgentResult:
        call = asyncio.current_task()
        assert call is not None
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        found = self._function(task)
        if not inspect.isawaitable(found):
            raise InvalidResultError(
                f"{_name(self._function)} must be an async function, but returned {found!r} at once"
            )
        try:
            result = await found
        except SystemExit as error:  # a program turned into a function; it must not end the trainer
            raise GenerationError(f"{_name(self._function)} exited with status {error.code}") from error
        except asyncio.CancelledError as error:  # of a task of its own, say; passed on, it would end the whole group
            if is_being_cancelled():
                raise
            raise GenerationError(f"{_name(self._function)} was cancelled from inside, not by the trainer") from error
        if isinstance(result, AgentResult):
            return result
        if result is None or isinstance(result, str):
            return AgentResult(output=result)
        if isinstance(result, Real):  # numpy's, too
            return AgentResult(reward=float(result))
        raise InvalidResultError(
            f"{_name(self._function)} must return an AgentResult, a reward, a string or None, got {result!r}"
        )


def shown_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a row's extras without ``HIDDEN_COLUMNS``."""
    return {
        name: _shown(value)
        for name, value in extras.items()
        if name not in HIDDEN_COLUMNS and not str(name).startswith("_")
    }


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return shown_extras(value)
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The agents' event loop. Its thread ends with the process, so that agents may keep clients."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_forever, args=(loop,), name="agents", daemon=True).start()
    return loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop, also after a task that an agent has started called ``sys.exit``: asyncio ends the loop with the error then."""
    while True:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            loop.run_forever()
