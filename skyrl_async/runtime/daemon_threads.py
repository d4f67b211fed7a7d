"""Threads for calls that may never return: such a call blocks neither other calls nor the end of the process.

Sets no limit on the number of calls; callers do.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_S = 10.0
"""A thread without work ends after this."""


class DaemonThreads(Executor):
    """An executor with a thread per running call; idle threads are used again.

    Args:
        name: name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._unfinished: set[Future[Any]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned."""
        return any(not future.done() for future in tuple(self._unfinished))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` at once."""
        future: Future[T] = Future()
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._calls.put(lambda: _settle(future, fn, args, kwargs))
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except Empty:
                if self._free.acquire(blocking=False):
                    return
                continue  # a call that reserved this thread is about to arrive
            call()
            del call  # or it would keep its arguments alive until the next call
            self._free.release()


def _settle(future: Future[T], function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
