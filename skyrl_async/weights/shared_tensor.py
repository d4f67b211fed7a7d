"""Tensors that other processes of this machine use in place, without a copy; and files that exist in memory alone.

    SharedTensor ──handle()──> plain values ──opened()──> the same memory, in the other process

A CUDA handle is CUDA IPC's, for processes on the same GPU. In host memory the handle is the path of a memory file. The owner keeps a shared
tensor until the others are done with it.

torch's own handles of CUDA tensors are for a sender that does not wait. They count the one process that opens them, and keep the memory
until it has, for ever if none does. They also carry an event to wait for, which the opener never releases. Here the owner says when a
tensor is complete and when it ends, so an opener uses neither.
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
"""Index in ``rebuild_cuda_tensor``'s arguments of the device's number, which differs between processes."""
_COUNTER_ARGUMENTS = slice(11, 13)
"""Likewise, of torch's reference counter: its file and its place there."""
_NO_COUNTER = (b"", 0)
"""An opener counts down as it releases the memory, which it does not in a file that it cannot open. Counted down by the owner too, an
unsigned counter would begin again at its largest value, and torch would keep the memory for ever."""
_WAITS_FOR_EVENT_ARGUMENT = 14
"""Likewise, of whether to wait for the event."""


def device_key(device: torch.device) -> str:
    """A name of the device that is equal in all processes, unlike its number."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


@dataclass(slots=True)
class MemoryFile:
    """A file without a name on any disk, which ends with the process that made it. Empty at first."""

    _file: FileIO = field(default_factory=lambda: FileIO(os.memfd_create("weights"), "r+"))

    @property
    def path(self) -> str:
        """A path for this process and others of its user on this machine."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def allocate(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8: the file's content; write only to reserved parts. Raises ``ValueError`` if the file is closed."""
        os.ftruncate(self._file.fileno(), num_bytes)
        return torch.frombuffer(mmap.mmap(self._file.fileno(), num_bytes), dtype=torch.uint8)

    def reserve(self, begin: int, num_bytes: int) -> None:
        """Reserve memory for a part, in bytes. Raises ``OSError`` if there is none, ``ValueError`` if the file is closed."""
        os.posix_fallocate(self._file.fileno(), begin, num_bytes)

    def close(self) -> None:
        """Release the memory, once nobody maps it."""
        self._file.close()


class SharedTensor:
    """A copy of a tensor, in memory that other processes can open.

    Args:
        tensor: any; it may change afterwards.
        device: the copy's, ``cuda`` or ``cpu``.

    Raises ``torch.OutOfMemoryError`` (CUDA) or ``OSError`` (CPU) if there is no room.
    """

    def __init__(self, tensor: Tensor, *, device: torch.device) -> None:
        self._file: MemoryFile | None = None
        self._counters: list[tuple[bytes, int]] = []
        """Reference counters of handles on CUDA."""
        if device.type == "cpu" and tensor.numel():
            self._file = MemoryFile()
            num_bytes = tensor.nbytes
            self._file.reserve(0, num_bytes)
            self._copy = self._file.allocate(num_bytes).view(tensor.dtype).view(tensor.shape)
        else:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._copy.copy_(tensor.detach())

    @property
    def nbytes(self) -> int:
        """Size of the copy."""
        return self._copy.nbytes

    def handle(self) -> dict[str, Any]:
        """Plain values for ``opened``. On CUDA the copy must be complete: the opener does not wait."""
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
        arguments[_COUNTER_ARGUMENTS] = _NO_COUNTER
        arguments[_WAITS_FOR_EVENT_ARGUMENT] = False
        return base64.b64encode(pickle.dumps(arguments)).decode()

    def close(self) -> None:
        """Release the memory. Nobody may use the tensor any more."""
        if self._file is not None:
            self._file.close()
        for counter in self._counters:
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)
        self._counters.clear()
        del self._copy


def opened(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The tensor of a handle, in its owner's memory; read-only.

    Raises ``RuntimeError`` or ``OSError`` if that memory cannot be reached from here.
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
