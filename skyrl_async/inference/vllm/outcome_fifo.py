"""How threads of other processes on this machine report that they are done, without polling: a line per outcome in a FIFO.

OutcomeFifo (an engine's process) ── path ──> worker process: run_and_report(work, path) ──line──> first_failure
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

_DONE = "ok"


class OutcomeFifo:
    """The reading end: a context manager that makes and removes a FIFO, which the event loop waits for as for a socket."""

    path: Path
    """The FIFO's path, within the context."""
    _descriptor: int

    def __enter__(self) -> Self:
        self.path = Path(tempfile.mkdtemp(prefix="skyrl_async-")) / "outcomes"
        os.mkfifo(self.path)
        self._descriptor = os.open(
            self.path, os.O_RDWR | os.O_NONBLOCK
        )  # never at its end, whoever opens and closes it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)
        self.path.parent.rmdir()

    async def first_failure(self, *, num_outcomes: int) -> str | None:
        """Wait for ``num_outcomes`` lines, and return the first failure among them."""
        received = ""
        while received.count("\n") < num_outcomes:
            await self._readable()
            received += os.read(self._descriptor, 1 << 16).decode()
        return next((line for line in received.splitlines() if line != _DONE), None)

    async def _readable(self) -> None:
        loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._descriptor, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            loop.remove_reader(self._descriptor)


def run_and_report(work: Callable[[], None], fifo_path: str) -> None:
    """Run ``work`` and report how it ended."""
    try:
        work()
    except Exception as error:
        report(fifo_path, error)
    else:
        report(fifo_path, None)


def report(fifo_path: str, failure: Exception | None) -> None:
    """Write an outcome to the FIFO, if anybody still reads it."""
    outcome = _DONE if failure is None else f"{type(failure).__name__}: {failure}".replace("\n", " ")[:1000]
    with contextlib.suppress(OSError):
        fifo = os.open(fifo_path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fifo, f"{outcome}\n".encode())
        os.close(fifo)
