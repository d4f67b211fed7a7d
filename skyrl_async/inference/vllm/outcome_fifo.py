"""How threads of other processes on this machine say that they are done, without anybody asking again and again.

Flows in: lines written to a FIFO, one per outcome. Flows out: the first that is a failure. Knows nothing of what is done.
"""

import asyncio
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

DONE = "ok"


class OutcomeFifo:
    """A context manager around a FIFO, which it makes and removes; the loop waits for it as for a socket."""

    path: Path
    """Within the context."""
    _descriptor: int

    def __enter__(self) -> Self:
        self.path = Path(tempfile.mkdtemp(prefix="skyrl_async-")) / "outcomes"
        os.mkfifo(self.path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # never at its end, whoever comes and goes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)
        self.path.parent.rmdir()

    async def first_failure(self, *, num_outcomes: int) -> str | None:
        """Wait for so many lines; the first of them that is not ``ok``."""
        received = ""
        while received.count("\n") < num_outcomes:
            await self._readable()
            received += os.read(self._descriptor, 1 << 16).decode()
        return next((line for line in received.splitlines() if line != DONE), None)

    async def _readable(self) -> None:
        loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._descriptor, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
