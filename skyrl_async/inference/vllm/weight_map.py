"""The file of a weight update as tensors: mapped, not read, so that loading copies each byte once."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from skyrl_async.weights.formats import TORCH_NAMES


class WeightMap:
    """A context manager; its tensors may outlive it, and keep the mapping alive.

    Args:
        path: a complete safetensors file; it may be deleted while it is mapped.
        load_bucket_bytes: most bytes of mapped pages that this process holds at a time; only a single larger tensor exceeds it.
    """

    def __init__(self, path: str | Path, load_bucket_bytes: int) -> None:
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        num_header_bytes = int.from_bytes(self._memory[:8], "little")
        header = json.loads(self._memory[8 : 8 + num_header_bytes])
        header.pop("__metadata__", None)
        self.layout = bytes(self._memory[: 8 + num_header_bytes])
        """The header's bytes: equal for updates with the same tensors at the same places."""
        self._entries = header
        self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._first = 8 + num_header_bytes
        self._load_bucket_bytes = load_bucket_bytes
        self._num_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """All tensors in the file's order, in lists of at most a load bucket; a larger one goes alone."""
        bucket: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name in self._entries:
            tensor = self.tensor(name)
            if bucket and num_bytes + tensor.nbytes > self._load_bucket_bytes:
                yield bucket
                bucket, num_bytes = [], 0
                self._memory.madvise(mmap.MADV_DONTNEED)
            bucket.append((name, tensor))
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket

    def tensor(self, name: str) -> Tensor:
        """One tensor, with its dtype and shape."""
        entry = self._entries[name]
        start, stop = (self._first + offset for offset in entry["data_offsets"])
        dtype = getattr(torch, TORCH_NAMES[entry["dtype"]])
        if start == stop:
            return torch.empty(entry["shape"], dtype=dtype)
        return self._whole[start:stop].view(dtype).view(entry["shape"])

    def region(self, offset: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """The bytes from ``offset`` on as a strided tensor."""
        num_usable = len(self._whole) // dtype.itemsize * dtype.itemsize
        return self._whole[:num_usable].view(dtype).as_strided(size, stride, offset // dtype.itemsize)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Offset in bytes of a view into the file; None for other tensors."""
        if tensor.untyped_storage().data_ptr() != self._whole.untyped_storage().data_ptr():
            return None
        return tensor.storage_offset() * tensor.element_size()

    def note_copied(self, num_bytes: int) -> None:
        """Count bytes copied from the mapping, and release its pages after each load bucket."""
        self._num_read += num_bytes
        if self._num_read >= self._load_bucket_bytes:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._num_read = 0
