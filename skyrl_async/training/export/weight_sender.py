"""Rank 0's end of a broadcast: the file of a published version to every engine that does not map it itself.

Flows in: a complete file in this machine's shared memory. Flows out: its bytes, at the other members of a group. Any version can be
sent as long as its file is there, whoever wrote it. Knows neither engines nor what the file holds.
"""

import mmap
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from skyrl_async.errors import WeightsTransferError
from skyrl_async.weights.transfer_group import GroupPlace, TransferGroup, open_store


class WeightSender:
    """In one group at a time.

    Args:
        device: of this rank; buckets pass through it with NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: dist.TCPStore | None = None
        self._host = ""
        self._place: GroupPlace | None = None
        self._group: TransferGroup | None = None

    def open(self, host: str, *, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        """Leave the group before and say where the next one meets, by ``host``, an address of this machine; its members come with the
        first ``send``."""
        self.close()
        if self._store is None or host != self._host:
            self._store, self._host = open_store(host), host
        self._place = GroupPlace(
            host=host,
            port=self._store.port,
            name=uuid.uuid4().hex,
            num_members=1 + num_receivers,
            backend=backend,
            timeout_s=timeout_s,
        )
        return self._place

    def send(self, path: Path, bucket_bytes: int) -> None:
        """Send a file, ``bucket_bytes`` (>= 1) at a time; on return its last bucket has left.

        Raises ``WeightsTransferError`` where a receiver is gone, or has not come or gone on in time: the group is left then, and
        another one is to be opened; or where none was, in this process.
        """
        if (place := self._place) is None:
            raise WeightsTransferError(f"{path} was not sent: no group was opened in this process")
        try:
            if self._group is None:
                self._group = TransferGroup(place, rank=0, device=self._device, store=self._store)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
                content = torch.frombuffer(memory, dtype=torch.uint8)
                try:
                    self._group.send(content, bucket_bytes)
                finally:
                    del content  # or the mapping could not be closed
        except (RuntimeError, OSError) as error:
            self.close()
            raise WeightsTransferError(f"{path} did not get to {place.num_members - 1} engines: {error}") from error

    def close(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group, self._place = self._group, None, None
        if group is not None:
            group.leave()
