"""Runs in threads what would hold up the event loop, so that no session holds up another.

Each session has one piece of long work done at a time: a hundred of its requests take one thread, and the memory of a few bodies.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from skyrl_async.endpoint.sessions.session import Session

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters that are tokenized, or values that are written, in some two milliseconds."""
LONG_BODY = 2**14
"""Bytes that are parsed in some two milliseconds, at the worst."""
LARGE_BODY = 2**18
"""Bytes of a request that are read without a limit on how many requests do."""
_NUM_LARGE_BODIES = 4
"""Large bodies in memory that are not yet prompts, for all requests outside of sessions together. A session has one."""
_CHUNK_S = 0.02
"""Time for a client to send a chunk before others send theirs."""
_NUM_TOKENIZING = 2
"""Threads: this many sessions may have a prompt that takes seconds before another session's long prompt waits."""


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


async def in_thread_if(work: Callable[[], T], *, is_long: bool) -> T:
    """Run ``work`` in a thread if it ``is_long``. For work that a request has once, at its end."""
    return await asyncio.to_thread(work) if is_long else work()


class LongWork:
    """Threads for long work, one piece per session at a time. Requests outside of sessions count as one session."""

    def __init__(self) -> None:
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="endpoint-parse")
        self._tokenizing = ThreadPoolExecutor(_NUM_TOKENIZING, thread_name_prefix="endpoint-tokenize")
        self._receiving = asyncio.Lock()
        self._limits: WeakKeyDictionary[Session, _Limits] = WeakKeyDictionary()
        self._common = _Limits(num_large_bodies=_NUM_LARGE_BODIES)

    def large_bodies(self, session: Session | None) -> asyncio.Semaphore:
        """Limits large bodies: acquire it for a large body, and release it when the body is a prompt or refused."""
        return self._limits_of(session).bodies

    async def parse(self, session: Session | None, work: Callable[[], T], *, is_long: bool) -> T:
        """Run ``work``, in the one thread for parsing if it ``is_long``: parsing holds the interpreter.

        Long work of a cancelled request still runs to its end, and the session's next waits for it.
        """
        return await self._run(self._parsing, session, work) if is_long else work()

    async def in_turn(self, receive: Callable[[], Awaitable[T]]) -> T:
        """Receive a chunk of a large body, one at a time: each lets threads have the interpreter, which a stream's next token waits for.

        A client that takes long to send it is no longer waited for by others. ``receive`` may be cancelled and called again.
        """
        async with self._receiving:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHUNK_S):
                    return await receive()
        return await receive()

    async def tokenize(self, session: Session | None, work: Callable[[], T], *, is_long: bool) -> T:
        """Run ``work``, in one of several threads if it ``is_long``: tokenizing mostly releases the interpreter."""
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
    """Limits of one session."""

    def __init__(self, num_large_bodies: int = 1) -> None:
        self.work = asyncio.Lock()
        self.bodies = asyncio.Semaphore(num_large_bodies)
