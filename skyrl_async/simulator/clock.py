"""An event loop whose clock jumps to the next timer when nothing else is left to do (after trio's ``MockClock``).

A coroutine then takes as little real time as its computations. Real sockets and subprocesses do not work in it: their completion is no
timer, and the loop raises instead of waiting for ever. Calls for threads run in place, in no virtual time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skyrl_async.errors import DeadlineError

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Moves the virtual clock to the next timer instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlineError(
                f"at {self.now:g} virtual seconds every task waits for something that nothing will cause"
            )
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``loop.time()`` is virtual and starts at 0."""

    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """Run the function in place: the end of a thread is no timer."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` and return its result. Raises ``DeadlineError`` when every task waits for ever."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
