"""A worker's process as its parent's machine sees it: ended at once, frozen or not, and seen to be gone.

Flows in: where a process says that it is. Flows out: a handle that cannot mean another process, whatever becomes of its number.
Only for processes of this machine, and only on Linux: elsewhere there is none, and Ray alone ends workers.
"""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Where a process is."""

    node_id: str
    """Of its machine, as Ray names it."""
    namespace: str
    """In which its number counts; empty where there are none."""
    pid: int

    @classmethod
    def of_this_process(cls, node_id: str) -> "ProcessPlace":
        """Where the caller is."""
        link = Path("/proc/self/ns/pid")
        return cls(node_id=node_id, namespace=os.readlink(link) if link.exists() else "", pid=os.getpid())


class WorkerProcess:
    """Holds a descriptor until ``close``."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL; nothing where it is gone already."""
        try:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def ended(self) -> None:
        """Return when the process is gone."""
        loop = asyncio.get_running_loop()
        is_gone = asyncio.Event()
        loop.add_reader(self._descriptor, is_gone.set)
        try:
            await is_gone.wait()
        finally:
            loop.remove_reader(self._descriptor)

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._descriptor)


def open_if_here(place: ProcessPlace, here: ProcessPlace) -> WorkerProcess | None:
    """A handle on a living process of the caller's machine; None for one of another, and where there are no such handles."""
    if (place.node_id, place.namespace) != (here.node_id, here.namespace) or not hasattr(os, "pidfd_open"):
        return None
    try:
        return WorkerProcess(place.pid)
    except ProcessLookupError:
        return None
