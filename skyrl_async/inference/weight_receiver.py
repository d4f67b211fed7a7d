"""A worker's end of a broadcast of weights: a copy of the sender's file in memory of this process, for its engine's workers to map.

Flows in: buckets from rank 0 of the policy. Flows out: paths of complete files, which other processes of this machine and user can open
too. They have no name on any disk and end with this process, however it ends. Knows neither vLLM nor models.
"""

import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from io import FileIO

import torch
from torch import Tensor

from skyrl_async.transfer_group import GroupPlace, TransferGroup


@dataclass(slots=True)
class _Membership:
    """In one group, joined with its first use."""

    place: GroupPlace
    rank: int
    group: TransferGroup | None = None

    def joined(self, device: torch.device) -> TransferGroup:
        if self.group is None:
            self.group = TransferGroup(self.place, rank=self.rank, device=device)
        return self.group

    def leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.leave()


@dataclass(slots=True)
class Replica:
    """A file that exists in memory alone."""

    _file: FileIO = field(default_factory=lambda: FileIO(os.memfd_create("weights"), "r+"))

    @property
    def path(self) -> str:
        """For this process and others of its user on this machine."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def allocate(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8: the file's content, to be written where it is reserved. Raises ``ValueError`` when it is closed."""
        os.ftruncate(self._file.fileno(), num_bytes)
        return torch.frombuffer(mmap.mmap(self._file.fileno(), num_bytes), dtype=torch.uint8)

    def reserve(self, begin: int, num_bytes: int) -> None:
        """Find memory for a part, in bytes. Raises ``OSError`` where there is none, ``ValueError`` when the file is closed."""
        os.posix_fallocate(self._file.fileno(), begin, num_bytes)

    def close(self) -> None:
        """Give the memory back, once nobody maps it."""
        self._file.close()


class WeightReceiver:
    """Holds the files that it was told to keep.

    Args:
        device: of this worker; buckets pass through it with NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._membership: _Membership | None = None
        self._replicas: dict[str, Replica] = {}

    def connect(self, place: GroupPlace, rank: int) -> None:
        """Leave the group before; the new one is joined when it is first received in, for that waits for the others."""
        if self._membership is not None:
            self._membership.leave()
        self._membership = _Membership(place, rank)

    def prepare(self, source: str, keep: Collection[str]) -> "Receiving":
        """Let go of all files but those of the names in ``keep``, and make an empty one for ``source``; returns who fills it."""
        assert self._membership is not None, "no group was connected"
        for name in [name for name in self._replicas if name == source or name not in keep]:
            self._replicas.pop(name).close()
        replica = self._replicas[source] = Replica()
        return Receiving(replica, self._membership, self._device)

    def close(self) -> None:
        """Leave the group and let go of everything."""
        if self._membership is not None:
            self._membership.leave()
        while self._replicas:
            self._replicas.popitem()[1].close()


class Receiving:
    """One file on its way; may be called in any thread, for it blocks until all is there."""

    def __init__(self, replica: Replica, membership: _Membership, device: torch.device) -> None:
        self._membership = membership
        self._device = device
        self._replica = replica
        self.path = replica.path
        """Whole on the return of the call, and not before."""

    def __call__(self) -> None:
        """Raises ``RuntimeError``, ``OSError`` and ``ValueError``; then the group is left, and the file is of no use."""
        try:
            self._membership.joined(self._device).receive(self._replica.allocate, self._replica.reserve)
        except BaseException:
            self._membership.leave()
            raise
