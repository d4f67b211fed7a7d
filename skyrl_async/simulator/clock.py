"""An event loop whose clock jumps to the next timer when nothing else is left to do (after trio's ``MockClock``).

Flows in: a coroutine. Flows out: its result, after as little real time as its computations take. Real sockets and
subprocesses do not belong into it: their completion is not a timer, and the loop says so instead of waiting for ever. What would
run in a thread runs in place, in no time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skyrl_async.errors import DeadlineError

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Where a loop would sleep until the next timer, moves the virtual clock there instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise DeadlineError(
                f"at {self.now:g} virtual seconds every task waits for something that nothing will cause"
            )
        if timeout and not ready:
            self.now += timeout
        return ready


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
        """Run it here and now: the end of a thread is no timer."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end and return the result. Raises ``DeadlineError`` when every task waits for ever."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
