"""What takes too long for the event loop, done in threads: nothing from one session holds up another.

Flows in: work of a session, and how long the text is that it is about. Flows out: its result. A session has one piece of long work
done at a time, so that a hundred of its requests take one thread, and the memory of a few bodies. Does not know what is done.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from skyrl_async.endpoint.sessions.session import Session

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters that are tokenized, or values that are written, in some two milliseconds."""
LONG_BODY = 2**14
"""Bytes that are parsed in as long, at the worst."""
LARGE_BODY = 2**18
"""Bytes; as much of any request is read at once."""
_NUM_LARGE_BODIES = 4
"""Being read, or waiting to become prompts, of all requests outside of sessions together. A session has one."""
_NUM_TOKENIZING = 2
"""Threads: as many sessions may have a prompt that takes seconds before another session's long prompt waits."""


def text_length(value: Any, enough: int = LONG_TEXT) -> int:
    """Characters and values in messages and tools, counted until they are more than ``enough``."""
    length, left = 0, [value]
    while left and length <= enough:
        match left.pop():
            case str(text):
                length += len(text)
            case dict() as items:
                left += [*items, *items.values()]
                length += len(items)
            case list() | tuple() as items:
                left += items
                length += len(items)
    return length


async def done_apart(work: Callable[[], T], *, is_long: bool) -> T:
    """What ``work`` returns, which is done in a thread if it ``is_long``: what one request asks for at its end, once."""
    return await asyncio.to_thread(work) if is_long else work()


class LongWork:
    """Threads, and whose turn it is: requests outside of sessions are one session."""

    def __init__(self) -> None:
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="endpoint-parse")
        self._tokenizing = ThreadPoolExecutor(_NUM_TOKENIZING, thread_name_prefix="endpoint-tokenize")
        self._limits: WeakKeyDictionary[Session, _Limits] = WeakKeyDictionary()
        self._common = _Limits(num_large_bodies=_NUM_LARGE_BODIES)

    def large_bodies(self, session: Session | None) -> asyncio.Semaphore:
        """One is held from where a body turns out to be large until it is a prompt, or refused."""
        return self._limits_of(session).bodies

    async def parse(self, session: Session | None, work: Callable[[], T], *, is_long: bool) -> T:
        """What ``work`` returns, which is done here and now unless it ``is_long``: work in one thread, because it holds the interpreter.

        Long work whose request was cancelled is done to its end, and the session's next waits for that.
        """
        return await self._run(self._parsing, session, work) if is_long else work()

    async def tokenize(self, session: Session | None, work: Callable[[], T], *, is_long: bool) -> T:
        """The same for work that mostly lets the interpreter go, in several threads."""
        return await self._run(self._tokenizing, session, work) if is_long else work()

    async def _run(self, threads: ThreadPoolExecutor, session: Session | None, work: Callable[[], T]) -> T:
        lock = self._limits_of(session).work
        await lock.acquire()
        working = asyncio.get_running_loop().run_in_executor(threads, work)
        working.add_done_callback(lambda _: lock.release())
        try:
            return await asyncio.shield(working)
        finally:
            del working  # a failure's traceback has this frame: what it holds would be there until a collection

    def _limits_of(self, session: Session | None) -> "_Limits":
        return self._common if session is None else self._limits.setdefault(session, _Limits())


class _Limits:
    """What one session may have at once."""

    def __init__(self, num_large_bodies: int = 1) -> None:
        self.work = asyncio.Lock()
        self.bodies = asyncio.Semaphore(num_large_bodies)
