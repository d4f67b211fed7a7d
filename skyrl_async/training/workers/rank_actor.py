"""A ``PolicyRank`` as a Ray actor, and its process as the trainer's machine sees it.

The actor trains in its first thread. Heartbeats, writing weights and sending them have threads of their own.

The trainer knows the workers' processes on its own machine, each by its number and when it began: it ends a frozen one at once and sees
when it is gone, and never hits another process that got the same number. Elsewhere, Ray alone ends workers.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
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


def process_at(address: ProcessAddress, here: ProcessAddress) -> psutil.Process | None:
    """A process on the caller's machine; None if it is elsewhere or gone."""
    if (address.node_id, address.namespace) == (here.node_id, here.namespace):
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(address.pid)
    return None


async def end_processes(processes: Mapping[str, psutil.Process]) -> None:
    """Wait until processes that Ray is ending are gone; kill those that stay, such as frozen ones. Logs a warning if that fails, too."""
    left = list(processes.values())
    for timeout_s in (_RAY_END_TIMEOUT_S, _KILL_TIMEOUT_S):
        _, left = await asyncio.to_thread(psutil.wait_procs, left, timeout_s)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    if left:
        logger.warning(
            "a policy worker of %s has not ended %g s after SIGKILL; what it holds on a GPU is still held",
            ", ".join(processes),
            _KILL_TIMEOUT_S,
        )
