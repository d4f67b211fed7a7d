"""Ends the processes of an agent: the program and all its descendants.

Flows in: a process group, and a mark in the program's environment, which its children inherit. Run as a program, this file is a guard:
it waits for the death of the process that started it, even by ``kill -9``, and ends the agents left behind, or deletes their directory.
Standard library only, because it is started by its path.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_MAX_ROUNDS = 20
_OWN_END_S = 30.0
"""For what ends by itself, and releases something of its own before: containers, say."""
_PR_SET_PDEATHSIG = 1


def kill_agent(group_id: int | None, mark: str) -> int:
    """Kill at once, without waiting for the deaths; returns the number of processes found by their mark.

    A descendant may have left the group (agents' tools often run in their own sessions, servers detach): on Linux it is found by its
    environment. A process that left the group and cleared its environment is not found.

    Args:
        group_id: of the process group that the program leads; None if it was not started or is unknown.
        mark: a unique ``NAME=value`` of its environment.
    """
    if group_id is not None:
        _kill(-group_id)
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):  # a forking process may leave a child that this round has not seen
        found = set(marked_processes(mark)) - killed
        if not found:
            break
        for pid in found:
            _kill(pid)
        killed |= found
    return len(killed)


def marked_processes(mark: str) -> Iterator[int]:
    """Ids of the living processes that were started with ``mark`` in their environment; only on Linux."""
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


def start_guard(mark: str, directory: str = "") -> subprocess.Popen[bytes] | None:
    """Start a process that kills the processes with ``mark`` after this process has died in any way; only on Linux.

    With a directory it first lets them end by themselves, for half a minute, and deletes the directory afterwards.
    """
    if sys.platform != "linux":
        return None
    # In its own session: a signal to this process's group must not end the guard.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(os.getpid()), directory],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """End a guard that is no longer needed."""
    guard.kill()
    guard.wait()


def _guard(mark: str, parent_id: int, directory: str) -> None:
    """Wait for the parent's death. The kernel's signal also comes at the end of the parent's thread, hence the loop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    while os.getppid() == parent_id:
        signal.sigwait({signal.SIGTERM})
    deadline = time.monotonic() + (_OWN_END_S if directory else 0.0)
    while time.monotonic() < deadline and any(marked_processes(mark)):
        time.sleep(0.1)
    kill_agent(None, mark)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]), sys.argv[3])
