"""A ``PolicyRank`` as a Ray actor: training in its first thread, what goes on beside that in threads of their own.

Flows in: calls of ``PolicyWorkers``. Flows out: the rank's answers.
"""

from pathlib import Path
from typing import Any

import ray
import torch

from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.export.weight_sender import WeightSender
from skyrl_async.training.workers.rank import PolicyRank
from skyrl_async.training.workers.worker_process import ProcessPlace
from skyrl_async.types import WeightUpdate
from skyrl_async.weights.transfer_group import GroupPlace

_PULSE = "pulse"
"""The thread that answers heartbeats."""
_SENDING = "sending"
"""The thread in which a rank writes its weights."""
_TRANSFERRING = "transferring"
"""The thread in which a rank sends what was written to engines."""
CONCURRENCY_GROUPS = {_PULSE: 1, _SENDING: 1, _TRANSFERRING: 1}


class RankActor(PolicyRank):
    """See the module."""

    def __init__(self, settings: TrainingSettings, *, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(settings, rank=rank, num_ranks=num_ranks)
        self._sender = WeightSender(torch.device(settings.device))

    def node_address(self) -> str:
        """Where the other ranks reach this one."""
        return str(ray.util.get_node_ip_address())

    @ray.method(concurrency_group=_SENDING)
    def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """In a thread of its own: the other methods run meanwhile."""
        return super().send_weights(version, directory, bucket_bytes)

    @ray.method(concurrency_group=_TRANSFERRING)
    def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        """See ``WeightSender.open``."""
        return self._sender.open(
            str(ray.util.get_node_ip_address()), num_receivers=num_receivers, backend=backend, timeout_s=timeout_s
        )

    @ray.method(concurrency_group=_TRANSFERRING)
    def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """See ``WeightSender.send``."""
        self._sender.send(path, bucket_bytes)

    @ray.method(concurrency_group=_TRANSFERRING)
    def share_weights(self, version: int) -> dict[str, dict[str, Any]]:
        """In a thread of its own: the rank may be training."""
        return super().share_weights(version)

    @ray.method(concurrency_group=_TRANSFERRING)
    def unshare_weights(self) -> None:
        """Likewise."""
        super().unshare_weights()

    def boot(self) -> ProcessPlace:
        """The process is up: where it is."""
        return this_place()

    @ray.method(concurrency_group=_PULSE)
    def ping(self) -> None:
        """The process runs, whatever it works on."""


def this_place() -> ProcessPlace:
    """Where the caller is."""
    return ProcessPlace.of_this_process(ray.get_runtime_context().get_node_id())
