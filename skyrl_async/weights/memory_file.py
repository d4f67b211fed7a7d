"""A file that exists in memory alone: it has no name on any disk, and ends with the process that made it, however that ends.

Flows in: sizes. Flows out: memory to write to, and a path that other processes of this machine and user can open.
"""

import mmap
import os
from dataclasses import dataclass, field
from io import FileIO

import torch
from torch import Tensor


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
