"""A process group of its own for one purpose: rank 0 of the policy sends bytes to one worker of every engine.

    rank 0: host memory ──bucket──> [gloo: host to host | NCCL: its device to theirs] ──bucket──> host memory: ranks 1, 2, ...

torch's default group, vLLM's groups and those of training are not used, so members may be in any of them.

A member that fails leaves, which closes its connections: with gloo the others then fail at once. The others wait for a member that stands
still until the group's timeout. After any failure a group is unusable.
"""

import mmap
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_async.errors import WeightsTransferError

NCCL = "nccl"
GLOO = "gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where and how a group forms; plain values, since it crosses processes."""

    host: str
    """Rank 0's host, as the others reach it."""
    port: int
    """Port of rank 0's store."""
    name: str
    """Unique within the store, which may serve several groups one after another."""
    num_members: int
    """Rank 0 included."""
    backend: str
    """``gloo`` or ``nccl``."""
    timeout_s: float
    """Longest wait of a member for the others, when the group forms and in each bucket."""


class TransferGroup:
    """One member's end. Its first use blocks until every member is there.

    Args:
        place: equal for all members.
        rank: 0 sends.
        device: this member's, for NCCL; gloo uses none.
        store: rank 0's own; the others connect to it.

    Both uses raise ``RuntimeError`` (such as ``dist.DistError``) if the others do not come in time, or one leaves.
    """

    def __init__(self, place: GroupPlace, *, rank: int, device: torch.device, store: dist.Store | None = None) -> None:
        self.place = place
        self._rank = rank
        self._device = device if place.backend == NCCL else torch.device("cpu")
        self._store = store
        self._group: dist.ProcessGroup | None = None

    def _join(self) -> dist.ProcessGroup:
        place, rank, timeout = self.place, self._rank, timedelta(seconds=self.place.timeout_s)
        store = self._store
        if store is None:
            store = dist.TCPStore(place.host, place.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(place.name, store)
        store.set_timeout(timeout)
        if place.backend == NCCL:
            _wait_for_members(store, rank, place.num_members)
            with _failing_in_the_caller(), torch.cuda.device(self._device):
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._stream = torch.cuda.Stream(self._device)
                return dist.ProcessGroupNCCL(store, rank, place.num_members, options)
        own = place.host if rank == 0 else _address_towards(place.host, place.port)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, place.num_members, options)

    def send(self, content: Tensor, bucket_bytes: int) -> None:
        """Rank 0: send (num_bytes,) uint8 in host memory to all others, ``bucket_bytes`` (>= 1) at a time."""
        self._broadcast(torch.tensor([content.numel(), bucket_bytes]))
        for bucket in content.split(bucket_bytes):
            self._broadcast(bucket)

    def receive(
        self, allocate: Callable[[int], Tensor], reserve: Callable[[int, int], None] = lambda begin, num_bytes: None
    ) -> None:
        """The others: receive into the (num_bytes,) uint8 in host memory that ``allocate`` returns.

        ``reserve`` is called before each bucket with its begin and size in bytes: memory is reserved for one bucket at a time, since rank 0
        waits meanwhile.
        """
        sizes = torch.zeros(2, dtype=torch.int64)
        self._broadcast(sizes)
        num_bytes, bucket_bytes = sizes.tolist()
        for index, bucket in enumerate(allocate(num_bytes).split(bucket_bytes)):
            reserve(index * bucket_bytes, bucket.numel())
            self._broadcast(bucket)

    def leave(self) -> None:
        """Close this member's connections, whatever the others do. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _broadcast(self, values: Tensor) -> None:
        """Copy rank 0's contiguous tensor in host memory into everybody's; complete on return."""
        if self._group is None:
            self._group = self._join()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if self._device.type == "cpu":
            self._group.broadcast([values], options).wait()
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            bucket = values.to(self._device) if self._rank == 0 else torch.empty_like(values, device=self._device)
            self._group.broadcast([bucket], options).wait()
            if self._rank == 0:
                self._stream.synchronize()
            else:
                values.copy_(bucket)


def _wait_for_members(store: dist.Store, rank: int, num_members: int) -> None:
    """Wait for every member, at most the store's timeout: NCCL, which connects later, would wait for ever."""
    store.set(f"member-{rank}", "")
    store.wait([f"member-{member}" for member in range(num_members)])


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the network interface that reaches ``host``; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextmanager
def _failing_in_the_caller() -> Iterator[None]:
    """NCCL groups made in this block raise after a timeout; by default it ends the whole process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class WeightSender:
    """Rank 0's end of a broadcast: sends the file of a published version to the other members of a group, one group at a time.

    It sends any version whose file is in this machine's shared memory, whichever process wrote it.

    Args:
        device: this rank's; with NCCL, buckets pass through it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: dist.TCPStore | None = None
        self._host = ""
        self._group: TransferGroup | None = None

    def open(self, host: str, *, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        """Leave the current group and say where the next one meets: at ``host``, an address of this machine. The first ``send`` waits
        for its members.
        """
        self.close()
        if self._store is None or host != self._host:
            self._store, self._host = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False), host
        place = GroupPlace(
            host=host,
            port=self._store.port,
            name=uuid.uuid4().hex,
            num_members=1 + num_receivers,
            backend=backend,
            timeout_s=timeout_s,
        )
        self._group = TransferGroup(place, rank=0, device=self._device, store=self._store)
        return place

    def send(self, path: Path, bucket_bytes: int) -> None:
        """Send a file, ``bucket_bytes`` (>= 1) at a time; returns when the last bucket has left.

        Raises:
            WeightsTransferError: a receiver is gone or did not answer in time. The group is left then; open another one. Also if this
                process opened none.
        """
        if (group := self._group) is None:
            raise WeightsTransferError(f"{path} was not sent: no group was opened in this process")
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
                content = torch.frombuffer(memory, dtype=torch.uint8)
                try:
                    group.send(content, bucket_bytes)
                finally:
                    del content  # or the mapping could not be closed
        except (RuntimeError, OSError) as error:
            self.close()
            raise WeightsTransferError(
                f"{path} did not get to {group.place.num_members - 1} engines: {error}"
            ) from error

    def close(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()
