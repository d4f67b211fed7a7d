"""An event loop for agents, in a thread of its own: theirs may be many, and the trainer's must never wait for them.

Flows in: coroutines, from any event loop. Flows out: what they return or raise. Does not know what they do.
"""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one loop of this process; its thread ends with the process, so that clients may be kept between agents."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop


async def run_beside(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the agents' loop; cancelling this cancels it there. Raises what it raises."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
