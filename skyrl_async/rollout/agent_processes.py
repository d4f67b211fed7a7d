"""Ends the processes of an agent: the program, and whatever it has started.

Flows in: a process group, and a mark that the program found in its environment and its children inherited. Flows out: signals.
Does not know what the processes were for.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_MAX_ROUNDS = 20


def kill_agent(group_id: int | None, mark: str) -> None:
    """Kill at once, without waiting for the deaths.

    A descendant may have left the group (agents' tools often run in sessions of their own, servers detach): on Linux it is known
    by its environment. One that left the group and cleared its environment is not found.

    Args:
        group_id: of the process group that the program leads; None when it was not started.
        mark: a ``NAME=value`` of its environment that no other process has.
    """
    if group_id is not None:
        _kill(-group_id)
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):  # one that is forking may leave a child that the round has not seen
        found = set(marked_processes(mark)) - killed
        if not found:
            return
        for pid in found:
            _kill(pid)
        killed |= found


def marked_processes(mark: str) -> Iterator[int]:
    """Ids of the living processes that began with ``mark`` in their environment; none but on Linux."""
    if sys.platform != "linux":
        return
    needle = mark.encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path("/proc", name, "environ").read_bytes()
        except OSError:  # gone by now, or another user's
            continue
        if needle in environment.split(b"\0"):
            yield int(name)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
