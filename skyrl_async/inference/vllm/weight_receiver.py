"""A worker's end of a broadcast of weights: a copy of the sender's file in memory of this process, for its engine's workers to map.

Flows in: buckets from rank 0 of the policy. Flows out: paths of complete files in this process's memory. Knows neither vLLM nor models.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from skyrl_async.weights.shared_tensor import MemoryFile
from skyrl_async.weights.transfer_group import GroupPlace, TransferGroup


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


class WeightReceiver:
    """Holds the files that it was told to keep.

    Args:
        device: of this worker; buckets pass through it with NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._membership: _Membership | None = None
        self._files: dict[str, MemoryFile] = {}

    def connect(self, place: GroupPlace, rank: int) -> None:
        """Leave the group before; the new one is joined when it is first received in, for that waits for the others."""
        if self._membership is not None:
            self._membership.leave()
        self._membership = _Membership(place, rank)

    def prepare(self, source: str, keep: Collection[str]) -> "Receiving":
        """Let go of all files but those of the names in ``keep``, and make an empty one for ``source``; returns who fills it.

        Their memory is given back by who fills it: that takes as long as filling, and here the engine stands still.
        """
        assert self._membership is not None, "no group was connected"
        left = [self._files.pop(name) for name in [*self._files] if name == source or name not in keep]
        file = self._files[source] = MemoryFile()
        return Receiving(file, left, self._membership, self._device)

    def close(self) -> None:
        """Leave the group and let go of everything."""
        if self._membership is not None:
            self._membership.leave()
        while self._files:
            self._files.popitem()[1].close()


class Receiving:
    """One file on its way; may be called in any thread, for it blocks until all is there."""

    def __init__(
        self, file: MemoryFile, left: Sequence[MemoryFile], membership: _Membership, device: torch.device
    ) -> None:
        self._left = left
        self._membership = membership
        self._device = device
        self._file = file
        self.path = file.path
        """Whole on the return of the call, and not before."""

    def __call__(self) -> None:
        """Raises ``RuntimeError``, ``OSError`` and ``ValueError``; then the group is left, and the file is of no use."""
        for file in self._left:
            file.close()
        try:
            self._membership.joined(self._device).receive(self._file.allocate, self._file.reserve)
        except BaseException:
            self._membership.leave()
            raise
