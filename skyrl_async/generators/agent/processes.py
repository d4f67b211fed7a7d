"""Ends the processes of an agent: the program, and whatever it has started.

Flows in: a process group, and a mark that the program found in its environment and its children inherited. Flows out: signals.
Does not know what the processes were for. As a program by itself it is a guard: it waits for the death of the process that started
it, which may come by ``kill -9``, and ends what that leaves behind. Standard library only, because it is started by its path.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_MAX_ROUNDS = 20
_PR_SET_PDEATHSIG = 1


def kill_agent(group_id: int | None, mark: str) -> int:
    """Kill at once, without waiting for the deaths; returns how many were found by their mark.

    A descendant may have left the group (agents' tools often run in sessions of their own, servers detach): on Linux it is known
    by its environment. One that left the group and cleared its environment is not found.

    Args:
        group_id: of the process group that the program leads; None when it was not started, or is not known.
        mark: a ``NAME=value`` of its environment that no other process has.
    """
    if group_id is not None:
        _kill(-group_id)
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):  # one that is forking may leave a child that the round has not seen
        found = set(marked_processes(mark)) - killed
        if not found:
            break
        for pid in found:
            _kill(pid)
        killed |= found
    return len(killed)


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


def start_guard(mark: str) -> subprocess.Popen[bytes] | None:
    """A process that kills what has ``mark`` once this process is dead, however it died; None but on Linux."""
    if sys.platform != "linux":
        return None
    # In a session of its own: what ends this process with all of its group leaves the guard to do its work.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """Nothing is left for it to do."""
    guard.kill()
    guard.wait()


def _guard(mark: str, parent_id: int) -> None:
    """The kernel's signal also comes when only the thread that started this one ends: then the process still is the parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    while os.getppid() == parent_id:
        signal.sigwait({signal.SIGTERM})
    kill_agent(None, mark)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
