"""Writes to disk beside the event loop, in order and within bounds of memory and time.

    items ──add──> in memory ──a thread, on ``begin``──> write

A disk that is full or hangs costs items, never the run: items wait until there is room, then newer ones are left out. A flush waits half a
minute for a disk that hangs, and later ones do not.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from skyrl_async.runtime.daemon_threads import DaemonThreads

logger = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S, _CLOSE_TIMEOUT_S = 30.0, 10.0
"""A write of a step's samples takes seconds on a slow disk."""

T = TypeVar("T")


class DiskWriter(Generic[T]):
    """Writes the items of one file, or of one directory.

    Args:
        path: the file or directory.
        what: the items in messages, such as ``samples``.
        write: writes a list of items, and takes each out of the list once it is on disk. A thread calls it, also without items. If it
            raises ``OSError``, the rest is tried again; after another error the rest is left out.
        size_of: bytes of an item in memory.
        max_bytes: most bytes of items that wait.
        interval_s: least time between two writes, unless one is waited for.
    """

    def __init__(
        self,
        path: Path,
        what: str,
        write: Callable[[list[T]], None],
        *,
        size_of: Callable[[T], int],
        max_bytes: int,
        interval_s: float = 0.0,
    ) -> None:
        self._path = path
        self._what = what
        self._write = write
        self._size_of = size_of
        self._max_bytes = max_bytes
        self._interval_s = interval_s
        self._waiting: deque[T] = deque()
        self._bytes_added = self._bytes_written = 0
        """Bytes of items that were added, and of those that are on disk or left out; each is changed by one thread."""
        self._threads = DaemonThreads(what)
        self._lock = threading.Lock()
        self._queued: Future[None] | None = None
        """The newest write; None before the first."""
        self._is_due = False
        """Whether it has yet to begin: it will write all that is added until then."""
        self._hangs = False
        """Whether a write took too long, and still does."""
        self._is_waited_for = threading.Event()
        """Whether the newest write is: it begins at once then."""
        self._written_at = -math.inf
        self._said: set[str] = set()
        """Warnings of writes that fail, each said once until one succeeds."""

    def add(self, item: T) -> None:
        """Hand over an item. Never waits."""
        num_bytes = self._size_of(item)
        if self._bytes_added - self._bytes_written + num_bytes > self._max_bytes:
            self._say("are left out: the disk does not keep up with them")
            return
        self._bytes_added += num_bytes
        self._waiting.append(item)

    def begin(self, *, is_waited_for: bool = False) -> Future[None]:
        """Begin to write all that was added so far: however long a write takes, only one more waits for it. Never waits."""
        if self._queued is None or not self._is_due:
            self._is_due = True
            self._is_waited_for = threading.Event()
            self._queued = self._threads.submit(self._write_waiting, self._is_waited_for)
        if is_waited_for:
            self._is_waited_for.set()
        return self._queued

    async def flush(self) -> None:
        """Wait until what was added is on disk, or has failed to get there; half a minute for a disk that hangs, once."""
        if self._hangs:
            return
        writing = self.begin(is_waited_for=True)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, writing.result, _FLUSH_TIMEOUT_S)
        except TimeoutError:
            self._hangs = not writing.done()
            self._say("wait: the disk hangs, and the run goes on without them")

    def close(self) -> bool:
        """Write the rest; nothing if nothing was begun or added. Idempotent. Returns False if the disk hangs, which is left."""
        if self._queued is None and not self._waiting:
            return True
        try:
            self.begin(is_waited_for=True).result(_CLOSE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the last %s are not yet in %s: the disk hangs", self._what, self._path)
            return False
        return True

    def _write_waiting(self, is_waited_for: threading.Event) -> None:
        is_waited_for.wait(max(0.0, self._written_at + self._interval_s - time.monotonic()))
        with self._lock:
            self._is_due = False
            self._written_at = time.monotonic()
            taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
            num_bytes, rest = sum(map(self._size_of, taken)), list[T]()
            try:
                self._write(taken)
                self._said.clear()
            except OSError as error:
                self._say(f"cannot be written: {error.strerror or error}; they are tried again")
                rest = taken
            except Exception:  # whatever is wrong with them, they are no reason to end a run
                logger.exception("%s are left out of %s", self._what, self._path)
            self._waiting.extendleft(reversed(rest))
            self._bytes_written += num_bytes - sum(map(self._size_of, rest))
            self._hangs = False

    def _say(self, what: str) -> None:
        """Log once until writing succeeds."""
        if what not in self._said:
            self._said.add(what)  # first, because the items may be lines of the log
            logger.warning("%s %s (%s)", self._what, what, self._path)
