"""Threads for calls that may never return: such a call blocks neither other calls nor the end of the process.

Sets no limit on the number of calls; callers do. Directories that such threads delete are here, too.
"""

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
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

    async def have_returned(self, timeout_s: float) -> bool:
        """Wait for the calls that run, at most so long; returns whether they have returned."""
        running = [asyncio.wrap_future(future) for future in tuple(self._unfinished)]
        return not running or not (await asyncio.wait(running, timeout=timeout_s))[1]

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


class NumberedDirectories:
    """Directories below one, which threads delete while the loop goes on: to delete large files takes as long as to write them.

    Args:
        root: holds the directories; made if missing.
        thread_name: name of the threads.
    """

    def __init__(self, root: Path, thread_name: str) -> None:
        self.root = root
        self._numbers = itertools.count(1)
        self._threads = DaemonThreads(thread_name)
        self._made: list[Path] = []
        self._deletions: set[asyncio.Future[None]] = set()

    def new(self, name: str) -> Path:
        """A path of this name and a number, at which nothing exists."""
        self._made.append(self.root / f"{name}-{next(self._numbers)}")
        return self._made[-1]

    def delete(self, directory: Path) -> None:
        """Begin to delete any directory. Cancellations do not stop it."""
        if directory.exists():
            delete = partial(shutil.rmtree, directory, ignore_errors=True)
            deletion = asyncio.get_running_loop().run_in_executor(self._threads, delete)
            self._deletions.add(deletion)
            deletion.add_done_callback(self._deletions.discard)

    async def deleted(self) -> None:
        """Wait until running deletions have ended."""
        if self._deletions:
            await asyncio.wait(self._deletions)
        self._made = [path for path in self._made if path.exists()]

    def close(self) -> None:
        """Delete what ``new`` has named now, also what a thread has begun to delete. Idempotent."""
        for directory in self._made:
            shutil.rmtree(directory, ignore_errors=True)
