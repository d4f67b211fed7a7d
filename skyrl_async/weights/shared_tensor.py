"""A tensor that another process of this machine uses where it lies, without a copy and without a way over the bus.

    SharedTensor ──handle()──> plain values ──opened()──> the same memory, in the other process

On CUDA the handle is one of CUDA IPC, for processes on the same GPU; in host memory it is the path of a memory file. Whoever shares a
tensor keeps it until the others are done with it: memory that was given back may hold anything.

torch's own handles of CUDA tensors are for a sender that does not wait. They count one process that opens them, and the memory stays until
it did, for ever where none does; and they bring an event to wait for, which whoever opens them never gives back. Here the owner says when a
tensor is complete and when it ends, and neither is used.
"""

import base64
import math
import mmap
import os
import pickle
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_DEVICE_ARGUMENT = 6
"""Of ``rebuild_cuda_tensor``: the device's number, which is another one in every process."""
_COUNTER_ARGUMENTS = slice(11, 13)
"""Likewise: where torch counts who has still to let go of the tensor."""
_WAITS_FOR_EVENT_ARGUMENT = 14
"""Likewise: whether the event is waited for."""


def device_key(device: torch.device) -> str:
    """Equal in all processes that use the device, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


@dataclass(slots=True)
class MemoryFile:
    """Empty at first."""

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


class SharedTensor:
    """A copy of a tensor, in memory that can be opened elsewhere.

    Args:
        tensor: any; it may change afterwards.
        dtype: of the copy.
        device: ``cuda`` or ``cpu``: where the copy is.

    Raises ``torch.OutOfMemoryError`` (CUDA) or ``OSError`` (CPU) where there is no room.
    """

    def __init__(self, tensor: Tensor, *, dtype: torch.dtype, device: torch.device) -> None:
        self._file: MemoryFile | None = None
        self._counters: list[tuple[bytes, int]] = []
        """Of the handles on CUDA."""
        if device.type == "cpu" and tensor.numel():
            self._file = MemoryFile()
            num_bytes = tensor.numel() * dtype.itemsize
            self._file.reserve(0, num_bytes)
            self._copy = self._file.allocate(num_bytes).view(dtype).view(tensor.shape)
        else:
            self._copy = torch.empty(tensor.shape, dtype=dtype, device=device)
        self._copy.copy_(tensor.detach())

    @property
    def nbytes(self) -> int:
        """Of the copy."""
        return self._copy.nbytes

    def handle(self) -> dict[str, Any]:
        """What ``opened`` takes, of strings and integers. On CUDA the copy has to be complete: whoever opens it does not wait."""
        return {
            "dtype": str(self._copy.dtype).removeprefix("torch."),
            "shape": list(self._copy.shape),
            "memory": self._file.path if self._file is not None else self._ipc_handle(),
        }

    def _ipc_handle(self) -> str:
        if not self._copy.numel():
            return ""
        _, reduced = reduce_tensor(self._copy)
        self._counters.append(reduced[_COUNTER_ARGUMENTS])
        arguments = list(reduced)
        arguments[_WAITS_FOR_EVENT_ARGUMENT] = False
        return base64.b64encode(pickle.dumps(arguments)).decode()

    def close(self) -> None:
        """Give the memory back, also where nobody opened it; whoever did is to be done with it."""
        if self._file is not None:
            self._file.close()
        for counter in self._counters:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)
        self._counters.clear()
        del self._copy


def opened(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The tensor of a handle, in the memory of whoever shares it; to be read, not written.

    Raises ``RuntimeError`` or ``OSError`` where that memory cannot be reached from here.
    """
    dtype, shape, memory = getattr(torch, handle["dtype"]), handle["shape"], handle["memory"]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        with open(memory, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(content, dtype=dtype).view(shape)
    arguments = pickle.loads(base64.b64decode(memory))
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device() if device.index is None else device.index
    tensor: Tensor = rebuild_cuda_tensor(*arguments)
    return tensor
