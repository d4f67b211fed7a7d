"""A ``PolicyRank`` as a Ray actor, and its process as the trainer's machine sees it.

The actor trains in its first thread. Heartbeats, writing weights and sending them have threads of their own.

The trainer holds a descriptor of each worker's process on its own machine: it ends a frozen one at once and sees when it is gone, and never
hits another process that got the same number. This takes Linux. Elsewhere, Ray alone ends workers.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.weights.transfer_group import GroupPlace, WeightSender

logger = logging.getLogger(__name__)

_RAY_END_TIMEOUT_S = 2.0
"""A worker that Ray ends is gone in milliseconds; Ray does not report an unexpected death then. A frozen one stays."""
_KILL_TIMEOUT_S = 10.0
"""The kernel ends a killed process in milliseconds, unless it hangs in a driver or on a dead file system."""
_HEARTBEAT = "heartbeat"
"""The thread that answers heartbeats."""
_WRITING = "writing"
"""The thread that writes weights to a file."""
_TRANSFERRING = "transferring"
"""The thread that sends a written file to engines, and shares copies on the device."""
CONCURRENCY_GROUPS = {_HEARTBEAT: 1, _WRITING: 1, _TRANSFERRING: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAddress:
    """Which process on which machine."""

    node_id: str
    """The machine, by Ray's name."""
    namespace: str
    """The process namespace in which ``pid`` counts; empty where the system has none."""
    pid: int


def own_address() -> ProcessAddress:
    """The calling process. Ray must be connected."""
    link = Path("/proc/self/ns/pid")
    namespace = os.readlink(link) if link.exists() else ""
    return ProcessAddress(node_id=ray.get_runtime_context().get_node_id(), namespace=namespace, pid=os.getpid())


class RankActor(PolicyRank):
    """The methods that run beside training, and those that need Ray."""

    send_weights = ray.method(concurrency_group=_WRITING)(PolicyRank.send_weights)
    share_weights = ray.method(concurrency_group=_TRANSFERRING)(PolicyRank.share_weights)
    unshare_weights = ray.method(concurrency_group=_TRANSFERRING)(PolicyRank.unshare_weights)

    def __init__(self, settings: TrainingSettings, *, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(settings, rank=rank, num_ranks=num_ranks)
        self._sender = WeightSender(torch.device(settings.device))

    def ip_address(self) -> str:
        """This machine's address, as the other ranks reach it."""
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group=_TRANSFERRING)
    def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        """As ``WeightSender.open``, at this machine's address."""
        return self._sender.open(self.ip_address(), num_receivers=num_receivers, backend=backend, timeout_s=timeout_s)

    @ray.method(concurrency_group=_TRANSFERRING)
    def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """As ``WeightSender.send``."""
        self._sender.send(path, bucket_bytes)

    def boot(self) -> ProcessAddress:
        """Return this process's address; the answer shows that the process is up."""
        return own_address()

    @ray.method(concurrency_group=_HEARTBEAT)
    def ping(self) -> None:
        """Answer while the process runs, whatever it works on."""


def open_if_here(address: ProcessAddress, here: ProcessAddress) -> int | None:
    """A descriptor of a process on the caller's machine; None if it is elsewhere or gone, and where the system has none."""
    if (address.node_id, address.namespace) != (here.node_id, here.namespace) or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(address.pid)
    except ProcessLookupError:
        return None


async def end_processes(processes: Mapping[str, int]) -> None:
    """Wait until processes that Ray is ending are gone; kill those that stay, such as frozen ones. Logs a warning if that fails, too.

    ``processes``: name -> descriptor, which is closed.
    """
    try:
        for timeout_s in (_RAY_END_TIMEOUT_S, _KILL_TIMEOUT_S):
            try:
                async with asyncio.timeout(timeout_s):
                    for process in processes.values():
                        await _ended(process)
                return
            except TimeoutError:
                for process in processes.values():
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
        logger.warning(
            "a policy worker of %s has not ended %g s after SIGKILL; what it holds on a GPU is still held",
            ", ".join(processes),
            _KILL_TIMEOUT_S,
        )
    finally:
        for process in processes.values():
            os.close(process)


async def _ended(process: int) -> None:
    """Wait until the process of a descriptor is gone."""
    loop, is_gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, is_gone.set)
    try:
        await is_gone.wait()
    finally:
        loop.remove_reader(process)
