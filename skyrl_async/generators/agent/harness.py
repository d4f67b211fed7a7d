"""Harnesses: what plays one sample of a prompt by talking to an endpoint, as an agent anywhere would.

Flows in: a task with the address and the key of a session. Flows out: what the harness says came of it. Does not know sessions'
rows, groups or rewards; ``agent_command`` runs harnesses that are programs.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from skyrl_async.errors import GenerationError
from skyrl_async.types import Message, SamplingParams

HIDDEN_COLUMNS = frozenset(
    {
        "answer",
        "answers",
        "extra_info",
        "ground_truth",
        "reward_model",
        "reward_spec",
        "solution",
        "solutions",
        "test_cases",
        "tests",
    }
)
"""Columns that only the judge may see, at any depth of a row's extras. So is every name that begins with an underscore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """One sample of a prompt to be played."""

    uid: str
    """The prompt's."""
    messages: tuple[Message, ...]
    """The prompt, in OpenAI form."""
    extras: dict[str, Any]
    """The row's other columns, without ``HIDDEN_COLUMNS``."""
    base_url: str
    """Of the endpoint, with ``/v1``."""
    api_key: str = field(repr=False)
    """Of this sample's session: what is asked with it is recorded."""
    model: str
    working_dir: Path
    """The sample's own; empty at first."""
    sample_index: int
    """Within the group."""
    is_evaluation: bool
    sampling: SamplingParams
    """What the endpoint samples with, whatever the harness asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What a harness says of its episode."""

    output: str | None = None
    """Its answer, for the judge; None: the text of the last turn."""
    reward: float | None = None
    """Only from functions, which run in the trainer and are trusted; None asks the reward function."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures of the episode."""


class Harness(Protocol):
    """Plays a task; any exception is a failed sample."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Play ``task`` to its end. Cancellation must release everything at once."""
        ...


AgentFunction = Callable[[AgentTask], Awaitable[AgentResult | float | str | None]]
"""A harness of a few lines: returns its whole result, or its reward, or its answer, or nothing."""


class FunctionHarness:
    """An async function, called on an event loop that all such agents share, and the trainer does not: it must not block."""

    def __init__(self, function: AgentFunction) -> None:
        self._function = function

    async def run(self, task: AgentTask) -> AgentResult:
        """Raises what the function raises, and ``GenerationError`` when it returns something else than it may."""
        return await run_on_agent_loop(self._call(task))

    async def _call(self, task: AgentTask) -> AgentResult:
        found = self._function(task)
        if not inspect.isawaitable(found):
            raise GenerationError(f"{_name(self._function)} must be an async function, but returned {found!r} at once")
        try:
            result = await found
        except SystemExit as error:  # a program turned into a function; it must not end the trainer
            raise GenerationError(f"{_name(self._function)} exited with status {error.code}") from error
        if isinstance(result, AgentResult):
            return result
        if result is None or isinstance(result, str):
            return AgentResult(output=result)
        if isinstance(result, int | float):
            return AgentResult(reward=float(result))
        raise GenerationError(
            f"{_name(self._function)} must return an AgentResult, a reward, a string or None, got {result!r}"
        )


def shown_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
    """What a harness may see of a row's extras: all but ``HIDDEN_COLUMNS``, copied."""
    return {name: _shown(value) for name, value in extras.items() if _is_shown(name)}


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return shown_extras(value)
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value


def _is_shown(name: str) -> bool:
    return name not in HIDDEN_COLUMNS and not str(name).startswith("_")


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one loop of this process; its thread ends with the process, so that clients may be kept between agents."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


async def run_on_agent_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the agents' loop; cancelling this cancels it there. Raises what it raises."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
