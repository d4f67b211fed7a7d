"""How threads of an engine's workers report that they are done, without polling: one datagram per outcome.

first_failure (an engine's process) <──outcome── report_from_thread (a worker's process)
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from socket import AF_UNIX, SOCK_DGRAM, socket

_DONE = "ok"
_MAX_BYTES = 4096


@contextlib.contextmanager
def outcome_socket() -> Iterator[socket]:
    """A socket that receives outcomes; its name is the path to report to."""
    with (
        tempfile.TemporaryDirectory(prefix="skyrl_async-", dir="/tmp") as directory,
        socket(AF_UNIX, SOCK_DGRAM) as outcomes,
    ):
        outcomes.setblocking(False)
        outcomes.bind(f"{directory}/outcomes")  # at most 107 characters, which TMPDIR may exceed
        yield outcomes


async def first_failure(outcomes: socket, num_outcomes: int) -> str | None:
    """Wait for ``num_outcomes``, and return the first failure among them."""
    loop = asyncio.get_running_loop()
    received = [(await loop.sock_recv(outcomes, _MAX_BYTES)).decode(errors="replace") for _ in range(num_outcomes)]
    return next((outcome for outcome in received if outcome != _DONE), None)


def report_from_thread(name: str, work: Callable[[], None], path: str) -> None:
    """Run ``work`` in a thread of this name, which reports how it ended, if anybody still listens."""

    def run_and_report() -> None:
        outcome = _DONE
        try:
            work()
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".replace("\n", " ")
        with contextlib.suppress(OSError), socket(AF_UNIX, SOCK_DGRAM) as reporting:
            reporting.sendto(outcome.encode()[:_MAX_BYTES], path)

    threading.Thread(target=run_and_report, name=name, daemon=True).start()
