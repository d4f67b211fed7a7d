"""Task groups that raise their first failure itself, waits for a condition without a lock, and turns of the event loop.

Callers tell errors apart by class, which an ``ExceptionGroup`` hides.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class task_group(asyncio.TaskGroup):
    """An ``asyncio.TaskGroup`` whose first failure is raised bare, once every other task has been cancelled."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            root = first_failure(failures)
            raise root from root.__cause__


async def run_together(coroutines: Mapping[str, Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Run the coroutines as tasks of these names in one ``task_group``, and return their results in order."""
    async with task_group() as group:
        tasks = [group.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
    return tuple(task.result() for task in tasks)


def is_being_cancelled() -> bool:
    """Whether somebody has cancelled the running task. If not, a ``CancelledError`` in it is that of another task it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def first_failure(failures: BaseException) -> BaseException:
    """What a group failed of: its first exception that is no group and was not raised while its task was being cancelled.

    A task group lists its body's own error last, behind whatever its tasks made of their cancellation. Any other exception is returned.
    """
    leaves = list(_leaves(failures))
    return next((leaf for leaf in leaves if not _comes_of_cancellation(leaf)), leaves[0])


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    if isinstance(failure, BaseExceptionGroup):
        for inner in failure.exceptions:
            yield from _leaves(inner)
    else:
        yield failure


def _comes_of_cancellation(failure: BaseException) -> bool:
    """Whether it was raised while a cancellation was under way that was not a timeout's."""
    seen: set[int] = set()
    error: BaseException | None = failure
    while error is not None and id(error) not in seen:
        if isinstance(error, asyncio.CancelledError):
            return True
        is_timeout = isinstance(error, TimeoutError) and isinstance(error.__cause__, asyncio.CancelledError)
        # A group is raised again out of one that was looked into before.
        if is_timeout or isinstance(error, BaseExceptionGroup):
            return False
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


class Changes:
    """Wakes tasks that wait for a condition: state changes synchronously, and each change wakes those whose condition has become true.

    changes = Changes()
    await changes.until(lambda: not self._queue)      # one task
    self._queue.clear(); changes.notify()             # another one
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def notify(self) -> None:
        """Wake the waiting tasks whose condition is true now. Call it after all of a change."""
        for woken, is_true in self._waiting.items():
            if not woken.done() and is_true():
                woken.set_result(None)

    async def next(self) -> None:
        """Wait for the next change."""
        await self._woken(lambda: True)

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until ``is_true()``; returns at once where it is."""
        while not is_true():
            await self._woken(is_true)

    async def _woken(self, is_true: Callable[[], bool]) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._waiting[woken] = is_true
        try:
            await woken
        finally:
            del self._waiting[woken]


class Turns:
    """Turns of the event loop in which few tasks go on: thousands that go on in one, for .3 ms each, would stop it for a second.

    Args:
        num_tasks: most that go on in a turn.
    """

    def __init__(self, num_tasks: int = 16) -> None:
        self._num_tasks = self._num_left = num_tasks
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Wait for a turn, in the order of the calls; returns at once where this one has room."""
        loop = asyncio.get_running_loop()
        if self._num_left == self._num_tasks:
            loop.call_soon(self._begin)
        if self._num_left:
            self._num_left -= 1
            return
        going_on = loop.create_future()
        self._waiting.append(going_on)
        await going_on

    def _begin(self) -> None:
        """A turn begins: the tasks that have waited longest go on in it."""
        self._num_left = self._num_tasks
        while self._waiting and self._num_left:
            going_on = self._waiting.popleft()
            if not going_on.done():  # else it was cancelled
                going_on.set_result(None)
                self._num_left -= 1
        if self._num_left < self._num_tasks:
            asyncio.get_running_loop().call_soon(self._begin)
